"""Leases and placements: the gsns that each shard may assign, and the servers of each shard.

A *lease* is a committed, irrevocable descriptor: a schedule and a run of equally long epochs. Its
gsns are [base, stop); epoch number `first_epoch + i` has [base + i * epoch_size, ... + epoch_size)
and repeats the schedule's round from its own base. Leases follow each other without a gap, in gsns
and in epochs, and each carries the digest of its predecessor (docs/protocol.md, "Leases").
A *placement* lists a shard's replicas with their endpoints, and the shard's state and view.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from ziplog.core.fields import Region
from ziplog.core.gsn import MAX_ROUND, Schedule
from ziplog.types import Epoch, ShardId, View

if TYPE_CHECKING:
    from collections.abc import Iterable

ShardState = Literal["joining", "live", "parked", "recovering", "leaving", "finalized"]
NodeState = Literal["starting", "up", "suspect", "down", "limbo"]
#: The state that a storage server reports. `up`: it serves its view. `frozen`: it promised a
#: recovery to store nothing more. `joined`: it holds the whole log of a view that has not started.
#: `limbo`: it restarted without knowledge of its promises, so what it holds may be out of date.
ServerState = Literal["starting", "up", "frozen", "joined", "limbo"]

#: Number of members from which on a lease is announced as a difference from the one before, and
#: servers are sent the placement of their own shard only.
MANY_MEMBERS: Final = 17
#: Maximum number of equal leases in one `LeaseStep`.
MAX_STEP: Final = 1000
#: Number of runs of equal leases that a storage server keeps: the newest ones.
KEPT_RUNS: Final = 64
#: Maximum number of leases by which a storage server may be ahead of those on its own disk.
MAX_UNRECORDED: Final = 4096
#: Limit of the lease runs in one message, in bytes; a single larger run still fits a frame.
MAX_RUNS_BYTES: Final = 4 * 1024 * 1024
#: Maximum encoded size of a member, a lease without members, and a run without leases, in bytes.
_MEMBER_BYTES: Final = 16
_LEASE_BYTES: Final = 64
_RUN_BYTES: Final = 10

#: The predecessor digest of the first lease.
NO_DIGEST: Final = b"\0" * 8

Digest = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Weight = Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUND)]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A shard that owns positions of a lease."""

    shard: ShardId
    view: View
    weight: Weight


