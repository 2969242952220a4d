"""Workers: threads that open, deliver and close, and keep what a target refused."""

from __future__ import annotations

import json
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from logplayer import Batch, Opened, Rejected, RejectedRecord, Retry, Task, targets
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from logplayer.workers import Workers
from tests.logged_events import captured_events, events_go_to
from tests.waiting import wait_until
from ziplog.errors import ConfigError
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TASK = Task("p", "t", 0, 1, 7, 1, 2, 0, 5, b"", False)


class FakeTarget:
    """Notes its calls; `answer` gets each batch."""

    def __init__(self, answer: Callable[[Batch], Any]) -> None:
        self.calls: list[str] = []
        self.answer = answer

    def open(self, task: Task) -> Opened:
        self.calls.append(f"open {task.term}")
        return Opened(task.position, b"m")

    def deliver(self, batch: Batch) -> Any:
        self.calls.append(f"deliver {batch.start}")
        return self.answer(batch)

    def close(self) -> None:
        self.calls.append("close")
        raise OSError("it was broken already")


class Bench:
    """Workers of one target."""

    def __init__(self, answer: Callable[[Batch], Any] = lambda _: None, **settings: Any) -> None:
        self.made: list[FakeTarget] = []
        self.ends: SimpleQueue[StepEnded] = SimpleQueue()

        def connect() -> FakeTarget:
            self.made.append(FakeTarget(answer))
            return self.made[-1]

        spec = targets.custom("t", connect, stores_position=True, **settings)
        self.workers = Workers([spec], self.ends.put)  # type: ignore[arg-type]

    def open(self, worker: int = 1) -> Any:
        self.workers.open(OpenTarget(worker, TASK))
        return self.end(worker)

    def deliver(self, batch: Batch, worker: int = 1) -> Any:
        self.workers.deliver(Deliver(worker, batch))
        return self.end(worker)

    def end(self, worker: int = 1) -> Any:
        ended = self.ends.get(timeout=30)
        assert ended.worker == worker
        return ended.result


def batch(start: int = 5, *gsns: int, rejected: tuple[RejectedRecord, ...] = ()) -> Batch:
    records = [record(gsn) for gsn in gsns]
    return Batch(TASK, start, start + 10, records, 9, rejected)


def record(gsn: int, payload: bytes = b"x") -> Record:
    return Record(RecordId(gsn, 0), payload, b"\xff", 0, 1)


def test_a_worker_opens_delivers_and_closes_one_target() -> None:
    bench = Bench(lambda _: b"mark")
    assert bench.open() == Opened(5, b"m")
    assert bench.deliver(batch(5)) == b"mark"
    assert bench.open() == Opened(5, b"m")
    bench.workers.close(CloseTarget(1))
    bench.workers.stop(30)
    (target,) = bench.made
    assert target.calls == ["open 2", "deliver 5", "open 2", "close"]
    assert bench.workers.running == []


def test_each_worker_has_its_own_target() -> None:
    bench = Bench()
    bench.open(1)
    bench.open(2)
    bench.workers.stop(30)
    assert [target.calls for target in bench.made] == [["open 2", "close"]] * 2


@pytest.mark.parametrize(
    "error", [Retry("later", 3.0), Rejected(1, "no"), OSError("broken"), TypeError("a bug")]
)
def test_errors_of_a_target_are_results(error: Exception) -> None:
    def answer(_: Batch) -> None:
        raise error

    bench = Bench(answer)
    bench.open()
    assert bench.deliver(batch()) is error
    bench.workers.stop(30)


def test_an_exit_of_a_target_is_a_failed_attempt() -> None:
    def answer(_: Batch) -> None:
        raise SystemExit(3)

    bench = Bench(answer)
    bench.open()
    assert isinstance(bench.deliver(batch()), Retry)
    assert isinstance(bench.deliver(batch()), Retry)
    bench.workers.stop(30)


@pytest.mark.parametrize("result", ["text", 5, Opened(5)])
def test_a_result_of_another_type_is_a_bug_of_the_target(result: Any) -> None:
    bench = Bench(lambda _: result)
    bench.open()
    assert isinstance(bench.deliver(batch()), TypeError)
    bench.workers.stop(30)


def test_a_target_that_hangs_delays_no_other() -> None:
    release = threading.Event()
    bench = Bench(lambda given: release.wait(30) and None if given.start == 1 else None)
    bench.open(1)
    bench.open(2)
    bench.workers.deliver(Deliver(1, batch(1)))
    for start in range(2, 10):
        assert bench.deliver(batch(start), 2) is None
    bench.workers.close(CloseTarget(1))
    bench.workers.stop(0.01)
    assert bench.workers.running == ["p/t/0"]
    release.set()
    wait_until(lambda: not bench.workers.running, "the worker ends")


def test_rejected_records_are_kept_before_the_delivery_and_once(tmp_path: Path) -> None:
    file = tmp_path / "dead.jsonl"
    seen: list[int] = []

    def answer(_: Batch) -> None:
        seen.append(len(file.read_text().splitlines()))
        if len(seen) == 1:
            raise Retry("again")

    bench = Bench(answer, rejected="dead-letter", dead_letter=file)
    bench.open()
    rejected = (RejectedRecord(record(6, b"\xfe"), "too odd"), RejectedRecord(record(7), "no"))
    assert isinstance(bench.deliver(batch(5, 8, rejected=rejected)), Retry)
    assert bench.deliver(batch(5, 8, rejected=rejected)) is None
    bench.workers.stop(30)
    assert seen == [2, 2]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["gsn"], line["why"], line["target"]) for line in lines] == [
        (6, "too odd", "t"), (7, "no", "t")
    ]  # fmt: skip
    assert lines[0]["payload_b64"] == "/g=="
    assert lines[1]["payload"] == "x"


