"""A server that resumes with an old copy of the data directory of its last clean stop."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

from shard.replica import Replica
from tests.unit.shard.recovery_world import (
    BACKUP,
    LEASE,
    PRIMARY,
    THIRD,
    acks,
    begin,
    decision,
    freeze,
    heard,
    joined,
    log,
    order,
    promise,
    recover,
    replica,
    send,
    start,
)
from tests.world import CLUSTER, MS, S, World, calm_world, insert, placements, shard_names
from ziplog import wire
from ziplog.core.view import run_of

if TYPE_CHECKING:
    from tests.memory_store import MemoryStore


class Copy(NamedTuple):
    """A server's directory after a clean stop."""

    store: MemoryStore
    checkpoint: bytes


def copied(world: World, name: str) -> Copy:
    """Copy what a server would leave if it stopped now."""
    return deepcopy(Copy(world.stores[name], replica(world, name).checkpoint()))


def replace(world: World, name: str, copy: Copy, f: int = 1) -> Replica:
    """Restart a server with a copy of its directory."""
    world.restart(name)
    world.stores[name] = copy.store
    new = Replica(
        world._configs[name], copy.store, copy.checkpoint,
        limbo=False, incarnation=9000, now=world.now,
    )  # fmt: skip
    world.nodes[name] = new
    announce(world, name, f)
    return new


def announce(world: World, name: str, f: int = 1) -> None:
    message = wire.LeaseAnnounced(CLUSTER, [run_of(LEASE)], 0, placements(1, f), 0)
    world.send("mms-0", name, message, reply=True)


def insert_at_all(world: World, *seqs: int, f: int = 1) -> None:
    for seq in seqs:
        send(world, insert(seq), *shard_names(0, f))


def outdated(world: World, f: int = 1) -> Copy:
    """Insert units 1 and 2; return the primary's directory from between them."""
    insert_at_all(world, 1, f=f)
    copy = copied(world, PRIMARY)
    insert_at_all(world, 2, f=f)
    world.run(1 * S)
    return copy


@pytest.mark.parametrize("name", [PRIMARY, BACKUP])
def test_server_with_an_old_copy_enters_limbo_and_copies_the_log(name: str) -> None:
    world = start()
    insert_at_all(world, 1, 2)
    world.run(1 * S)
    copy = copied(world, name)
    insert_at_all(world, 3, 4)
    world.run(1 * S)
    other = BACKUP if name == PRIMARY else PRIMARY
    whole = log(world, other)
    new = replace(world, name, copy)
    assert world.run_until(lambda: new.state.server_state == "limbo", 1 * S)
    world.run(5 * MS)
    assert any(one.node == name and one.state == "limbo" for one in heard(world, wire.Suspect))
    recover(world, other, name)
    assert log(world, name)[: len(whole)] == whole


def test_primary_with_an_old_copy_decides_nothing_before_it_is_found() -> None:
    world = start()
    copy = outdated(world)
    world.paused.add(BACKUP)
    new = replace(world, PRIMARY, copy)
    last = new.state.stream.last
    insert_at_all(world, 3)
    send(world, wire.Want(CLUSTER, 0, 0, LEASE.base + 9), PRIMARY)
    world.run(500 * MS)
    assert (new.state.server_state, new.state.stream.last) == ("up", last)
    world.paused.discard(BACKUP)
    assert world.run_until(lambda: new.state.server_state == "limbo", 1 * S)
    assert new.state.stream.last <= last
    assert (3, 0) not in {(seq, server) for seq, server, _ in acks(world)}


def test_request_to_freeze_from_before_an_old_copy_was_found_is_ignored() -> None:
    """The handler took the server for one with the whole log; another one has a newer log."""
    world = start()
    copy = outdated(world)
    new = replace(world, PRIMARY, copy)
    incarnation = new.state.incarnation
    assert world.run_until(lambda: new.state.server_state == "limbo", 1 * S)
    order(world, msgspec.structs.replace(freeze(), incarnation=incarnation), PRIMARY)
    world.run(100 * MS)
    assert new.state.server_state == "limbo"
    assert not heard(world, wire.Frozen)
    recover(world, BACKUP, PRIMARY)
    assert log(world, PRIMARY) == log(world, BACKUP)


def test_each_backup_counts() -> None:
    world = start(f=2)
    copy = outdated(world, f=2)
    world.paused |= {BACKUP, THIRD}
    new = replace(world, PRIMARY, copy, f=2)
    world.send(BACKUP, PRIMARY, wire.Beat(CLUSTER, 0, 1, 1, 7, "up"))  # of an earlier release
    insert_at_all(world, 3, f=2)
    assert new.state.stream.last == copy.store.last_fseq
    world.paused.discard(THIRD)
    assert world.run_until(lambda: new.state.server_state == "limbo", 1 * S)


