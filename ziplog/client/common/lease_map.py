"""A contiguous part of the lease history, from a reader's position on.

Rule: a reader never passes the end of its known leases (D44).

Invariant: the known leases have no gap; runs are in order, and equal leases in a row are one run.
See docs/protocol.md, sections 3 and 7.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ziplog.core.view import LeaseRun

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ziplog.core.view import Lease


class LeaseMap:
    """A contiguous part of the lease history."""

    __slots__ = ("_runs", "_shards")

    def __init__(self) -> None:
        self._runs: list[LeaseRun] = []
        #: Number of runs in which each shard is a member.
        self._shards: Counter[int] = Counter()

    @property
    def base(self) -> int:
        """The first known gsn; 0 if no lease is known."""
        return self._runs[0].first.base if self._runs else 0

    @property
    def stop(self) -> int:
        """The first gsn after the known leases; 0 if no lease is known."""
        return self._runs[-1].last.stop if self._runs else 0

    @property
    def runs(self) -> list[LeaseRun]:
        """The known runs, in order."""
        return list(self._runs)

    @property
    def run_count(self) -> int:
        """Number of known runs."""
        return len(self._runs)

    @property
    def shards(self) -> set[int]:
        """The shards that are members of a known lease."""
        return set(self._shards)

    def extend(self, runs: Iterable[LeaseRun]) -> bool:
        """Append the runs that follow; return False if a lease between is missing."""
        for run in runs:
            if not self._runs:
                self._add(run)
            elif run.last.stop <= self.stop:
                continue
            elif run.first.base > self.stop:
                return False
            else:
                self._append(run)
        return True

    def _add(self, run: LeaseRun) -> None:
        self._runs.append(run)
        self._shards.update(member.shard for member in run.first.members)

    def _append(self, run: LeaseRun) -> None:
        last = self._runs[-1]
        if run.first.number > last.last.number and not last.last.repeats(run.first):
            self._add(run)
            return
        # It continues or overlaps the last run, and its leases are equal to that run's.
        first = min(last.first, run.first, key=_number)
        self._runs[-1] = LeaseRun(first, run.last.number - first.number + 1, run.last)

    def forget(self, gsn: int) -> None:
        """Drop the runs that end at or before `gsn`, except the last one."""
        passed = 0
        while passed < len(self._runs) - 1 and self._runs[passed].last.stop <= gsn:
            self._shards.subtract(member.shard for member in self._runs[passed].first.members)
            passed += 1
        if passed:
            del self._runs[:passed]
            self._shards = +self._shards

    def lease_at(self, gsn: int) -> Lease | None:
        """Return the lease that contains `gsn`, if it is known."""
        if not self.base <= gsn < self.stop:
            return None
        return next(run.lease_at(gsn) for run in self._runs if gsn < run.last.stop)

    def next_owned(self, shard: int, gsn: int) -> int | None:
        """Return a shard's first position at or after `gsn`; None if none is known."""
        for run in self._runs:
            gsn = run.next_owned(shard, gsn)
            if gsn < run.last.stop:
                return gsn
        return None

    def settled_end(
        self,
        position: int,
        frontiers: Mapping[int, int],
        shards: Collection[int] | None = None,
    ) -> int:
        """Return the lowest position from `position` on that a member may not have settled.

        Args:
            position: where to begin.
            frontiers: by shard; everything of the shard below it is settled. A member that is not
                in it has settled nothing.
            shards: count these members only; None: all.

        """
        end = position
        for run in self._runs:
            stop = run.last.stop
            if stop <= end:
                continue
            lowest = min(
                (
                    frontiers.get(member.shard, 0)
                    for member in run.first.members
                    if shards is None or member.shard in shards
                ),
                default=stop,
            )
            if lowest < stop:
                return max(end, lowest)
            end = stop
        return end

    def owner(self, gsn: int) -> int | None:
        """Return the shard that owns `gsn`, if it is known."""
        lease = self.lease_at(gsn)
        return lease.owner(gsn) if lease is not None and lease.members else None


def _number(lease: Lease) -> int:
    return lease.number
