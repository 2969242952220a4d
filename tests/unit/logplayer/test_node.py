"""A player's node: the feed, the calls of the application, the status, the stop."""

from __future__ import annotations

import json
from typing import Any

import pytest

from logplayer.calls import FailureCall, PositionsCall, StartedCall, StatusCall, WaitCall
from logplayer.contract import Retry
from logplayer.node import MAX_POLLED
from logplayer.ring import RECORD_BYTES
from logplayer.steps import CloseTarget, Deliver
from logplayer.task import PlayerTask
from tests.sim.player.targets import Sink, Store
from tests.unit.logdb.fakelog import UNAVAILABLE, fail
from tests.unit.logplayer.test_members import check_all_done, shared
from tests.unit.logplayer.world import Player, World, spec
from ziplog.client.common.requests import (
    ClaimRequest,
    CursorsRequest,
    FetchRequest,
    SubscribeRequest,
)
from ziplog.core.node import BatchEnd, Cancelled
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError, ConfigError, DeadlineError


def of_two(**settings: Any) -> tuple[World, Player]:
    """Return a world with one player, two targets and 20 records."""
    world = World([Store("db"), Sink("sink")], **settings)
    player = world.add_player()
    world.fill(20)
    return world, player


def subscriptions(player: Player) -> list[int]:
    return [r.start.gsn for r in player.core.requests if isinstance(r, SubscribeRequest)]


def test_a_cursor_that_is_deleted_before_its_claim_begins_at_the_start() -> None:
    """Not where it was: its target may have been emptied, to be filled again."""
    world, _ = of_two()
    world.run(2000)
    other = world.add_player()
    world.run(5000)
    claims = [one for one in other.core.requests if isinstance(one, ClaimRequest)]
    of_tasks = [one for one in claims if "members" not in one.name]
    assert of_tasks
    assert {one.start.gsn for one in of_tasks} == {0}


# --- the feed and the ring ---


def test_tasks_share_one_subscription() -> None:
    world, player = of_two()
    world.run(2000)
    world.fill(500)
    world.run(2000)
    assert len(subscriptions(player)) == 1
    assert len(world.payloads("db")) == len(world.payloads("sink")) == 520


def test_a_task_that_leaves_out_rows_has_a_subscription_of_its_own() -> None:
    store, sink = Store("db"), Sink("sink")
    world = World([store, sink], specs=[spec(store, skip_writers=(b"writer",)), spec(sink)])
    player = world.add_player()
    world.fill(20)
    world.run(2000)
    world.fill(500)
    world.run(2000)
    requests = [one for one in player.core.requests if isinstance(one, SubscribeRequest)]
    assert sorted(one.skip_writers for one in requests) == [(), (b"writer",)]
    assert len(world.payloads("db")) == len(world.payloads("sink")) == 520
    tasks = {one["target"]: one for one in player.node.status(0)["tasks"]}
    assert (tasks["db"]["source"], tasks["sink"]["source"]) == ("own", "feed")


def test_a_slow_task_falls_out_and_comes_back() -> None:
    world, player = of_two(memory_bytes=1000)
    world.run(1000)
    down = True
    player.fault = lambda _kind, one: (
        Retry("down", 0.05) if down and "db" in str(one)[:200] else None
    )
    world.fill(200)
    world.run(1000)
    assert len(world.payloads("sink")) == 220, "others do not wait for it"
    assert player.node.feed.ring.size <= 1000
    down = False
    world.run(2000)
    assert world.payloads("db") == world.payloads("sink")
    assert len(subscriptions(player)) >= 2
    assert player.task("db").reader.source is None, "it is with the feed again"
    assert len(player.core.subscriptions) == 1


def test_a_task_that_no_other_is_before_reads_each_record_once() -> None:
    world = World([Store("db")], memory_bytes=4000 * RECORD_BYTES)
    world.fill(20_000)
    player = world.add_player()
    world.run(4000)
    assert len(world.payloads("db")) == 20_000
    assert len(subscriptions(player)) == 1, "it stays with the feed, which does not run away"


