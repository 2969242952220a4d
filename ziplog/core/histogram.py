"""A histogram of durations, counted with integers only.

All histograms have the same buckets: up to 64 µs, 128 µs, ... 16.8 s, and above. See
docs/monitoring.md.
"""

from __future__ import annotations

from typing import Final

#: The bounds are 2**6 to 2**24 µs.
_FIRST_POWER: Final = 6
#: Upper bounds of the buckets, in µs; the last bucket has none.
BOUNDS_US: Final[tuple[int, ...]] = tuple(1 << power for power in range(_FIRST_POWER, 25))
_LAST: Final = len(BOUNDS_US)


class Histogram:
    """Durations by size."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        """Start empty."""
        #: Number of durations in each bucket.
        self.counts = [0] * (_LAST + 1)
        self.sum_ns = 0

    def add(self, ns: int) -> None:
        """Count a duration, in nanoseconds; a negative one counts as 0."""
        power = ((ns - 1) // 1000).bit_length() if ns > 0 else 0
        self.counts[min(max(power - _FIRST_POWER, 0), _LAST)] += 1
        self.sum_ns += max(ns, 0)
