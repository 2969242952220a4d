"""What a task does when its cursor is paused, sought, released or deleted."""

from __future__ import annotations

import pytest

from logplayer.contract import Retry
from logplayer.steps import CloseTarget, StepEnded
from tests.sim.player.targets import Sink, Store
from tests.unit.logplayer.test_task import log_payloads, played

# --- pauses ---


def test_a_paused_task_finishes_its_step_and_moves_its_cursor() -> None:
    world, player = played(batch_records=2, commit_ms=60_000)
    player.hangs = True
    world.run(500)
    world.edit("pause")
    world.run(100)
    assert player.states() == ["opening"]
    player.go_on()
    world.run(100)
    assert player.states() == ["paused"]
    world.edit("resume")
    world.run(500)
    assert world.payloads() == log_payloads(world)
    world.edit("pause")
    world.run(100)
    assert world.cursor().position == player.task().delivery.position, "the move is not due yet"
    world.insert(b"new")
    world.run(3000)
    assert b"new" not in world.payloads()
    world.edit("resume")
    world.run(100)
    assert world.payloads()[-1] == b"new"


def test_a_pause_does_not_count_as_a_time_of_failures() -> None:
    world, player = played(retry_s=3)
    player.fault = lambda *_: Retry("down")
    world.run(1000)
    world.edit("pause")
    world.run(5000)
    assert player.states() == ["paused"]
    world.edit("resume")
    world.run(1500)
    assert player.states() == ["retrying"]
    world.run(9000)
    assert player.states() == ["failed"]


@pytest.mark.parametrize("kind", [Store, Sink])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_task_pauses_at_a_position(kind: type[Store | Sink], *, is_early: bool) -> None:
    world, player = played(kind("db"), batch_records=3)
    at = world.log.gsns[10]
    if is_early:
        world.service.edit("orders/db/0", "create", 0)
        world.edit("pause", at)
        world.run(2000)
    else:
        at = world.log.tail.gsn + 7
        world.run(1000)
        world.edit("pause", at)
        world.run(100)
        world.log.sealed = at
        world.fill(5)
        world.run(2000)
    assert player.states() == ["paused"]
    below = [gsn for gsn in world.log.gsns if gsn < at]
    assert world.payloads() == [world.log.records[gsn].payload for gsn in below]
    assert world.cursor().position == at
    world.edit("resume")
    world.run(500)
    assert world.payloads() == log_payloads(world)


def test_a_pause_ends_the_attempts_of_a_task() -> None:
    world, player = played()
    player.fault = lambda *_: Retry("down")
    world.run(500)
    world.edit("pause")
    world.run(100)
    assert player.states() == ["paused"]
    steps = len(player.steps)
    world.run(5000)
    assert len(player.steps) == steps
    player.fault = lambda *_: None
    world.edit("resume")
    world.run(500)
    assert world.payloads() == log_payloads(world)


def test_a_paused_cursor_may_be_claimed_and_stays_paused() -> None:
    world, player = played()
    world.service.edit("orders/db/0", "create", 0)
    world.edit("pause")
    world.run(3000)
    assert player.states() == ["paused"]
    assert not player.steps
    assert world.cursor().owner_text == player.owner


# --- the end of a claim ---


@pytest.mark.parametrize("edit", ["seek", "release"])
def test_a_claim_that_is_lost_ends_the_worker_and_is_made_again(edit: str) -> None:
    world, player = played(batch_records=4)
    player.hangs = True
    world.run(500)
    worker = player.task().worker
    world.edit(edit, 0)
    world.run(10)
    assert CloseTarget(worker) in player.steps
    player.go_on()
    world.run(3000)
    assert world.payloads() == log_payloads(world)
    assert player.task().worker != worker


def test_the_result_of_a_worker_that_was_closed_is_ignored() -> None:
    world, player = played()
    world.run(500)
    player.hangs = True
    world.insert(b"new")
    world.run(100)
    task, worker = player.task(), player.task().worker
    position = task.delivery.position
    world.edit("release")
    world.run(5)
    player.posted.append(StepEnded(worker, None))
    world.run(5)
    assert task.delivery.position == position


def test_a_deleted_cursor_is_created_again_and_its_target_refuses_it() -> None:
    world, player = played()
    world.run(1000)
    world.edit("delete")
    world.run(3000)
    assert player.states() == ["failed"]
    assert "ConfigError" in player.task().error


def test_a_list_of_the_cursors_reports_a_lost_claim() -> None:
    world, player = played()
    world.run(500)
    term = world.cursor().term
    player.core.is_unaware = True
    world.edit("release")
    world.run(1200)
    player.core.is_unaware = False
    assert player.task().claim.state is not None
    assert player.task().claim.state.term == world.cursor().term > term + 1


def test_a_seek_back_delivers_again_from_there() -> None:
    world, player = played()
    world.run(1000)
    at = world.log.gsns[5]
    world.run(50)
    world.edit("seek", at)
    world.run(150)
    assert world.payloads() == log_payloads(world)[5:]
    assert player.states() == ["playing"]
