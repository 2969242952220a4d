"""Shows how far the replay of a long log is: a bar on a terminal, a line a second elsewhere.

Rule: it only looks at the follower, from a thread of its own; what it sees may be a moment old.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Self

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from logdb.coordinator.log_tailer import Follower

_EVERY_S: Final = 1.0
_BAR_EVERY_S: Final = 0.1


class Replay:
    """What is told of the starts of one coordinator, inside a `with` block."""

    def __init__(self, follower: Follower, endpoint: str, log: str) -> None:
        """Make it: of a follower that answers at `endpoint`, and looks for the log at `log`."""
        self._follower: Final = follower
        self._endpoint: Final = endpoint
        self._log: Final = log
        self._console: Final = Console(stderr=True)
        self._ended: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="logdb-replay", daemon=True)
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look no longer."""
        self._ended.set()
        self._thread.join()

    def ready(self) -> None:
        """Tell that it answers: on stdout only once, for whoever waits for that."""
        follower = self._follower
        is_first = not self._ended.is_set()
        self._ended.set()
        structlog.get_logger().info(
            "ready",
            endpoint=self._endpoint,
            position=str(follower.state.position),
            keys=len(follower.state.versions),
            records=follower.state.records,
            seconds=round(time.monotonic() - self._began, 3),
        )
        if is_first:
            print(f"logdb ready at {self._endpoint}", flush=True)  # noqa: T201 - the one line

    def _run(self) -> None:
        if self._ended.wait(_EVERY_S):
            return
        if self._console.is_terminal:
            self._draw()
            return
        log, follower = structlog.get_logger(), self._follower
        while True:
            awaited = follower.awaited
            waits = {"waits_for": ", ".join(awaited)} if awaited else {}
            if self._is_looking():
                log.info("looking for the log", at=self._log)
            else:
                log.info("replaying", position=follower.passed, tail=follower.tail, **waits)
            if self._ended.wait(_EVERY_S):
                return

    def _is_looking(self) -> bool:
        """Whether nothing was heard of the log yet."""
        follower = self._follower
        return not (follower.tail or follower.passed or follower.awaited)

    def _draw(self) -> None:
        follower = self._follower
        columns = (
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task("", total=None)
            while not self._ended.wait(_BAR_EVERY_S):
                awaited = follower.awaited
                what = f"waiting for {', '.join(awaited)}" if awaited else "replaying the log"
                if self._is_looking():
                    what = f"looking for the log at {self._log}"
                bars.update(
                    task, description=what, total=follower.tail or None, completed=follower.passed
                )
