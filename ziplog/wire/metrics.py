"""Messages of the monitor: a node's counters and histograms (docs/monitoring.md).

A node keeps them as plain integers, and makes a snapshot when it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from ziplog.core.fields import Unsigned
from ziplog.core.histogram import BOUNDS_US
from ziplog.core.message import Message
from ziplog.wire.base import VERSION, Name, Request

if TYPE_CHECKING:
    from ziplog.core.histogram import Histogram

#: Maximum number of single values and of histograms of a node.
MAX_VALUES: Final = 120
MAX_DURATIONS: Final = 5
_BUCKETS: Final = len(BOUNDS_US) + 1

Labels = Annotated[dict[Name, Name], Meta(max_length=4)]


class Value(msgspec.Struct, frozen=True, array_like=True):
    """The value of a counter or a gauge, since the process started or now."""

    name: Name
    value: int | float
    labels: Labels = {}


class Durations(msgspec.Struct, frozen=True, array_like=True):
    """A histogram."""

    name: Name
    #: Number of durations in each bucket of `ziplog.core.histogram`.
    counts: Annotated[list[Unsigned], Meta(min_length=_BUCKETS, max_length=_BUCKETS)]
    sum_ns: Unsigned
    labels: Labels = {}

    @classmethod
    def of(cls, name: str, histogram: Histogram, labels: dict[str, str]) -> Durations:
        """Return the present state of a histogram."""
        return cls(name, list(histogram.counts), histogram.sum_ns, labels)


class MetricsQuery(Message, tag=VERSION * 256 + 56, frozen=True, gc=False):
    """Requests the metrics of the node that listens here."""

    request: Request


class Metrics(Message, tag=VERSION * 256 + 57, frozen=True, gc=False):
    """The metrics of a node."""

    request: Request
    values: Annotated[list[Value], Meta(max_length=MAX_VALUES)]
    durations: Annotated[list[Durations], Meta(max_length=MAX_DURATIONS)]
