"""The monotonic clock of all nodes and clients, and of the deadlines that users pass to them.

A node measures how long *other* processes waited, so its clock also counts the time during which
this machine was suspended. On Linux, CLOCK_BOOTTIME counts it and CLOCK_MONOTONIC does not; on
other systems, CLOCK_MONOTONIC counts it, or there is no better clock. Code that only limits its own
wait (a poll loop, a sleep) uses `time.monotonic`. See docs/protocol.md, section 4, rule 8.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_CLOCKS: Final = ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC")


def _choose() -> Callable[[], int]:
    for name in _CLOCKS:
        number = getattr(time, name, None)
        if number is not None:
            return partial(time.clock_gettime_ns, number)
    return time.monotonic_ns  # Windows


#: Nanoseconds since a fixed time before this process started: never goes back, never stops.
now_ns: Final = _choose()


def wall_offset_ns() -> int:
    """Return Unix time minus `now_ns`; it changes with each jump of the wall clock."""
    return time.time_ns() - now_ns()
