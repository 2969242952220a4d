"""How fast rows are made: slowly while records come, at once where somebody misses them.

The lowest priority is not enough to cost those who insert nothing: between two messages a core is
idle for a moment, and what fills all such moments takes caches, memory's bandwidth and the other
half of a core. Rule: a rest is bounded, and ends when somebody misses rows or nothing is written
any more (docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

#: A server that wrote nothing for so long is at rest. It writes within 10 ms of a record, and now
#: and then while the log is followed.
IDLE_S: Final = 0.25
#: While records come, a maker works for one part of so many of the time.
_PARTS: Final = 20
#: The longest rest after a block.
MAX_PAUSE_S: Final = 5.0
#: For so long there is no rest once somebody has missed rows: more are missed, or about to be.
EXPEDITED_S: Final = 10.0


class Throttle:
    """The pace of one thread that makes rows."""

    def __init__(self) -> None:
        """Begin without hurry."""
        self._woken = threading.Event()
        self._expedited_until = 0.0
        self._since = 0.0

    def expedite(self) -> None:
        """Somebody has asked for rows that are not there. From any thread."""
        self._expedited_until = time.monotonic() + EXPEDITED_S
        self._woken.set()

    def start(self) -> None:
        """Work begins."""
        self._since = time.thread_time()

    def throttle(self, written: Path) -> None:
        """Rest from work, for as long as `written` is written to and nobody misses rows."""
        self._woken.clear()
        worked_s = time.thread_time() - self._since
        until = time.monotonic() + min((_PARTS - 1) * worked_s, MAX_PAUSE_S)
        while (
            self._expedited_until <= (now := time.monotonic()) < until and _age_s(written) < IDLE_S
        ):
            self._woken.wait(min(until - now, IDLE_S))
        self.start()


def _age_s(path: Path) -> float:
    """Return how long ago a file was written to; one that is gone, never."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
