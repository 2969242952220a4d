"""Marks that a target returns from `open`: they are committed before the first batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logplayer.contract import Batch, Opened, Retry, Task
from logplayer.steps import Deliver, OpenTarget
from tests.sim.player.targets import Sink
from tests.unit.logplayer.world import World, spec

if TYPE_CHECKING:
    from tests.unit.logplayer.world import Player


class Marked(Sink):
    """A target that returns the position of the cursor as its own, and a mark if it is due."""

    stores_position = True  # type: ignore[misc]

    def __init__(self) -> None:
        super().__init__("db")
        #: What `open` returns; b"": the mark of the cursor.
        self.mark = b"first"
        self.marks: list[bytes] = []

    def open(self, task: Task) -> Opened:
        super().open(task)
        self.marks.append(task.mark)
        return Opened(task.position, self.mark or task.mark)

    def deliver(self, batch: Batch) -> bytes | None:
        super().deliver(batch)
        self.mark = b""
        return b"at %d" % batch.stop


def played(**settings: Any) -> tuple[World, Player, Marked]:
    target = Marked()
    world = World([target], [spec(target, batch_records=5)], **settings)
    return world, world.add_player(), target


def payloads(world: World) -> list[bytes]:
    """Return the payloads of the log."""
    return [world.log.records[gsn].payload for gsn in world.log.gsns]


def has_delivered(player: Player) -> bool:
    return any(isinstance(step, Deliver) for step in player.steps)


def test_a_new_mark_is_committed_before_the_first_batch() -> None:
    world, player, target = played(commit_ms=60_000)
    world.fill(20)

    def check() -> None:
        if target.batches and len(target.batches) == 1:
            assert world.cursor().mark == b"first"

    world.checks.append(check)
    world.run(1000)
    assert world.payloads() == payloads(world)
    assert (target.marks, player.states()) == ([b""], ["playing"])
    player.stop()
    world.run(1000)
    assert world.cursor().mark == b"at %d" % world.cursor().position


def test_a_task_waits_while_its_mark_cannot_be_committed() -> None:
    world, player, _target = played(lease_ms=60_000)
    world.fill(20)
    step = player.connections.open

    def open_and_cut(task: Task) -> Any:
        world.service.is_down = True
        return step(task)

    player.connections.open = open_and_cut  # type: ignore[method-assign]
    world.run(5000)
    assert (player.states(), has_delivered(player)) == (["opening"], False)
    world.service.is_down = False
    world.run(5000)
    assert len(world.payloads()) == 20


@pytest.mark.parametrize("edit", ["release", "seek", "delete"])
def test_an_owner_that_cannot_commit_its_mark_delivers_nothing(edit: str) -> None:
    world, player, target = played()
    world.fill(20)
    opened = player.connections.open
    is_first = [True]

    def open_and_lose(task: Task) -> Any:
        if is_first[0]:
            world.edit(edit)
            assert not has_delivered(player)
        is_first[0] = False
        return opened(task)

    player.connections.open = open_and_lose  # type: ignore[method-assign]
    world.run(10_000)
    opens = [step.task for step in player.steps if isinstance(step, OpenTarget)]
    delivered = [step.batch.task.term for step in player.steps if isinstance(step, Deliver)]
    assert opens[0].term < min(delivered), "the first claim has delivered nothing"
    assert target.marks[:2] == [b"", b""]
    assert len(world.payloads()) == 20


def test_a_mark_that_changes_after_a_failure_is_committed_before_the_batch_is_repeated() -> None:
    world, player, target = played(commit_ms=60_000)
    world.fill(10)
    fails = [True]

    def fault(kind: str, _argument: Any) -> Any:
        if kind == "deliver" and fails[0] and len(target.batches) == 1:
            fails[0] = False
            target.mark = b"second"
            return Retry("the shard was removed")
        return None

    player.fault = fault

    def opened(task: Task) -> Opened:
        # As a mirror, it knows where this claim is.
        position = target.batches[-1].stop if target.batches else task.position
        return Opened(position, target.mark)

    target.open = opened  # type: ignore[method-assign]
    target.rows[0] = []
    seen: list[bytes] = []
    world.checks.append(lambda: seen.append(world.cursor().mark))
    world.run(3000)
    assert world.payloads() == payloads(world)
    assert seen[-1] == b"second"
    player.stop()
    world.run(1000)
    assert world.cursor().mark == b"at %d" % world.cursor().position


def test_a_pause_while_the_mark_is_committed_counts_afterwards() -> None:
    world, player, _target = played()
    world.fill(5)
    opened = player.connections.open

    def open_and_pause(task: Task) -> Any:
        world.edit("pause")
        return opened(task)

    player.connections.open = open_and_pause  # type: ignore[method-assign]
    world.run(3000)
    assert (player.states(), has_delivered(player)) == (["paused"], False)
    assert world.cursor().mark == b"first"
    world.edit("resume")
    world.run(3000)
    assert len(world.payloads()) == 5


def test_a_new_worker_begins_at_the_last_mark() -> None:
    world, player, target = played(commit_ms=60_000)
    world.fill(10)
    player.fault = lambda kind, _argument: (
        TypeError("a bug") if kind == "deliver" and len(target.batches) == 1 else None
    )
    world.run(1000)
    assert player.states() == ["failed"]
    mark = world.cursor().mark
    assert mark.startswith(b"at ")
    player.fault = lambda _kind, _argument: None
    world.edit("pause")
    world.edit("resume")
    world.run(10_000)
    assert target.marks == [b"", mark]
    assert world.payloads() == payloads(world)


def test_a_new_mark_with_a_position_below_the_cursor_is_not_awaited() -> None:
    world, player, target = played()
    world.fill(10)
    world.run(1000)
    player.is_dead = True
    first = world.log.gsns[0]
    older = Opened(first, b"older")
    target.open = lambda _task: older  # type: ignore[method-assign]
    target.rows[0] = []
    player = world.add_player()
    world.run(10_000)
    assert any("an older state was put back" in text for text in player.warnings)
    assert world.payloads() == payloads(world)


def test_a_commit_of_an_earlier_move_does_not_stand_for_that_of_a_new_mark() -> None:
    world, player, target = played(lease_ms=60_000, commit_ms=1)
    world.fill(10)
    fails = [True]

    def fault(kind: str, _argument: Any) -> Any:
        if kind == "deliver" and fails[0] and target.batches:
            fails[0] = False
            return Retry("the shard was removed")
        return None

    def opened(task: Task) -> Opened:
        if not target.batches:
            target.rows[0] = []
            return Opened(task.position, b"first")
        # The move of the first batch waits for the service, and so will this mark.
        return Opened(target.batches[-1].stop, b"second")

    def check() -> None:
        world.service.is_down |= len(target.batches) == 1 and fails[0]

    player.fault = fault
    target.open = opened  # type: ignore[method-assign]
    world.checks.append(check)
    marks: list[bytes] = []
    deliver = player._carry_out

    def carry_out(effect: Any) -> None:
        if isinstance(effect, Deliver):
            marks.append(world.cursor().mark)
        deliver(effect)

    player._carry_out = carry_out  # type: ignore[method-assign]
    world.run(1000)
    world.service.is_down = False
    world.run(5000)
    assert world.payloads() == payloads(world)
    assert marks[:3] == [b"first", b"first", b"second"]


@pytest.mark.parametrize("keeps_position", [True, False])
def test_a_step_without_a_mark_keeps_the_former_one(*, keeps_position: bool) -> None:
    world, player, target = played()
    target.deliver = lambda batch: Sink.deliver(target, batch)  # type: ignore[method-assign]
    world.fill(5)
    world.run(2000)
    assert world.payloads() == payloads(world)
    assert world.cursor().mark == b"first"
    player.stop()
    world.run(1000)
    target.rows[0] = []
    position = world.cursor().position if keeps_position else None
    target.open = lambda _task: Opened(position)  # type: ignore[method-assign]
    if not keeps_position:
        world.service.edit("orders/db/0", "delete")
    world.add_player()
    world.insert(b"later")
    world.run(2000)
    assert world.payloads()[-1] == b"later"
    assert world.cursor().mark == (b"first" if keeps_position else b"")


def test_a_task_that_leaves_while_it_opens_beyond_the_log_ends() -> None:
    world, player, target = played()
    world.fill(5)
    target.open = lambda _task: Opened(2**62 + 1, b"damaged")  # type: ignore[method-assign]
    opened = player.connections.open

    def open_and_stop(task: Task) -> Any:
        player.stop()
        return opened(task)

    player.connections.open = open_and_stop  # type: ignore[method-assign]
    world.run(2000)
    assert player.task().is_gone
    assert not world.cursor().owner


def test_a_mark_that_was_refused_with_its_position_is_awaited_again() -> None:
    world, player, target = played(commit_ms=60_000)
    world.fill(5)
    target.open = lambda _task: Opened(2**62 + 1, b"first")  # type: ignore[method-assign]
    world.run(2000)
    assert player.states() == ["failed"]
    del target.open  # type: ignore[method-assign]

    def check() -> None:
        if len(target.batches) == 1:
            assert world.cursor().mark == b"first"

    world.checks.append(check)
    world.edit("pause")
    world.run(5000)
    world.edit("resume")
    world.run(5000)
    assert world.payloads() == payloads(world)
