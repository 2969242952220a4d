"""The highest position reported before a time."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Highest:
    """Positions by the time at which they were reported.

    Args:
        rows: (time, gsn), in any order.

    """

    def __init__(self, rows: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(rows)
        self._times = [at for at, _ in ordered]
        self._highest = list(accumulate((gsn for _, gsn in ordered), max))

    def before(self, at: int) -> int:
        """Return the highest gsn reported before a time; 0 if there is none."""
        index = bisect_left(self._times, at)
        return self._highest[index - 1] if index else 0
