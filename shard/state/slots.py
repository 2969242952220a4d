"""Compact encoding of a unit's gsns, for sessions and session tables.

The distances between the slots of a unit repeat, because they follow the schedule. So a first gsn,
a count and one period of distances describe the unit. Rule: `unpack(pack(gsns))` is exact for every
increasing list; a list without a short period costs one distance per record.
"""

from __future__ import annotations

from itertools import accumulate, chain, cycle, islice
from operator import sub
from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.entries import Steps

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Longest period that the encoder looks for, in distances.
_MAX_PERIOD: Final = 64


class _Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    first: int
    steps: Steps


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[_Packed]] = msgspec.msgpack.Decoder(_Packed)


def pack(gsns: list[int]) -> bytes:
    """Encode two or more increasing gsns."""
    return _encoder.encode(_Packed(gsns[0], _steps_of(gsns)))


def unpack(packed: bytes) -> list[int]:
    """Return the gsns that `pack` encoded."""
    first, steps = split(packed)
    return _gsns_of(first, steps)


def split(packed: bytes) -> tuple[int, Steps]:
    """Return the first gsn, and the distances of the others."""
    held = _decoder.decode(packed)
    return held.first, held.steps


def join(first: int, steps: Steps) -> bytes:
    """Encode a first gsn and distances, as `pack` does."""
    return _encoder.encode(_Packed(first, steps))


def _steps_of(gsns: list[int]) -> Steps:
    """Return the distances of two or more gsns."""
    first, last, count = gsns[0], gsns[-1], len(gsns)
    step, rest = divmod(last - first, count - 1)
    if not rest and gsns == list(range(first, last + 1, step)):
        return Steps(count, [step])
    steps = list(map(sub, gsns[1:], gsns))
    return Steps(count, steps[: _period(steps)])


def _gsns_of(first: int, steps: Steps) -> list[int]:
    """Return all gsns of a unit."""
    distances = steps.distances
    if len(distances) == 1:
        step = distances[0]
        return list(range(first, first + step * steps.count, step))
    return list(accumulate(islice(chain((first,), cycle(distances)), steps.count)))


def _period(steps: Sequence[int]) -> int:
    """Return the period of the distances."""
    for period in range(1, min(_MAX_PERIOD, len(steps) - 1) + 1):
        if steps[period] == steps[0] and steps[period:] == steps[:-period]:
            return period
    return len(steps)