class Lease(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The right to assign the gsns [base, stop), divided among the members by weight.

    `dict=True` is for the cached properties, which are not part of its value.
    """

    #: 1 for the first lease; each next lease has the next number.
    number: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    #: Digest of the lease before this one.
    predecessor: Digest
    base: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    first_epoch: Epoch
    #: Number of epochs.
    epochs: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    #: Number of gsns in an epoch.
    epoch_size: Annotated[int, msgspec.Meta(ge=1, le=2**28)]
    #: Nominal length of an epoch, in milliseconds.
    epoch_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
    #: Sorted by shard. Only a rebuilt history has leases without members: no shard owns them.
    members: tuple[Member, ...]

    @cached_property
    def stop(self) -> int:
        """The first gsn after the lease."""
        return self.base + self.epochs * self.epoch_size

    @property
    def stop_epoch(self) -> int:
        """The first epoch after the lease."""
        return self.first_epoch + self.epochs

    @cached_property
    def digest(self) -> bytes:
        """The value of `predecessor` in the next lease."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=8).digest()

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the members (leases with equal members share one)."""
        return _schedule(self.members)

    @cached_property
    def _views(self) -> dict[int, int]:
        return {member.shard: member.view for member in self.members}

    def view_of(self, shard: int) -> int | None:
        """Return the view in which `shard` is a member, or None if it is not a member."""
        return self._views.get(shard)

    def weight_of(self, shard: int) -> int:
        """Return the weight of a shard; 0 if it is not a member."""
        return self.schedule.weights.get(shard, 0)

    def epoch_at(self, gsn: int) -> int:
        """Return the epoch of a gsn of this lease."""
        return self.first_epoch + (gsn - self.base) // self.epoch_size

    def epoch_base(self, epoch: int) -> int:
        """Return the first gsn of an epoch of this lease (or of the one right after it)."""
        return self.base + (epoch - self.first_epoch) * self.epoch_size

    def owner(self, gsn: int) -> int:
        """Return the shard that owns a gsn of this lease; 0 if it has no members."""
        if not self.members:
            return 0
        return self.schedule.owner((gsn - self.base) % self.epoch_size)

    def next_owned(self, shard: int, gsn: int) -> int:
        """Return the first gsn at or after `gsn` that `shard` owns, or `stop` if there is none."""
        if shard not in self._views:
            return self.stop
        schedule, size = self.schedule, self.epoch_size
        gsn = max(gsn, self.base)
        rest = (gsn - self.base) % size
        offset = schedule.next_offset(shard, rest)
        if offset >= size:
            # The shard has no more slots in this epoch: take the first slot of the next epoch, if
            # epochs are long enough to have one.
            first = schedule.offset(shard, 0)
            if first >= size:
                return self.stop
            offset = size + first
        return min(gsn - rest + offset, self.stop)

    def take(self, shard: int, gsn: int, count: int) -> list[int]:
        """Return `count` consecutive gsns of `shard` from `gsn` on, all in the epoch of `gsn`.

        Empty if fewer are left in the epoch. The shard must own `gsn`.
        """
        if count == 1:
            return [gsn]
        schedule = self.schedule
        rest = (gsn - self.base) % self.epoch_size
        slot = schedule.slot_from(shard, rest)
        if schedule.offset(shard, slot + count - 1) >= self.epoch_size:
            return []
        return schedule.offsets(shard, slot, count, gsn - rest)

    def slot(self, shard: int, gsn: int) -> int:
        """Return how many slots of `shard` lie between the lease's base and `gsn`."""
        schedule = self.schedule
        epochs, rest = divmod(gsn - self.base, self.epoch_size)
        return epochs * schedule.slot_from(shard, self.epoch_size) + schedule.slot_from(shard, rest)

    def following(
        self,
        members: tuple[Member, ...] | None = None,
        *,
        epochs: int | None = None,
        epoch_size: int | None = None,
        epoch_ms: int | None = None,
    ) -> Lease:
        """Return the lease right after this one, equal to it except for the given fields."""
        return Lease(
            number=self.number + 1,
            predecessor=self.digest,
            base=self.stop,
            first_epoch=self.stop_epoch,
            epochs=epochs or self.epochs,
            epoch_size=epoch_size or self.epoch_size,
            epoch_ms=epoch_ms or self.epoch_ms,
            members=self.members if members is None else members,
        )

    def repeats(self, successor: Lease) -> bool:
        """Whether `successor` follows this lease and has equal fields."""
        return successor == self.following()


class LeaseRun(msgspec.Struct, frozen=True, array_like=True):
    """A run of equal leases: the first one, their number, and the last (D32: run-length encoding).

    `last` is `first` after `count - 1` calls of `following`.
    """

    first: Lease
    count: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    last: Lease

    @property
    def max_bytes(self) -> int:
        """An upper bound of its encoded size; at most twice the size for large schedules."""
        members = len(self.first.members) + len(self.last.members)
        return _RUN_BYTES + 2 * _LEASE_BYTES + members * _MEMBER_BYTES

    def lease_at(self, gsn: int) -> Lease:
        """Return the lease that holds `gsn`; its predecessor's digest is exact only at the ends."""
        if gsn >= self.last.base:
            return self.last
        step = (gsn - self.first.base) // (self.first.stop - self.first.base)
        return self.numbered(self.first.number + step, NO_DIGEST)

    def lease_of_epoch(self, epoch: int) -> Lease:
        """Return the lease that has an epoch of this run; its predecessor's digest as above."""
        step = (epoch - self.first.first_epoch) // self.first.epochs
        return self.numbered(self.first.number + step, NO_DIGEST)

    def next_owned(self, shard: int, gsn: int) -> int:
        """Return the first gsn of this run at or after `gsn` that `shard` owns.

        Returns the run's end if there is none, or `gsn` if that is after the end.
        """
        gsn = max(gsn, self.first.base)
        # All leases of a run are alike: if the rest of one and the next have none, none has one.
        for _ in range(2):
            if gsn >= self.last.stop:
                return gsn
            lease = self.lease_at(gsn)
            gsn = lease.next_owned(shard, gsn)
            if gsn < lease.stop:
                return gsn
        return self.last.stop

    def numbered(self, number: int, predecessor: bytes) -> Lease:
        """Return lease `number`; `predecessor` is used only for leases between the two ends."""
        first, step = self.first, number - self.first.number
        assert 0 <= step < self.count, "the lease is not in this run"
        if step == 0:
            return first
        return (
            self.last
            if step == self.count - 1
            else msgspec.structs.replace(
                first,
                number=number,
                predecessor=predecessor,
                base=first.base + step * (first.stop - first.base),
                first_epoch=first.first_epoch + step * first.epochs,
            )
        )

    def after(self, number: int, digest: bytes) -> LeaseRun:
        """Return the part of this run after its lease `number`, which has this digest."""
        first = self.numbered(number + 1, digest)
        return LeaseRun(first, self.last.number - number, self.last)


def run_of(lease: Lease) -> LeaseRun:
    """Return a run of one lease."""
    return LeaseRun(lease, 1, lease)


def fitting(runs: Iterable[LeaseRun]) -> list[LeaseRun]:
    """Return the first of these runs: as many as fit a message, and at least one."""
    found: list[LeaseRun] = []
    size = 0
    for run in runs:
        size += run.max_bytes
        if found and size > MAX_RUNS_BYTES:
            break
        found.append(run)
    return found


def extend_runs(runs: list[LeaseRun], more: Iterable[LeaseRun]) -> None:
    """Add runs that were received later; a run that continues the last one replaces it."""
    for run in more:
        last = runs[-1] if runs else None
        if last is None or run.first.number > last.last.number + 1:
            runs.append(run)
        elif run.last.number > last.last.number:
            if run.first.number <= last.first.number:
                runs[-1] = run
            elif run.first.number <= last.last.number or last.last.repeats(run.first):
                runs[-1] = LeaseRun(last.first, run.last.number - last.first.number + 1, run.last)
            else:
                runs.append(run)


class LeaseStep(msgspec.Struct, frozen=True, array_like=True):
    """A run of equal leases, encoded as the difference from the lease before it."""

    #: Number of leases.
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEP)]
    epochs: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    epoch_size: Annotated[int, msgspec.Meta(ge=1, le=2**28)]
    epoch_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
    #: Members that are new, or in another view, or of another weight.
    changed: tuple[Member, ...] = ()
    #: Shards that are no longer members.
    gone: tuple[ShardId, ...] = ()

    @property
    def max_bytes(self) -> int:
        """An upper bound of its encoded size."""
        return _LEASE_BYTES + (len(self.changed) + len(self.gone)) * _MEMBER_BYTES


