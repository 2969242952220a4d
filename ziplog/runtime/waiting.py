"""Waits of the main thread, which signals end.

The kernel delivers a signal to any thread of a process, and Python runs the handler in the main
thread. A main thread that waits for a lock without a time-out never runs the handler of a signal
that another thread got, as happens after a suspension (SIGSTOP, SIGCONT). So it waits in intervals.

A handler may run at any step of a wait. `threading.Event` would deadlock if the handler sets it,
and may stay locked if the handler raises; a `Latch` does neither.
"""

from __future__ import annotations

import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

#: Longest time until the handler of a signal runs. A waiter that no other one wakes waits as long.
INTERVAL_S: Final = 0.5


class Latch:
    """A flag that is set once; for any thread and for signal handlers."""

    def __init__(self) -> None:
        """Start unset."""
        self._is_set = False
        self._wakes: Final[SimpleQueue[None]] = SimpleQueue()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it."""
        self._is_set = True
        self._wakes.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set; return whether it is.

        Args:
            timeout_s: in seconds; None: without limit.

        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set:
            left_s = INTERVAL_S if until is None else min(INTERVAL_S, until - time.monotonic())
            if left_s <= 0:
                return False
            with suppress(Empty):
                self._wakes.get(timeout=left_s)
                self._wakes.put(None)  # For the next waiter.
        return True
