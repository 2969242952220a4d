"""A shard that leaves, or is parked: what its clients are told, what is refused, what is sealed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.checkers import places
from tests.shard.leavers import (
    AGAIN,
    BACKUP,
    LEASE,
    OTHER,
    PRIMARY,
    THIRD,
    WITHOUT,
    acks,
    announce,
    heard,
    last_beat,
    out,
    redirects,
    replica,
    sealed,
    send,
    start,
)
from tests.world import CLUSTER, MS, Link, S, World, add_shard, insert
from ziplog import wire

LIMIT = LEASE.stop


# --- leaving ---


def test_shard_that_leaves_takes_inserts_and_asks_their_clients_to_go() -> None:
    world = start()
    send(world, insert(1))
    assert not heard(world, wire.Leaving)
    announce(world, "leaving")
    send(world, insert(2), insert(3))
    assert acks(world) == [(seq, s, [2 * seq - 1]) for seq in (1, 2, 3) for s in (0, 1)]
    assert heard(world, wire.Leaving) == [wire.Leaving(CLUSTER, 0, 1)], "once, by the primary"
    world.run(50 * MS)
    send(world, insert(4), insert(3))
    assert len(heard(world, wire.Leaving)) == 2, "who goes on is told again, once"


def test_drained_shard_says_so_until_a_lease_is_without_it() -> None:
    world = start()
    send(world, insert(1))
    announce(world, "leaving", run=15 * MS)
    assert not heard(world, wire.Rate, "mms-0"), "an insert came just now"
    world.run(10 * MS)
    assert heard(world, wire.Rate, "mms-0") == [wire.Rate(CLUSTER, 0, 1, 0)]
    world.run(200 * MS)
    assert len(heard(world, wire.Rate, "mms-0")) == 3, "again every 100 ms: it may have been lost"
    announce(world, "leaving", WITHOUT, starts_in_us=50_000, run=500 * MS)
    assert len(heard(world, wire.Rate, "mms-0")) == 3


def test_shard_in_which_a_unit_waits_is_not_drained() -> None:
    world = start()
    send(world, insert(2, predecessor=1))
    announce(world, "leaving", run=200 * MS)
    assert not heard(world, wire.Rate, "mms-0")
    send(world, insert(1))
    world.run(60 * MS)
    assert len(heard(world, wire.Rate, "mms-0")) == 1
    assert [place.seq for place in places(world, PRIMARY)] == [1, 2]


def test_shard_that_leaves_refuses_what_goes_behind_its_end() -> None:
    world = start()
    announce(world, "leaving", WITHOUT, starts_in_us=1_000_000)
    send(world, insert(1, after=WITHOUT.stop + 5), insert(2, predecessor=1), insert(3, after=LIMIT))
    assert redirects(world) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    assert not heard(world, wire.LeaseQuery, "mms-0")
    send(world, insert(3, after=LIMIT))
    assert redirects(world)[-2:] == [(3, 0), (3, 1)], "a backup says so to the second copy"


def test_unit_that_waited_for_a_lease_is_refused_when_the_shard_is_to_leave() -> None:
    world = start()
    send(world, insert(1, after=LIMIT + 5), insert(2, predecessor=1), run=20 * MS)
    assert not heard(world, wire.Refused)
    announce(world, "leaving")
    assert redirects(world) == [(1, 0), (2, 0)]
    send(world, insert(1, after=LIMIT + 5), insert(2, predecessor=1))
    assert redirects(world) == [(seq, s) for seq in (1, 2) for s in (0, 0, 1)]


# --- out ---


@pytest.mark.parametrize("placed", ["leaving", "parked"])
def test_shard_without_positions_decides_the_rest_and_refuses_what_has_no_slot(placed: str) -> None:
    world = start()
    send(world, insert(1), insert(3, predecessor=2), run=5 * MS)
    out(world, placed)
    for name in (PRIMARY, BACKUP):
        state = replica(world, name)._state
        assert state.is_out
        assert state.stream.stable_end >= LIMIT, "nobody watches, and yet all is decided"
        assert state.frontier == WITHOUT.stop
    assert redirects(world) == [(3, 0), (3, 1)]
    send(world, insert(1), insert(4, client=b"d" * 16), insert(3, predecessor=2))
    assert acks(world)[-2:] == [(1, 1, [1]), (1, 1, [1])], "what is placed is acked, as ever"
    assert redirects(world) == [(3, 0), (3, 0), (3, 1), (3, 1), (4, 0), (4, 1)]


def test_last_lease_is_used_to_its_end() -> None:
    """The lease that is to come tells nothing of what is taken before it begins."""
    world = start()
    announce(world, "leaving", WITHOUT, starts_in_us=100_000, run=90 * MS)
    send(world, insert(1))
    assert acks(world) == [(1, 0, acks(world)[0][2]), (1, 1, acks(world)[0][2])]
    send(world, insert(3, predecessor=2))
    world.run(20 * MS)
    assert redirects(world) == [(3, 0), (3, 1)], "told when the time has come, by itself"
    assert replica(world, PRIMARY)._state.stream.stable_end >= LIMIT


@pytest.mark.parametrize("placed", ["live", "recovering", "joining"])
def test_who_is_not_known_to_be_out_lets_units_wait(placed: str) -> None:
    world = start()
    out(world, placed)
    send(world, insert(1), run=50 * MS)
    assert not heard(world, wire.Refused)
    assert not replica(world, PRIMARY)._state.is_out


def test_server_that_knows_no_lease_is_not_out() -> None:
    world = start()
    announce(world, "leaving")
    world.restart(BACKUP)
    world.restart(PRIMARY, clean=False)
    send(world, insert(1))
    refused = heard(world, wire.Refused)
    assert [(message.server, message.code) for message in refused] == [(0, "not-ready")]


def test_refused_units_do_not_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.ordering.primary.MAX_UNSTABLE_RECORDS", 1)
    monkeypatch.setattr("shard.ordering.primary.MAX_UNSTABLE_DECISIONS", 1)
    world = start()
    world.paused.add(BACKUP)
    send(world, insert(1), insert(2), insert(3), to=(PRIMARY,))
    out(world)
    assert redirects(world) == [(2, 0), (3, 0)]
    world.run(100 * MS)
    assert replica(world, PRIMARY)._state.stream.end < LIMIT, "no more than fits is decided"
    world.paused.clear()
    world.run(100 * MS)
    assert replica(world, PRIMARY)._state.stream.stable_end >= LIMIT


# --- the primary knows it before the backup, and the reverse ---


def test_backup_that_knows_nothing_refuses_nothing() -> None:
    world = start()
    announce(world, "leaving", WITHOUT, to=(PRIMARY,))
    send(world, insert(1))
    assert redirects(world) == [(1, 0)]
    announce(world, "leaving", WITHOUT, to=(BACKUP,))
    assert redirects(world) == [(1, 0), (1, 1)]


def test_backup_does_not_refuse_what_the_stream_may_still_bring() -> None:
    world = start()
    send(world, insert(2, predecessor=1), to=(BACKUP,))
    announce(world, "leaving", WITHOUT, to=(BACKUP,))
    assert replica(world, BACKUP)._state.is_out
    send(world, insert(1), insert(2, predecessor=1), to=(PRIMARY,))
    send(world, insert(3), to=(BACKUP,))
    assert redirects(world) == []
    send(world, insert(1), insert(3))
    announce(world, "leaving", WITHOUT, to=(PRIMARY,))
    assert redirects(world) == []
    assert {(seq, server) for seq, server, _ in acks(world)} == {
        (seq, server) for seq in (1, 2, 3) for server in (0, 1)
    }


def test_promise_that_the_last_no_ops_broke_is_refused() -> None:
    world = start()
    send(world, insert(1), to=(BACKUP,))
    assert acks(world) == [(1, 1, [1])]
    announce(world, "leaving", WITHOUT, to=(BACKUP,))
    assert redirects(world) == [], "the primary may have placed it just there"
    announce(world, "leaving", WITHOUT, to=(PRIMARY,))
    assert redirects(world) == [(1, 1)]
    send(world, insert(1))
    assert redirects(world) == [(1, 0), (1, 1), (1, 1)]
    assert places(world, PRIMARY) == []


def test_third_replica_that_holds_its_promise_does_not_refuse() -> None:
    world = start(2)
    world.links[PRIMARY, THIRD] = Link(lose=lambda: True)
    everywhere = (PRIMARY, BACKUP, THIRD)
    send(world, insert(1), to=(BACKUP, THIRD))
    announce(world, "leaving", WITHOUT, f=2)
    send(world, insert(1), to=everywhere)
    assert redirects(world) == [(1, 0), (1, 1), (1, 1)]
    assert acks(world)[-1] == (1, 2, [1]), "it did not hear that its slot is taken"
    world.links.clear()
    world.run(200 * MS)
    assert redirects(world)[-1] == (1, 2)


# --- sealed ---


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_server_that_has_all_on_disk_and_knows_it_of_the_others_is_sealed(durability: str) -> None:
    world = start(durability=durability)
    world.flush_ns = 10 * MS
    send(world, insert(1))
    announce(world, "leaving", run=200 * MS)
    assert sealed(world) == [False, False]
    announce(world, "leaving", WITHOUT, run=300 * MS)
    assert sealed(world) == [True, True]
    for name in (PRIMARY, BACKUP):
        beat = last_beat(world, name)
        assert (beat.placed, beat.is_sealed) == ("leaving", True), "and says so without delay"
        assert beat.frontier == beat.durable == WITHOUT.stop or beat.durable >= LIMIT
        mark = world.stores[name].mark
        assert mark is not None
        assert mark.frontier >= LIMIT
    announce(world, "finalized", run=100 * MS)
    assert last_beat(world, BACKUP).placed == "finalized"
    assert sealed(world) == [True, True]


def test_shard_that_is_parked_is_not_sealed() -> None:
    world = start()
    announce(world, "parked", WITHOUT, run=2 * S)
    assert sealed(world) == [False, False]
    announce(world, "leaving", run=300 * MS)
    assert sealed(world) == [True, True]


def test_server_is_not_sealed_before_every_disk_has_it() -> None:
    world = start()
    send(world, insert(1))
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    announce(world, "leaving", WITHOUT, run=2 * S)
    assert sealed(world) == [False, False]
    world.links.clear()
    world.run(2 * S)
    assert sealed(world) == [True, True]


def test_backup_that_missed_the_last_word_asks_for_it() -> None:
    world = start()
    world.flush_ns = 100 * MS
    send(world, insert(1))
    announce(world, "leaving", WITHOUT, run=50 * MS)
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    world.run(500 * MS)
    assert sealed(world) == [True, False], "nobody told the backup of the primary's disk"
    world.links.clear()
    world.run(3 * S)
    assert sealed(world) == [True, True]


@pytest.mark.parametrize("name", [PRIMARY, BACKUP])
def test_server_whose_own_mark_is_not_flushed_is_not_sealed(name: str) -> None:
    world = start()
    send(world, insert(1))
    world.run(50 * MS)
    world.stores[name].backlog_bytes = 1
    announce(world, "leaving", WITHOUT, run=500 * MS)
    assert sealed(world, name) == [False]
    world.stores[name].backlog_bytes = 0
    world.run(50 * MS)
    assert sealed(world, name) == [True], "it looks again by itself"


def test_server_without_a_mark_of_all_is_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.recovery.watermark_records.WATERMARK_INTERVAL_NS", 2 * S)
    world = start()
    send(world, insert(1), run=3 * S)
    assert world.stores[PRIMARY].mark is not None, "an earlier one is not enough"
    announce(world, "leaving", WITHOUT, run=1 * S)
    assert sealed(world) == [False, False]
    world.run(2 * S)
    assert sealed(world) == [True, True]


def test_sealed_server_is_so_again_after_a_restart() -> None:
    world = start()
    send(world, insert(1))
    announce(world, "leaving", WITHOUT, run=300 * MS)
    world.restart(BACKUP)
    assert sealed(world, BACKUP) == [False], "it was not told yet how its shard is placed"
    announce(world, "finalized", to=(BACKUP,), run=300 * MS)
    assert sealed(world, BACKUP) == [True]


@pytest.mark.parametrize("name", [PRIMARY, BACKUP])
def test_server_that_stopped_before_it_wrote_its_last_mark_is_sealed_after_a_restart(
    name: str,
) -> None:
    world = start()
    send(world, insert(1), run=300 * MS)
    announce(world, "leaving", WITHOUT, run=50 * MS)
    mark = world.stores[name].mark
    assert mark is not None
    assert mark.frontier < LIMIT, "the last one is not due yet"
    world.restart(name)
    announce(world, "leaving", WITHOUT, run=2 * S)
    assert sealed(world) == [True, True]


def test_server_that_hears_of_another_lease_is_not_sealed_any_more() -> None:
    """It was told how its shard is placed, but not yet of the last lease that it is in."""
    world = start()
    announce(world, "leaving", WITHOUT, run=300 * MS)
    assert sealed(world) == [True, True]
    announce(world, "leaving", AGAIN, AGAIN.following(OTHER), starts_in_us=500_000, run=100 * MS)
    assert sealed(world) == [False, False]
    assert not replica(world, PRIMARY)._state.is_out
    world.run(900 * MS)
    assert sealed(world) == [True, True]


def test_leases_that_were_over_before_they_came_are_settled_too() -> None:
    world = start()
    announce(world, "leaving", WITHOUT, run=300 * MS)
    world.paused.add(BACKUP)
    announce(world, "leaving", AGAIN, AGAIN.following(OTHER), run=50 * MS)
    assert sealed(world, PRIMARY) == [False]
    world.paused.clear()
    world.run(300 * MS)
    assert sealed(world) == [True, True]
    assert replica(world, PRIMARY)._state.stream.stable_end >= AGAIN.stop


def test_shard_that_was_never_a_member_is_sealed_at_once() -> None:
    world = World()
    add_shard(world, 0)
    announce(world, "joining", replace(LEASE, members=OTHER), run=200 * MS)
    assert sealed(world) == [False, False]
    announce(world, "finalized", run=300 * MS)
    assert sealed(world) == [True, True]


# --- heartbeats ---


def test_heartbeat_says_how_the_shard_is_placed_as_soon_as_that_changes() -> None:
    world = start()
    assert last_beat(world, PRIMARY).placed == "live"
    for placed in ("parked", "live", "leaving"):
        announce(world, placed)  # type: ignore[arg-type]
        assert [last_beat(world, name).placed for name in (PRIMARY, BACKUP)] == [placed] * 2


def test_primary_of_a_shard_that_is_read_along_is_heard_four_times_a_second() -> None:
    world = start()
    world.run(3 * S)

    def beats(name: str) -> int:
        before = len([b for b in heard(world, wire.Heartbeat, "mms-0") if b.node == name])
        for _ in range(8):
            send(world, wire.Want(CLUSTER, 0, 0, 1), to=(PRIMARY,), run=500 * MS)
        return len([b for b in heard(world, wire.Heartbeat, "mms-0") if b.node == name]) - before

    assert beats(PRIMARY) in range(15, 19)
    assert last_beat(world, PRIMARY).is_watched
    assert beats(BACKUP) in range(3, 6)
    world.run(3 * S)
    assert not last_beat(world, PRIMARY).is_watched


def test_idle_shard_that_has_left_is_quiet() -> None:
    world = start()
    announce(world, "leaving", WITHOUT, run=2 * S)
    before = len(world.sent)
    world.run(4 * S)
    kinds = {type(message).__name__ for _, _, message in world.sent[before:]}
    assert kinds <= {"Heartbeat", "Beat"}
