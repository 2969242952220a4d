"""The durability level of a server: what is flushed and recorded before it changes."""

from __future__ import annotations

import itertools

import pytest

from shard.state.ack_level import AckLevel
from tests.unit.shard.test_readers import BACKUP, calm_world, put, replica
from tests.world import MS, insert
from ziplog.core.node import FlushBeforeSend, LevelRecorded, LevelRequested, RecordLevel
from ziplog.core.units import NS_PER_S


def test_raising_flushes_first_and_records_when_all_is_on_the_disk() -> None:
    level = AckLevel("memory", "memory")
    assert level.is_memory
    assert level.on_event(LevelRequested("disk")) == [FlushBeforeSend(True)]
    assert not level.is_memory
    assert level.reported is None
    assert level.advance(0, is_complete=False) == []
    assert level.advance(1, is_complete=True) == [RecordLevel("disk")]
    assert level.on_event(LevelRecorded("disk")) == []
    assert level.reported == "disk"
    assert level.advance(NS_PER_S, is_complete=True) == []


def test_lowering_records_first() -> None:
    level = AckLevel("disk", "disk")
    assert level.on_event(LevelRequested("memory")) == []
    assert not level.is_memory
    assert level.advance(0, is_complete=False) == [RecordLevel("memory")]
    assert not level.is_memory
    assert level.reported == "disk"
    assert level.on_event(LevelRecorded("memory")) == [FlushBeforeSend(False)]
    assert level.is_memory


def test_level_that_the_disk_refuses_is_recorded_again() -> None:
    level = AckLevel("disk", "memory")
    assert level.advance(0, is_complete=True) == [RecordLevel("disk")]
    assert level.advance(NS_PER_S - 1, is_complete=True) == []
    assert level.advance(NS_PER_S, is_complete=True) == [RecordLevel("disk")]


@pytest.mark.parametrize("steps", list(itertools.product(("memory", "disk", "record"), repeat=5)))
def test_memory_acks_only_while_memory_is_recorded(steps: tuple[str, ...]) -> None:
    level, flushes, recording = AckLevel("memory", "memory"), False, ""
    for now, step in enumerate(steps):
        if step == "record" and recording:
            effects = level.on_event(LevelRecorded(recording))  # type: ignore[arg-type]
            recording = ""
        elif step != "record":
            effects = level.on_event(LevelRequested(step))  # type: ignore[arg-type]
        else:
            continue
        effects += level.advance(now * NS_PER_S, is_complete=True)
        for effect in effects:
            if isinstance(effect, FlushBeforeSend):
                flushes = effect.is_on
            elif isinstance(effect, RecordLevel):
                recording = effect.level
        level.check()
        assert flushes is not level.is_memory


def test_backup_records_disk_once_its_promises_are_decided() -> None:
    """A unit reached this backup only: the primary decides the promised slot at its request."""
    world = calm_world()
    put(world, insert(1))
    world.send("c", BACKUP, insert(2))
    world.run(2 * MS)
    backup = replica(world, BACKUP)
    assert backup._guesses is not None
    assert len(backup._guesses.promised) == 1
    world.inject(BACKUP, LevelRequested("disk"))
    level = backup.state.level
    assert not level.is_memory
    assert level.recorded == "memory", "the promise is on no disk"
    world.run(200 * MS)
    assert not backup._guesses.promised
    assert level.recorded == "disk"
