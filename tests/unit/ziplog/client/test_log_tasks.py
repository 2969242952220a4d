"""Tasks on a log's core: results that come at once, later, and in lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.logdb.fakelog import FakeLog, fail
from ziplog.client.common.requests import InsertRequest, ReadRequest, TailRequest
from ziplog.client.log_tasks import LogTasks, Task
from ziplog.core.node import Wakeup
from ziplog.core.units import NEVER
from ziplog.errors import NoSuchRecordError, UnavailableError
from ziplog.types import RID_GENESIS, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ziplog.client.log_tasks import TaskSteps


def insert(payload: bytes) -> InsertRequest:
    return InsertRequest(NEVER, [payload], RID_GENESIS, None, 0)


def test_a_task_handles_thousands_of_immediate_results() -> None:
    def task() -> TaskSteps:
        for _ in range(20_000):
            yield TailRequest(NEVER)
        return "end"

    ends: list[Any] = []
    LogTasks(FakeLog().core(), 0).run(task(), ends.append)
    assert ends == ["end"]


@pytest.mark.parametrize("at_once", [True, False])
def test_the_results_of_a_list_are_in_the_order_of_its_requests(at_once: bool) -> None:
    log = FakeLog(seed=2)
    (there,) = log.insert(b"x")

    def task() -> TaskSteps:
        return (
            yield [ReadRequest(NEVER, there), ReadRequest(NEVER, RecordId(9**9, 0)), insert(b"y")]
        )

    ends: list[Any] = []
    calls = LogTasks(log.core(at_once=at_once), 0)
    calls.run(task(), ends.append)
    while not ends:
        calls.step(Wakeup(), 1)
    record, missing, rids = ends[0]
    assert isinstance(record, Record)
    assert record.payload == b"x"
    assert isinstance(missing, NoSuchRecordError)
    assert log.records[rids[0].gsn].payload == b"y"


def test_an_empty_list_has_an_empty_result() -> None:
    def task() -> TaskSteps:
        return (yield [])

    ends: list[Any] = []
    LogTasks(FakeLog().core(), 0).run(task(), ends.append)
    assert ends == [[]]


def test_an_exception_is_raised_where_the_task_waits_and_may_end_it() -> None:
    log = FakeLog()
    log.faults.append(fail(TailRequest, "unavailable", times=2))

    def task() -> TaskSteps:
        try:
            yield TailRequest(NEVER)
        except UnavailableError:
            yield TailRequest(NEVER)

    ends: list[Any] = []
    LogTasks(log.core(), 0).run(task(), ends.append)
    assert isinstance(ends[0], UnavailableError)


def test_other_steps_are_started_by_the_hook_and_stopped_with_the_task() -> None:
    begun: list[tuple[Task, Any]] = []
    stopped: list[Any] = []
    ends: list[Any] = []

    def begin(running: Task, step: Any) -> Callable[[], object] | None:
        begun.append((running, step))
        if step == "at once":
            running.resume("here")
            return None
        return lambda: stopped.append(step)

    def task() -> Generator[Any, Any, None]:
        assert (yield "at once") == "here"
        assert (yield "later") == "there"
        yield "never"

    running = Task(task(), ends.append, lambda: LogTasks(FakeLog().core(), 0), begin)
    running.resume()
    assert begun == [(running, "at once"), (running, "later")]
    running.resume("there")
    running.cancel()
    running.cancel()
    running.resume("too late")
    assert [step for _, step in begun] == ["at once", "later", "never"]
    assert stopped == ["never"]
    assert running.is_over
    assert ends == []


def test_a_cancelled_task_leaves_no_call_open() -> None:
    log = FakeLog()
    log.insert(b"x")
    core = log.core(at_once=False)
    calls = LogTasks(core, 0)
    ends: list[Any] = []
    ended: list[str] = []

    def task() -> TaskSteps:
        try:
            yield [TailRequest(NEVER), insert(b"y")]
        finally:
            ended.append("closed")

    running = Task(task(), ends.append, lambda: calls)
    running.resume()
    running.cancel()
    assert ended == ["closed"]
    assert calls._callbacks == {}
    calls.step(Wakeup(), 1)
    assert ends == []


def test_a_step_without_a_hook_is_an_assertion_error() -> None:
    def task() -> Generator[Any, Any, None]:
        yield "what?"

    with pytest.raises(AssertionError, match="what"):
        LogTasks(FakeLog().core(), 0).run(task(), print)
