"""The records of the benchmark, and figures of delays. Pure.

A record is a transaction of some keys, each of which belongs to one target, as the paper on
LogPlayer has it. Its payload is a head, which has the record's number and the time of its insert,
and the keys. What a target gets of it begins with the same head.
"""

from __future__ import annotations

import statistics
import struct
from typing import TYPE_CHECKING, Any, Final

import msgspec
from metrics.windows import percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ziplog.types import Record

Figures = dict[str, Any]

#: Number of a record, and when it was inserted, in ns.
_HEAD: Final = struct.Struct(">QQ")
KEY_BYTES: Final = 1000
_NS_PER_MS: Final = 1e6


def payload(number: int, keys: int, now: int) -> bytes:
    """Return the payload of a record."""
    return _HEAD.pack(number, now) + bytes(keys * KEY_BYTES)


def head(data: bytes) -> tuple[int, int]:
    """Return the number of a record and when it was inserted, of its payload."""
    number, inserted_at = _HEAD.unpack_from(data)
    return number, inserted_at


def keys_of(number: int, keys: int, targets: int, target: int) -> int:
    """Return how many keys of a record belong to a target."""
    return sum(_hash(number * keys + key) % targets == target for key in range(keys))


def _hash(value: int) -> int:
    return (value * 2654435761 % 2**32) >> 8


class Part:
    """The `map` of a target: its keys of a record."""

    def __init__(self, target: int, targets: int) -> None:
        self._target, self._targets = target, targets

    def __call__(self, record: Record) -> Record | None:
        """Return the record with the target's keys only; None: it has none of them."""
        keys = (len(record.payload) - _HEAD.size) // KEY_BYTES
        number, inserted_at = head(record.payload)
        mine = keys_of(number, keys, self._targets, self._target)
        if not mine:
            return None
        return msgspec.structs.replace(record, payload=payload(number, mine, inserted_at))


def delays_ms(delays_ns: Iterable[int]) -> Figures:
    """Return mean, p50 and p99 of delays in ms, and their count."""
    values = [value / _NS_PER_MS for value in delays_ns]
    return {
        "mean_ms": statistics.fmean(values) if values else None,
        "p50_ms": percentile(values, 50),
        "p99_ms": percentile(values, 99),
        "count": len(values),
    }


def between(
    dispatched: Mapping[int, int], applied: Iterable[Sequence[tuple[int, int, int]]]
) -> list[int]:
    """Return the delays from dispatch to apply, in ns.

    Args:
        dispatched: for the number of a record: when the player had it.
        applied: of each target: number of a record, when it was inserted, and when the target had
            it. Records that the player did not note do not count.

    """
    return [
        at - dispatched[number]
        for target in applied
        for number, _, at in target
        if number in dispatched
    ]


def worst_window(
    applied: Iterable[Sequence[tuple[int, int, int]]], start: int, stop: int, width: int
) -> list[float | None]:
    """Return the p99 from insert to apply in ms, for the inserts of each window of [start, stop).

    All times are in ns. None: the window has no record.
    """
    windows: list[list[float]] = [[] for _ in range(max(0, (stop - start) // width))]
    for target in applied:
        for _, inserted_at, at in target:
            index = (inserted_at - start) // width
            if 0 <= index < len(windows):
                windows[index].append((at - inserted_at) / _NS_PER_MS)
    return [percentile(values, 99) for values in windows]