def test_the_feed_waits_while_no_task_is_with_it() -> None:
    world = World([Store("db")], memory_bytes=1000)
    player = world.add_player()
    world.run(1000)
    player.hangs = True
    world.fill(100)
    world.run(500)
    world.fill(100)
    world.run(500)
    stop = player.node.feed.ring.stop
    world.fill(300)
    world.run(2000)
    assert player.node.feed.ring.stop == stop
    player.go_on()
    world.run(3000)
    assert len(world.payloads()) == 500


def test_a_task_behind_the_others_reads_for_itself() -> None:
    world, _player = of_two(commit_ms=10)
    world.run(1000)
    world.edit("seek", world.log.gsns[3], "sink")
    world.run(3000)
    assert len(world.payloads("sink")) == 20 + 17
    assert world.payloads("sink")[20:] == world.payloads("db")[3:]


def test_a_batch_of_the_log_ends_after_the_calls_of_the_tasks() -> None:
    """A client grants credit at the end of a batch, so none may wait for the next event."""
    world, player = of_two(memory_bytes=1000)
    seen, step, core = list[type](), player.node.step, player.core
    step_core, step_call = core.step, core.step_call

    def noted_step(event: Any, now: int) -> list[Any]:
        seen.append(type(event))
        return step_core(event, now)

    def noted_call(number: int, request: Any, now: int) -> list[Any]:
        seen.append(type(request))
        return step_call(number, request, now)

    def checked(event: Any, now: int) -> list[Any]:
        seen.clear()
        effects = step(event, now)
        if isinstance(event, BatchEnd):
            assert seen[-1] is BatchEnd
        return effects

    core.step, core.step_call = noted_step, noted_call  # type: ignore[method-assign]
    player.node.step = checked  # type: ignore[method-assign]
    world.fill(100)
    world.run(2000)
    assert len(world.payloads("db")) == 120
    assert len(subscriptions(player)) >= 2, "a task read for itself"


def test_a_failed_subscription_is_opened_again() -> None:
    world, player = of_two()
    world.run(1000)
    world.log.faults.append(fail(SubscribeRequest, UNAVAILABLE, times=2))
    player.core.subscriptions.clear()
    world.fill(3)
    world.run(4000)
    assert len(world.payloads("db")) == len(world.payloads("sink")) == 23
    assert any("cannot read the log" in text for text in player.warnings)


def test_a_quiet_node_sleeps() -> None:
    world, player = of_two()
    world.run(3000)
    steps = 0
    original = player.step

    def counted() -> None:
        nonlocal steps
        steps += 1
        original()

    player.step = counted  # type: ignore[method-assign]
    world.run(10_000)
    assert steps < 100


# --- calls ---


def test_a_start_is_answered_after_the_first_claims() -> None:
    world = World([Store("db")])
    world.service.is_down = True
    player = world.add_player()
    call = player.call(StartedCall(player.deadline(10_000)))
    late = player.call(StartedCall(player.deadline(1000)))
    world.run(2000)
    assert isinstance(player.results[late], DeadlineError)
    assert call not in player.results
    world.service.is_down = False
    world.run(4000)
    assert player.results[call] is None
    assert player.held


def test_a_start_waits_for_the_claims_under_way() -> None:
    world = World([Store("db")])
    player = world.add_player()
    player.core.holds_claims = True
    call = player.call(StartedCall(player.deadline()))
    world.run(3000)
    assert player.states() == ["claiming"]
    assert call not in player.results
    player.core.holds_claims = False
    world.run(1500)
    assert player.results[call] is None


def test_a_wait_ends_at_once_although_the_next_record_is_of_another_task() -> None:
    target = Store("db")
    settings = [spec(target, partitions=3)]
    world = World([target], settings, idle_ms=60_000, commit_ms=60_000)
    player = world.add_player()
    world.fill(10, keys=7)
    world.run(1000)
    world.insert(b"last", key=b"key")
    call = player.call(WaitCall(player.deadline(), world.log.tail.gsn + 1))
    world.run(30)
    assert player.results[call] is None


