"""How a log tailer starts, what it applies, and when its waiters resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.coordinator.log_tailer import LogTailer
from logdb.errors import NoCheckpointError
from tests.unit.logdb.cleaner.test_checkpoint import write as write_checkpoint
from tests.unit.logdb.fakelog import SILENT_OUT, UNAVAILABLE, FakeLog, fail
from tests.unit.logdb.harness import Core, S, commit, waiter_count
from tests.unit.logdb.histories import UNREADABLE
from ziplog.client.common.requests import (
    BarrierRequest,
    ConnectRequest,
    FetchRequest,
    SubscribeRequest,
    TailRequest,
    UnsubscribeRequest,
)
from ziplog.client.log_tasks import LogTasks
from ziplog.core.node import BatchEnd, LogWarning, Wakeup
from ziplog.errors import UnavailableError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable


class Waiter:
    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.is_over = False
        self.resumed = 0
        self._then = then

    def resume(self) -> None:
        self.resumed += 1
        self._then()


class Bench:
    """A follower on a log in memory."""

    def __init__(self, log: FakeLog, *, at_once: bool = True) -> None:
        self.log = log
        self.core = Core(log, at_once=at_once)
        self.calls = LogTasks(self.core, S)
        self.received: list[Any] = []
        self.states: list[Any] = []
        self.ready = self.passes = 0
        self.failures: list[Exception] = []
        self.tailer = LogTailer(
            self.calls,
            connect_ns=S,
            on_state=self.states.append,
            on_applied=self.received.append,
            on_passed=self.count_pass,
            on_ready=self.count_ready,
            on_failure=self.failures.append,
        )
        self.tailer.start()

    def count_pass(self) -> None:
        self.passes += 1

    def count_ready(self) -> None:
        self.ready += 1

    def poll(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.calls.step(Wakeup(), self.calls.now)
            self.tailer.poll(drained=False)
            self.calls.step(BatchEnd(), self.calls.now)
            self.tailer.poll(drained=True)
            self.tailer.check()

    def settle(self) -> None:
        """Turn until nothing more happens (but for questions how far the log is)."""
        for _ in range(40):
            self.poll()

    def count(self, kind: type) -> int:
        return sum(isinstance(request, kind) for request in self.core.requests)


def filled(count: int, seed: int = 0) -> FakeLog:
    log = FakeLog(seed=seed)
    for number in range(1, count + 1):
        log.insert(commit(number, {b"%d" % (number % 5): b"v"}), after=log.tail)
    return log


def test_a_tailer_applies_every_record_in_order_and_becomes_ready() -> None:
    bench = Bench(filled(2500))
    assert not bench.ready
    bench.settle()
    assert bench.ready == 1
    assert [applied.position.gsn for applied in bench.received] == bench.log.gsns
    assert bench.tailer.passed == bench.tailer.tail == bench.log.tail.gsn


def warnings(bench: Bench) -> list[str]:
    return [effect.text for effect in bench.calls.pop_effects() if isinstance(effect, LogWarning)]


def test_the_first_foreign_record_causes_one_warning() -> None:
    log = filled(2)
    bench = Bench(log)
    bench.settle()
    assert not warnings(bench)
    (foreign,) = log.insert(b"not ours", after=log.tail)
    bench.settle()
    (text,) = warnings(bench)
    assert f"gsn {foreign.gsn} is not LogDB's" in text
    assert "stop other programs" in text
    log.insert(b"nor this", after=log.tail)
    bench.settle()
    assert not warnings(bench)
    log.faults.append(fail(FetchRequest, UNAVAILABLE))
    bench.poll()
    log.faults.clear()
    bench.calls.now += S
    bench.settle()
    assert bench.tailer.starts == 2
    assert not [text for text in warnings(bench) if "LogDB" in text]


def test_the_first_unreadable_record_causes_one_warning() -> None:
    log = filled(2)
    (unreadable,) = log.insert(UNREADABLE, after=log.tail)
    log.insert(UNREADABLE, after=log.tail)
    bench = Bench(log)
    bench.settle()
    (text,) = warnings(bench)
    assert f"cannot read the record at gsn {unreadable.gsn}" in text
    assert "start coordinators of the version that wrote it" in text


def test_a_tailer_that_starts_after_a_foreign_record_warns_too() -> None:
    log = filled(2)
    (foreign,) = log.insert(b"not ours", after=log.tail)
    write_checkpoint(log, {"first_foreign": foreign.gsn}, keys=0)
    bench = Bench(log)
    bench.settle()
    assert bench.tailer.state.commits == 0, "it began at the checkpoint"
    (text,) = warnings(bench)
    assert f"gsn {foreign.gsn} is not LogDB's" in text


def test_a_tailer_of_an_empty_log_is_ready_immediately() -> None:
    bench = Bench(FakeLog())
    bench.settle()
    assert bench.ready == 1


def test_one_barrier_request_serves_all_earlier_waiters() -> None:
    bench = Bench(filled(3), at_once=False)
    bench.settle()
    before = bench.count(BarrierRequest)
    waiters = [Waiter() for _ in range(10)]
    bench.tailer.wait_for_tail(waiters[0])
    for waiter in waiters[1:]:
        bench.tailer.wait_for_tail(waiter)
    assert bench.count(BarrierRequest) == before + 1
    bench.settle()
    # The first waiter's barrier was requested before the others came; they have a second one.
    assert bench.count(BarrierRequest) == before + 2
    assert [waiter.resumed for waiter in waiters] == [1] * 10


def test_a_waiter_for_the_tail_waits_for_every_position_below_the_barrier() -> None:
    bench = Bench(filled(3))
    bench.settle()
    bound = RecordId(bench.tailer.passed + 2, 0)
    bench.core._answer[BarrierRequest] = lambda *_: bound
    waiter = Waiter()
    bench.tailer.wait_for_tail(waiter)
    assert waiter.resumed == 0
    bench.log.insert(commit(9, {b"k": b"v"}), after=bench.log.tail)
    bench.settle()
    assert waiter.resumed == 1


def test_a_waiter_for_a_hole_resumes_when_it_is_passed() -> None:
    bench = Bench(filled(1))
    bench.settle()
    hole = bench.log.tail.gsn + 1
    waiter = Waiter()
    bench.tailer.wait_for_position(hole, waiter)
    bench.poll()
    assert not waiter.resumed
    (subscription,) = bench.core.subscriptions.values()
    subscription.position = hole + 1
    bench.poll()
    assert waiter.resumed == 1
    assert bench.tailer.state.records == 1


def test_a_failed_barrier_request_is_retried() -> None:
    bench = Bench(filled(1))
    bench.settle()
    bench.log.faults.append(fail(BarrierRequest, UNAVAILABLE))
    waiter = Waiter()
    bench.tailer.wait_for_tail(waiter)
    bench.settle()
    assert waiter.resumed == 1


@given(st.data())
def test_a_resumed_waiter_sees_every_earlier_record(data: st.DataObject) -> None:
    """Fresh: all that was in the log when they came; at a position: all up to it; each once."""
    log = filled(data.draw(st.integers(0, 30)), data.draw(st.integers(0, 99)))
    bench = Bench(log, at_once=False)
    number = 1000
    waiters: list[Waiter] = []
    for step in data.draw(st.lists(st.sampled_from(["insert", "fresh", "at", "turn", "lose"]))):
        if step == "insert":
            number += 1
            log.insert(commit(number, {b"k": b"v"}))
        elif step == "turn":
            bench.poll()
        elif step == "lose":
            log.faults.append(fail(FetchRequest, UNAVAILABLE))
            bench.poll()
            log.faults.clear()
            bench.calls.now += 2 * S
        else:
            must = tuple(log.gsns)
            if step == "at":
                must = must[: data.draw(st.integers(0, len(must)))]

            def look(must: tuple[int, ...] = must) -> None:
                seen = {each.position.gsn for each in bench.received}
                assert seen.issuperset(must)
                assert bench.tailer.state.position.gsn >= max(must, default=0)

            waiter = Waiter(look)
            waiters.append(waiter)
            if step == "fresh":
                bench.tailer.wait_for_tail(waiter)
            else:
                bench.tailer.wait_for_position(max(must, default=0), waiter)
    for _ in range(2):  # A start that failed before may end its subscription first.
        bench.calls.now += 2 * S
        bench.settle()
    assert [waiter.resumed for waiter in waiters] == [1] * len(waiters)
    assert not waiter_count(bench.tailer)
    assert bench.tailer.is_ready


def test_a_tailer_restarts_after_a_failure_with_a_new_state() -> None:
    bench = Bench(filled(10))
    bench.settle()
    before = bench.count(UnsubscribeRequest)
    bench.log.faults.append(fail(FetchRequest, UNAVAILABLE))
    bench.poll()
    bench.log.faults.clear()
    assert not bench.tailer.is_ready
    assert bench.count(UnsubscribeRequest) == before + 1
    assert bench.tailer.next_wakeup() == bench.calls.now + S
    bench.calls.now += S
    bench.settle()
    assert (bench.ready, len(bench.states), bench.tailer.starts) == (2, 2, 2)
    assert bench.states[1] is bench.tailer.state is not bench.states[0]
    assert bench.tailer.state.records == 10
    assert len([w for w in bench.calls.pop_effects() if "starting again" in str(w)]) == 1


def lose_log(bench: Bench) -> None:
    bench.log.faults.append(fail(FetchRequest, UNAVAILABLE))
    bench.poll()
    bench.log.faults.clear()


def check_ready_at_tail(bench: Bench) -> None:
    """Poll a second start until the tailer is ready; it may not be before the tail."""
    bench.calls.now += S
    for _ in range(60):
        bench.poll()
        assert not bench.tailer.is_ready or bench.tailer.passed >= bench.log.tail.gsn
    assert bench.tailer.starts == 2
    assert bench.tailer.is_ready


def test_a_lost_start_does_not_make_the_next_one_ready() -> None:
    bench = Bench(filled(2500))
    while not bench.tailer.passed:
        bench.poll()
    lose_log(bench)
    assert not bench.ready
    for number in range(2501, 6001):
        bench.log.insert(commit(number, {b"k": b"v"}), after=bench.log.tail)
    check_ready_at_tail(bench)
    assert bench.ready == 1


def test_a_late_tail_of_a_lost_start_does_not_make_the_next_one_ready() -> None:
    log = filled(2500)
    # The search for a checkpoint also requests the tail.
    log.faults.append(fail(TailRequest, SILENT_OUT, after=1))
    bench = Bench(log)
    pending = bench.core.pending.items()
    (late,) = [call for call, request in pending if isinstance(request, TailRequest)]
    lose_log(bench)
    tail = log.tail
    for number in range(2501, 6001):
        log.insert(commit(number, {b"k": b"v"}), after=log.tail)
    bench.calls._callbacks[late](tail)
    check_ready_at_tail(bench)
    assert bench.ready == 1


def test_a_trimmed_log_without_a_checkpoint_is_a_final_failure() -> None:
    log = filled(10)
    log.trim(log.gsns[5])
    bench = Bench(log)
    bench.poll(3)
    (failure,) = bench.failures
    assert isinstance(failure, NoCheckpointError)
    assert not bench.ready


@pytest.mark.parametrize(("cluster", "is_final"), [(0, True), (7, False)])
def test_an_unreachable_log_is_a_final_failure_only_at_the_first_start(
    cluster: int, is_final: bool
) -> None:
    log = filled(3)
    log.faults.append(fail(SubscribeRequest if cluster else ConnectRequest, UNAVAILABLE))
    bench = Bench.__new__(Bench)
    former, Core.cluster = Core.cluster, cluster
    try:
        bench.__init__(log)  # type: ignore[misc]
        assert bool(bench.failures) == is_final
    finally:
        Core.cluster = former
    assert all(isinstance(each, UnavailableError) for each in bench.failures)
    if not is_final:
        bench.calls.now += S
        bench.settle()
        assert bench.ready == 1


def test_finished_waiters_are_forgotten() -> None:
    bench = Bench(filled(3), at_once=False)
    bench.settle()
    waiters = [Waiter() for _ in range(6)]
    for waiter in waiters[:3]:
        bench.tailer.wait_for_tail(waiter)
    for waiter in waiters[3:]:
        bench.tailer.wait_for_position(10**9, waiter)
    for waiter in waiters[::2]:
        waiter.is_over = True
    bench.tailer.drop_finished_waiters()
    assert waiter_count(bench.tailer) == 3
    bench.settle()
    assert [waiter.resumed for waiter in waiters] == [0, 1, 0, 0, 0, 0]
    bench.log.insert(commit(9, {b"k": b"v"}), after=bench.log.owner(10**9))
    bench.settle()
    assert [waiter.resumed for waiter in waiters] == [0, 1, 0, 1, 0, 1]
