"""Owners of positions, computed independently with exact fractions: the schedule's oracle.

It shares no code with `ziplog.core.gsn` and `ziplog.core.view` (docs/protocol.md, sections 2 and 3;
thesis 4.2.3, Fig. 4.2; D31). Invariant: in all learned leases, no position has two owners, and none
is skipped.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import lcm
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Lease:
    """Positions [base, stop) and their owners; equal consecutive leases may be one."""

    base: int
    stop: int
    first_epoch: int
    #: Number of gsns in an epoch.
    epoch_size: int
    #: (shard, weight), each shard once.
    weights: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def round_of(weights: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Return the owners of one round: records by expected arrival, ties by shard (T, Fig. 4.2)."""
    whole = lcm(*(weight for _, weight in weights))  # of j / weight, the common denominator
    arrivals = [(j * (whole // w), shard) for shard, w in weights for j in range(1, w + 1)]
    return tuple(shard for _, shard in sorted(arrivals))


class Ownership:
    """The owners of positions by all learned leases."""

    def __init__(self) -> None:
        self._spans: Final[list[Lease]] = []
        #: Ranges that leases without members took away. A lease that no server had recorded before
        #: a rebuild may have given positions there to shards, which never learned of it.
        self._taken: Final[set[tuple[int, int]]] = set()

    @property
    def stop(self) -> int:
        """The end of the leases; 0 if none is known."""
        return self._spans[-1].stop if self._spans else 0

    def learn(self, leases: Iterable[Lease]) -> None:
        """Add leases, in order; known positions must have the same owners."""
        for lease in leases:
            assert lease.base < lease.stop, f"an empty lease: {lease}"
            assert not self._spans or lease.base <= self.stop, (
                f"no lease has [{self.stop}, {lease.base})"
            )
            if not lease.weights:
                self._taken.add((lease.base, lease.stop))
            # Leases without members only take positions away that no shard may have used.
            for known in self._spans[self._index(lease.base) :] if lease.weights else ():
                overlap = max(known.base, lease.base)
                if overlap < min(known.stop, lease.stop):
                    assert _is_same_at(known, lease, overlap), (
                        f"position {overlap} was given out twice: {known}, and {lease}"
                    )
            if lease.stop > self.stop:
                self._append(lease)

    def _append(self, lease: Lease) -> None:
        """Add the part after the known end."""
        last = self._spans[-1] if self._spans else None
        base = max(lease.base, self.stop)
        if last is not None and _continues(last, lease, base):
            self._spans[-1] = Lease(
                last.base, lease.stop, last.first_epoch, last.epoch_size, last.weights
            )
            return
        into, rest = divmod(base - lease.base, lease.epoch_size)
        # Unrecorded leases may have had shorter epochs than those that replace them.
        assert rest == 0 or not lease.weights, (
            f"a lease ends within an epoch: at {base}, of {lease}"
        )
        self._spans.append(
            Lease(base, lease.stop, lease.first_epoch + into, lease.epoch_size, lease.weights)
        )

    def _index(self, gsn: int) -> int:
        """Return the index of the last lease that begins at or before `gsn`, else of the first."""
        return max(0, bisect_right(self._spans, gsn, key=lambda lease: lease.base) - 1)

    def lease_at(self, gsn: int) -> Lease:
        """Return the lease of a position."""
        lease = self._spans[self._index(gsn)] if self._spans else None
        assert lease is not None, "no lease is known"
        assert lease.base <= gsn < lease.stop, f"no lease has position {gsn}"
        return lease

    def owner(self, gsn: int) -> int:
        """Return the shard that a position belongs to."""
        return _owner(self.lease_at(gsn), gsn)

    def epoch(self, gsn: int) -> int:
        """Return the epoch of a position."""
        return _epoch(self.lease_at(gsn), gsn)

    def limit(self, shard: int) -> int:
        """Return the end of a shard's last lease; 0 if it has none."""
        spans = (one.stop for one in reversed(self._spans) if shard in dict(one.weights))
        return next(spans, 0)

    def next_owned(self, shard: int, gsn: int) -> int:
        """Return the shard's first position at or after `gsn`; the leases' end if there is none."""
        found = self._next_given(shard, gsn)
        for start, stop in sorted(self._taken):
            if start <= found < stop:
                found = self._next_given(shard, stop)
        return found

    def _next_given(self, shard: int, gsn: int) -> int:
        """Return the same, whether or not the position was taken away."""
        for lease in self._spans[self._index(gsn) :]:
            at = max(gsn, lease.base)
            if all(shard != member for member, _ in lease.weights):
                continue
            # The rest of this epoch, or of its next round, and a first round of the next epoch.
            length = len(round_of(lease.weights))
            ahead = min(length, lease.epoch_size - (at - lease.base) % lease.epoch_size)
            tries = chain(range(at, at + ahead), range(at + ahead, at + ahead + length))
            found = (g for g in tries if g < lease.stop and _owner(lease, g) == shard)
            if (first := next(found, None)) is not None:
                return first
        return max(self.stop, gsn)


def _owner(lease: Lease, gsn: int) -> int:
    owners = round_of(lease.weights)
    return owners[(gsn - lease.base) % lease.epoch_size % len(owners)]


def _epoch(lease: Lease, gsn: int) -> int:
    return lease.first_epoch + (gsn - lease.base) // lease.epoch_size


def _is_same_at(known: Lease, lease: Lease, gsn: int) -> bool:
    """Whether two leases are equal from a position on."""
    return (
        (known.weights, known.epoch_size) == (lease.weights, lease.epoch_size)
        and (known.base - lease.base) % known.epoch_size == 0
        and _epoch(known, gsn) == _epoch(lease, gsn)
    )


def _continues(last: Lease, lease: Lease, base: int) -> bool:
    """Whether a lease from `base` on repeats `last`."""
    is_whole = (base - last.base) % last.epoch_size == 0
    return is_whole and last.stop == base and _is_same_at(last, lease, base)
