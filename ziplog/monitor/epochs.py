"""When the latest epochs began, as the monitor saw them: to date positions that stay open."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from ziplog.core.units import NS_PER_S

#: Maximum number of observations; then every second one is dropped.
_MAX_OBSERVATIONS: Final = 7200


class EpochTimes:
    """The present epoch at earlier times, for some hours."""

    def __init__(self) -> None:
        """Start without observations."""
        #: In order: an epoch, and when it was first observed, in ns. Other threads read it.
        self._observed: list[tuple[int, int]] = []

    def observe(self, epoch: int, now: int) -> None:
        """Record the present epoch at `now`, in ns."""
        if self._observed and epoch <= self._observed[-1][0]:
            return
        self._observed.append((epoch, now))
        if len(self._observed) > _MAX_OBSERVATIONS:
            self._observed = self._observed[::2]

    def age_s(self, epoch: int, now: int) -> float:
        """Return how long ago an epoch began, in seconds; 0: it was not observed to begin."""
        observed = self._observed
        at = bisect_left(observed, (epoch, 0))
        return (now - observed[at][1]) / NS_PER_S if at < len(observed) else 0.0
