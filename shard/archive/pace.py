"""How fast rows are made: slowly while records come, at once where somebody waits for them.

The lowest priority is not enough to cost those who insert nothing: between two messages a core is
idle for a moment, and what fills all such moments takes caches, memory's bandwidth and the other
half of a core. Rule: nobody waits here for longer than a segment takes to make, many times over
(docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

#: A server that wrote nothing for so long is at rest; it writes within 10 ms of a record.
CALM_S: Final = 0.25
#: While records come, a maker works for one part of so many of the time.
_PARTS: Final = 20


class Pace:
    """The pace of one maker."""

    def __init__(self) -> None:
        """Begin without hurry."""
        self._hurried = threading.Event()
        self._since = 0.0

    def hurry(self) -> None:
        """Somebody has asked for rows that are not there. From any thread."""
        self._hurried.set()

    def done(self) -> None:
        """All that can be made is made."""
        self._hurried.clear()

    def begin(self) -> None:
        """Work begins."""
        self._since = time.monotonic()

    def rest(self, written: Path) -> None:
        """Rest from work, for as long as `written` is written to and nobody waits."""
        now = time.monotonic()
        until = now + (_PARTS - 1) * (now - self._since)
        while (left_s := until - time.monotonic()) > 0 and _age_s(written) < CALM_S:
            if self._hurried.wait(min(left_s, CALM_S)):
                break
        self.begin()


def _age_s(path: Path) -> float:
    """Return how long ago a file was written to; one that is gone, never."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