def test_each_of_the_records_that_a_map_makes_of_one_is_kept_once(tmp_path: Path) -> None:
    file = tmp_path / "dead.jsonl"
    bench = Bench(rejected="dead-letter", dead_letter=file)
    bench.open()
    made = [RejectedRecord(record(6, payload), "odd") for payload in (b"a", b"b", b"b")]
    for count in (1, 2, 3, 3):
        assert bench.deliver(batch(5, 7, rejected=tuple(made[:count]))) is None
    kept = [json.loads(line)["payload"] for line in file.read_text().splitlines()]
    assert kept == ["a", "b", "b"]


def test_a_rejected_record_is_kept_once_when_its_batch_is_halved(tmp_path: Path) -> None:
    file = tmp_path / "dead.jsonl"
    bench = Bench(rejected="dead-letter", dead_letter=file)
    bench.open()
    late = (RejectedRecord(record(12), "odd"),)
    for start, stop, rejected in ((5, 15, late), (5, 9, ()), (9, 15, late), (15, 20, ())):
        bench.deliver(Batch(TASK, start, stop, [record(start)], 1, rejected))
    bench.workers.stop(30)
    assert [json.loads(line)["gsn"] for line in file.read_text().splitlines()] == [12]


def test_records_are_not_passed_if_they_cannot_be_kept(tmp_path: Path) -> None:
    bench = Bench(rejected="dead-letter", dead_letter=tmp_path / "none" / "dead.jsonl")
    bench.open()
    result = bench.deliver(batch(5, rejected=(RejectedRecord(record(6), "no"),)))
    assert isinstance(result, OSError)
    bench.workers.stop(30)
    assert bench.made[0].calls == ["open 2", "close"]


@pytest.mark.parametrize(
    "error",
    [
        Retry("later", float("nan")),
        Retry("later", "5"),  # type: ignore[arg-type]
    ],
)
def test_what_an_error_of_a_target_has_is_checked(error: Exception) -> None:
    def answer(_: Batch) -> None:
        raise error

    bench = Bench(answer)
    bench.open()
    result = bench.deliver(batch())
    assert isinstance(result, TypeError)
    assert type(error).__name__ in str(result)
    bench.workers.stop(30)


@pytest.mark.parametrize("position", [-1, "5", 2**63, True, 0.5])
def test_the_position_of_a_target_is_checked(position: Any) -> None:
    bench = Bench()
    bench.open()
    bench.made[0].open = lambda _task: Opened(position)  # type: ignore[method-assign,assignment]
    assert isinstance(bench.open(), TypeError)
    bench.workers.stop(30)


@pytest.mark.parametrize("mark", ["m", b"x" * 513])
def test_the_mark_of_a_target_is_checked(mark: Any) -> None:
    bench = Bench(lambda _: mark)
    bench.open()
    assert isinstance(bench.deliver(batch()), TypeError | ConfigError)
    bench.made[0].open = lambda _task: Opened(5, mark)  # type: ignore[method-assign,assignment]
    assert isinstance(bench.open(), TypeError | ConfigError)
    bench.workers.stop(30)


@pytest.mark.parametrize("error", [TypeError("a bug"), ConfigError("position", 1, "2")])
def test_only_bugs_are_logged_with_their_traceback(error: Exception) -> None:
    def answer(_: Batch) -> None:
        raise error

    bench = Bench(answer)
    bench.open()
    with captured_events() as logs:
        assert bench.deliver(batch()) is error
    assert len(logs) == isinstance(error, TypeError)
    bench.workers.stop(30)


def test_a_log_that_fails_ends_no_worker() -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError("the handler of the program fails")

    def answer(_: Batch) -> NoReturn:
        raise TypeError("a bug")

    bench = Bench(answer)
    bench.open()
    with events_go_to(fail):
        assert isinstance(bench.deliver(batch()), TypeError)
        assert isinstance(bench.deliver(batch()), TypeError)
    bench.workers.stop(30)


def test_a_target_may_stop_its_own_workers() -> None:
    bench = Bench(lambda _: bench.workers.stop(1))
    bench.open()
    assert bench.deliver(batch()) is None


def test_a_target_that_hangs_keeps_few_threads_however_often_its_claim_is_lost() -> None:
    release = threading.Event()
    bench = Bench(lambda _: release.wait(60) and None)
    for worker in range(1, 4):
        bench.open(worker)
        bench.workers.deliver(Deliver(worker, batch()))
        bench.workers.close(CloseTarget(worker))
    for worker in range(4, 8):
        refusal = bench.open(worker)
        assert isinstance(refusal, Retry)
        assert "3 steps of former claims are still under way" in str(refusal)
        bench.workers.close(CloseTarget(worker))
    assert len(bench.made) == 3
    release.set()
    assert sorted(bench.ends.get(timeout=30).worker for _ in range(3)) == [1, 2, 3]
    wait_until(lambda: not bench.workers.running, "the former workers end")
    assert bench.open(8) == Opened(5, b"m")
    bench.workers.stop(30)
