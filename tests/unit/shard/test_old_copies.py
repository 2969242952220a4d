"""A server with an old copy of its data directory, which was made while it was stopped cleanly."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest

from tests.unit.shard.recovery_world import BACKUP, PRIMARY, acks, log, replica, send, start
from tests.world import MS, S, insert

if TYPE_CHECKING:
    from tests.world import World


def acked(world: World) -> set[int]:
    """Return the records for which both servers have sent the same positions."""
    sent = {(seq, tuple(gsns), server) for seq, server, gsns in acks(world)}
    return {seq for seq, gsns, server in sent if (seq, gsns, 1 - server) in sent}


def restored(name: str, later: int) -> World:
    """Restart a shard after a clean stop: `name` lacks the last `later` records that were acked."""
    world = start()
    for seq in range(1, 4):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.run(20 * MS)
    for one in (PRIMARY, BACKUP):
        world.restart(one)
    world.run(20 * MS)
    checkpoint, store = replica(world, name).checkpoint(), copy.deepcopy(world.stores[name])
    for seq in range(4, 4 + later):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.run(20 * MS)
    assert acked(world) == set(range(1, 4 + later))
    assert world.halts == []
    for one in (PRIMARY, BACKUP):
        if one == name:
            world.stores[name] = store
            world.restart(name, checkpoint=checkpoint)
        else:
            world.restart(one)
    return world


@pytest.mark.parametrize("name", [PRIMARY, BACKUP])
def test_a_server_with_an_old_copy_halts(name: str) -> None:
    world = restored(name, later=3)
    other = BACKUP if name == PRIMARY else PRIMARY
    before = log(world, other)
    send(world, insert(7), PRIMARY, BACKUP)
    world.run(20 * MS)
    ((halted, reason),) = world.halts
    assert halted == name
    assert f"the log of {name} ends at " in reason
    assert "an old copy of a data directory is in the place of its own one" in reason
    assert log(world, other)[: len(before)] == before
    assert acked(world) == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("is_started_later", [False, True])
@pytest.mark.parametrize("later", [1, 3])
def test_a_primary_halts_that_has_placed_others_in_the_place_of_what_it_lacks(
    later: int, *, is_started_later: bool
) -> None:
    world = restored(PRIMARY, later)
    whole = log(world, BACKUP)
    world.paused.add(BACKUP)
    for seq in range(7, 10):
        send(world, insert(seq), PRIMARY)
    world.run(20 * MS)
    world.paused.discard(BACKUP)
    if is_started_later:
        world.restart(BACKUP)
    assert world.run_until(lambda: bool(world.halts), 5 * S)
    ((halted, reason),) = world.halts
    assert halted == PRIMARY
    assert "a backup has other entries in view 1 of shard 0" in reason
    assert log(world, BACKUP) == whole
    assert acked(world) == set(range(1, 4 + later))


def test_what_a_clean_restart_repeats_is_no_sign_of_an_old_copy() -> None:
    world = start()
    for number in range(6):
        send(world, insert(2 * number + 1), PRIMARY, BACKUP)
        send(world, insert(2 * number + 2), PRIMARY, BACKUP)
        world.restart(PRIMARY if number % 2 else BACKUP)
        world.run(5 * MS)
    world.run(300 * MS)
    assert world.halts == []