def test_a_wait_begins_steps_although_the_service_does_not_reply() -> None:
    target = Store("db")
    world = World([target], [spec(target, keys=("none",))], idle_ms=60_000)
    player = world.add_player()
    world.run(1000)
    last = world.fill(2)[-1]
    world.run(50)
    player.core.is_isolated = True
    player.call(WaitCall(NEVER, last + 1))
    world.run(50)
    assert [stop > last for _, stop in player.batches()] == [True]


def test_only_the_tasks_that_an_event_concerns_are_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tasks: a record is delivered by one of them, whose step then ends."""
    target = Store("db")
    world = World([target], [spec(target, partitions=10)], idle_ms=60_000, commit_ms=60_000)
    player = world.add_player()
    world.fill(40)
    world.run(2000)
    polled: list[str] = []
    poll = PlayerTask.poll

    def noting(task: PlayerTask) -> None:
        polled.append(task.name)
        poll(task)

    monkeypatch.setattr(PlayerTask, "poll", noting)
    world.insert(b"payload", key=b"one")
    player.posted.append(BatchEnd())
    world.run(50)
    [delivering] = {one.batch.task.cursor for one in player.steps[-1:] if isinstance(one, Deliver)}
    assert len(set(polled)) == 10, "each task looks at the record's position"
    assert polled.count(delivering) > 1
    assert all(polled.count(name) == 1 for name in set(polled) - {delivering})


def test_few_tasks_are_polled_in_a_row_and_each_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Store("db")
    world = World([target], [spec(target, partitions=3 * MAX_POLLED)], idle_ms=60_000)
    player = world.add_player()
    world.fill(200)
    world.run(2000)
    rows: list[list[str]] = []
    monkeypatch.setattr(PlayerTask, "poll", lambda task: rows[-1].append(task.name))
    monkeypatch.setattr(PlayerTask, "next_wakeup", lambda _task: world.now)
    for name in player.node.tasks:
        player.node.tasks[name].wake()
    for _ in range(3):
        rows.append([])
        player.node.step(BatchEnd(), world.now)
    assert [len(row) for row in rows] == [MAX_POLLED] * 3
    assert {name for row in rows for name in row} == set(player.node.tasks)


def test_many_tasks_that_read_for_themselves_come_to_rest() -> None:
    target = Store("db")
    own = spec(target, partitions=2 * MAX_POLLED, skip_writers=(b"writer",))
    world = World([target], [own], idle_ms=60_000)
    player = world.add_player()
    world.run(1000)
    world.fill(100)
    world.run(1000)  # A node that asks for time without end fails the test.
    assert sum(len(target.rows[part].records) for part in target.rows) == 100
    assert set(player.states()) == {"playing"}


def test_a_wait_for_a_far_position_makes_no_steps() -> None:
    target = Store("db")
    world = World([target], [spec(target, keys=("none",))], idle_ms=60_000)
    player = world.add_player()
    world.run(1000)
    player.call(WaitCall(NEVER, 10**12))
    for _ in range(20):
        world.fill(2)
        world.run(50)
    assert not player.batches()


def test_a_start_is_answered_although_others_own_all_tasks() -> None:
    world, [_] = shared(partitions=1, players=1)
    other = world.add_player()
    call = other.call(StartedCall(other.deadline()))
    world.run(2000)
    assert other.results[call] is None
    assert not other.held


def test_a_start_with_other_partitions_is_answered_with_the_error() -> None:
    world, [_] = shared(partitions=2, players=1)
    target = world.targets["db"]
    other = world.add_player(World([target], [spec(target, partitions=3)]).settings)
    start, wait = other.call(StartedCall(NEVER)), other.call(WaitCall(NEVER, 7))
    world.run(2000)
    assert isinstance(other.results[start], ConfigError)
    assert isinstance(other.results[wait], ConfigError)


def test_a_wait_ends_when_every_task_of_all_processes_has_committed() -> None:
    world, [first, second] = shared()
    last = world.fill(40, keys=17)[-1]
    target = max(world.log.tail.gsn, last) + 1
    call = first.call(WaitCall(first.deadline(), target))
    world.run(1500)
    assert first.results[call] is None
    positions = [world.cursor("db", n).position for n in range(4)]
    assert min(positions) >= target
    check_all_done(world)
    del second


@pytest.mark.parametrize("waiter", [0, 1])
def test_a_wait_after_a_seek_waits_for_what_is_delivered_again(waiter: int) -> None:
    """The owner, or another process, has the former position until it lists the cursors."""
    world, players = shared(partitions=1)
    world.run(12_000)
    last = world.log.tail.gsn
    for player in players:
        player.fault = lambda kind, _: Retry("down") if kind == "deliver" else None
    players[waiter].core.is_isolated = True
    world.edit("seek", world.log.gsns[3])
    call = players[waiter].call(WaitCall(NEVER, last + 1))
    world.run(100)
    assert call not in players[waiter].results
    players[waiter].core.is_isolated = False
    world.run(3000)
    assert call not in players[waiter].results
    for player in players:
        player.fault = lambda _kind, _: None
    world.run(8000)
    assert players[waiter].results[call] is None
    assert len(world.payloads("db")) == len(world.log.gsns) - 3


def test_a_wait_without_a_reply_of_the_service_says_so() -> None:
    world, player = of_two()
    world.run(1000)
    player.core.is_isolated = True
    call = player.call(WaitCall(player.deadline(500), 1))
    world.run(1000)
    assert "the membership service did not answer" in str(player.results[call])


def test_a_wait_names_the_tasks_that_are_behind() -> None:
    world, player = of_two()
    world.run(1000)
    world.edit("pause", 0, "sink")
    world.run(1000)
    world.fill(5)
    call = player.call(WaitCall(player.deadline(2000), world.log.tail.gsn + 1))
    world.run(3000)
    error = player.results[call]
    assert isinstance(error, DeadlineError)
    assert "orders/sink/0 (paused)" in str(error)
    assert "orders/db/0" not in str(error)


def test_a_call_gets_the_positions_after_the_steps_under_way() -> None:
    world, player = of_two(commit_ms=60_000)
    world.run(1000)
    player.hangs = True
    last = world.fill(5)[-1]
    world.run(100)
    call = player.call(PositionsCall(NEVER))
    world.run(10)
    assert world.cursor().position <= last
    assert player.results[call] == {"orders/db/0": last + 1, "orders/sink/0": last + 1}
    idle = world.add_player()
    world.run(1000)
    call = idle.call(PositionsCall(NEVER))
    world.run(10)
    assert "orders/db/0" not in idle.results[call]


def test_a_call_waits_for_a_task_that_fails() -> None:
    world, player = of_two()
    world.run(1000)
    late = player.call(FailureCall(player.deadline(500)))
    call = player.call(FailureCall(NEVER))
    world.run(1000)
    assert isinstance(player.results[late], DeadlineError)
    assert call not in player.results
    player.fault = lambda kind, one: (
        TypeError("a bug") if kind == "deliver" and one.task.target == "db" else None
    )
    world.fill(1)
    world.run(100)
    assert player.results[call] == {"orders/db/0": "TypeError: a bug"}
    player.stop()
    call = player.call(FailureCall(NEVER))
    world.run(100)
    assert isinstance(player.results[call], ClosedError)


def test_a_wait_that_is_cancelled_is_not_answered() -> None:
    world, player = of_two()
    call = player.call(WaitCall(player.deadline(2000), 10**9))
    world.run(500)
    player.posted.append(Cancelled(call))
    world.run(3000)
    assert call not in player.results


def test_calls_of_the_log_are_passed_on() -> None:
    world, player = of_two()
    world.run(1000)
    call = player.call(CursorsRequest(player.deadline()))
    world.run(100)
    assert next(info.name for info in player.results[call]) == "orders/db/0"


# --- the stop ---


def test_a_stop_drains_moves_and_releases() -> None:
    world, player = of_two(commit_ms=60_000)
    world.run(1000)
    world.fill(5)
    player.hangs = True
    world.run(50)
    call = player.stop()
    world.run(1000)
    assert call not in player.results, "two steps are under way"
    assert player.states() == ["draining", "draining"]
    player.go_on()
    world.run(200)
    assert player.results[call] is None
    assert player.states() == ["free", "free"]
    assert not [one for one in world.service.table.in_order() if one.owner]
    assert world.cursor("db").position == player.task("db").delivery.position
    assert world.cursor("sink").position == player.task("sink").delivery.position
    assert sum(isinstance(step, CloseTarget) for step in player.steps) == 2
    assert not player.core.subscriptions
    other = world.add_player()
    world.run(1000)
    assert len(other.held) == 2, "no lease is waited for"
    assert len(world.payloads("sink")) == 25


def test_a_stop_names_the_tasks_that_do_not_end() -> None:
    world, player = of_two()
    player.hangs = True
    world.run(1000)
    call = player.stop(2000)
    world.run(3000)
    error = player.results[call]
    assert isinstance(error, DeadlineError)
    assert "orders/db/0, orders/sink/0" in str(error)


def test_calls_that_wait_end_with_a_stop() -> None:
    world, player = of_two()
    world.run(500)
    call = player.call(WaitCall(NEVER, 10**9))
    world.run(100)
    stop = player.stop()
    world.run(500)
    assert isinstance(player.results[call], ClosedError)
    assert player.results[stop] is None


def test_a_stop_during_the_first_claims_releases_them() -> None:
    world = World([Store("db")])
    player = world.add_player()
    stop = player.stop()
    world.run(3000)
    assert player.results[stop] is None
    assert not [one for one in world.service.table.in_order() if one.owner]


def test_a_stop_waits_for_the_claims_under_way() -> None:
    for kind in ("holds_claims", "holds_members"):
        world = World([Store("db")])
        player = world.add_player()
        setattr(player.core, kind, True)
        world.run(500)
        stop = player.stop()
        world.run(500)
        assert stop not in player.results, kind
        setattr(player.core, kind, False)
        world.run(500)
        assert player.results[stop] is None
        assert not [one for one in world.service.table.in_order() if one.owner]


def test_a_stopped_node_begins_nothing() -> None:
    world, player = of_two()
    world.run(500)
    player.stop()
    world.run(500)
    requests = len(player.core.requests)
    world.fill(5)
    world.run(20_000)
    assert len(player.core.requests) == requests
    assert not [r for r in player.core.requests[-3:] if isinstance(r, FetchRequest)]


# --- the status ---


def test_the_status_describes_every_task() -> None:
    world, [first, second] = shared(partitions=3)
    status = first.node.status(0)
    json.dumps(status)
    assert status["player"] == "orders"
    assert status["members"] == [first.owner, second.owner]
    tasks = {one["partition"]: one for one in status["tasks"]}
    assert len(tasks) == 3
    for partition, one in tasks.items():
        cursor = world.cursor("db", partition)
        assert (one["target"], one["owner"]) == ("db", cursor.owner_text)
        assert (one["term"], one["position"]) == (cursor.term, cursor.position)
        is_own = cursor.owner_text == first.owner
        assert one["state"] == ("playing" if is_own else "owned")
        assert one["source"] == ("feed" if is_own else "")
        assert one["lag_s"] == (0.0 if is_own else None)
        assert one["delivered"] == (first.task("db", partition).delivered if is_own else 0)
        assert (one["delay_us"]["p50"] is not None) == is_own
    call = first.call(StatusCall(NEVER, 0))
    world.run(10)
    assert first.results[call]["player"] == "orders"


def test_the_status_names_the_last_error_and_the_lag() -> None:
    world, player = of_two()
    world.run(1000)
    player.fault = lambda *_: Retry("the disk is full")
    at_us = (world.now + 10**18) // 1000
    world.log.insert(b"new", timestamp_us=at_us - 7_000_000)
    world.run(3000)
    [db, sink] = player.node.status(world.now + 10**18)["tasks"]
    assert "the disk is full" in db["last_error"]
    assert (db["state"], db["retries"] > 1) == ("retrying", True)
    assert db["lag_s"] == sink["lag_s"] == pytest.approx(10, abs=0.1)


# --- settings ---


def test_every_step_has_a_worker_of_its_own() -> None:
    _, players = shared(partitions=4)
    for player in players:
        workers = {s.batch.task.partition: s.worker for s in player.steps if isinstance(s, Deliver)}
        assert len(set(workers.values())) == len(workers)
