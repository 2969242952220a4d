"""The records of the benchmark, and figures of delays. Pure.

A record is a transaction of some keys, each of which belongs to one target, as the paper on
LogPlayer has it. Its payload is a head and the keys. The head has the record's number, the time of
its insert, and how many keys each target has. What a target gets begins with the same head.
"""

from __future__ import annotations

import statistics
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from metrics.windows import percentile, sorted_in

from ziplog.core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ziplog.types import Record

Figures = dict[str, Any]

#: Number of a record, and when it was inserted, in ns; then the number of each target's keys.
_HEAD: Final = struct.Struct(">QQ")
_MAX_TARGETS: Final = 32
HEAD_BYTES: Final = _HEAD.size + _MAX_TARGETS
KEY_BYTES: Final = 1000


class Applied(NamedTuple):
    """A record that a target had: its number, when it was inserted, and when the target had it."""

    number: int
    inserted_at: int
    at: int


def payload(number: int, keys: int, now: int, targets: int = 1) -> bytes:
    """Return the payload of a record whose keys belong to so many targets."""
    shares = [0] * _MAX_TARGETS
    for key in range(keys):
        shares[_hash(number * keys + key) % targets] += 1
    return _HEAD.pack(number, now) + bytes(shares) + bytes(keys * KEY_BYTES)


def _hash(value: int) -> int:
    return (value * 2654435761 % 2**32) >> 8


def head(data: bytes) -> tuple[int, int]:
    """Return the number of a record and when it was inserted, of its payload."""
    number, inserted_at = _HEAD.unpack_from(data)
    return number, inserted_at


def part(data: bytes, target: int) -> bytes | None:
    """Return the head of a payload and a target's keys; None: it has none of them."""
    keys = data[_HEAD.size + target]
    return data[: HEAD_BYTES + keys * KEY_BYTES] if keys else None


class Part:
    """The `map` of a target: its keys of a record. It costs little, as players are measured."""

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, record: Record) -> Record | None:
        """Return the record with the target's keys only; None: it has none of them."""
        data = part(record.payload, self._target)
        return None if data is None else msgspec.structs.replace(record, payload=data)


def delays_ms(delays_ns: Iterable[int]) -> Figures:
    """Return mean, p50 and p99 of delays in ms, and their count."""
    values = [value / NS_PER_MS for value in delays_ns]
    return {
        "mean_ms": statistics.fmean(values) if values else None,
        "p50_ms": percentile(values, 50),
        "p99_ms": percentile(values, 99),
        "count": len(values),
    }


def delays_of(dispatched: Mapping[int, int], applied: Iterable[Applied]) -> list[tuple[int, int]]:
    """Return when each record was inserted, and its delay from dispatch to apply, in ns.

    Args:
        dispatched: for the number of a record: when the player had it.
        applied: what the targets noted. Records that the player did not note do not count.

    """
    return [
        (one.inserted_at, one.at - dispatched[one.number])
        for one in applied
        if one.number in dispatched
    ]


def p99_windows(
    delays: Iterable[tuple[int, int]], start: int, stop: int, width: int
) -> list[float | None]:
    """Return the p99 in ms of each window of [start, stop); None: no record was inserted then.

    Args:
        delays: when each record was inserted, and its delay.
        start: of the first window.
        stop: of the last one.
        width: of each. All are in ns.

    """
    windows = sorted_in(delays, start, stop, width)
    found = [percentile(values, 99) for values in windows]
    return [None if value is None else value / NS_PER_MS for value in found]


def worst(windows: Iterable[float | None]) -> float | None:
    """Return the highest value of windows; None: there is none."""
    return max((value for value in windows if value is not None), default=None)


def over(ours: float | None, theirs: float | None) -> float | None:
    """Return the ratio of two figures; None: one is missing."""
    return None if ours is None or not theirs else ours / theirs
