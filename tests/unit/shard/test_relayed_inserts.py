"""A backup relays the undecided insert that a client locates to the primary."""

from __future__ import annotations

import pytest

from tests.unit.shard.recovery_world import BACKUP, PRIMARY, acks, heard, replica, send, start
from tests.world import CLUSTER, MS, World, insert, probe
from ziplog import wire
from ziplog.core.node import StorageChanged

THIRD = "shard-0-2"


def relayed(world: World) -> list[wire.Insert]:
    return [one.insert for _, _, one in world.sent if type(one) is wire.RelayedInsert]


def locate(world: World, *servers: str, seq: int = 1, view: int = 1) -> list[wire.Located]:
    """Locate an insert; return the replies."""
    send(world, wire.Locate(CLUSTER, 0, view, b"c" * 16, seq, 0), *servers)
    world.run(20 * MS)
    found = heard(world, wire.Located, "c")
    probe(world).received.clear()
    return found


@pytest.mark.parametrize("f", [1, 2])
def test_a_guess_that_is_located_reaches_the_primary(f: int) -> None:
    world = start(f=f)
    backups = [BACKUP, THIRD][:f]
    send(world, insert(1, count=2), *backups)
    assert {one.verdict for one in locate(world, *backups)} == {"pending"}
    assert [(one.seq, one.copy) for one in relayed(world)] == [(1, 0)] * f
    found = locate(world, *backups)
    assert {one.verdict for one in found} == {"present"}
    assert {tuple(one.gsns) for one in found} == {tuple(found[0].gsns)}
    assert len(relayed(world)) == f, "it is decided"


def test_the_primary_places_a_relayed_insert_once() -> None:
    world = start()
    send(world, insert(1), BACKUP)
    locate(world, BACKUP)
    send(world, insert(1, copy=2), PRIMARY, BACKUP)
    world.run(20 * MS)
    assert len({tuple(gsns) for _, _, gsns in acks(world)}) == 1
    assert replica(world, PRIMARY).state.stream.last_record == acks(world)[0][2][0]


def test_what_a_server_of_an_older_view_held_is_not_relayed() -> None:
    world = start()
    send(world, insert(1), BACKUP)
    locate(world, BACKUP, view=0)
    locate(world, BACKUP, seq=2)
    assert not relayed(world)


def test_the_clients_own_copy_gets_the_ack_although_a_relayed_one_came_later() -> None:
    world = start()
    send(world, insert(1, copy=1), PRIMARY)
    world.send(BACKUP, PRIMARY, wire.RelayedInsert(CLUSTER, insert(1)))
    send(world, insert(1, copy=2), PRIMARY)
    assert {server for _, server, _ in acks(world)} == {0}
    assert len({tuple(gsns) for _, _, gsns in acks(world)}) == 1


def test_copies_that_the_primary_refused_stay_refused() -> None:
    """The client may have inserted the records elsewhere by then."""
    world = start()
    world.inject(PRIMARY, StorageChanged(full=True))
    world.run(2 * MS)
    send(world, insert(1, copy=1), PRIMARY)
    world.inject(PRIMARY, StorageChanged(full=False))
    world.send(BACKUP, PRIMARY, wire.RelayedInsert(CLUSTER, insert(1)))
    world.run(20 * MS)
    assert replica(world, PRIMARY).state.stream.last_record == 0
    (refusal,) = heard(world, wire.Refused, "c")
    assert (refusal.code, refusal.copies) == ("no-space", 1)


def test_a_backup_takes_no_relayed_insert() -> None:
    world = start()
    world.send(PRIMARY, BACKUP, wire.RelayedInsert(CLUSTER, insert(1)))
    world.run(20 * MS)
    assert not replica(world, BACKUP).state.sessions.by_client
