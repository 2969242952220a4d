"""Prometheus' text format 0.0.4 and OpenMetrics 1.0, and the choice between them.

The formats differ in the head of counters, which OpenMetrics names without `_total`, in the last
line, and in the media type.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.core.histogram import BOUNDS_US
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ziplog.monitor.catalogue import Kind

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_BOUNDS: Final = tuple(repr(bound / 1_000_000) for bound in BOUNDS_US)


class Counted(NamedTuple):
    """The value of a histogram: the number of durations in each bucket, and their sum."""

    counts: Sequence[int]
    sum_ns: int


Labels = dict[str, object]
Sample = tuple[Labels, "float | Counted"]


class Family(NamedTuple):
    """A metric: its name, type, help text and samples."""

    name: str
    kind: Kind
    text: str
    samples: list[Sample]


def media_type(accept: str) -> str:
    """Return the media type to reply with, by the value of an `Accept` header."""
    weights = dict(_accepted(accept))
    wanted = weights.get("application/openmetrics-text", 0.0)
    plain = max(weights.get("text/plain", 0.0), weights.get("*/*", 0.0))
    return OPEN_METRICS if wanted and wanted >= plain else TEXT


def _accepted(accept: str) -> Iterator[tuple[str, float]]:
    """Yield the media types of an `Accept` header, each with its highest weight last."""
    found: list[tuple[float, str]] = []
    for item in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in item.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            found.append((float(quality), kind))
        except ValueError:
            continue
    for weight, kind in sorted(found):
        yield kind, weight


def render(families: Iterable[Family], media: str) -> str:
    """Return families in the format of a media type."""
    is_open = media == OPEN_METRICS
    lines = [line for family in families for line in _lines(family, is_open=is_open)]
    return "\n".join([*lines, *(["# EOF"] if is_open else []), ""])


def _lines(family: Family, *, is_open: bool) -> Iterator[str]:
    name, kind = family.name, family.kind
    head = name.removesuffix("_total") if is_open and kind == "counter" else name
    yield f"# HELP {head} {family.text}"
    yield f"# TYPE {head} {kind}"
    for labels, value in family.samples:
        if isinstance(value, Counted):
            yield from _histogram(name, labels, value)
        elif math.isfinite(value):
            yield f"{name}{_labels(labels)} {_number(value)}"


def _histogram(name: str, labels: Labels, value: Counted) -> Iterator[str]:
    total = 0
    for bound, count in zip((*_BOUNDS, "+Inf"), value.counts, strict=True):
        total += count
        yield f"{name}_bucket{_labels(labels | {'le': bound})} {total}"
    yield f"{name}_sum{_labels(labels)} {_number(value.sum_ns / NS_PER_S)}"
    yield f"{name}_count{_labels(labels)} {total}"


def _labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
