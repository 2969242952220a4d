"""A coordinator's progress reports during the replay of the log."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from logdb.coordinator import progress
from logdb.coordinator.progress import Replay
from tests.logged_events import events_go_to

if TYPE_CHECKING:
    import pytest

DEADLINE_S = 30.0


class Lines:
    """The events that were logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, dict[str, Any]]] = []
        self.came = threading.Condition()

    def receive(self, event: dict[str, Any]) -> None:
        fields = {key: value for key, value in event.items() if key not in {"event", "log_level"}}
        with self.came:
            self.logged.append((event["event"], fields))
            self.came.notify_all()

    def until(self, event: str, wanted: dict[str, Any]) -> None:
        with self.came:
            found = self.came.wait_for(lambda: (event, wanted) in self.logged, timeout=DEADLINE_S)
        assert found, self.logged


def test_progress_shows_position_and_awaited_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    tailer: Any = SimpleNamespace(passed=0, tail=0, waiting_for=[])
    with events_go_to(lines.receive), Replay(tailer, "h:1", "h:2"):
        lines.until("looking for the log", {"at": "h:2"})
        tailer.waiting_for = ["shard 1 (recovering)"]
        lines.until("replaying", {"position": 0, "tail": 0, "waits_for": "shard 1 (recovering)"})
        tailer.waiting_for, tailer.passed, tailer.tail = [], 7, 9
        lines.until("replaying", {"position": 7, "tail": 9})
