"""What a server refused for good, it never takes: told again, kept, bounded (section 13.8)."""

from __future__ import annotations

import msgspec
import pytest

from shard.recovery.checkpoint import Checkpoint
from shard.replica import Replica
from shard.state.sessions import ALL_COPIES
from tests.checkers import decided, places
from tests.shard.leavers import (
    AGAIN,
    BACKUP,
    LEASE,
    OTHER,
    PRIMARY,
    WITHOUT,
    acks,
    announce,
    heard,
    out,
    redirects,
    replica,
    sealed,
    send,
    start,
)
from tests.world import CLUSTER, MS, US, S, insert
from ziplog import wire
from ziplog.core.entries import Skip

LIMIT = LEASE.stop


def test_unit_that_was_refused_is_never_taken_in_this_view() -> None:
    world = start()
    out(world, "parked")
    send(world, insert(1))
    announce(world, "live", AGAIN)
    send(world, insert(1), insert(2, predecessor=1), insert(3))
    assert redirects(world) == [(1, 0), (1, 0), (1, 1), (1, 1), (2, 0), (2, 1)]
    assert [place.seq for place in places(world, PRIMARY)] == [3]
    assert [(seq, server) for seq, server, _ in acks(world)] == [(3, 0), (3, 1)]


@pytest.mark.parametrize("name", [PRIMARY, BACKUP])
def test_tombstones_outlive_a_clean_restart(name: str) -> None:
    world = start()
    out(world, "parked")
    send(world, insert(1), insert(2))
    world.restart(name)
    announce(world, "live", AGAIN)
    send(world, insert(1), insert(2), insert(3))
    assert redirects(world) == [(s, server) for s in (1, 2) for server in (0, 0, 1, 1)]
    assert [place.seq for place in places(world, PRIMARY)] == [3]


def test_checkpoint_of_before_there_were_tombstones_is_read() -> None:
    world = start()
    send(world, insert(1))
    saved = msgspec.msgpack.decode(replica(world, BACKUP).checkpoint())
    old = msgspec.msgpack.encode(saved[:-3])
    read = msgspec.msgpack.decode(old, type=Checkpoint)
    assert read.refused == []
    assert [client for client, _, _ in read.sessions] == [b"c" * 16]


def test_checkpoint_of_when_all_tombstones_were_of_all_copies_is_read() -> None:
    world = start()
    out(world, "parked")
    send(world, insert(1), to=(PRIMARY,))
    saved = msgspec.msgpack.decode(replica(world, PRIMARY).checkpoint())
    old = msgspec.msgpack.encode(saved[:-1])
    config, store = world._configs[PRIMARY], world.stores[PRIMARY]
    again = Replica(config, store, old, limbo=False, incarnation=9, now=world.now)
    assert again._state.sessions.by_client[b"c" * 16].refused == {1: ALL_COPIES}


def test_tombstones_are_forgotten_when_their_client_calls_them_settled() -> None:
    world = start()
    out(world, "parked")
    send(world, insert(1), insert(2))
    announce(world, "live", AGAIN)
    send(world, insert(3, first_incomplete=2))
    for name in (PRIMARY, BACKUP):
        session = replica(world, name)._state.sessions.by_client[b"c" * 16]
        assert set(session.refused) == {2}
    world.nodes["c"].received.clear()  # type: ignore[attr-defined]
    send(world, insert(1, first_incomplete=2))
    assert {message.code for message in heard(world, wire.Refused)} == {"identity-reused"}


def test_tombstones_are_no_more_than_the_window() -> None:
    world = start()
    out(world, "parked")
    limit = wire.Limits().max_unsettled_units
    for first in range(1, limit + 100, 100):
        send(world, *(insert(seq) for seq in range(first, first + 100)))
    for name in (PRIMARY, BACKUP):
        session = replica(world, name)._state.sessions.by_client[b"c" * 16]
        assert set(session.refused) == set(range(1, limit + 1))
        assert not session.units


def test_tombstones_go_with_their_session() -> None:
    world = start(session_timeout_s=10)
    out(world, "parked")
    send(world, insert(1))
    world.run(15 * S)
    assert not any(replica(world, n)._state.sessions.by_client for n in (PRIMARY, BACKUP))


@pytest.mark.parametrize("placed", ["leaving", "finalized"])
def test_log_of_a_shard_that_has_left_does_not_grow_as_clients_fall_silent(placed: str) -> None:
    world = start(session_timeout_s=10)
    send(world, insert(1))
    out(world, "leaving")
    announce(world, placed)  # type: ignore[arg-type]
    last = world.stores[PRIMARY].last_fseq
    world.run(30 * S)
    assert {world.stores[name].last_fseq for name in (PRIMARY, BACKUP)} == {last}
    assert replica(world, PRIMARY)._state.sessions.by_client
    assert sealed(world) == [True, True]
    # Nor while it is not told how it is placed.
    world.restart(PRIMARY)
    world.run(30 * S)
    assert world.stores[PRIMARY].last_fseq == last


