"""What the membership service agrees on: a replicated, deterministic state machine.

Shards and where they are, which of them are being recovered and what that may have lost, the
history of leases, the trim point and a floor of the finalized epoch. Rule: a command is either
applied whole or refused with a reason, and never raises; applying it twice is the same as once. A
lease is taken only as the exact successor of the last one, so there is one descriptor per lease,
ever (D30), and equal leases in a row take the room of one (D32).

Invariants: `ClusterState.check()`. See docs/protocol.md, sections 3, 8 and 11.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Final, Literal

import msgspec

from ziplog.gsn import MAX_ROUND
from ziplog.types import Durability, Epoch, Gsn, ShardId, View
from ziplog.view import NO_DIGEST, Lease, LeaseRun, Placement, run_of
from ziplog.wire import Name

#: Positions in a lease: even a new one every 10 ms lasts eleven years (D32).
MAX_LEASE_SIZE: Final = 2**28
#: Digests kept to check what servers say that they hold; servers behind them are believed.
_KEPT_DIGESTS: Final = 4096
#: Possible losses that are kept; then the oldest go.
MAX_LOSSES: Final = 1000

_ClusterId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class Command(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what consensus carries for the membership service."""

    def encode(self) -> bytes:
        """Return its bytes."""
        return msgspec.msgpack.encode(self)


class CreateCluster(Command, tag=1, frozen=True, gc=False):
    """The first command: the cluster's identity (a random number) and its shards."""

    cluster: _ClusterId
    name: Name
    placements: list[Placement]
    #: The level of the log, for as long as it lives.
    durability: Durability = "memory"


class GrantLease(Command, tag=2, frozen=True, gc=False):
    """Commit the next lease, and the placements that change with it."""

    lease: Lease
    placements: list[Placement]


class SetTrim(Command, tag=3, frozen=True, gc=False):
    """Everything before `gsn` is deleted."""

    gsn: Gsn


class SetFinalized(Command, tag=4, frozen=True, gc=False):
    """This epoch, and every one before it, is finalized."""

    epoch: Epoch


class Barrier(Command, tag=5, frozen=True, gc=False):
    """Nothing: who sees it applied has seen all that was committed before. `token` is unique."""

    token: bytes


class RemoveShard(Command, tag=6, frozen=True, gc=False):
    """Give the shard no more leases: `recovery`, from `view` or a later one, is under way."""

    shard: ShardId
    view: View
    recovery: View


class RecordLoss(Command, tag=7, frozen=True, gc=False):
    """Records of the shard in [start, stop) may be lost, says the recovery to `view`."""

    shard: ShardId
    view: View
    start: Gsn
    stop: Gsn


