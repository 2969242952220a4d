"""The lease history of a rebuilt membership service, from the leases that servers recorded.

Rules: the positions of known leases keep their owners and epochs. All leases get new numbers, above
every number that was ever given out, so no lease has two descriptors. The history ends with leases
without members. They cover all positions that unrecorded leases may have had, so no later lease has
a position that was given out before. Pure (docs/protocol.md, section 16).
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from mms.state import MAX_LEASE_SIZE
from ziplog.core.view import MAX_UNRECORDED, NO_DIGEST, Lease, LeaseRun, Member
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.core.holdings import ServerHoldings

#: Epochs of the leases without members.
_EPOCHS: Final = 16
#: Maximum number of leases of a run whose digests are computed one by one.
_MAX_CHAINED: Final = 200_000


class Span(NamedTuple):
    """Equal leases that follow each other."""

    #: The first of them.
    first: Lease
    #: Their number.
    leases: int

    @property
    def size(self) -> int:
        """The number of positions of each lease."""
        return self.first.stop - self.first.base

    @property
    def stop(self) -> int:
        """The first position after them."""
        return self.first.base + self.leases * self.size

    @property
    def stop_epoch(self) -> int:
        """The first epoch after them."""
        return self.first.first_epoch + self.leases * self.first.epochs

    @property
    def shape(self) -> tuple[object, ...]:
        """What equal leases have in common."""
        lease = self.first
        return lease.epochs, lease.epoch_size, lease.epoch_ms, lease.members


def rebuilt_runs(servers: Sequence[ServerHoldings], trim: int) -> list[LeaseRun]:
    """Return the history from the trim point on; its last run has no members.

    Raises:
        UnavailableError: servers recorded leases that contradict each other.

    """
    spans = _fill_holes(_known(servers), servers)
    spans = _cover_records(spans, servers)
    number = 1 + max(server.lease for server in servers) + MAX_UNRECORDED
    last = spans[-1]
    gap = _lease(last.stop, last.stop_epoch, _EPOCHS, MAX_LEASE_SIZE // _EPOCHS, ())
    # Recoveries decided positions up to the end of leases that no server may have recorded.
    beyond = max(known_end(servers) - last.stop, 0)
    spans.append(Span(gap, MAX_UNRECORDED + -(-beyond // MAX_LEASE_SIZE)))
    return _numbered(_joined(span for span in spans if span.stop > trim), number)


def known_end(servers: Iterable[ServerHoldings]) -> int:
    """Return the first position after all leases and entries that servers recorded."""
    return max(
        max([server.end, *(run.last.stop for run in server.runs)], default=1) for server in servers
    )


def _known(servers: Iterable[ServerHoldings]) -> list[Span]:
    """Return the recorded leases in the order of their positions; later leases replace earlier."""
    runs = [run for server in servers for run in server.runs]
    spans: list[Span] = []
    for run in sorted(runs, key=lambda run: (run.first.number, run.last.number)):
        _cut(spans, run)
        spans.append(Span(run.first, run.count))
    return spans


def _cut(spans: list[Span], run: LeaseRun) -> None:
    """Remove the leases from a run's first position on, which the run has as well."""
    base = run.first.base
    while spans and spans[-1].stop > base:
        span = spans.pop()
        kept, rest = divmod(max(base - span.first.base, 0), span.size)
        is_same = span.first.number + kept == run.first.number
        if is_same and (rest or span.shape != Span(run.first, 1).shape):
            raise UnavailableError(
                f"the servers recorded different leases {run.first.number}: their directories are"
                " not of one cluster. Put the right ones back"
            )
        if kept:
            spans.append(Span(span.first, kept))
            break


def _fill_holes(spans: list[Span], servers: Sequence[ServerHoldings]) -> list[Span]:
    """Fill the places of leases that no server recorded.

    All shards own positions there, so that readers ask all of them.
    """
    if not spans:
        raise UnavailableError(
            "the servers have no record of a lease: an earlier release wrote their directories, or"
            " the cluster never was live"
        )
    members = _members(server.placement.shard for server in servers if server.placement)
    filled: list[Span] = []
    stop, epoch = 1, 0
    for span in spans:
        if span.first.base > stop:
            filled += _filling(stop, epoch, span.first, members)
        filled.append(span)
        stop, epoch = span.stop, span.stop_epoch
    return filled


def _filling(start: int, epoch: int, after: Lease, members: tuple[Member, ...]) -> list[Span]:
    """Return leases for all positions and epochs before `after`, in epochs of nearly equal size."""
    epochs, positions = after.first_epoch - epoch, after.base - start
    if not epochs <= positions <= epochs * MAX_LEASE_SIZE:
        raise UnavailableError(
            f"the servers recorded lease {after.number} with position {after.base} in epoch"
            f" {after.first_epoch}, which no lease before can precede: their directories are not of"
            " one cluster. Put the right ones back"
        )
    spans = []
    least, larger = divmod(positions, epochs)
    for size, count in ((least + 1, larger), (least, epochs - larger)):
        if count:
            each = gcd(count, MAX_LEASE_SIZE // size)
            spans.append(Span(_lease(start, epoch, each, size, members), count // each))
            start, epoch = spans[-1].stop, spans[-1].stop_epoch
    return spans


def _cover_records(spans: list[Span], servers: Sequence[ServerHoldings]) -> list[Span]:
    """Add leases for stored records after the last recorded lease."""
    last = spans[-1]
    late = [one for one in servers if one.placement and one.records_end > last.stop]
    if late:
        count = -(-(max(one.records_end for one in late) - last.stop) // MAX_LEASE_SIZE)
        members = _members(one.placement.shard for one in late if one.placement)
        size = MAX_LEASE_SIZE // _EPOCHS
        spans = [*spans, Span(_lease(last.stop, last.stop_epoch, _EPOCHS, size, members), count)]
    return spans


def _members(shards: Iterable[int]) -> tuple[Member, ...]:
    return tuple(Member(shard, 1, 1) for shard in sorted(set(shards)))


def _lease(base: int, epoch: int, epochs: int, size: int, members: tuple[Member, ...]) -> Lease:
    return Lease(1, NO_DIGEST, base, epoch, epochs, size, 1000, members)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return the spans with equal leases that follow each other as one."""
    joined: list[Span] = []
    for span in spans:
        before = joined[-1] if joined else None
        if (
            before is not None
            and before.shape == span.shape
            and (before.stop, before.stop_epoch) == (span.first.base, span.first.first_epoch)
        ):
            joined[-1] = Span(before.first, before.leases + span.leases)
        else:
            joined.append(span)
    return joined


def _numbered(spans: Sequence[Span], number: int) -> list[LeaseRun]:
    """Return runs with consecutive numbers, each with the digest of the lease before it."""
    runs: list[LeaseRun] = []
    digest = NO_DIGEST
    for span in spans:
        first = msgspec.structs.replace(span.first, number=number, predecessor=digest)
        run = LeaseRun(first, span.leases, _last(first, span.leases))
        number, digest = number + span.leases, run.last.digest
        runs.append(run)
    return runs


def _last(first: Lease, count: int) -> Lease:
    """Return the last of `count` equal leases; no server checks the digests of long runs."""
    if count > _MAX_CHAINED:
        first = LeaseRun(first, count, first).numbered(
            first.number + count - _MAX_CHAINED, NO_DIGEST
        )
        count = _MAX_CHAINED
    for _ in range(count - 1):
        first = first.following()
    return first
