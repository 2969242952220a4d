"""Schedule arithmetic: computes the owner shard of each gsn. Integers only.

A *schedule* gives each shard an integer weight, its share of arrivals. One round of R positions (R
is the sum of the weights) is the expected-arrival merge of thesis 4.2.3, Fig. 4.2: the j-th record
of a shard of weight w is expected at time j/w of the round, positions follow expected times, and
equal times follow shard ids. An epoch is that round, repeated from its base to its end.

Positions here are *offsets* from an epoch's base, and a shard's k-th offset (k from 0) is its k-th
*slot*. Invariant: every offset has exactly one owner (docs/protocol.md, "Schedule").
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import repeat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Maximum length of a round, which is the sum of all weights.
MAX_ROUND: Final = 65_536

# Two different fractions j/w with w <= 2**16 are at least 2**-32 apart, so the floor of
# j * 2**33 / w orders them exactly, and equal fractions have equal floors.
_TIME_SHIFT: Final = 33


class Schedule:
    """Maps offsets to owner shards, and slots of a shard to offsets, in O(1)."""

    __slots__ = ("_offsets", "_owners", "round_length", "weights")

    def __init__(self, weights: Sequence[tuple[int, int]]) -> None:
        """Lay out one round for `weights`: (shard, weight >= 1) pairs, each shard once.

        Without pairs, no offset has an owner.
        """
        self.weights: Final = dict(sorted(weights))
        self.round_length: Final = sum(self.weights.values())
        assert len(self.weights) == len(weights), "a shard is listed twice"
        assert all(weight >= 1 for weight in self.weights.values()), "a weight is below 1"
        assert self.round_length <= MAX_ROUND, "the sum of the weights is out of range"
        self._owners: Final = _merge(self.weights)
        self._offsets: Final[dict[int, list[int]]] = {shard: [] for shard in self.weights}
        for offset, shard in enumerate(self._owners):
            self._offsets[shard].append(offset)

    def owner(self, offset: int) -> int:
        """Return the shard that owns `offset`."""
        return self._owners[offset % self.round_length]

    def offset(self, shard: int, slot: int) -> int:
        """Return the offset of the shard's slot number `slot`."""
        table = self._offsets[shard]
        rounds, index = divmod(slot, len(table))
        return rounds * self.round_length + table[index]

    def offsets(self, shard: int, slot: int, count: int, base: int = 0) -> list[int]:
        """Return `base` plus the offsets of `count` consecutive slots from `slot` on."""
        table, length = self._offsets[shard], self.round_length
        rounds, index = divmod(slot, len(table))
        base += rounds * length
        if len(table) == 1:
            first = base + table[0]
            return list(range(first, first + count * length, length))
        result: list[int] = []
        while len(result) < count:
            result += [base + at for at in table[index : index + count - len(result)]]
            base, index = base + length, 0
        return result

    def slot_from(self, shard: int, offset: int) -> int:
        """Return the shard's first slot with an offset at or after `offset`.

        This is also the number of the shard's slots below `offset`.
        """
        table = self._offsets[shard]
        rounds, rest = divmod(offset, self.round_length)
        return rounds * len(table) + bisect_left(table, rest)

    def stride(self, shard: int) -> tuple[int, int]:
        """Return the shard's first offset, and the distance of its offsets if they have one; or 0.

        With one shard the distance is 1, with n shards of equal weights n.
        """
        table = self._offsets.get(shard)
        if table is None:
            return 0, 0
        distance, rest = divmod(self.round_length, len(table))
        is_even = not rest and table == list(range(table[0], self.round_length, distance))
        return table[0], distance if is_even else 0

    def next_offset(self, shard: int, offset: int) -> int:
        """Return the shard's first offset at or after `offset`."""
        table, length = self._offsets[shard], self.round_length
        rest = offset % length
        if rest > table[-1]:
            return offset - rest + length + table[0]
        return offset - rest + table[bisect_left(table, rest)]


def _merge(weights: dict[int, int]) -> list[int]:
    """Return the owners of one round. `weights` is in shard order, so a stable sort breaks ties."""
    times: list[int] = []
    owners: list[int] = []
    arrivals: dict[int, list[int]] = {}
    for shard, weight in weights.items():
        if weight not in arrivals:
            arrivals[weight] = [(j << _TIME_SHIFT) // weight for j in range(1, weight + 1)]
        times += arrivals[weight]
        owners += repeat(shard, weight)
    return [owners[index] for index in sorted(range(len(times)), key=times.__getitem__)]
