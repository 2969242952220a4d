"""Tombstones: permanent refusals are repeated, kept, and bounded (section 13.8)."""

from __future__ import annotations

import msgspec
import pytest

from shard.recovery.checkpoint import Checkpoint
from shard.replica import Replica
from shard.state.sessions import ALL_COPIES
from tests.checkers import decided, places
from tests.unit.shard.draining import (
    AGAIN,
    BACKUP,
    LEASE,
    OTHER,
    PRIMARY,
    WITHOUT,
    acks,
    announce,
    received,
    redirects,
    replica,
    sealed,
    send,
    start,
    without_positions,
)
from tests.world import CLUSTER, MS, US, S, insert
from ziplog import wire
from ziplog.core.entries import Skip

LIMIT = LEASE.stop


def test_refused_unit_is_never_accepted_in_this_view() -> None:
    world = start()
    without_positions(world, "parked")
    send(world, insert(1))
    announce(world, "live", AGAIN)
    send(world, insert(1), insert(2, predecessor=1), insert(3))
    assert redirects(world) == [(1, 0), (1, 0), (1, 1), (1, 1), (2, 0), (2, 1)]
    assert [place.seq for place in places(world, PRIMARY)] == [3]
    assert [(seq, server) for seq, server, _ in acks(world)] == [(3, 0), (3, 1)]


@pytest.mark.parametrize("name", [PRIMARY, BACKUP])
def test_tombstones_outlive_a_clean_restart(name: str) -> None:
    world = start()
    without_positions(world, "parked")
    send(world, insert(1), insert(2))
    world.restart(name)
    announce(world, "live", AGAIN)
    send(world, insert(1), insert(2), insert(3))
    assert redirects(world) == [(s, server) for s in (1, 2) for server in (0, 0, 1, 1)]
    assert [place.seq for place in places(world, PRIMARY)] == [3]


def test_checkpoint_without_tombstones_is_read() -> None:
    world = start()
    send(world, insert(1))
    saved = msgspec.msgpack.decode(replica(world, BACKUP).checkpoint())
    old = msgspec.msgpack.encode(saved[:-3])
    read = msgspec.msgpack.decode(old, type=Checkpoint)
    assert read.refused == []
    assert [client for client, _, _ in read.sessions] == [b"c" * 16]


def test_checkpoint_with_tombstones_of_all_copies_only_is_read() -> None:
    world = start()
    without_positions(world, "parked")
    send(world, insert(1), to=(PRIMARY,))
    saved = msgspec.msgpack.decode(replica(world, PRIMARY).checkpoint())
    old = msgspec.msgpack.encode(saved[:-1])
    config, store = world._configs[PRIMARY], world.stores[PRIMARY]
    again = Replica(config, store, old, limbo=False, incarnation=9, now=world.now)
    assert again.state.sessions.by_client[b"c" * 16].refused == {1: ALL_COPIES}


def test_tombstones_are_forgotten_when_their_client_settles_them() -> None:
    world = start()
    without_positions(world, "parked")
    send(world, insert(1), insert(2))
    announce(world, "live", AGAIN)
    send(world, insert(3, first_incomplete=2))
    for name in (PRIMARY, BACKUP):
        session = replica(world, name).state.sessions.by_client[b"c" * 16]
        assert set(session.refused) == {2}
    world.nodes["c"].received.clear()  # type: ignore[attr-defined]
    send(world, insert(1, first_incomplete=2))
    assert {message.code for message in received(world, wire.Refused)} == {"identity-reused"}


def test_tombstones_are_bounded_by_the_window() -> None:
    world = start()
    without_positions(world, "parked")
    limit = wire.Limits().max_unsettled_units
    for first in range(1, limit + 100, 100):
        send(world, *(insert(seq) for seq in range(first, first + 100)))
    for name in (PRIMARY, BACKUP):
        session = replica(world, name).state.sessions.by_client[b"c" * 16]
        assert set(session.refused) == set(range(1, limit + 1))
        assert not session.units


def test_tombstones_go_with_their_session() -> None:
    world = start(session_timeout_s=10)
    without_positions(world, "parked")
    send(world, insert(1))
    world.run(15 * S)
    assert not any(replica(world, n).state.sessions.by_client for n in (PRIMARY, BACKUP))


@pytest.mark.parametrize("placed", ["leaving", "finalized"])
def test_log_of_a_shard_that_has_left_does_not_grow_as_sessions_expire(placed: str) -> None:
    world = start(session_timeout_s=10)
    send(world, insert(1))
    without_positions(world, "leaving")
    announce(world, placed)  # type: ignore[arg-type]
    last = world.stores[PRIMARY].last_fseq
    world.run(30 * S)
    assert {world.stores[name].last_fseq for name in (PRIMARY, BACKUP)} == {last}
    assert replica(world, PRIMARY).state.sessions.by_client
    assert sealed(world) == [True, True]
    # Nor before its placement is announced.
    world.restart(PRIMARY)
    world.run(30 * S)
    assert world.stores[PRIMARY].last_fseq == last


