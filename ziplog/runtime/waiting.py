"""Waits of the main thread, which signals end.

The kernel delivers a signal to any thread of a process, and Python runs the handler in the main
thread. A main thread that waits for a lock without a time-out never runs the handler of a signal
that another thread got, as happens after a suspension (SIGSTOP, SIGCONT). So it waits in intervals.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from threading import Event

#: Longest time until the handler of a signal runs.
_INTERVAL_S: Final = 0.5


def wait(event: Event, timeout_s: float | None = None) -> bool:
    """Wait for an event; return whether it is set.

    Args:
        event: set by another thread, or by the handler of a signal.
        timeout_s: in seconds; None: without limit.

    """
    if timeout_s is None:
        while not event.wait(_INTERVAL_S):
            pass
        return True
    until = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
    while not event.wait(min(_INTERVAL_S, max(until - time.monotonic(), 0))):
        if time.monotonic() >= until:
            return False
    return True