class Recovering(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shard that was taken out of the leases: its newest recovery, and the end of what it owns.

    The limit stays the same over all attempts, until the shard is live again.
    """

    shard: ShardId
    recovery: View
    limit: Gsn


AnyCommand = (
    CreateCluster | GrantLease | SetTrim | SetFinalized | Barrier | RemoveShard | RecordLoss
)

#: Why a command was refused; "" if it was not.
Refusal = Literal[
    "", "malformed", "no-cluster", "other-cluster", "not-successor", "bad-members",
    "bad-placements", "no-such-position", "no-such-shard", "other-view",
]  # fmt: skip

_decoder: Final[msgspec.msgpack.Decoder[AnyCommand]] = msgspec.msgpack.Decoder(AnyCommand)


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    cluster: int
    name: str
    placements: list[Placement]
    runs: list[LeaseRun]
    trim: int
    finalized: int
    recovering: list[Recovering] = []
    losses: list[RecordLoss] = []
    durability: Durability = "memory"


class ClusterState:
    """The state; every node of the membership service holds the same."""

    def __init__(self) -> None:
        #: 0 until the cluster is created.
        self.cluster = 0
        self.name = ""
        self.durability: Durability = "memory"
        #: Every shard ever, by its number, in order.
        self.placements: dict[int, Placement] = {}
        #: The history of leases from the trim point on, oldest first.
        self.runs: list[LeaseRun] = []
        #: The first position still there; 0: nothing was trimmed.
        self.trim = 0
        #: The last epoch known to be finalized; -1: none.
        self.finalized = -1
        #: The shards that are being recovered, by their number.
        self.recovering: dict[int, Recovering] = {}
        #: What recoveries may have lost, oldest first.
        self.losses: list[RecordLoss] = []
        # Derived from `runs` and from what was granted since: no part of the state.
        self._digests: dict[int, bytes] = {}

    # --- the machine ---

    def apply(self, command: bytes) -> bytes:
        """Apply a command; return the encoded `Refusal`."""
        return msgspec.msgpack.encode(self._apply(command))

    def _apply(self, command: bytes) -> Refusal:
        try:
            decoded = _decoder.decode(command)
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
                return self._set_trim(decoded.gsn)
            case SetFinalized():
                return self._set_finalized(decoded.epoch)
            case RemoveShard():
                return self._remove(decoded)
            case RecordLoss():
                return self._record_loss(decoded)

    def _create(self, command: CreateCluster) -> Refusal:
        if self.cluster:
            return "" if command.cluster == self.cluster else "other-cluster"
        if not command.placements or not self._takes(command.placements):
            return "bad-placements"
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
        if not self._takes(command.placements):
            return "bad-placements"
        if not self._fits(lease, command.placements):
            return "bad-members"
        self._place(command.placements)
        self._extend(lease)
        return ""

    def _takes(self, placements: list[Placement]) -> bool:
        """Whether each shard occurs once, and may become what its placement says."""
        shards = {placement.shard for placement in placements}
        return len(shards) == len(placements) and all(map(self.may_become, placements))

    def may_become(self, changed: Placement) -> bool:
        """Whether a shard's placement may change so with the next lease.

        No view goes back. One that is being recovered comes back by its newest recovery only, and
        with the same servers.
        """
        before, recovering = self.placements.get(changed.shard), self.recovering.get(changed.shard)
        if changed.state == "recovering":
            return False
        if before is None or recovering is None:
            return before is None or changed.view >= before.view
        return (changed.state, changed.view) == ("live", recovering.recovery) and [
            (replica.name, replica.endpoint) for replica in changed.replicas
        ] == [(replica.name, replica.endpoint) for replica in before.replicas]

    def _fits(self, lease: Lease, changed: list[Placement]) -> bool:
        """Whether the members are live shards in their current views, sorted, within limits."""
        placements = self.placements | {placement.shard: placement for placement in changed}
        views = {shard: p.view for shard, p in placements.items() if p.state == "live"}
        shards = [member.shard for member in lease.members]
        return (
            0 < sum(member.weight for member in lease.members) <= MAX_ROUND
            and all(before < after for before, after in pairwise(shards))
            and all(views.get(member.shard) == member.view for member in lease.members)
        )

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
        self._digests[lease.number] = lease.digest
        self._digests.pop(lease.number - _KEPT_DIGESTS, None)

    def _set_trim(self, gsn: int) -> Refusal:
        last = self.last
        if last is None or gsn >= last.stop:
            return "no-such-position"
        if gsn > self.trim:
            self.trim = gsn
            self.runs = [run for run in self.runs if run.last.stop > gsn]
            self.losses = [loss for loss in self.losses if loss.stop > gsn]
        return ""

    def _set_finalized(self, epoch: int) -> Refusal:
        last = self.last
        if last is None or epoch >= last.first_epoch + last.epochs:
            return "no-such-position"
        self.finalized = max(self.finalized, epoch)
        return ""

    def _remove(self, command: RemoveShard) -> Refusal:
        placement, last = self.placements.get(command.shard), self.last
        if placement is None or last is None:
            return "no-such-shard"
        if not placement.view <= command.view < command.recovery:
            return "other-view"
        recovering = self.recovering.get(command.shard)
        if recovering is not None:
            if command.recovery < recovering.recovery:
                return "other-view"
            limit = recovering.limit
        elif placement.state in {"live", "parked"} and command.view == placement.view:
            limit = last.stop
        else:
            return "other-view"
        self._place([msgspec.structs.replace(placement, state="recovering")])
        self.recovering[command.shard] = Recovering(command.shard, command.recovery, limit)
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

    def snapshot(self) -> bytes:
        """Return the whole state; equal states give equal bytes."""
        return msgspec.msgpack.encode(
            _Snapshot(
                self.cluster, self.name, list(self.placements.values()), self.runs, self.trim,
                self.finalized, [self.recovering[shard] for shard in sorted(self.recovering)],
                self.losses, self.durability,
            )
        )  # fmt: skip

    def restore(self, snapshot: bytes) -> None:
        """Take the state of a snapshot.

        Raises:
            msgspec.MsgspecError: it is none.

        """
        found = msgspec.msgpack.decode(snapshot, type=_Snapshot)
        self.cluster, self.name = found.cluster, found.name
        self.placements = {placement.shard: placement for placement in found.placements}
        self.runs, self.trim, self.finalized = found.runs, found.trim, found.finalized
        self.recovering = {one.shard: one for one in found.recovering}
        self.losses, self.durability = found.losses, found.durability
        self._digests = {
            lease.number: lease.digest for run in self.runs for lease in (run.first, run.last)
        }

    # --- questions ---

    @property
    def last(self) -> Lease | None:
        """The last lease; None before there is one."""
        return self.runs[-1].last if self.runs else None

    def contradicts(self, number: int, digest: bytes) -> bool:
        """Whether a server that holds lease `number` with this digest was told another one."""
        last = self.last
        if last is None or number > last.number:
            return number > 0
        return self._digests.get(number, digest) != digest

    def runs_after(self, number: int, digest: bytes) -> list[LeaseRun]:
        """Return the leases that follow lease `number`, which has this digest; 0: all of them."""
        found: list[LeaseRun] = []
        for run in reversed(self.runs):
            if run.last.number <= number:
                break
            inside = run.first.number <= number
            found.append(run.after(number, digest) if inside else run)
        return found[::-1]

    def numbered(self, number: int) -> Lease:
        """Return lease `number`, or the nearest one to it; the digest it names may be forgotten."""
        run = next((run for run in self.runs if run.last.number >= number), self.runs[-1])
        number = min(max(number, run.first.number), run.last.number)
        return run.numbered(number, self._digests.get(number - 1, NO_DIGEST))

    def runs_from(self, gsn: int, max_members: int) -> list[LeaseRun]:
        """Return the runs from the one that holds `gsn` on; from the first for a trimmed `gsn`.

        None if nobody was ever given it. Not more, past the first, than have `max_members` in all.
        """
        found: list[LeaseRun] = []
        members = 0
        for run in self.runs:
            if run.last.stop <= gsn:
                continue
            members += 2 * len(run.first.members)
            if found and members > max_members:
                break
            found.append(run)
        return found

    def runs_until(self, gsn: int, leases: int) -> list[LeaseRun]:
        """Return whole runs: those that hold the last `leases` leases before `gsn`, or more."""
        found: list[LeaseRun] = []
        for run in reversed(self.runs):
            if run.first.base >= gsn:
                continue
            found.append(run)
            if sum(one.count for one in found) >= leases:
                break
        return found[::-1]

    def lease_at(self, gsn: int) -> Lease | None:
        """Return the lease that holds `gsn`; None if it is trimmed or was never given out."""
        run = next((run for run in reversed(self.runs) if run.first.base <= gsn), None)
        return run.lease_at(gsn) if run is not None and gsn < run.last.stop else None

    def check(self) -> None:
        """Assert the invariants."""
        before: LeaseRun | None = None
        for run in self.runs:
            assert run.count == run.last.number - run.first.number + 1, "a run of the wrong length"
            assert run.count > 1 or run.first == run.last
            size = run.first.stop - run.first.base
            assert run.last.base == run.first.base + (run.count - 1) * size
            assert before is None or _follows(run.first, before.last), "a gap in the history"
            assert before is None or not before.last.repeats(run.first), "two runs could be one"
            before = run
        last = self.last
        assert list(self.placements) == sorted(self.placements)
        assert self.trim == 0 or (last is not None and self.trim < last.stop)
        assert all(run.last.stop > self.trim for run in self.runs), "trimmed history is kept"
        assert self.finalized < 0 or last is not None
        assert not self.cluster or self.placements
        states = {shard for shard, p in self.placements.items() if p.state == "recovering"}
        assert states == self.recovering.keys(), "a recovery without a limit, or the reverse"
        for one in self.recovering.values():
            assert one.recovery > self.placements[one.shard].view
            assert last is not None
            assert one.limit <= last.stop
        assert len(self.losses) <= MAX_LOSSES
        assert all(loss.stop > self.trim for loss in self.losses), "a trimmed loss is kept"


def decode_refusal(result: bytes) -> Refusal:
    """Return what `ClusterState.apply` answered."""
    refusal: Any = msgspec.msgpack.decode(result, type=Refusal)
    return refusal  # type: ignore[no-any-return]


def decode_command(command: bytes) -> AnyCommand:
    """Return a command that `ClusterState.apply` did not find malformed."""
    return _decoder.decode(command)


def _follows(lease: Lease, last: Lease | None) -> bool:
    """Whether `lease` is right behind `last`, and within the limits."""
    size = lease.epochs * lease.epoch_size
    if size > MAX_LEASE_SIZE or lease.base + size > 2**63 - 1:
        return False
    if last is None:
        return (lease.number, lease.base, lease.first_epoch, lease.predecessor) == (
            1, 1, 0, NO_DIGEST
        )  # fmt: skip
    return (lease.number, lease.base, lease.first_epoch, lease.predecessor) == (
        last.number + 1, last.stop, last.first_epoch + last.epochs, last.digest
    )  # fmt: skip