def test_finalized_shard_decides_nothing_though_its_primary_has_missed_leases() -> None:
    world = start()
    send(world, insert(1))
    without_positions(world, "leaving")
    last = world.stores[PRIMARY].last_fseq
    state = replica(world, PRIMARY).state
    state.clock.recent.clear()
    state.clock.lease = None
    later = AGAIN.following(OTHER).following(OTHER)
    announce(world, "finalized", later, to=(PRIMARY,))
    assert state.clock.next_owned(LIMIT) == LIMIT, "it may own the position, by the leases it holds"
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 7, later.base))
    world.run(2 * S)
    assert world.stores[PRIMARY].last_fseq == last


def test_wanted_position_after_the_last_lease_is_not_a_hole() -> None:
    """A reader waits there for another shard; the lease has not begun by this clock."""
    world = start()
    announce(world, "leaving", WITHOUT, starts_in_us=50_000, run=1 * MS)
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 7, WITHOUT.base))
    world.run(1 * MS)
    assert decided(world, PRIMARY)[-1].decision == Skip(1, WITHOUT.base + 1)
    assert replica(world, PRIMARY).state.holes == 0


def test_finalized_shard_keeps_no_state_of_unknown_clients() -> None:
    world = start()
    send(world, insert(1))
    without_positions(world, "leaving")
    announce(world, "finalized")
    send(world, insert(1), insert(1, client=b"d" * 16))
    assert redirects(world) == [(1, 0), (1, 1)]
    assert len(acks(world)) == 4
    for name in (PRIMARY, BACKUP):
        assert list(replica(world, name).state.sessions.by_client) == [b"c" * 16]


def test_primarys_decision_overrides_an_early_refusal_of_a_backup() -> None:
    """A backup that missed the last lease refuses; the stream overrides that."""
    world = start()
    without_positions(world, "parked")
    announce(world, "live", AGAIN, to=(PRIMARY,))
    send(world, insert(1), run=50 * MS)
    assert redirects(world) == [(1, 1)]
    (place,) = places(world, PRIMARY)
    announce(world, "live", AGAIN, to=(BACKUP,))
    world.run(50 * MS)
    send(world, insert(1))
    assert acks(world) == [(1, 0, place.gsns)] * 2 + [(1, 1, place.gsns)]
    assert places(world, BACKUP) == [place]


@pytest.mark.parametrize("backup", ["was-there", "was-there-before-a-restart", "was-away"])
@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_late_copy_at_a_backup_after_the_return_gets_an_outcome(
    backup: str, durability: str
) -> None:
    world = start(durability=durability)
    knows = backup != "was-away"
    if knows:
        without_positions(world, "parked")
    else:
        announce(world, "parked", WITHOUT, to=(PRIMARY,))
    send(world, insert(1), to=(PRIMARY,))
    announce(world, "live", *([] if knows else [WITHOUT]), AGAIN, to=(BACKUP,))
    announce(world, "live", AGAIN, to=(PRIMARY,))
    if backup == "was-there-before-a-restart":
        world.restart(BACKUP)
    for turn in range(20):
        if turn == 10:  # the clock restarted, and it may have guessed into the last epoch
            announce(world, "live", AGAIN.following())
        send(world, insert(1), run=20 * MS)
        if (1, 1) in redirects(world):
            break
    assert (1, 1) in redirects(world), "its promise was never decided, or never refused"
    send(world, insert(1), run=20 * MS)
    assert redirects(world)[-1] == (1, 1)
    assert places(world, PRIMARY) == []


def test_backup_does_not_refuse_a_unit_that_the_stream_has_placed() -> None:
    world = start(durability="disk")
    without_positions(world, "parked")
    announce(world, "live", AGAIN)
    send(world, insert(2), to=(BACKUP,))
    send(world, insert(1), insert(2), to=(PRIMARY,), run=150 * US)
    send(world, insert(2), to=(BACKUP,), run=100 * US)
    backup = replica(world, BACKUP)._backup
    assert backup is not None
    assert len(backup._pending) == 2, "the stream waits for the body of unit 1"
    world.run(20 * MS)
    assert not received(world, wire.Refused)
    assert [place.seq for place in places(world, BACKUP)] == [1, 2]


def test_promise_to_a_refused_unit_is_broken_in_an_idle_shard() -> None:
    """An idle primary decides nothing, so a promise would last for ever."""
    world = start()
    announce(world, "parked", WITHOUT, to=(PRIMARY,))
    send(world, insert(1), to=(PRIMARY,))
    send(world, insert(1), to=(BACKUP,))
    announce(world, "live", WITHOUT, AGAIN, to=(BACKUP,))
    announce(world, "live", AGAIN, to=(PRIMARY,))
    world.run(100 * MS)
    assert not replica(world, BACKUP).state.sessions.by_client[b"c" * 16].refused
    send(world, insert(1), run=20 * MS)
    send(world, insert(1), run=20 * MS)
    assert (1, 1) in redirects(world)