def test_finalized_shard_decides_nothing_though_its_primary_has_missed_leases() -> None:
    world = start()
    send(world, insert(1))
    out(world, "leaving")
    last = world.stores[PRIMARY].last_fseq
    state = replica(world, PRIMARY)._state
    state.clock.recent.clear()
    state.clock.lease = None
    later = AGAIN.following(OTHER).following(OTHER)
    announce(world, "finalized", later, to=(PRIMARY,))
    assert state.clock.next_owned(LIMIT) == LIMIT, "it may be its own, for all that it knows"
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 7, later.base))
    world.run(2 * S)
    assert world.stores[PRIMARY].last_fseq == last


def test_position_wanted_behind_the_last_lease_is_no_hole() -> None:
    """A reader waits there for another shard; the lease has begun for others, but not here yet."""
    world = start()
    announce(world, "leaving", WITHOUT, starts_in_us=50_000, run=1 * MS)
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 7, WITHOUT.base))
    world.run(1 * MS)
    assert decided(world, PRIMARY)[-1].decision == Skip(1, WITHOUT.base + 1)
    assert replica(world, PRIMARY)._state.holes == 0


def test_finalized_shard_keeps_nothing_of_clients_that_it_does_not_know() -> None:
    world = start()
    send(world, insert(1))
    out(world, "leaving")
    announce(world, "finalized")
    send(world, insert(1), insert(1, client=b"d" * 16))
    assert redirects(world) == [(1, 0), (1, 1)]
    assert len(acks(world)) == 4
    for name in (PRIMARY, BACKUP):
        assert list(replica(world, name)._state.sessions.by_client) == [b"c" * 16]


def test_primary_is_right_where_a_backup_refused_too_early() -> None:
    """A backup that was not told of the last lease refuses; the stream is above that."""
    world = start()
    out(world, "parked")
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
def test_late_copy_at_a_backup_after_the_return_does_not_leave_the_client_in_doubt(
    backup: str, durability: str
) -> None:
    world = start(durability=durability)
    knows = backup != "was-away"
    if knows:
        out(world, "parked")
    else:
        announce(world, "parked", WITHOUT, to=(PRIMARY,))
    send(world, insert(1), to=(PRIMARY,))
    announce(world, "live", *([] if knows else [WITHOUT]), AGAIN, to=(BACKUP,))
    announce(world, "live", AGAIN, to=(PRIMARY,))
    if backup == "was-there-before-a-restart":
        world.restart(BACKUP)
    for turn in range(20):
        if turn == 10:  # whose clock began anew may have guessed into the last epoch of all
            announce(world, "live", AGAIN.following())
        send(world, insert(1), run=20 * MS)
        if (1, 1) in redirects(world):
            break
    assert (1, 1) in redirects(world), "its promise was never decided, or never refused"
    send(world, insert(1), run=20 * MS)
    assert redirects(world)[-1] == (1, 1)
    assert places(world, PRIMARY) == []


def test_backup_does_not_refuse_what_the_stream_has_placed_already() -> None:
    world = start(durability="disk")
    out(world, "parked")
    announce(world, "live", AGAIN)
    send(world, insert(2), to=(BACKUP,))
    send(world, insert(1), insert(2), to=(PRIMARY,), run=150 * US)
    send(world, insert(2), to=(BACKUP,), run=100 * US)
    backup = replica(world, BACKUP)._backup
    assert backup is not None
    assert len(backup._pending) == 2, "the stream waits for the body of unit 1"
    world.run(20 * MS)
    assert not heard(world, wire.Refused)
    assert [place.seq for place in places(world, BACKUP)] == [1, 2]


def test_promise_to_a_refused_unit_is_broken_though_nothing_else_comes() -> None:
    """Found by thought: an idle primary decides nothing, so a promise would stand for ever."""
    world = start()
    announce(world, "parked", WITHOUT, to=(PRIMARY,))
    send(world, insert(1), to=(PRIMARY,))
    send(world, insert(1), to=(BACKUP,))
    announce(world, "live", WITHOUT, AGAIN, to=(BACKUP,))
    announce(world, "live", AGAIN, to=(PRIMARY,))
    world.run(100 * MS)
    assert not replica(world, BACKUP)._state.sessions.by_client[b"c" * 16].refused
    send(world, insert(1), run=20 * MS)
    send(world, insert(1), run=20 * MS)
    assert (1, 1) in redirects(world)
