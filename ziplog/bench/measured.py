"""What one measuring process reports, and the sum of several.

A histogram counts durations in buckets, each about 3 % wide, so it has the same size after a second
and after a day.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Leading bits of a duration that select its bucket.
_BITS: Final = 6
_MASK: Final = (1 << _BITS) - 1


class Histogram:
    """Durations in nanoseconds, counted in buckets."""

    def __init__(self, counts: dict[int, int] | None = None) -> None:
        """Start with the counts of another histogram, by bucket."""
        self.counts: Final = Counter(counts or {})

    def record(self, duration_ns: int) -> None:
        """Count a duration."""
        shift = max(duration_ns.bit_length() - _BITS, 0)
        self.counts[(shift << _BITS) + (duration_ns >> shift)] += 1

    def buckets(self) -> Iterator[tuple[int, int]]:
        """Yield the end of each bucket (exclusive, in nanoseconds) and its count, in order."""
        for bucket in sorted(self.counts):
            yield ((bucket & _MASK) + 1) << (bucket >> _BITS), self.counts[bucket]

    def quantile(self, share: float) -> int:
        """Return the duration, in nanoseconds, that a share of all durations does not exceed."""
        left = share * self.counts.total()
        for end, count in self.buckets():
            left -= count
            if left <= 0:
                return end
        return 0


class Measured(msgspec.Struct):
    """The measurements of one kind of operation."""

    operation: str
    #: Operations, and the seconds in which they were done.
    count: int = 0
    seconds: float = 0.0
    #: Operations of each second, summed over all processes.
    rate: float = 0.0
    #: By bucket of a `Histogram`.
    counts: dict[int, int] = {}
    #: Inserts that took two message delays, and those that took more.
    fast_path: int = 0
    slow_path: int = 0


def total(reports: Iterable[list[Measured]]) -> list[Measured]:
    """Return the sum of the reports of several processes, for each operation."""
    sums: dict[str, Measured] = {}
    for one in (measured for report in reports for measured in report):
        found = sums.setdefault(one.operation, Measured(one.operation))
        found.count += one.count
        found.seconds = max(found.seconds, one.seconds)
        found.rate += one.count / one.seconds if one.seconds else 0.0
        found.counts = dict(Counter(found.counts) + Counter(one.counts))
        found.fast_path += one.fast_path
        found.slow_path += one.slow_path
    return list(sums.values())