def difference(
    before: tuple[Member, ...], after: tuple[Member, ...]
) -> tuple[tuple[Member, ...], tuple[int, ...]]:
    """Return the new or changed members, and the shards that are no longer members."""
    known = {member.shard: member for member in before}
    changed = tuple(member for member in after if known.get(member.shard) != member)
    left = known.keys() - {member.shard for member in after}
    return changed, tuple(sorted(left))


def unfold(last: Lease, after: int, steps: Iterable[LeaseStep]) -> list[LeaseRun]:
    """Decode steps that follow lease number `after`, and return the leases that follow `last`.

    Empty if `last` is older than lease `after`, or if the steps hold no lease after `last`.
    """
    runs: list[LeaseRun] = []
    if last.number < after:
        return runs
    for step in steps:
        after += step.count
        count = after - last.number
        if count <= 0:
            continue
        members = _changed(last.members, step)
        first = last = last.following(
            members, epochs=step.epochs, epoch_size=step.epoch_size, epoch_ms=step.epoch_ms
        )
        for _ in range(min(count, step.count) - 1):
            last = last.following()
        runs.append(LeaseRun(first, last.number - first.number + 1, last))
    return runs


def _changed(members: tuple[Member, ...], step: LeaseStep) -> tuple[Member, ...]:
    changed = {member.shard: member for member in step.changed}
    if not changed and not step.gone:
        return members
    gone = set(step.gone)
    kept = [changed.pop(m.shard, m) for m in members if m.shard not in gone]
    return tuple(sorted([*kept, *changed.values()], key=_shard) if changed else kept)


def _shard(member: Member) -> int:
    return member.shard


class Replica(msgspec.Struct, frozen=True, array_like=True):
    """A storage server: its name in the cluster file and its endpoint ("host:port")."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    endpoint: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    #: Fingerprint of the data directory with which it joined its shard; "" before that. A
    #: directory with another fingerprint does not hold the server's promises.
    fingerprint: Annotated[str, msgspec.Meta(max_length=64)] = ""
    #: The region that it reported when it joined its shard; before that, the cluster file's.
    region: Region = ""


@lru_cache(maxsize=16_384)
def fingerprint(identity: str) -> str:
    """Return the public fingerprint of a data directory's secret identity; "" for ""."""
    return blake2b(identity.encode(), digest_size=16).hexdigest() if identity else ""


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """The servers of a shard: its replicas (the primary first), their view, and its state."""

    shard: ShardId
    view: View
    state: ShardState
    replicas: Annotated[tuple[Replica, ...], msgspec.Meta(min_length=1, max_length=16)]

    @property
    def regions(self) -> frozenset[str]:
        """The regions that the shard spans."""
        return frozenset(replica.region for replica in self.replicas)

    def has_servers_of(self, other: Placement) -> bool:
        """Whether both name the same servers in the same order; all else may differ."""
        return [(one.name, one.endpoint) for one in self.replicas] == [
            (one.name, one.endpoint) for one in other.replicas
        ]


@lru_cache(maxsize=64)
def _schedule(members: tuple[Member, ...]) -> Schedule:
    return Schedule([(member.shard, member.weight) for member in members])
