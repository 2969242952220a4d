"""Statistics of times: percentiles, windows, distributions. Pure; times in any one unit.

Ranges and windows are half-open. Only complete windows count: the last one is left out unless it
ends at or before `stop`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the smallest value that `percent` (0 to 100) of all values do not exceed.

    None if there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def percentile_ms(values_s: Iterable[float], percent: float) -> float | None:
    """Return the `percentile` of seconds in ms, to the microsecond."""
    value = percentile(values_s, percent)
    return None if value is None else round(value * 1000, 3)


def latency_ms(values_s: Iterable[float]) -> dict[str, Any]:
    """Return p50 and p99 in ms, of seconds, and their count."""
    values = list(values_s)
    return {f"p{p}_ms": percentile_ms(values, p) for p in (50, 99)} | {"count": len(values)}


def counts(times: Iterable[float], start: float, stop: float, width: float) -> list[int]:
    """Return how many of `times` fall into each whole window of [start, stop)."""
    return [len(values) for values in sorted_in(((t, t) for t in times), start, stop, width)]


def sorted_in(
    pairs: Iterable[tuple[float, float]], start: float, stop: float, width: float
) -> list[list[float]]:
    """Return the values of (time, value) pairs for each whole window of [start, stop)."""
    # A hair more: 0.3 / 0.1 is 2.9999999999999996.
    windows: list[list[float]] = [[] for _ in range(int((stop - start) / width + 1e-9))]
    for time, value in pairs:
        index = math.floor((time - start) / width)
        if 0 <= index < len(windows):
            windows[index].append(value)
    return windows


def longest_pause(times: Iterable[float], start: float, stop: float) -> float:
    """Return the longest part of [start, stop) without any of `times`; it may last to the end.

    Times after `stop` count, too: the range then ends with the last one.
    """
    after = sorted(time for time in times if time > start)
    ends = [start, *after, max([stop, *after[-1:]])]
    return max(later - earlier for earlier, later in pairwise(ends))


def distribution(values: Iterable[float], points: int) -> list[tuple[float, float]]:
    """Return up to `points` (value, share of the values that are not above it), the last at 1."""
    ordered = sorted(values)
    ranks = sorted({math.ceil(len(ordered) * step / points) for step in range(1, points + 1)})
    return [(ordered[rank - 1], rank / len(ordered)) for rank in ranks if rank]


def phases(
    pairs: Iterable[tuple[float, float]], starts: Sequence[float], stop: float, width: float
) -> list[list[float]]:
    """Lay the times after each of `starts` (in order) over each other; windows of [0, stop).

    A time counts from the last start at or before it.
    """
    laid = []
    for time, value in pairs:
        index = bisect_right(starts, time) - 1
        if index >= 0:
            laid.append((time - starts[index], value))
    return sorted_in(laid, 0, stop, width)
