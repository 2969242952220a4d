"""Throttle of the block builder: it works slowly while records arrive, fast for a waiting reader.

The lowest priority alone is not enough. Between two messages a core is idle for a moment, and work
in all these moments takes caches, memory bandwidth and the sibling hyperthread from the server.
Rule: a pause is bounded, and ends when a reader misses blocks or the server stops writing
(docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

#: Time without a write after which the server counts as idle. It writes within 10 ms of a record,
#: and occasionally while readers follow the log.
IDLE_S: Final = 0.25
#: While records arrive, the builder works 1/20 of the time.
_PARTS: Final = 20
#: Maximum pause after a block.
MAX_PAUSE_S: Final = 5.0
#: Time without pauses after a reader missed blocks: it will probably miss more.
EXPEDITED_S: Final = 10.0


class Throttle:
    """Throttles one building thread."""

    def __init__(self) -> None:
        """Start in the throttled state."""
        self._woken = threading.Event()
        self._expedited_until = 0.0
        self._since = 0.0

    def expedite(self) -> None:
        """Stop throttling for a while: a reader requested missing blocks. Thread-safe."""
        self._expedited_until = time.monotonic() + EXPEDITED_S
        self._woken.set()

    def start(self) -> None:
        """Record the start of work."""
        self._since = time.thread_time()

    def throttle(self, written: Path) -> None:
        """Pause after work, while the server writes to `written` and no reader misses blocks."""
        self._woken.clear()
        worked_s = time.thread_time() - self._since
        until = time.monotonic() + min((_PARTS - 1) * worked_s, MAX_PAUSE_S)
        while (
            self._expedited_until <= (now := time.monotonic()) < until and _age_s(written) < IDLE_S
        ):
            self._woken.wait(min(until - now, IDLE_S))
        self.start()


def _age_s(path: Path) -> float:
    """Return the time since the last write to a file; infinity if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
