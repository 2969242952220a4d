"""`ziplog player status`: the lags of tasks, also while a shard does not reply."""

from __future__ import annotations

import contextlib
import itertools
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest

import ziplog
from logplayer.cli import commands, task_positions
from tests.unit.ziplog.cli.fakes import run
from ziplog.errors import DeadlineError, TrimmedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TASKS = [("copy", 0), ("copy", 1)]
SLOW = ziplog.RecordId(7, 0)


class Subscription:
    """The first record from a position on, until the time limit."""

    def __init__(self, log: Log, start: ziplog.RecordId) -> None:
        self._log, self._start = log, start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[ziplog.Record]:
        trims = self._log.trims
        if trims and self._start.gsn < trims[0]:
            raise TrimmedError(ziplog.RecordId(trims.pop(0), 0))
        if self._log.stuck == "subscribe" and self._start == SLOW:
            raise DeadlineError("no record came")
        yield ziplog.Record(self._start, b"", None, 0, 0)


class Log:
    """A log with a shard that may not reply; it records the time limits of its calls."""

    def __init__(
        self, *starts: ziplog.RecordId, stuck: str = "", trims: Sequence[int] = ()
    ) -> None:
        self.starts, self.stuck, self.trims = starts, stuck, list(trims)
        self.limits: list[float] = []

    def cursors(self, _pattern: str, timeout: float) -> list[Any]:
        self.limits.append(timeout)
        return [
            SimpleNamespace(name=f"p/copy/{index}", position=start, owner="", term=1, mark=b"")
            for index, start in enumerate(self.starts)
        ]

    def subscribe(self, start: ziplog.RecordId, *, follow: bool, timeout: float) -> Subscription:
        assert not follow
        self.limits.append(timeout)
        return Subscription(self, start)

    def check_tail(self, *, timeout: float) -> ziplog.RecordId:
        return self._reply("check_tail", timeout, ziplog.RecordId(9, 0))

    def extents(self, start: int, stop: int, *, timeout: float) -> Any:
        shard = SimpleNamespace(shard=0, start=start, stop=stop)
        return self._reply("extents", timeout, SimpleNamespace(shards=[shard]))

    def outline(self, _shard: int, start: int, stop: int, *, timeout: float) -> Any:
        return self._reply("outline", timeout, SimpleNamespace(steps=[(stop, stop - start)]))

    def _reply(self, call: str, timeout: float, reply: Any) -> Any:
        self.limits.append(timeout)
        if call == self.stuck:
            raise DeadlineError(f"no reply to {call}")
        return reply


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[[Log], tuple[list[Any], list[str]]]:
    """Return the sizes of the lags of two tasks, and the warnings."""
    monkeypatch.setattr(task_positions, "state_of", lambda *_: "free")

    def shown(log: Log) -> tuple[list[Any], list[str]]:
        warnings: list[str] = []
        found = task_positions.document(log, "p", TASKS, 5.0, warnings.append)  # type: ignore[arg-type]
        assert all(
            (task["lag_s"] is None) == (task["lag_bytes"] is None) for task in found["tasks"]
        )
        assert all(0 < limit <= 5.0 for limit in log.limits)
        return [task["lag_bytes"] for task in found["tasks"]], warnings

    return shown


def test_a_shard_without_a_reply_hides_the_lag_of_its_positions_only(show: Any) -> None:
    start = ziplog.RecordId(3, 0)
    assert show(Log(start, SLOW)) == ([7, 3], [])
    sizes, warnings = show(Log(start, SLOW, stuck="subscribe"))
    assert (sizes, warnings) == ([7, None], ["the lag is not known: no record came"])


@pytest.mark.parametrize("call", ["check_tail", "extents", "outline"])
def test_the_tasks_are_shown_if_the_size_of_the_log_is_unknown(show: Any, call: str) -> None:
    sizes, warnings = show(Log(SLOW, SLOW, stuck=call))
    assert (sizes, warnings) == ([None, None], [f"the lag is not known: no reply to {call}"])


def test_the_time_limit_is_that_of_all_calls(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(step=2)
    clock = SimpleNamespace(monotonic=lambda: next(seconds), time=lambda: 0.0)
    monkeypatch.setattr(task_positions, "time", clock)
    sizes, warnings = show(Log(SLOW, SLOW))
    passed = "the lag is not known: the time limit passed before the log was read"
    assert (sizes, warnings) == ([None, None], [passed])


def test_trims_meanwhile_move_the_position(show: Any) -> None:
    trimmed = ziplog.RecordId(2, 0)
    assert show(Log(trimmed, trimmed, trims=[4, 6])) == ([4, 4], [])


def test_a_watch_goes_on_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [
        {"tasks": [], "number": 1},
        DeadlineError("no reply"),
        {"tasks": [], "number": 3},
        KeyboardInterrupt(),
    ]

    def document(*_: object) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(commands, "document", document)
    monkeypatch.setattr(commands, "connect", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(commands, "_REFRESH_S", 0)
    result = run("player", "status", "orders", "--watch", "--json")
    numbers = [json.loads(line)["number"] for line in result.stdout.splitlines()]
    assert numbers == [1, 3]
    assert "no reply" in result.stderr
