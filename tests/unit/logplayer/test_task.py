"""The state machine of a task: the ends of its steps, and the changes of its cursor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from logplayer.calls import WaitCall
from logplayer.contract import Batch, Fenced, Rejected, Retry
from logplayer.steps import CloseTarget, Deliver, OpenTarget
from tests.sim.player.targets import Sink, Store
from tests.unit.logplayer.world import World, log_payloads, once, played
from ziplog.core.units import NS_PER_MS
from ziplog.errors import ConfigError


def numbers(*ranges: tuple[int, int]) -> list[bytes]:
    return [b"%d" % n for start, stop in ranges for n in range(start, stop)]


def test_a_task_delivers_the_whole_log_once_and_in_order() -> None:
    world, player = played(batch_records=3)
    world.run(2000)
    assert world.payloads() == log_payloads(world)
    assert len(player.batches()) == 7
    spans = player.batches()
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
    assert world.cursor().position == spans[-1][1]
    assert player.states() == ["playing"]


def test_records_that_arrive_later_are_delivered_at_once() -> None:
    world, player = played()
    world.run(2000)
    world.insert(b"new")
    world.run(5)
    assert world.payloads()[-1] == b"new"
    assert player.task().delivered == 21


def test_one_step_is_under_way_at_a_time() -> None:
    world, player = played(batch_records=2)
    player.hangs = True
    world.run(3000)
    assert len(player.running) == 1
    player.go_on()
    world.run(1000)
    assert world.payloads() == log_payloads(world)


# --- batches that wait ---


def test_a_batch_waits_until_it_is_full() -> None:
    world, player = played(batch_records=8, linger_ms=2000)
    world.run(1000)
    assert world.payloads() == numbers((0, 16)), "two batches were full"
    world.fill(3)
    world.run(20)
    assert len(world.payloads()) == 16
    world.insert(b"last")
    world.run(20)
    assert len(world.payloads()) == 24
    assert len(player.batches()) == 3


def test_a_batch_waits_until_its_first_record_is_old_enough() -> None:
    world, player = played(linger_ms=500)
    world.run(1000)
    count = len(player.batches())
    for _ in range(5):
        world.insert(b"more")
        world.run(90)
    assert len(world.payloads()) == 20
    assert player.states() == ["playing"]
    world.run(100)
    assert len(world.payloads()) == 25
    assert len(player.batches()) == count + 1


def test_a_batch_waits_for_no_call_and_no_pause_that_wait_for_it() -> None:
    world, player = played(linger_ms=60_000)
    world.run(1000)
    call = player.call(WaitCall(player.deadline(), world.log.gsns[-1] + 1))
    world.run(2000)
    assert (player.results[call], len(world.payloads())) == (None, 20)
    world.fill(5)
    world.run(1000)
    assert len(world.payloads()) == 20
    world.edit("pause", world.log.gsns[22])
    world.run(2000)
    assert (len(world.payloads()), player.states()) == (22, ["paused"])


def test_a_batch_that_waits_is_delivered_by_the_next_owner() -> None:
    world, player = played(linger_ms=3000)
    world.run(1000)
    player.stop()
    world.run(1000)
    assert world.payloads() == []
    world.add_player()
    world.run(5000)
    assert world.payloads() == log_payloads(world)


def test_a_repeated_batch_has_the_records_of_the_first_attempt() -> None:
    world, player = played(Sink("db"), linger_ms=100)
    player.fault = once("deliver", OSError("away"))
    world.run(150)
    world.fill(5)
    world.run(2000)
    spans = player.batches()
    assert spans[0] == spans[1]
    assert world.payloads() == log_payloads(world)


# --- moves of the cursor ---


def test_the_cursor_moves_only_to_what_the_target_has() -> None:
    world, player = played(batch_records=4)
    target = world.targets["db"]
    world.checks.append(lambda: check_cursor(world))

    def check_cursor(world: World) -> None:
        assert world.cursor().position <= target.rows[0].position  # type: ignore[union-attr]

    world.run(300)
    player.hangs = True
    world.fill(20)
    world.run(3000)
    assert world.cursor().position == target.rows[0].position  # type: ignore[union-attr]
    assert player.task().delivery.cut is not None


def test_moves_of_a_task_are_one_in_each_interval() -> None:
    world, player = played(commit_ms=1000)
    world.run(500)
    for _ in range(300):
        world.insert(b"more")
        world.run(10)
    assert 3 <= world.cursor().move <= 5
    world.run(2000)
    assert world.cursor().position == player.task().delivery.position


# --- exceptions of steps ---


@pytest.mark.parametrize("error", [Retry("away"), OSError("away"), ValueError("odd")])
@pytest.mark.parametrize("kind", ["open", "deliver"])
def test_an_error_is_tried_again_after_a_pause(kind: str, error: Exception) -> None:
    world, player = played()
    player.fault = once(kind, error)
    world.run(70)
    assert player.states() == ["retrying"]
    assert "away" in player.task().error or "odd" in player.task().error
    world.run(200)
    assert player.states() == ["playing"]
    assert world.payloads() == log_payloads(world)
    assert player.task().retries == 1


def test_pauses_double_while_a_target_is_down() -> None:
    world, player = played()
    times = []

    def fault(_kind: str, _argument: Any) -> Any:
        times.append(world.now // NS_PER_MS)
        return Retry("down")

    player.fault = fault
    world.run(8000)
    pauses = [two - one for one, two in itertools.pairwise(times)]
    assert len(pauses) >= 5
    for n, pause in enumerate(pauses):
        assert 80 * 2**n <= pause <= 100 * 2**n + 5
    player.fault = lambda *_: None
    world.run(15_000)
    assert world.payloads() == log_payloads(world)


def test_an_outage_is_logged_once() -> None:
    world, player = played()
    for _outage in range(2):
        player.fault = once("deliver", Retry("short"))
        world.run(3000)
    assert not [text for text in player.warnings if "tried again" in text]
    for outage in (1, 2):
        player.fault = lambda *_: Retry("down")
        world.insert(b"further")
        world.run(20_000)
        player.fault = lambda *_: None
        world.run(30_000)
        assert world.payloads() == log_payloads(world)
        logged = [text for text in player.warnings if "tried again" in text]
        assert len(logged) == outage
        assert "its target fails, and is tried again: Retry: down" in logged[-1]


def test_a_target_asks_for_a_pause() -> None:
    world, player = played()
    player.fault = once("deliver", Retry("busy", 3.0))
    world.run(2900)
    assert player.states() == ["retrying"]
    world.run(200)
    assert world.payloads() == log_payloads(world)


def test_a_target_that_stores_positions_is_opened_after_a_failure() -> None:
    """An unknown outcome is not taken for a failure or a success."""
    for fault in ("before", "after", "late"):
        world, player = played()
        player.fault = once("deliver", fault)
        world.run(3000)
        assert world.payloads() == log_payloads(world), fault
        kinds = [type(step) for step in player.steps]
        assert kinds[:3] == [OpenTarget, Deliver, OpenTarget], fault


def test_other_targets_get_the_batch_again_without_an_open() -> None:
    sink = Sink("db")
    world, player = played(sink)
    player.fault = once("deliver", "after")
    world.run(3000)
    kinds = [type(step) for step in player.steps]
    assert kinds == [OpenTarget, Deliver, Deliver]
    first, second = sink.batches
    assert (first.start, first.stop, first.records) == (second.start, second.stop, second.records)


@pytest.mark.parametrize(
    "error",
    [TypeError(), AttributeError(), NameError(), ImportError(), ConfigError("a", 1, "2")],
)
@pytest.mark.parametrize("kind", ["open", "deliver"])
def test_a_bug_fails_the_task_at_once(kind: str, error: Exception) -> None:
    world, player = played()
    player.fault = once(kind, error)
    world.run(5000)
    assert player.states() == ["failed"]
    assert type(error).__name__ in player.task().error
    assert player.held, "its cursor stays claimed"
    assert isinstance(player.steps[-1], CloseTarget)


def test_a_task_that_fails_too_long_has_failed() -> None:
    world, player = played(retry_s=3)
    player.fault = lambda *_: Retry("down")
    world.run(2500)
    assert player.states() == ["retrying"]
    world.run(4000)
    assert player.states() == ["failed"]
    assert "it failed for 3 s" in player.task().error
    wait = player.call(WaitCall(player.deadline(500), world.log.gsns[-1] + 1))
    world.run(1000)
    error = str(player.results[wait])
    assert f"{player.task().name} (failed: {player.task().error})" in error


@pytest.mark.parametrize("kind", ["open", "deliver"])
def test_a_fenced_task_is_released(kind: str) -> None:
    world, player = played()
    player.fault = once(kind, Fenced("later"))
    world.run(200)
    assert player.states() == ["free"]
    assert not world.cursor().owner
    assert isinstance(player.steps[-1], CloseTarget)
    assert any("refuses the claim: Fenced: later" in one for one in player.warnings)
    world.run(3000)
    assert world.payloads() == log_payloads(world), "it is claimed again"


@pytest.mark.parametrize("error", [KeyError("id"), SystemExit("KeyError")])
def test_a_map_that_fails_fails_the_task(error: BaseException) -> None:
    def broken(_record: Any) -> Any:
        raise error

    world, player = played(map=broken)
    world.run(500)
    assert player.states() == ["failed"]
    assert "map" in player.task().error
    assert "KeyError" in player.task().error


# --- opening ---


def test_an_empty_target_behind_a_cursor_that_moved_fails_the_task() -> None:
    world, player = played()
    world.run(2000)
    player.stop()
    world.run(500)
    world.targets["db"].rows.clear()
    other = world.add_player()
    world.run(2000)
    assert other.states() == ["failed"]
    assert "ziplog cursor seek orders/db/0 genesis" in other.task().error
    world.edit("seek", 0)
    world.run(3000)
    assert world.payloads() == log_payloads(world)


def test_a_target_beyond_the_log_fails_the_task() -> None:
    world, player = played()
    world.run(2000)
    row = world.targets["db"].rows[0]
    right, row.position = row.position, 2**62 + 1
    player.is_dead = True
    other = world.add_player()
    world.run(5000)
    assert other.states() == ["failed"]
    assert f"gsn {2**62 + 1}" in other.task().error
    row.position = right
    world.edit("resume")
    world.run(3000)
    assert world.payloads() == log_payloads(world)
    row.position = 2**62 + 1
    other.is_dead = True
    last = world.add_player()
    world.run(5000)
    last.stop()
    world.run(500)
    assert last.task().is_gone


def test_a_target_that_lost_all_while_it_played_fails_the_task() -> None:
    world, player = played()
    world.run(2000)
    world.targets["db"].rows.clear()
    world.insert(b"new")
    world.run(3000)
    assert player.states() == ["failed"] or player.task().error


def test_the_position_of_the_target_counts() -> None:
    world, player = played(batch_records=5, commit_ms=60_000)
    world.run(1000)
    assert world.cursor().position < player.task().delivery.position
    player.is_dead = True
    other = world.add_player()
    world.run(8000)
    assert other.batches() == []
    assert world.payloads() == log_payloads(world)
    assert world.cursor().position == player.task().delivery.position


def test_a_target_before_its_cursor_gets_records_again() -> None:
    world, player = played(batch_records=5)
    world.run(2000)
    player.stop()
    world.run(200)
    row: Any = world.targets["db"].rows[0]
    row.position, row.records = row.effects[1][2], row.records[:10]
    other = world.add_player()
    world.run(3000)
    assert any("older state" in text for text in other.warnings)
    assert world.payloads() == log_payloads(world)


def test_a_cursor_below_the_trim_point_fails_the_task() -> None:
    world, player = played()
    world.run(2000)
    player.stop()
    world.run(200)
    world.fill(10)
    world.service.trim(world.log.tail.gsn)
    other = world.add_player()
    world.run(3000)
    assert other.states() == ["failed"]
    assert "were trimmed" in other.task().error
    assert sum("were trimmed" in one for one in other.warnings) == 1
    world.edit("seek", world.log.first)
    world.run(3000)
    assert other.states() == ["playing"]


def test_a_target_below_the_trim_point_fails_the_task() -> None:
    world, player = played(batch_records=5)
    world.run(2000)
    player.stop()
    world.run(200)
    row: Any = world.targets["db"].rows[0]
    row.position, row.records = row.effects[1][2], row.records[:10]
    world.service.trim(world.cursor().position)
    other = world.add_player()
    world.run(3000)
    assert other.states() == ["failed"]
    assert "were trimmed" in other.task().error


def test_records_that_are_trimmed_by_force_under_a_slow_task_fail_it() -> None:
    world, player = played()
    world.run(2000)
    player.fault = lambda *_: Retry("down")
    world.fill(5)
    world.run(500)
    world.edit("pause")
    world.run(1000)
    world.fill(5)
    world.service.trim(world.log.tail.gsn)
    player.fault = lambda *_: None
    world.edit("resume")
    world.run(20_000)
    assert player.states() == ["failed"]
    assert "were trimmed" in player.task().error


# --- rejected records ---


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("kind", [Store, Sink])
@pytest.mark.parametrize("policy", ["stop", "skip", "dead-letter"])
def test_rejected_records(kind: type[Store | Sink], policy: Any, *, is_named: bool) -> None:
    target = kind("db")
    target.rejects = lambda record: "odd" if record.payload in {b"4", b"11"} else ""
    target.names_rejected = is_named
    world, player = played(target, rejected=policy)
    world.run(3000)
    whole = log_payloads(world)
    task = player.task()
    if policy == "stop":
        at = min(whole.index(b"4"), whole.index(b"11"))
        assert world.payloads() == whole[:at]
        assert player.states() == ["failed"]
        assert "odd" in task.error
        assert world.cursor().position <= world.log.gsns[at]
        return
    assert world.payloads() == [one for one in whole if one not in {b"4", b"11"}]
    assert player.states() == ["playing"]
    assert task.rejected == 2
    assert task.error == ""
    kept = []
    for step in player.steps:
        if isinstance(step, Deliver):
            kept += [one.record.payload for one in step.batch.rejected]
    assert sorted(set(kept)) == ([b"11", b"4"] if policy == "dead-letter" else [])
    if isinstance(target, Store) and policy == "dead-letter":
        assert sorted(one.record.payload for one in target.rows[0].rejected) == [b"11", b"4"]


def test_the_search_for_a_rejected_record_halves_the_batch() -> None:
    target = Store("db")
    target.rejects = lambda record: "odd" if record.payload == b"odd" else ""
    target.names_rejected = False
    world, player = played(target, rejected="skip")
    world.fill(200)
    world.insert(b"odd")
    world.run(3000)
    assert player.task().rejected == 1
    assert len(player.batches()) <= 2 * 8 + 3


@pytest.mark.parametrize("kind", [Store, Sink])
def test_a_batch_of_nothing_but_rejected_records(kind: type[Store | Sink]) -> None:
    target = kind("db")
    target.rejects = lambda record: "odd" if record.payload in {b"4", b"11"} else ""
    target.names_rejected = False
    world, player = played(target, rejected="skip", batch_records=1)
    world.run(3000)
    assert len(world.payloads()) == 18
    world.insert(b"4")
    world.run(3000)
    assert len(world.payloads()) == 18
    assert world.cursor().position == world.log.tail.gsn + 1
    assert player.states() == ["playing"]


def test_a_resumed_cursor_tries_a_failed_task_again() -> None:
    target = Store("db")
    target.rejects = lambda record: "odd" if record.payload == b"7" else ""
    world, player = played(target)
    world.run(6000)
    assert player.states() == ["failed"]
    target.rejects = lambda _record: ""
    world.edit("resume")
    world.run(3000)
    assert player.states() == ["playing"]
    assert world.payloads() == log_payloads(world)


def test_the_end_of_a_pause_tries_a_failed_task_again_at_once() -> None:
    world, player = played()
    player.fault = once("open", TypeError("x"))
    world.run(500)
    world.edit("pause")
    world.run(20)
    assert player.states() == ["failed"]
    world.edit("resume")
    world.run(50)
    assert world.payloads() == log_payloads(world)


def test_a_failed_task_stays_failed_without_a_change_of_its_cursor() -> None:
    world, player = played()
    player.fault = once("open", TypeError("x"))
    world.run(30_000)
    assert player.states() == ["failed"]
    assert sum(isinstance(step, OpenTarget) for step in player.steps) == 1


def test_a_seek_skips_a_rejected_record() -> None:
    target = Store("db")
    target.rejects = lambda record: "odd" if record.payload == b"7" else ""
    world, player = played(target)
    world.run(4000)
    at = log_payloads(world).index(b"7")
    world.edit("seek", world.log.gsns[at] + 1)
    world.run(3000)
    assert player.states() == ["playing"]
    assert world.payloads() == log_payloads(world)[at + 1 :]


# --- idle tasks ---


def test_a_task_passes_the_records_of_others() -> None:
    for kind in (Store, Sink):
        target = kind("db")
        world, player = played(target, keys=("none-*",))
        world.run(300)
        assert world.cursor().position == 1
        world.run(1500)
        assert world.cursor().position == world.log.tail.gsn + 1
        steps = [step for step in player.steps if isinstance(step, Deliver)]
        assert len(steps) == (1 if kind is Store else 0)
        assert all(not step.batch.records for step in steps)


def test_the_delays_of_records_are_counted() -> None:
    world, player = played(batch_records=5)
    world.run(1000)
    assert sum(player.task().delays.counts) == 4


def test_a_batch_has_its_task_and_size() -> None:
    world, player = played()
    world.run(1000)
    batches = [step.batch for step in player.steps if isinstance(step, Deliver)]
    batch: Batch = batches[0]
    assert (batch.task.player, batch.task.target, batch.task.partition) == ("orders", "db", 0)
    assert batch.task.cluster == 77
    assert batch.task.term == world.cursor().term
    assert batch.size == sum(len(one.payload) for one in batch.records)


def test_a_rejection_of_nothing_is_tried_again() -> None:
    world, player = played(keys=("none-*",))
    player.fault = once("deliver", Rejected("odd"))
    world.run(3000)
    assert player.states() == ["playing"]
    assert player.task().retries == 1
