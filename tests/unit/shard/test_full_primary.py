"""A primary without disk space: its backups refuse what it refuses, so no unit is in doubt."""

from __future__ import annotations

import pytest

from tests.unit.shard.recovery_world import BACKUP, PRIMARY, heard, send, start
from tests.world import MS, World, insert
from ziplog import wire
from ziplog.core.node import StorageChanged

THIRD = "shard-0-2"


def fill(world: World, *, full: bool = True) -> None:
    world.inject(PRIMARY, StorageChanged(full=full))
    world.run(2 * MS)


def refusals(world: World) -> set[tuple[int, int, str, int]]:
    """Return the refusals: (seq, server, code, number of copies that are never accepted)."""
    found = heard(world, wire.Refused, "c")
    return {(one.request, one.server, one.code, one.copies) for one in found}


def test_the_backups_hear_of_it_at_once() -> None:
    world = start(f=2)
    fill(world)
    send(world, insert(1, copy=1), PRIMARY, BACKUP, THIRD)
    assert refusals(world) == {(1, server, "no-space", 1) for server in (0, 1, 2)}
    assert not heard(world, wire.InsertAck, "c")
    fill(world, full=False)
    send(world, insert(1, copy=2), PRIMARY, BACKUP, THIRD)
    acked = heard(world, wire.InsertAck, "c")
    assert {ack.server for ack in acked} == {0, 1, 2}
    assert len({tuple(ack.gsns) for ack in acked}) == 1


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_a_unit_that_reached_the_backup_before_is_refused_once_an_epoch_ends(
    durability: str,
) -> None:
    world = start(durability=durability)
    send(world, insert(1, copy=1), BACKUP)
    fill(world)
    send(world, insert(1, copy=1), PRIMARY)
    world.run(80 * MS)
    assert refusals(world) == {(1, 0, "no-space", 1), (1, 1, "no-space", 1)}


def test_a_full_backup_takes_what_the_primary_places() -> None:
    world = start()
    world.inject(BACKUP, StorageChanged(full=True))
    send(world, insert(1, copy=1), PRIMARY, BACKUP)
    assert [ack.server for ack in heard(world, wire.InsertAck, "c")] == [0]
    world.run(20 * MS)
    send(world, insert(1, copy=2), BACKUP)
    assert [(ack.server, ack.gsns) for ack in heard(world, wire.InsertAck, "c")][1:] == [(1, [1])]
