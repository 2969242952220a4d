"""Rates and quantiles of a node between two of its replies."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.core.histogram import BOUNDS_US

if TYPE_CHECKING:
    from ziplog.wire import Metrics

_US_PER_S: Final = 1_000_000


class NodeReply(NamedTuple):
    """A reply of a node."""

    metrics: Metrics
    #: When it came, in ns.
    at: int


class Change(NamedTuple):
    """Two replies of one node, with `seconds` between them."""

    before: Metrics
    after: Metrics
    seconds: float

    def rate(self, name: str, **labels: str) -> float | None:
        """Return by how much a counter grew a second; None: unknown, or the process restarted."""
        before, after = (total(reply, name, **labels) for reply in (self.before, self.after))
        if before is None or after is None or after < before or self.seconds <= 0:
            return None
        return (after - before) / self.seconds

    def quantile(self, part: float, name: str, **labels: str) -> float | None:
        """Return a quantile of the durations between the replies, in seconds; None: there are none.

        It is interpolated within its bucket, as Prometheus does.
        """
        before, after = (_counts(reply, name, labels) for reply in (self.before, self.after))
        counts = [new - old for new, old in zip(after, before, strict=True)]
        if sum(counts) <= 0 or min(counts) < 0:
            return None
        rank, sums = part * sum(counts), list(accumulate(counts))
        at = next(index for index, reached in enumerate(sums) if reached >= rank and reached)
        if at == len(BOUNDS_US):
            return BOUNDS_US[-1] / _US_PER_S
        low = BOUNDS_US[at - 1] if at else 0
        inside = (rank - (sums[at] - counts[at])) / counts[at]
        return (low + (BOUNDS_US[at] - low) * inside) / _US_PER_S


def total(reply: Metrics, name: str, **labels: str) -> float | None:
    """Return the sum of a metric's values with these labels; None: there is none."""
    wanted = labels.items()
    found = [one.value for one in reply.values if one.name == name and wanted <= one.labels.items()]
    return sum(found) if found else None


def _counts(reply: Metrics, name: str, labels: dict[str, str]) -> list[int]:
    """Return the sum of the buckets of all histograms with these labels."""
    counts = [0] * (len(BOUNDS_US) + 1)
    for one in reply.durations:
        if one.name == name and labels.items() <= one.labels.items():
            counts = [sum(both) for both in zip(counts, one.counts, strict=True)]
    return counts
