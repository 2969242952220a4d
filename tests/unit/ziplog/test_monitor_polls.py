"""A monitor of a cluster that answers late or in part, and one without descriptors."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ziplog.errors import DeadlineError, UnavailableError
from ziplog.monitor import cursor_polls, server
from ziplog.monitor.cursor_polls import CursorPolls
from ziplog.monitor.server import Monitor, Snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.client.blocking import Log
    from ziplog.types import RecordId

DOCUMENT: dict[str, Any] = {
    "cluster": "c", "epoch": 9, "mms": [], "failure_handlers": [],
    "shards": [{"stable_gsn": 100, "replicas": []}], "trimmed_before": "1@1",
}  # fmt: skip


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int(self.now_s * 1e9)


class FakeLog:
    """A log whose shards send no record of some positions, after `pause_s` or a time-out."""

    def __init__(self, clock: Clock, silent: set[int], pause_s: float) -> None:
        self._clock, self._silent, self._pause_s = clock, silent, pause_s

    @contextmanager
    def subscribe(self, start: RecordId, *, follow: bool) -> Iterator[FakeLog]:
        assert not follow
        self._start = start.gsn
        yield self

    def fetch(self, _count: int, timeout: float) -> list[Any]:
        if self._start not in self._silent:
            return [SimpleNamespace(timestamp_us=0)]
        self._clock.now_s += min(timeout, self._pause_s)
        if timeout < self._pause_s:
            return []
        raise UnavailableError("the shard recovers")


def polls(monkeypatch: pytest.MonkeyPatch, silent: set[int], pause_s: float) -> CursorPolls:
    clock = Clock()
    monkeypatch.setattr(cursor_polls, "time", clock)
    return CursorPolls(cast("Log", FakeLog(clock, silent, pause_s)), lambda: DOCUMENT)


def test_a_cluster_that_answers_after_more_than_a_second_has_a_snapshot() -> None:
    class LateLog:
        def cluster(self, timeout: float) -> dict[str, Any]:
            snapshots._stopped.set()
            if timeout < 1.5:
                raise DeadlineError("no answer")
            return DOCUMENT

    snapshots = Snapshots(cast("Log", LateLog()))
    try:
        snapshots._run()
        assert snapshots.document == DOCUMENT
    finally:
        snapshots._polls._transport.close()


def test_records_that_do_not_come_do_not_delay_the_next_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions = set(range(1, 9))
    found = polls(monkeypatch, positions, 60.0)
    before = cursor_polls.time.monotonic()
    found._read_first(positions)
    assert cursor_polls.time.monotonic() - before <= 3.0


def test_records_that_do_not_come_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = polls(monkeypatch, set(range(1, 11)), 0.01)
    positions = set(range(1, 13))
    found._read_first(positions)
    assert not found._inserted_at
    found._read_first(positions)
    assert set(found._inserted_at) == {11, 12}


@pytest.mark.parametrize(("number", "pauses"), [(errno.EMFILE, [0.1]), (errno.ECONNABORTED, [])])
def test_a_monitor_without_descriptors_pauses_between_attempts(
    monkeypatch: pytest.MonkeyPatch, number: int, pauses: list[float]
) -> None:
    def refuse() -> None:
        raise OSError(number, "refused")

    paused: list[float] = []
    monkeypatch.setattr(server, "time", SimpleNamespace(sleep=paused.append))
    with Monitor("127.0.0.1", 0, cast("Snapshots", None)) as monitor:
        listening, monitor.socket = monitor.socket, SimpleNamespace(accept=refuse)
        try:
            with pytest.raises(OSError, match="refused"):
                monitor.get_request()
        finally:
            monitor.socket = listening
    assert paused == pauses
