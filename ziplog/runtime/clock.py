"""The clock of every node, client and server, and of the deadlines that users hand to one.

Rule: a node measures how long *other* processes waited, so its clock also counts the time in which
this machine was suspended. Linux's CLOCK_MONOTONIC does not (CLOCK_BOOTTIME does); elsewhere the
system's CLOCK_MONOTONIC counts it, or nothing better exists. A process that only bounds its own
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


#: Nanoseconds since some moment before this process: never goes back, and never stands still.
now_ns: Final = _choose()