def test_an_unstable_entry_of_one_backup_counts() -> None:
    world = start(f=2)
    insert_at_all(world, 1, f=2)
    world.run(1 * S)
    copy = copied(world, PRIMARY)
    world.paused.add(THIRD)
    send(world, insert(2), PRIMARY, BACKUP)
    world.run(10 * MS)
    assert replica(world, BACKUP).state.stream.last > replica(world, BACKUP).state.stream.stable
    new = replace(world, PRIMARY, copy, f=2)
    assert world.run_until(lambda: new.state.server_state == "limbo", 500 * MS)


def test_copy_from_before_the_view_began_is_compared() -> None:
    """A server that stops after it joined a view is in the view as soon as it starts."""
    world = start()
    insert_at_all(world, 1)
    frozen = promise(world, PRIMARY)
    order(world, decision(frozen), PRIMARY, BACKUP)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 2 * S)
    copy = copied(world, PRIMARY)
    begin(world, 2)
    send(world, insert(2, view=2), PRIMARY, BACKUP)
    assert acks(world, view=2)
    world.paused.add(BACKUP)
    new = replace(world, PRIMARY, copy)
    begin(world, 2)
    assert (new.state.server_state, new.state.is_compared) == ("up", False)
    world.paused.discard(BACKUP)
    assert world.run_until(lambda: new.state.server_state == "limbo", 1 * S)


def gated(world: World) -> Replica:
    """Restart a primary with its own directory while its backup is paused."""
    insert_at_all(world, 1)
    world.run(1 * S)
    world.paused.add(BACKUP)
    world.restart(PRIMARY)
    announce(world, PRIMARY)
    world.run(1 * MS)
    return replica(world, PRIMARY)


def test_primary_sleeps_while_units_wait_for_the_comparison() -> None:
    """Also when the next lease begins meanwhile."""
    world = start()
    gated(world)
    send(world, insert(2), PRIMARY)
    following = wire.LeaseAnnounced(
        CLUSTER, [run_of(LEASE.following(LEASE.members))], 50_000, placements(1, 1), 0
    )
    world.send("mms-0", PRIMARY, following, reply=True)
    world.run(900 * MS)  # or the world would count too many wakeups
    world.paused.discard(BACKUP)
    world.run(10 * MS)
    assert (2, 0) in {(seq, server) for seq, server, _ in acks(world)}


def test_primary_of_a_leaving_shard_decides_the_rest_after_the_comparison() -> None:
    """No further announcement is needed: it may take as long as a lease."""
    world = start()
    primary = gated(world)
    clock, stream = primary.state.clock, primary.state.stream
    following = LEASE.following((msgspec.structs.replace(LEASE.members[0], shard=1),))
    leaving = msgspec.structs.replace(placements(1, 1)[0], state="leaving")
    message = wire.LeaseAnnounced(CLUSTER, [run_of(following)], 0, [leaving], 0)
    world.send("mms-0", PRIMARY, message, reply=True)
    world.run(500 * MS)
    assert primary.state.has_no_positions
    assert not clock.has_ended(stream.end)
    world.paused.discard(BACKUP)
    assert world.run_until(lambda: primary.state.is_compared, 1 * S)
    assert clock.has_ended(stream.end)


def test_primary_with_its_own_directory_continues_after_the_heartbeats() -> None:
    world = start()
    insert_at_all(world, 1)
    world.run(1 * S)
    world.restart(PRIMARY)
    announce(world, PRIMARY)
    insert_at_all(world, 2)
    world.run(100 * MS)
    assert {(seq, server) for seq, server, _ in acks(world)} >= {(2, 0), (2, 1)}


def test_a_backup_answers_the_first_heartbeat_of_a_new_process_at_once() -> None:
    world = start()
    world.run(1 * S)
    world.restart(PRIMARY)
    world.sent.clear()
    world.run(20 * MS)
    assert any(
        (src, dst) == (BACKUP, PRIMARY) and type(message) is wire.Beat
        for src, dst, message in world.sent
    )


@pytest.mark.parametrize("peer", [0, 1])
def test_heartbeats_of_frozen_servers_and_other_views_are_not_compared(peer: int) -> None:
    world = start()
    insert_at_all(world, 1)
    name = shard_names(0, 1)[1 - peer]
    for view, state in ((1, "frozen"), (1, "starting"), (0, "up")):
        send(world, wire.Beat(CLUSTER, 0, view, peer, 7, state, 0, "", 1000, 1000), name)
        assert replica(world, name).state.server_state == "up"


def test_the_view_after_a_recovery_needs_no_comparison() -> None:
    world = start()
    insert_at_all(world, 1)
    world.run(1 * S)
    world.paused.add(BACKUP)
    world.restart(PRIMARY)
    announce(world, PRIMARY)
    world.run(100 * MS)
    assert not replica(world, PRIMARY).state.is_compared
    world.paused.discard(BACKUP)
    frozen = recover(world, BACKUP, PRIMARY)
    assert frozen.recovery == 2
    begin(world, 2)
    assert replica(world, PRIMARY).state.is_compared


def test_without_a_failure_handler_nothing_is_compared() -> None:
    world = calm_world()
    insert_at_all(world, 1)
    world.restart(PRIMARY)
    assert replica(world, PRIMARY).state.is_compared
