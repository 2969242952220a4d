"""Progress display of a log replay: a bar on a terminal, a log line per second elsewhere.

It reads the tailer from its own thread, so what it shows may be slightly old.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ziplog import event_log

if TYPE_CHECKING:
    from logdb.coordinator.log_tailer import LogTailer

_EVERY_S: Final = 1.0
_BAR_EVERY_S: Final = 0.1


class Replay:
    """Reports the starts of one coordinator, inside a `with` block."""

    def __init__(self, tailer: LogTailer, endpoint: str, log: str) -> None:
        """Prepare.

        Args:
            tailer: the tailer to report.
            endpoint: the coordinator's address.
            log: the addresses of the log.

        """
        self._tailer: Final = tailer
        self._endpoint: Final = endpoint
        self._log: Final = log
        self._console: Final = Console(stderr=True)
        self._is_stopped: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="logdb-replay", daemon=True)
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        """Start reporting."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reporting."""
        self._is_stopped.set()
        self._thread.join()

    def ready(self) -> None:
        """Report that the coordinator is ready; on stdout only the first time."""
        tailer = self._tailer
        is_first = not self._is_stopped.is_set()
        self._is_stopped.set()
        event_log.info(
            "ready",
            endpoint=self._endpoint,
            position=str(tailer.state.position),
            keys=len(tailer.state.versions),
            records=tailer.state.records,
            seconds=round(time.monotonic() - self._started_at, 3),
        )
        if is_first:
            print(f"logdb ready at {self._endpoint}", flush=True)  # noqa: T201 - the one line

    def _run(self) -> None:
        if self._is_stopped.wait(_EVERY_S):
            return
        if self._console.is_terminal:
            self._draw()
            return
        tailer = self._tailer
        while True:
            waiting_for = tailer.waiting_for
            waits = {"waits_for": ", ".join(waiting_for)} if waiting_for else {}
            if self._is_connecting():
                event_log.info("looking for the log", at=self._log)
            else:
                event_log.info("replaying", position=tailer.passed, tail=tailer.tail, **waits)
            if self._is_stopped.wait(_EVERY_S):
                return

    def _is_connecting(self) -> bool:
        """Whether the log has not replied yet."""
        tailer = self._tailer
        return not (tailer.tail or tailer.passed or tailer.waiting_for)

    def _draw(self) -> None:
        tailer = self._tailer
        columns = (
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task("", total=None)
            while not self._is_stopped.wait(_BAR_EVERY_S):
                waiting_for = tailer.waiting_for
                what = (
                    f"waiting for {', '.join(waiting_for)}" if waiting_for else "replaying the log"
                )
                if self._is_connecting():
                    what = f"looking for the log at {self._log}"
                bars.update(
                    task, description=what, total=tailer.tail or None, completed=tailer.passed
                )
