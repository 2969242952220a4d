"""Extents: the shards that own positions of a range, and the epochs of the range.

    leases requested from the range's start --more?--> from their end --> completed

Rule: the result is complete. The client requests leases until they reach the range's end, or until
there are no more. A range after the last lease fails with the end of the log.

Invariant: a pending call has an open request. See docs/protocol.md, sections 3 and 14.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import msgspec

from ziplog.client.common.lease_map import LeaseMap
from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.client.common.requests import ExtentsRequest
from ziplog.core.view import Lease, LeaseRun
from ziplog.errors import ConfigError, DeadlineError, NoSuchRecordError, TrimmedError
from ziplog.types import RecordId
from ziplog.wire import LeaseQuery

if TYPE_CHECKING:
    from ziplog.wire import LeaseHistory


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A range [start, stop) in which a shard owns its share of the positions throughout."""

    shard: int
    start: int
    stop: int


class Extents(msgspec.Struct, frozen=True):
    """The owners of a range, and its epochs."""

    #: Every record before it was trimmed.
    trim: int
    #: The first position without a known owner; the range ends there at the latest.
    end: int
    #: Sorted by start, then by shard. A shard that was not a member all the time has several.
    #: Trimmed positions are left out.
    shards: list[Extent]
    #: The leases, from the one before the range on.
    runs: list[LeaseRun]

    def epoch_at(self, gsn: int) -> int:
        """Return the epoch of a position.

        Raises:
            NoSuchRecordError: no lease of this range contains the position.
            TrimmedError: its lease was trimmed.

        """
        return self._lease_at(gsn).epoch_at(gsn)

    def owner_at(self, gsn: int) -> int:
        """Return the shard that owns a position, trimmed or not; errors as of `epoch_at`."""
        lease = self._lease_at(gsn)
        if not lease.members:
            raise NoSuchRecordError(RecordId(gsn, 0), "no shard was live to own it")
        return lease.owner(gsn)

    def _lease_at(self, gsn: int) -> Lease:
        at = bisect_right(self.runs, gsn, key=_base) - 1
        if at < 0 and self._base <= self.trim:
            raise TrimmedError(RecordId(self.trim, 0))
        if at < 0 or gsn >= self.end:
            why = f"the leases known here have positions {self._base} to {self.end - 1}"
            raise NoSuchRecordError(RecordId(gsn, 0), why)
        return self.runs[at].lease_at(gsn)

    def epoch_start(self, epoch: int) -> int:
        """Return the first position of an epoch.

        Raises:
            ConfigError: no lease of this range contains the epoch.
            TrimmedError: its lease was trimmed.

        """
        return self._lease_of(epoch).epoch_base(epoch)

    def epoch_stop(self, epoch: int) -> int:
        """Return the position after an epoch's last one; errors as of `epoch_start`."""
        return self._lease_of(epoch).epoch_base(epoch + 1)

    @property
    def _base(self) -> int:
        return self.runs[0].first.base if self.runs else self.end

    def _lease_of(self, epoch: int) -> Lease:
        if not self.runs:
            raise ConfigError("epoch", epoch, "an epoch of the log, which has none yet")
        at = bisect_right(self.runs, epoch, key=_first_epoch) - 1
        if at < 0 <= epoch and self._base <= self.trim:
            raise TrimmedError(RecordId(self.trim, 0))
        if at < 0 or epoch > _last_epoch(self.runs[-1]):
            known = f"{_first_epoch(self.runs[0])} to {_last_epoch(self.runs[-1])}"
            raise ConfigError("epoch", epoch, f"an epoch of the leases known here, {known}")
        return self.runs[at].lease_of_epoch(epoch)


def extents_of(runs: list[LeaseRun], start: int, stop: int | None, trim: int) -> Extents:
    """Return the owners of [start, stop), given all its leases."""
    end = runs[-1].last.stop if runs else 1
    low, high = max(start, trim), end if stop is None else min(stop, end)
    #: For each member of the last run: the start of its uninterrupted membership.
    since: dict[int, int] = {}
    extents: list[Extent] = []
    for run in runs:
        base, members = run.first.base, {member.shard for member in run.first.members}
        extents += [Extent(shard, since.pop(shard), base) for shard in since.keys() - members]
        since |= dict.fromkeys(members - since.keys(), base)
    extents += [Extent(shard, base, end) for shard, base in since.items()]
    clipped = [Extent(e.shard, max(e.start, low), min(e.stop, high)) for e in extents]
    shards = sorted((e for e in clipped if e.start < e.stop), key=_by_start)
    return Extents(trim, end, shards, runs)


class ExtentQuery(PendingRequest, kw_only=True):
    """One pending call."""

    request: ExtentsRequest
    leases: LeaseMap = msgspec.field(default_factory=LeaseMap)
    #: No shard owns its start: the query now asks for the end of the log.
    is_past_end: bool = False


class ExtentQueries(PendingRequests[ExtentQuery]):
    """The pending extent queries of a client."""

    def start(self, call: int, request: ExtentsRequest) -> None:
        """Start a call."""
        query = ExtentQuery(call, request.deadline, request=request)
        self._add(query)
        # The position before the start has an owner, even if the log ends at the start.
        self._query_leases(query, max(request.start - 1, 1))

    def _query_leases(self, query: ExtentQuery, gsn: int) -> None:
        query.service_request = self._membership.send_request(
            lambda cluster, request: LeaseQuery(cluster, request, gsn),
            lambda history: self._on_history(query, history),
        )

    def _on_history(self, query: ExtentQuery, history: LeaseHistory) -> None:
        self._routing.update_placements(history.placements)
        leases, stop = query.leases, query.request.stop
        before = leases.stop
        if not leases.extend(history.runs):
            # The leases between were trimmed meanwhile, and so were those before.
            leases = query.leases = LeaseMap()
            leases.extend(history.runs)
        has_news = leases.stop > before
        if has_news and (stop is None or leases.stop < stop):
            self._query_leases(query, leases.stop)
        elif not leases.stop and not query.is_past_end:
            query.is_past_end = True
            lease = self._routing.lease
            self._query_leases(query, lease.base if lease is not None else 1)
        else:
            self._finish(query, self._result(query, history.trim))

    def _result(self, query: ExtentQuery, trim: int) -> Extents | NoSuchRecordError:
        request, runs = query.request, query.leases.runs
        end = query.leases.stop or 1
        last = max(request.start, request.stop or 0)
        if last > end:
            why = f"no shard owns a position from {end} on yet"
            return NoSuchRecordError(RecordId(last, 0), why)
        return extents_of(runs, request.start, request.stop, trim)

    def _result_at_deadline(self, query: ExtentQuery) -> DeadlineError:
        what = f"timed out waiting for the membership service of {self._routing}"
        return DeadlineError(f"{what} to report the leases from gsn {query.request.start} on")

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        for query in self._pending.values():
            assert self._membership.is_open(query.service_request), "a call without a request"


def _base(run: LeaseRun) -> int:
    return run.first.base


def _first_epoch(run: LeaseRun) -> int:
    return run.first.first_epoch


def _last_epoch(run: LeaseRun) -> int:
    return run.last.stop_epoch - 1


def _by_start(extent: Extent) -> tuple[int, int]:
    return extent.start, extent.shard
