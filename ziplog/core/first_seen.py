"""When a growing number, such as a position, reached its values: to date what is behind it."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from ziplog.core.units import NS_PER_S

#: Maximum number of observations; then every second one is dropped.
_MAX_OBSERVATIONS: Final = 7200


class FirstSeen:
    """The values of a growing number at earlier times: with one observation a second, for hours."""

    def __init__(self) -> None:
        """Start without observations."""
        #: In order: a value, and when it was first observed, in ns. Other threads read it.
        self._observed: list[tuple[int, int]] = []

    def observe(self, value: int, now: int) -> None:
        """Record the present value at `now`, in ns."""
        if self._observed and value <= self._observed[-1][0]:
            return
        self._observed.append((value, now))
        if len(self._observed) > _MAX_OBSERVATIONS:
            self._observed = self._observed[::2]

    @property
    def first(self) -> int | None:
        """The first observed value; None: there is none."""
        return self._observed[0][0] if self._observed else None

    def age_s(self, value: int, now: int) -> float:
        """Return how long ago a value was first reached, in seconds; 0: this was not observed."""
        observed = self._observed
        at = bisect_left(observed, (value, 0))
        return (now - observed[at][1]) / NS_PER_S if at < len(observed) else 0.0
