"""A shard that leaves or is parked: `Leaving` messages, refusals, the sealed state."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.checkers import places
from tests.unit.shard.draining import (
    AGAIN,
    BACKUP,
    LEASE,
    OTHER,
    PRIMARY,
    THIRD,
    WITHOUT,
    acks,
    announce,
    last_beat,
    received,
    redirects,
    replica,
    sealed,
    send,
    start,
    without_positions,
)
from tests.world import CLUSTER, MS, Link, S, World, add_shard, insert
from ziplog import wire
from ziplog.core.node import StorageChanged

LIMIT = LEASE.stop


# --- leaving ---


def test_leaving_shard_accepts_inserts_and_sends_leaving() -> None:
    world = start()
    send(world, insert(1))
    assert not received(world, wire.Leaving)
    announce(world, "leaving")
    send(world, insert(2), insert(3))
    assert acks(world) == [(seq, s, [2 * seq - 1]) for seq in (1, 2, 3) for s in (0, 1)]
    assert received(world, wire.Leaving) == [wire.Leaving(CLUSTER, 0, 1)], "once, by the primary"
    world.run(50 * MS)
    send(world, insert(4), insert(3))
    assert len(received(world, wire.Leaving)) == 2, "a client that continues gets one more message"


def test_drained_shard_reports_it_until_a_lease_excludes_it() -> None:
    world = start()
    send(world, insert(1))
    announce(world, "leaving", run=15 * MS)
    assert not received(world, wire.Rate, "mms-0"), "an insert came just now"
    world.run(10 * MS)
    assert received(world, wire.Rate, "mms-0") == [wire.Rate(CLUSTER, 0, 1, 0)]
    world.run(200 * MS)
    assert len(received(world, wire.Rate, "mms-0")) == 3, (
        "again every 100 ms: it may have been lost"
    )
    announce(world, "leaving", WITHOUT, starts_in_us=50_000, run=500 * MS)
    assert len(received(world, wire.Rate, "mms-0")) == 3


def test_shard_in_which_a_unit_waits_is_not_drained() -> None:
    world = start()
    send(world, insert(2, predecessor=1))
    announce(world, "leaving", run=200 * MS)
    assert not received(world, wire.Rate, "mms-0")
    send(world, insert(1))
    world.run(60 * MS)
    assert len(received(world, wire.Rate, "mms-0")) == 1
    assert [place.seq for place in places(world, PRIMARY)] == [1, 2]


def test_leaving_shard_refuses_units_after_its_end() -> None:
    world = start()
    announce(world, "leaving", WITHOUT, starts_in_us=1_000_000)
    send(world, insert(1, after=WITHOUT.stop + 5), insert(2, predecessor=1), insert(3, after=LIMIT))
    assert redirects(world) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    assert not received(world, wire.LeaseQuery, "mms-0")
    send(world, insert(3, after=LIMIT))
    assert redirects(world)[-2:] == [(3, 0), (3, 1)], "a backup refuses the second copy"


def test_unit_that_waits_for_a_lease_is_refused_when_the_shard_leaves() -> None:
    world = start()
    send(world, insert(1, after=LIMIT + 5), insert(2, predecessor=1), run=20 * MS)
    assert not received(world, wire.Refused)
    announce(world, "leaving")
    assert redirects(world) == [(1, 0), (2, 0)]
    send(world, insert(1, after=LIMIT + 5), insert(2, predecessor=1))
    assert redirects(world) == [(seq, s) for seq in (1, 2) for s in (0, 0, 1)]


# --- without positions ---


@pytest.mark.parametrize("placed", ["leaving", "parked"])
def test_shard_without_positions_decides_the_rest_and_refuses_waiting_units(placed: str) -> None:
    world = start()
    send(world, insert(1), insert(3, predecessor=2), run=5 * MS)
    without_positions(world, placed)
    for name in (PRIMARY, BACKUP):
        state = replica(world, name).state
        assert state.has_no_positions
        assert state.stream.stable_end >= LIMIT, "all is decided even without readers"
        assert state.frontier == WITHOUT.stop
    assert redirects(world) == [(3, 0), (3, 1)]
    send(world, insert(1), insert(4, client=b"d" * 16), insert(3, predecessor=2))
    assert acks(world)[-2:] == [(1, 1, [1]), (1, 1, [1])], "placed units are acked as before"
    assert redirects(world) == [(3, 0), (3, 0), (3, 1), (3, 1), (4, 0), (4, 1)]


def test_last_lease_is_used_to_its_end() -> None:
    """A coming lease does not affect inserts that arrive before it begins."""
    world = start()
    ends = replica(world, PRIMARY).state.clock.ends_at
    assert ends is not None
    rest = ends - world.now
    announce(world, "leaving", WITHOUT, starts_in_us=rest // 1000, run=rest - 10 * MS)
    send(world, insert(1))
    assert acks(world) == [(1, 0, acks(world)[0][2]), (1, 1, acks(world)[0][2])]
    send(world, insert(3, predecessor=2))
    world.run(20 * MS)
    assert redirects(world) == [(3, 0), (3, 1)], "refused when the lease ends, by itself"
    assert replica(world, PRIMARY).state.stream.stable_end >= LIMIT


@pytest.mark.parametrize("placed", ["live", "recovering", "joining"])
def test_server_that_may_have_positions_lets_units_wait(placed: str) -> None:
    world = start()
    without_positions(world, placed)
    send(world, insert(1), run=50 * MS)
    assert not received(world, wire.Refused)
    assert not replica(world, PRIMARY).state.has_no_positions


def test_server_without_a_lease_is_not_without_positions() -> None:
    world = start()
    announce(world, "leaving")
    world.restart(BACKUP)
    world.restart(PRIMARY, clean=False)
    send(world, insert(1))
    refused = received(world, wire.Refused)
    assert [(message.server, message.code) for message in refused] == [(0, "not-ready")]


def test_refused_units_do_not_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.ordering.forwards.MAX_UNSTABLE_RECORDS", 1)
    monkeypatch.setattr("shard.ordering.epoch_closer.MAX_UNSTABLE_DECISIONS", 1)
    world = start()
    world.paused.add(BACKUP)
    send(world, insert(1), insert(2), insert(3), to=(PRIMARY,))
    without_positions(world)
    assert redirects(world) == [(2, 0), (3, 0)]
    world.run(100 * MS)
    assert replica(world, PRIMARY).state.stream.end < LIMIT, "only what fits is decided"
    world.paused.clear()
    world.run(100 * MS)
    assert replica(world, PRIMARY).state.stream.stable_end >= LIMIT


# --- primary and backup learn of the end at different times ---


def test_backup_without_the_last_lease_refuses_nothing() -> None:
    world = start()
    announce(world, "leaving", WITHOUT, to=(PRIMARY,))
    send(world, insert(1))
    assert redirects(world) == [(1, 0)]
    announce(world, "leaving", WITHOUT, to=(BACKUP,))
    assert redirects(world) == [(1, 0), (1, 1)]


def test_backup_does_not_refuse_units_that_the_stream_may_place() -> None:
    world = start()
    send(world, insert(2, predecessor=1), to=(BACKUP,))
    announce(world, "leaving", WITHOUT, to=(BACKUP,))
    assert replica(world, BACKUP).state.has_no_positions
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
    assert redirects(world) == [], "the primary may have placed it at this slot"
    announce(world, "leaving", WITHOUT, to=(PRIMARY,))
    assert redirects(world) == [(1, 1)]
    send(world, insert(1))
    assert redirects(world) == [(1, 0), (1, 1), (1, 1)]
    assert places(world, PRIMARY) == []


def test_replica_with_an_intact_promise_does_not_refuse() -> None:
    world = start(2)
    world.links[PRIMARY, THIRD] = Link(lose=lambda: True)
    everywhere = (PRIMARY, BACKUP, THIRD)
    send(world, insert(1), to=(BACKUP, THIRD))
    announce(world, "leaving", WITHOUT, f=2)
    send(world, insert(1), to=everywhere)
    assert redirects(world) == [(1, 0), (1, 1), (1, 1)]
    assert acks(world)[-1] == (1, 2, [1]), "it did not receive the decision about its slot"
    world.links.clear()
    world.run(200 * MS)
    assert redirects(world)[-1] == (1, 2)


# --- sealed ---


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_server_is_sealed_when_all_disks_have_everything(durability: str) -> None:
    world = start(durability=durability)
    world.flush_ns = 10 * MS
    send(world, insert(1))
    announce(world, "leaving", run=200 * MS)
    assert sealed(world) == [False, False]
    announce(world, "leaving", WITHOUT, run=300 * MS)
    assert sealed(world) == [True, True]
    for name in (PRIMARY, BACKUP):
        beat = last_beat(world, name)
        assert (beat.shard_state, beat.is_sealed) == ("leaving", True), "reported without delay"
        assert beat.frontier == beat.durable == WITHOUT.stop or beat.durable >= LIMIT
        mark = world.stores[name].mark
        assert mark is not None
        assert mark.frontier >= LIMIT
    announce(world, "finalized", run=100 * MS)
    assert last_beat(world, BACKUP).shard_state == "finalized"
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


def test_backup_requests_the_lost_durable_watermark() -> None:
    world = start()
    world.flush_ns = 100 * MS
    send(world, insert(1))
    announce(world, "leaving", WITHOUT, run=50 * MS)
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    world.run(500 * MS)
    assert sealed(world) == [True, False], "the backup did not receive the durable watermark"
    world.links.clear()
    world.run(3 * S)
    assert sealed(world) == [True, True]


@pytest.mark.parametrize("name", [PRIMARY, BACKUP])
def test_server_with_an_unflushed_watermark_record_is_not_sealed(name: str) -> None:
    world = start()
    send(world, insert(1))
    world.run(50 * MS)
    world.stores[name].backlog_bytes = 1
    announce(world, "leaving", WITHOUT, run=500 * MS)
    assert sealed(world, name) == [False]
    world.stores[name].backlog_bytes = 0
    world.run(50 * MS)
    assert sealed(world, name) == [True], "it checks again by itself"


def test_server_without_a_complete_watermark_record_is_not_sealed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shard.recovery.watermark_records.WATERMARK_INTERVAL_NS", 2 * S)
    world = start()
    send(world, insert(1), run=3 * S)
    assert world.stores[PRIMARY].mark is not None, "an earlier record is not enough"
    announce(world, "leaving", WITHOUT, run=1 * S)
    assert sealed(world) == [False, False]
    world.run(2 * S)
    assert sealed(world) == [True, True]


def test_sealed_server_is_so_again_after_a_restart() -> None:
    world = start()
    send(world, insert(1))
    announce(world, "leaving", WITHOUT, run=300 * MS)
    world.restart(BACKUP)
    assert sealed(world, BACKUP) == [False], "its shard's placement was not announced yet"
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


def test_another_lease_ends_the_sealed_state() -> None:
    """It received its shard's placement, but not yet the shard's last lease."""
    world = start()
    announce(world, "leaving", WITHOUT, run=300 * MS)
    assert sealed(world) == [True, True]
    announce(world, "leaving", AGAIN, AGAIN.following(OTHER), starts_in_us=500_000, run=100 * MS)
    assert sealed(world) == [False, False]
    assert not replica(world, PRIMARY).state.has_no_positions
    world.run(900 * MS)
    assert sealed(world) == [True, True]


def test_leases_that_ended_before_they_arrived_are_decided_too() -> None:
    world = start()
    announce(world, "leaving", WITHOUT, run=300 * MS)
    world.paused.add(BACKUP)
    announce(world, "leaving", AGAIN, AGAIN.following(OTHER), run=50 * MS)
    assert sealed(world, PRIMARY) == [False]
    world.paused.clear()
    world.run(300 * MS)
    assert sealed(world) == [True, True]
    assert replica(world, PRIMARY).state.stream.stable_end >= AGAIN.stop


def test_shard_that_was_never_a_member_is_sealed_at_once() -> None:
    world = World()
    add_shard(world, 0)
    announce(world, "joining", replace(LEASE, members=OTHER), run=200 * MS)
    assert sealed(world) == [False, False]
    announce(world, "finalized", run=300 * MS)
    assert sealed(world) == [True, True]


# --- heartbeats ---


def test_heartbeat_reports_a_full_disk_and_room_again_at_once() -> None:
    world = start()
    for reason in ("no space", ""):
        world.inject(PRIMARY, StorageChanged(full=bool(reason), reason=reason))
        world.run(MS)
        assert last_beat(world, PRIMARY).full == reason


def test_heartbeat_reports_a_change_of_the_shard_state_at_once() -> None:
    world = start()
    assert last_beat(world, PRIMARY).shard_state == "live"
    for placed in ("parked", "live", "leaving"):
        announce(world, placed)  # type: ignore[arg-type]
        assert [last_beat(world, name).shard_state for name in (PRIMARY, BACKUP)] == [placed] * 2


def test_primary_with_readers_sends_four_heartbeats_a_second() -> None:
    world = start()
    world.run(3 * S)

    def beats(name: str) -> int:
        before = len([b for b in received(world, wire.Heartbeat, "mms-0") if b.node == name])
        for _ in range(8):
            send(world, wire.Want(CLUSTER, 0, 0, 1), to=(PRIMARY,), run=500 * MS)
        return len([b for b in received(world, wire.Heartbeat, "mms-0") if b.node == name]) - before

    assert beats(PRIMARY) in range(15, 19)
    assert last_beat(world, PRIMARY).has_readers
    assert beats(BACKUP) in range(3, 6)
    world.run(3 * S)
    assert not last_beat(world, PRIMARY).has_readers


def test_idle_shard_that_has_left_is_quiet() -> None:
    world = start()
    announce(world, "leaving", WITHOUT, run=2 * S)
    before = len(world.sent)
    world.run(4 * S)
    kinds = {type(message).__name__ for _, _, message in world.sent[before:]}
    assert kinds <= {"Heartbeat", "Beat"}
