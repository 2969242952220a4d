"""The replicated state of the membership service: a deterministic state machine.

It holds shards and their placements, recoveries, retired shards, possible losses, the lease
history, the trim point, cursors, a lower bound of the finalized epoch, lost regions, and the wire
version in use.
Rule: a command (of `MoveCursors`: each step) is applied whole or refused with a reason, and never
raises; applying it twice equals once.
A lease must be the exact successor of the last one, so each lease has one descriptor (D30); equal
leases in a row share one run (D32).

Invariants: `ClusterState.check()`. See docs/protocol.md, sections 3, 8, 11 and 13.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from mms import lease_history
from mms.commands import (
    Barrier,
    ClaimCursor,
    CreateCluster,
    EditCursor,
    FinalizeShard,
    GrantLease,
    MoveCursors,
    PlaceShard,
    RaiseWire,
    RecordEvents,
    RecordLoss,
    ReleaseCursor,
    RemoveShard,
    RetireShard,
    SetDurability,
    SetFinalized,
    SetRegionLost,
    SetTrim,
    decode_command,
)
from mms.cursor_table import CursorTable
from mms.event_history import EventHistory
from mms.snapshot import Recovering, Retired, Snapshot
from ziplog.core.fields import MAX_SHARDS
from ziplog.core.gsn import MAX_ROUND
from ziplog.core.view import NO_DIGEST, Lease, LeaseRun, Placement, ShardState, fitting, run_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mms.commands import Refusal
    from ziplog.core.view import Replica
    from ziplog.types import Durability

#: Maximum positions in a lease: even with a new lease every 10 ms, gsns last eleven years (D32).
MAX_LEASE_SIZE: Final = 2**28
#: Number of digests kept to check the leases that servers report; older ones are not checked.
_KEPT_DIGESTS: Final = 4096
#: Maximum number of possible losses; the oldest are dropped.
MAX_LOSSES: Final = 1000
#: Maximum number of bytes of the encoded placements of all shards, retired ones included.
MAX_PLACEMENTS_BYTES: Final = 4 * 1024 * 1024


class ClusterState:
    """The replicated state; every node of the membership service holds the same."""

    def __init__(self) -> None:
        #: 0 until the cluster is created.
        self.cluster = 0
        self.name = ""
        #: The durability level in force, and the epoch since which it is (0: it never changed).
        self.durability: Durability = "memory"
        self.durability_epoch = 0
        #: Every shard that ever existed, by number, in order.
        self.placements: dict[int, Placement] = {}
        #: The lease history from the trim point on, oldest first.
        self.runs: list[LeaseRun] = []
        #: The first position that is not trimmed; 0: nothing was trimmed.
        self.trim = 0
        #: The last epoch known to be finalized; -1: none.
        self.finalized = -1
        #: The shards in recovery, by number.
        self.recovering: dict[int, Recovering] = {}
        #: The shards that have left, or are leaving, by number.
        self.retired: dict[int, Retired] = {}
        #: Number of `RetireShard` commands that were applied or refused.
        self.retirements = 0
        #: The wire version in use; never decreases.
        self.wire = 1
        #: The regions that an operator gave up, sorted: at most those of servers.
        self.lost_regions: list[str] = []
        #: Number of `SetRegionLost` that were applied.
        self.region_changes = 0
        #: Possible losses of recoveries, oldest first.
        self.losses: list[RecordLoss] = []
        self.history = EventHistory()
        self.cursors = CursorTable()
        # Derived from `runs` and from later grants; not part of the state.
        #: Upper bound of the encoded length of the runs.
        self.history_bytes = 0
        self._digests: dict[int, bytes] = {}

    # --- commands ---

    def apply(self, command: bytes) -> bytes:
        """Apply a command; return the encoded `Refusal`, of `MoveCursors` a list of them."""
        return msgspec.msgpack.encode(self._apply(command))

    def _apply(self, command: bytes) -> Refusal | list[Refusal]:
        try:
            decoded = decode_command(command)
        except (msgspec.MsgspecError, RecursionError):
            return "malformed"
        match decoded:
            case CreateCluster():
                return self._create(decoded)
            case Barrier():
                return ""
        if not self.cluster:
            return "no-cluster"
        match decoded:
            case GrantLease():
                return self._grant(decoded)
            case SetTrim():
                return self._set_trim(decoded)
            case SetFinalized():
                return self._set_finalized(decoded.epoch)
            case RemoveShard():
                return self._remove(decoded)
            case RecordLoss():
                return self._record_loss(decoded)
            case PlaceShard():
                return self._place_shard(decoded.placement)
            case RetireShard():
                return self._retire(decoded)
            case FinalizeShard():
                return self._finalize(decoded.shard)
            case RaiseWire():
                self.wire = max(self.wire, decoded.wire)
                return ""
            case RecordEvents():
                return self.history.record(decoded)
            case SetDurability():
                self.durability, self.durability_epoch = decoded.level, decoded.epoch
                return ""
            case SetRegionLost():
                return self._set_region_lost(decoded)
            case ClaimCursor():
                return self.cursors.claim(decoded, self.trim, self.stop)
            case MoveCursors():
                return [self.cursors.move(move, self.stop, decoded.at_us) for move in decoded.moves]
            case ReleaseCursor():
                return self.cursors.release(decoded)
            case EditCursor():
                return self.cursors.edit(decoded, self.trim, self.stop)

    def _create(self, command: CreateCluster) -> Refusal:
        if self.cluster:
            return "" if command.cluster == self.cluster else "other-cluster"
        shards = {placement.shard for placement in command.placements}
        if not shards or len(shards) != len(command.placements):
            return "bad-placements"
        if not all(placement.state in {"joining", "live"} for placement in command.placements):
            return "bad-placements"
        if not _has_room(command.placements):
            return "too-many"
        self.cluster, self.name = command.cluster, command.name
        self.durability = command.durability
        self._place(command.placements)
        return ""

    def _grant(self, command: GrantLease) -> Refusal:
        lease, last = command.lease, self.last
        if last is not None and lease == last:
            return ""
        if not _follows(lease, last):
            return "not-successor"
        if not self._are_valid(command.placements):
            return "bad-placements"
        if not self._are_valid_members(lease, command.placements):
            return "bad-members"
        if command.placements:
            self._place(command.placements)
        for shard, retired in self.retired.items():
            if not retired.limit and lease.view_of(shard) is None:
                self.retired[shard] = Retired(shard, self._end_of(shard))
        self._extend(lease)
        return ""

    def _are_valid(self, placements: list[Placement]) -> bool:
        """Whether each shard occurs once, and may change to its placement."""
        shards = {placement.shard for placement in placements}
        return len(shards) == len(placements) and all(map(self.may_become, placements))

    def may_become(self, changed: Placement) -> bool:
        """Whether a shard's placement may change so with the next lease.

        Views never decrease, and the servers stay. A shard in recovery returns only by its newest
        recovery, in its present state; a shard that has left returns in no other way.
        """
        shard, before = changed.shard, self.placements.get(changed.shard)
        if before is None or not before.has_servers_of(changed):
            return False
        recovering = self.recovering.get(shard)
        if recovering is not None:
            return (changed.state, changed.view) == (self.returns_as(shard), recovering.recovery)
        return (
            shard not in self.retired
            and changed.state in {"live", "parked"}
            and changed.view >= before.view
        )

    def returns_as(self, shard: int) -> ShardState:
        """Return the state in which a shard returns from its recovery."""
        retired = self.retired.get(shard)
        if retired is None:
            return "live"
        return "finalized" if retired.is_finalized else "leaving"

    def _are_valid_members(self, lease: Lease, changed: list[Placement]) -> bool:
        """Whether a lease's members may be members, in their current views, sorted, within limits.

        Members may be live shards, and leaving ones until the first lease without them.
        """
        placements = self.placements | {placement.shard: placement for placement in changed}
        views = {
            shard: placement.view
            for shard, placement in placements.items()
            if placement.state == "live" or self.may_stay(shard)
        }
        shards = [member.shard for member in lease.members]
        return (
            0 < sum(member.weight for member in lease.members) <= MAX_ROUND
            and all(before < after for before, after in pairwise(shards))
            and all(views.get(member.shard) == member.view for member in lease.members)
        )

    def may_stay(self, shard: int) -> bool:
        """Whether a shard is leaving, and every lease so far has it."""
        retired = self.retired.get(shard)
        return retired is not None and not retired.limit

    def _place(self, placements: list[Placement]) -> None:
        for placement in placements:
            self.placements[placement.shard] = placement
            self.recovering.pop(placement.shard, None)
        self.placements = dict(sorted(self.placements.items()))

    def _extend(self, lease: Lease) -> None:
        if self.runs and self.runs[-1].last.repeats(lease):
            run = self.runs[-1]
            self.runs[-1] = LeaseRun(run.first, run.count + 1, lease)
        else:
            self.runs.append(run_of(lease))
            self.history_bytes += self.runs[-1].max_bytes
        self._digests[lease.number] = lease.digest
        self._digests.pop(lease.number - _KEPT_DIGESTS, None)

    def _set_trim(self, command: SetTrim) -> Refusal:
        last, gsn = self.last, command.gsn
        if last is None or gsn >= last.stop:
            return "no-such-position"
        if command.force:
            self.cursors.stop_holding(gsn)
        elif self.cursors.holder(gsn) is not None:
            return "held"
        if gsn > self.trim:
            self.trim = gsn
            self.runs = [run for run in self.runs if run.last.stop > gsn]
            self.history_bytes = sum(run.max_bytes for run in self.runs)
            self.losses = [loss for loss in self.losses if loss.stop > gsn]
        return ""

    def _set_finalized(self, epoch: int) -> Refusal:
        last = self.last
        if last is None or epoch >= last.stop_epoch:
            return "no-such-position"
        self.finalized = max(self.finalized, epoch)
        return ""

    def _set_region_lost(self, command: SetRegionLost) -> Refusal:
        region, lost = command.region, set(self.lost_regions)
        if command.turn not in {None, self.region_changes}:
            return "out-of-turn"
        if command.is_lost and region not in self.regions:
            return "no-such-region"
        lost = lost | {region} if command.is_lost else lost - {region}
        self.lost_regions = sorted(lost & self.regions)
        self.region_changes += 1
        return ""

    def _remove(self, command: RemoveShard) -> Refusal:
        placement, last = self.placements.get(command.shard), self.last
        if placement is None or last is None:
            return "no-such-shard"
        # A rebuilt state may be behind the failure handler, whose decision began the view.
        if not placement.view <= command.view < command.recovery:
            return "other-view"
        recovering, is_new = self.recovering.get(command.shard), self.is_new(placement)
        if recovering is not None:
            if command.recovery < recovering.recovery:
                return "other-view"
            limit = recovering.limit
        else:
            # A joining shard with a crashed server owns nothing.
            limit = self._end_of(command.shard) if is_new else last.stop
        retired = self.retired.get(command.shard)
        if retired is not None:
            # A recovery during the leave ends the leases; a shard that had left keeps its limit.
            limit = retired.limit or limit
            self.retired[command.shard] = msgspec.structs.replace(retired, limit=limit)
        self._place([msgspec.structs.replace(placement, state="recovering")])
        self.recovering[command.shard] = Recovering(command.shard, command.recovery, limit, is_new)
        return ""

    def _record_loss(self, command: RecordLoss) -> Refusal:
        if command in self.losses:
            return ""
        recovering = self.recovering.get(command.shard)
        if recovering is None or command.view != recovering.recovery:
            return "other-view"
        if not command.start < command.stop <= recovering.limit:
            return "no-such-position"
        if command.stop > self.trim:
            self.losses = [*self.losses, command][-MAX_LOSSES:]
        return ""

    def _place_shard(self, placement: Placement) -> Refusal:
        shard, before = placement.shard, self.placements.get(placement.shard)
        if before is not None:
            if shard in self.retired:
                return "retired"
            return "" if before.has_servers_of(placement) else "exists"
        is_new = (placement.view, placement.state) == (1, "joining")
        if not is_new or any(replica.fingerprint for replica in placement.replicas):
            return "bad-placements"
        others = [replica for one in self.placements.values() for replica in one.replicas]
        if len(placement.replicas) * len(self.placements) != len(others):
            return "wrong-size"
        if not _are_new(placement.replicas, others):
            return "exists"
        if not _has_room([*self.placements.values(), placement]):
            return "too-many"
        self._place([placement])
        return ""

    def _retire(self, command: RetireShard) -> Refusal:
        shard = command.shard
        if shard in self.retired:
            return ""
        if command.turn not in {None, self.retirements}:
            return "out-of-turn"
        self.retirements += 1
        placement, last = self.placements.get(shard), self.last
        if placement is None:
            return "no-such-shard"
        if not self._is_spare(placement):
            return "last-shard"
        recovering, was_never_member = self.recovering.get(shard), self.is_new(placement)
        if recovering is not None:
            limit = recovering.limit
        else:
            is_member = last is not None and last.view_of(shard) is not None
            limit = 0 if is_member else self._end_of(shard)
            state: ShardState = "finalized" if was_never_member else "leaving"
            self._place([msgspec.structs.replace(placement, state=state)])
        self.retired[shard] = Retired(shard, limit, was_never_member)
        return ""

    def _is_spare(self, placement: Placement) -> bool:
        """Whether another shard takes records without this one."""
        others = [
            other.state
            for shard, other in self.placements.items()
            if shard != placement.shard and shard not in self.retired
        ]
        return "live" in others or (self.is_new(placement) and bool(others))

    def is_new(self, placement: Placement) -> bool:
        """Whether a shard was never a member."""
        recovering = self.recovering.get(placement.shard)
        return placement.state == "joining" or (recovering is not None and recovering.is_new)

    def _end_of(self, shard: int) -> int:
        """Return the end of the last lease that has the shard; at least 1."""
        stops = (
            run.last.stop for run in reversed(self.runs) if run.last.view_of(shard) is not None
        )
        return next(stops, max(self.trim, 1))

    def _finalize(self, shard: int) -> Refusal:
        retired = self.retired.get(shard)
        if retired is None:
            return "no-such-shard"
        if not retired.limit:
            return "has-leases"
        self.retired[shard] = msgspec.structs.replace(retired, is_finalized=True)
        if shard not in self.recovering:
            self._place([msgspec.structs.replace(self.placements[shard], state="finalized")])
        return ""

    def snapshot(self) -> bytes:
        """Return the whole state; equal states give equal bytes."""
        return msgspec.msgpack.encode(
            Snapshot(
                self.cluster, self.name, list(self.placements.values()), self.runs, self.trim,
                self.finalized, [self.recovering[shard] for shard in sorted(self.recovering)],
                self.losses, self.durability,
                [self.retired[shard] for shard in sorted(self.retired)], self.retirements,
                self.wire, self.history.events, self.history.last, self.durability_epoch,
                self.cursors.in_order(), self.cursors.terms, self.lost_regions,
                self.region_changes, list(self.cursors.edits.items()),
            )
        )  # fmt: skip

    def restore(self, snapshot: bytes) -> None:
        """Load the state of a snapshot.

        Raises:
            msgspec.MsgspecError: the bytes are not a snapshot.

        """
        found = msgspec.msgpack.decode(snapshot, type=Snapshot)
        self.cluster, self.name = found.cluster, found.name
        self.placements = {placement.shard: placement for placement in found.placements}
        self.runs, self.trim, self.finalized = found.runs, found.trim, found.finalized
        self.history_bytes = sum(run.max_bytes for run in self.runs)
        self.recovering = {one.shard: one for one in found.recovering}
        self.losses, self.durability = found.losses, found.durability
        self.retired = {one.shard: one for one in found.retired}
        self.durability_epoch = found.durability_epoch
        self.retirements, self.wire = found.retirements, found.wire
        self.history = EventHistory(found.events, found.last_event)
        self.cursors = CursorTable(found.cursors, found.terms, found.cursor_edits)
        self.lost_regions, self.region_changes = found.lost_regions, found.region_changes
        kept = self.runs[-1].last.number - _KEPT_DIGESTS if self.runs else 0
        newest = islice(self.runs, lease_history.index_of(self.runs, kept + 1), None)
        self._digests = {
            lease.number: lease.digest for run in newest for lease in (run.first, run.last)
        }

    # --- queries ---

    @property
    def last(self) -> Lease | None:
        """The last lease; None before there is one."""
        return self.runs[-1].last if self.runs else None

    @property
    def regions(self) -> set[str]:
        """The regions of all servers."""
        return {one.region for p in self.placements.values() for one in p.replicas}

    @property
    def stop(self) -> int:
        """The end of all leases; 0 before there is one."""
        return self.runs[-1].last.stop if self.runs else 0

    def contradicts(self, number: int, digest: bytes) -> bool:
        """Whether a lease that a server reports was never committed."""
        last = self.last
        if last is None or number > last.number:
            return number > 0
        return self._digests.get(number, digest) != digest

    def digest_of(self, number: int) -> bytes:
        """Return the digest of a recent lease, or `NO_DIGEST`."""
        return self._digests.get(number, NO_DIGEST)

    def runs_after(self, number: int, digest: bytes) -> list[LeaseRun]:
        """Return the leases after lease `number`, which has this digest; 0: from the first.

        If they do not fit a message, the oldest of them.
        """
        return lease_history.following(self.runs, number, digest)

    def first_needed(self, number: int, gsn: int) -> LeaseRun | None:
        """Return the first run that a server needs; None if it is the next one.

        The server holds leases up to `number` (0: none), and its log is stable up to `gsn`.
        """
        return lease_history.first_needed(self.runs, number, gsn)

    def numbered(self, number: int) -> Lease:
        """Return lease `number`, or the nearest one to it; its predecessor's digest may be lost."""
        run = self.runs[min(lease_history.index_of(self.runs, number), len(self.runs) - 1)]
        number = min(max(number, run.first.number), run.last.number)
        return run.numbered(number, self._digests.get(number - 1, NO_DIGEST))

    def runs_from(self, gsn: int) -> list[LeaseRun]:
        """Return the runs from the one that holds `gsn` on; from the first for a trimmed `gsn`.

        Empty if no lease has `gsn` yet. If they do not fit a message, the oldest of them.
        """
        return fitting(islice(self.runs, lease_history.index_after(self.runs, gsn), None))

    def runs_until(self, gsn: int, leases: int) -> list[LeaseRun]:
        """Return whole runs: those that hold the last `leases` leases before `gsn`, or more.

        If they do not fit a message, the newest of them.
        """
        return lease_history.until(self.runs, gsn, leases)

    def lease_at(self, gsn: int) -> Lease | None:
        """Return the lease that holds `gsn`; None if it is trimmed or not leased yet."""
        index = lease_history.index_after(self.runs, gsn)
        if index == len(self.runs) or gsn < self.runs[index].first.base:
            return None
        return self.runs[index].lease_at(gsn)

    def next_owned(self, shard: int, gsn: int) -> int:
        """Return the shard's first position at or after `gsn`; if none, the end of all leases."""
        for run in islice(self.runs, lease_history.index_after(self.runs, gsn), None):
            gsn = run.next_owned(shard, gsn)
            if gsn < run.last.stop:
                break
        return gsn

    def check(self) -> None:
        """Assert the invariants."""
        self.history.check()
        self.cursors.check(self.trim)
        before: LeaseRun | None = None
        for run in self.runs:
            assert run.count == run.last.number - run.first.number + 1, "a run of the wrong length"
            assert run.count > 1 or run.first == run.last
            size = run.first.stop - run.first.base
            assert run.last.base == run.first.base + (run.count - 1) * size
            assert before is None or _follows(run.first, before.last), "a gap in the history"
            assert before is None or not before.last.repeats(run.first), (
                "two runs that should be one"
            )
            before = run
        assert self.history_bytes == sum(run.max_bytes for run in self.runs)
        last = self.last
        assert list(self.placements) == sorted(self.placements)
        assert self.trim == 0 or (last is not None and self.trim < last.stop)
        assert all(run.last.stop > self.trim for run in self.runs), "trimmed history was kept"
        assert self.finalized < 0 or last is not None
        assert not self.cluster or self.placements
        assert self.lost_regions == sorted(set(self.lost_regions))
        states = {shard for shard, p in self.placements.items() if p.state == "recovering"}
        assert states == self.recovering.keys(), "a recovery without a limit, or the reverse"
        for one in self.recovering.values():
            assert one.recovery > self.placements[one.shard].view
            assert last is not None
            assert one.limit <= last.stop
            retired = self.retired.get(one.shard)
            assert retired is None or retired.limit == one.limit, "a shard with two limits"
        self._check_retired(last)
        assert len(self.losses) <= MAX_LOSSES
        assert all(loss.stop > self.trim for loss in self.losses), "a trimmed loss is kept"

    def _check_retired(self, last: Lease | None) -> None:
        gone = {"leaving", "finalized"}
        assert {shard for shard, p in self.placements.items() if p.state in gone} == {
            shard for shard in self.retired if shard not in self.recovering
        }, "a shard that left without a limit, or the reverse"
        for shard, retired in self.retired.items():
            is_member = last is not None and last.view_of(shard) is not None
            assert is_member or retired.limit, "a shard that left has no limit"
            assert not retired.is_finalized or retired.limit
            assert not is_member or last is None or retired.limit in {0, last.stop}
            if shard not in self.recovering:
                assert self.placements[shard].state == self.returns_as(shard)


