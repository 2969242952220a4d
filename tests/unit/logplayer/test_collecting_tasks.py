"""Tasks of targets that collect records, and finish them in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logplayer.contract import Batch, Retry
from logplayer.steps import Deliver, OpenTarget
from tests.unit.logplayer.world import log_payloads, once, played

if TYPE_CHECKING:
    from tests.unit.logplayer.world import Player


def deliveries(player: Player) -> list[Batch]:
    return [step.batch for step in player.steps if isinstance(step, Deliver)]


def test_a_target_that_collects_finishes_in_time() -> None:
    world, player = played(roll_s=5)
    world.run(4900)
    assert all(batch.records for batch in deliveries(player))
    world.run(300)
    (finish,) = (batch for batch in deliveries(player) if not batch.records)
    assert finish.start == finish.stop == world.cursor().position
    world.run(20_000)
    assert finish is deliveries(player)[-1]
    world.fill(1)
    world.run(5200)
    assert [len(batch.records) for batch in deliveries(player)[-3:]] == [0, 1, 0]


def test_a_busy_target_that_collects_finishes_in_time() -> None:
    world, player = played(roll_s=2)
    for ms in range(0, 4900, 100):
        world.after(ms, lambda: world.fill(1))
    world.run(4800)
    assert sum(batch.start == batch.stop for batch in deliveries(player)) == 2
    assert world.payloads() == log_payloads(world)[: len(world.payloads())]


def test_a_pause_finishes_what_a_target_collected() -> None:
    world, player = played(roll_s=60)
    world.run(1000)
    world.edit("pause")
    world.run(100)
    assert player.states() == ["paused"]
    assert deliveries(player)[-1].start == deliveries(player)[-1].stop
    assert not deliveries(player)[-1].records


def test_a_pause_while_the_service_is_silent_finishes_it_afterwards() -> None:
    world, player = played(roll_s=60)
    world.run(1000)
    player.hangs = True
    world.fill(1)
    world.run(500)
    world.edit("pause")
    world.run(5000)
    world.service.is_down = True
    world.run(10_000)
    player.go_on()
    world.run(1000)
    assert player.states() == ["paused"]
    assert deliveries(player)[-1].records  # No step begins while the service is silent.
    world.service.is_down = False
    world.run(5000)
    assert player.states() == ["paused"]
    assert deliveries(player)[-1].start == deliveries(player)[-1].stop
    steps = len(player.steps)
    world.run(100_000)
    assert len(player.steps) == steps


def test_a_target_that_fails_to_finish_is_opened_again() -> None:
    world, player = played(roll_s=5)
    world.run(1000)
    player.fault = once("deliver", Retry("full"))
    world.run(10_000)
    assert player.states() == ["playing"]
    assert isinstance(player.steps[-1], OpenTarget)
