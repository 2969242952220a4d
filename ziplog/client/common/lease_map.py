"""The leases that a reader knows: who owns which position, from its own position on.

Rule: a reader never passes the end of the leases that it knows (D44). Invariant: what is known has
no gap; runs are kept in order, and equal leases in a row as one run.
See docs/protocol.md, sections 3 and 7.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ziplog.core.view import LeaseRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ziplog.core.view import Lease


class LeaseMap:
    """A contiguous piece of the lease history."""

    __slots__ = ("_runs", "_shards")

    def __init__(self) -> None:
        self._runs: list[LeaseRun] = []
        #: In how many runs each shard is a member.
        self._shards: Counter[int] = Counter()

    @property
    def base(self) -> int:
        """The first gsn known; 0 if none is."""
        return self._runs[0].first.base if self._runs else 0

    @property
    def stop(self) -> int:
        """The first gsn after the known leases; 0 if none is known."""
        return self._runs[-1].last.stop if self._runs else 0

    @property
    def runs(self) -> list[LeaseRun]:
        """What is kept, in order."""
        return list(self._runs)

    @property
    def run_count(self) -> int:
        """How many runs are kept."""
        return len(self._runs)

    @property
    def last(self) -> Lease | None:
        """The last lease known."""
        return self._runs[-1].last if self._runs else None

    @property
    def shards(self) -> set[int]:
        """The shards that are members of a lease that is kept."""
        return set(self._shards)

    def extend(self, runs: Iterable[LeaseRun]) -> bool:
        """Take what follows the known leases; False if something between is missing."""
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
        if run.first.number > last.last.number:
            self._runs[-1] = LeaseRun(last.first, last.count + run.count, run.last)
            return
        # It overlaps what is known: it goes on with the lease that is known last.
        more = run.last.number - last.last.number
        if run.first.number >= last.first.number:
            self._runs[-1] = LeaseRun(last.first, last.count + more, run.last)
        else:
            self._runs[-1] = run

    def forget(self, gsn: int) -> None:
        """Drop the runs that end at or before `gsn`, but the last one."""
        passed = 0
        while passed < len(self._runs) - 1 and self._runs[passed].last.stop <= gsn:
            self._shards.subtract(member.shard for member in self._runs[passed].first.members)
            passed += 1
        if passed:
            del self._runs[:passed]
            self._shards = +self._shards

    def lease_at(self, gsn: int) -> Lease | None:
        """Return the lease that holds `gsn`, if it is known."""
        if not self.base <= gsn < self.stop:
            return None
        return next(run.lease_at(gsn) for run in self._runs if gsn < run.last.stop)

    def next_owned(self, shard: int, gsn: int) -> int | None:
        """Return the first gsn at or after `gsn` that a shard owns; None if none is known."""
        for run in self._runs:
            # All leases of a run are alike: if the rest of one and the next have none, none has.
            for _ in range(2):
                if gsn >= run.last.stop:
                    break
                lease = run.lease_at(max(gsn, run.first.base))
                gsn = lease.next_owned(shard, gsn)
                if gsn < lease.stop:
                    return gsn
        return None

    def owner(self, gsn: int) -> int | None:
        """Return the shard that owns `gsn`, if it is known."""
        lease = self.lease_at(gsn)
        return lease.owner(gsn) if lease is not None and lease.members else None

    def spans(self, gsn: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Give (stop, members) for each run that reaches beyond `gsn`, in order."""
        for run in self._runs:
            if run.last.stop > gsn:
                yield run.last.stop, tuple(member.shard for member in run.first.members)