def _are_new(replicas: Sequence[Replica], others: Sequence[Replica]) -> bool:
    """Whether all names and endpoints are new and unique."""
    names, endpoints = {one.name for one in replicas}, {one.endpoint for one in replicas}
    return (
        len(names) == len(endpoints) == len(replicas)
        and names.isdisjoint(one.name for one in others)
        and endpoints.isdisjoint(one.endpoint for one in others)
    )


def _has_room(placements: Sequence[Placement]) -> bool:
    """Whether all placements fit one message, and all shards one status document."""
    return (
        len(placements) <= MAX_SHARDS
        and len(msgspec.msgpack.encode(placements)) <= MAX_PLACEMENTS_BYTES
    )


def _follows(lease: Lease, last: Lease | None) -> bool:
    """Whether `lease` directly follows `last`, and is within the limits."""
    size = lease.epochs * lease.epoch_size
    if size > MAX_LEASE_SIZE or lease.base + size > 2**63 - 1:
        return False
    if last is None:
        return (lease.number, lease.base, lease.first_epoch, lease.predecessor) == (
            1, 1, 0, NO_DIGEST
        )  # fmt: skip
    return (lease.number, lease.base, lease.first_epoch, lease.predecessor) == (
        last.number + 1, last.stop, last.stop_epoch, last.digest
    )  # fmt: skip
