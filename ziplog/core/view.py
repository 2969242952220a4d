"""Leases and placements: who may assign which gsns, and where each shard's servers are.

A *lease* is a committed, irrevocable descriptor: a schedule and a run of equally long epochs. Its
gsns are [base, stop); epoch number `first_epoch + i` has [base + i * epoch_size, ... + epoch_size)
and repeats the schedule's round from its own base. Leases follow each other without a gap, in gsns
and in epochs, and each carries the digest of its predecessor (docs/protocol.md, "Leases").
A *placement* says where a shard's replicas listen and in which view they are.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from ziplog.core.gsn import MAX_ROUND, Schedule
from ziplog.types import Epoch, ShardId, View

if TYPE_CHECKING:
    from collections.abc import Iterable

ShardState = Literal["joining", "live", "parked", "recovering", "leaving", "finalized"]
NodeState = Literal["starting", "up", "suspect", "down", "limbo"]
#: What a storage server says of itself: it serves its view; it promised a recovery to store nothing
#: more; it holds all of a new view, which has not begun; what it holds may be old.
ServerState = Literal["starting", "up", "frozen", "joined", "limbo"]

#: Members of a lease from which on it is told by what has changed, and servers are told of no other
#: shard than their own.
MANY_MEMBERS: Final = 17
#: Equal leases that one step may stand for.
MAX_STEP: Final = 1000
#: Runs of equal leases that a storage server keeps: the newest ones.
KEPT_RUNS: Final = 64
#: Lease runs in one message, in bytes; a single run may be larger, and always fits a frame.
MAX_RUNS_BYTES: Final = 4 * 1024 * 1024
#: The most that a member, a lease without members and a run without leases take, encoded, in bytes.
_MEMBER_BYTES: Final = 16
_LEASE_BYTES: Final = 64
_RUN_BYTES: Final = 10

#: The digest that the first lease names as its predecessor's.
NO_DIGEST: Final = b"\0" * 8

Digest = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Weight = Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUND)]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A shard that owns positions of a lease."""

    shard: ShardId
    view: View
    weight: Weight


class Lease(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The right to assign the gsns [base, stop), shared out by the members' weights.

    `dict=True` is for the cached properties; they are no part of its value.
    """

    #: 1 for the first, one more for each.
    number: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    #: Digest of the lease before this one.
    predecessor: Digest
    base: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    first_epoch: Epoch
    #: How many epochs.
    epochs: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    #: gsns in an epoch.
    epoch_size: Annotated[int, msgspec.Meta(ge=1, le=2**28)]
    #: Nominal length of an epoch.
    epoch_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
    #: Sorted by shard.
    members: tuple[Member, ...]

    @cached_property
    def stop(self) -> int:
        """The first gsn after the lease."""
        return self.base + self.epochs * self.epoch_size

    @cached_property
    def digest(self) -> bytes:
        """What the next lease must name as its predecessor."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=8).digest()

    @cached_property
    def schedule(self) -> Schedule:
        """The owner table (made once for equal members)."""
        return _schedule(self.members)

    @cached_property
    def _views(self) -> dict[int, int]:
        return {member.shard: member.view for member in self.members}

    def view_of(self, shard: int) -> int | None:
        """Return the view in which `shard` is a member, or None if it is none."""
        return self._views.get(shard)

    def epoch_at(self, gsn: int) -> int:
        """Return the epoch of a gsn of this lease."""
        return self.first_epoch + (gsn - self.base) // self.epoch_size

    def epoch_base(self, epoch: int) -> int:
        """Return the first gsn of an epoch of this lease (or of the one right after it)."""
        return self.base + (epoch - self.first_epoch) * self.epoch_size

    def owner(self, gsn: int) -> int:
        """Return the shard that owns a gsn of this lease."""
        return self.schedule.owner((gsn - self.base) % self.epoch_size)

    def next_owned(self, shard: int, gsn: int) -> int:
        """Return the first gsn at or after `gsn` that `shard` owns, or `stop` if there is none."""
        schedule, size = self.schedule, self.epoch_size
        if shard not in schedule.weights:
            return self.stop
        gsn = max(gsn, self.base)
        rest = (gsn - self.base) % size
        offset = schedule.next_offset(shard, rest)
        if offset >= size:
            # Nothing is left of this epoch: the first of the next one, if epochs have any.
            first = schedule.offset(shard, 0)
            if first >= size:
                return self.stop
            offset = size + first
        return min(gsn - rest + offset, self.stop)

    def take(self, shard: int, gsn: int, count: int) -> list[int]:
        """Return `count` consecutive gsns of `shard` from `gsn` on, all of gsn's epoch.

        Empty if the epoch has fewer left. `gsn` must be one that the shard owns.
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
        """Return the lease right after this one, alike but for what is named."""
        return Lease(
            number=self.number + 1,
            predecessor=self.digest,
            base=self.stop,
            first_epoch=self.first_epoch + self.epochs,
            epochs=epochs or self.epochs,
            epoch_size=epoch_size or self.epoch_size,
            epoch_ms=epoch_ms or self.epoch_ms,
            members=self.members if members is None else members,
        )

    def repeats(self, successor: Lease) -> bool:
        """Whether `successor` is what `following()` gives: the same again."""
        return successor == self.following()


class LeaseRun(msgspec.Struct, frozen=True, array_like=True):
    """Equal leases in a row: the first one, how many, and the last (D32: run-length encoded).

    Invariant: `last` is `first` followed `count - 1` times by itself.
    """

    first: Lease
    count: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    last: Lease

    @property
    def max_bytes(self) -> int:
        """An upper bound of its encoded length; no more than twice that for large schedules."""
        members = len(self.first.members) + len(self.last.members)
        return _RUN_BYTES + 2 * _LEASE_BYTES + members * _MEMBER_BYTES

    def lease_at(self, gsn: int) -> Lease:
        """Return the lease that holds `gsn`; its predecessor's digest is exact only at the ends."""
        if gsn >= self.last.base:
            return self.last
        step = (gsn - self.first.base) // (self.first.stop - self.first.base)
        return self.numbered(self.first.number + step, NO_DIGEST)

    def numbered(self, number: int, predecessor: bytes) -> Lease:
        """Return lease `number`; what `predecessor` says counts between the ends only."""
        first, step = self.first, number - self.first.number
        assert 0 <= step < self.count, "the lease is not of this run"
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
        """Return the part of this run that follows its lease `number`, whose digest is given."""
        first = self.numbered(number + 1, digest)
        return LeaseRun(first, self.last.number - number, self.last)


def run_of(lease: Lease) -> LeaseRun:
    """Return the run that holds one lease."""
    return LeaseRun(lease, 1, lease)


class LeaseStep(msgspec.Struct, frozen=True, array_like=True):
    """Equal leases in a row, by what is other in them than in the lease before."""

    #: How many.
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_STEP)]
    epochs: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    epoch_size: Annotated[int, msgspec.Meta(ge=1, le=2**28)]
    epoch_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
    #: Members that are new, or in another view, or of another weight.
    changed: tuple[Member, ...] = ()
    #: Who is no member any more.
    gone: tuple[ShardId, ...] = ()

    @property
    def max_bytes(self) -> int:
        """An upper bound of its encoded length."""
        return _LEASE_BYTES + (len(self.changed) + len(self.gone)) * _MEMBER_BYTES


def difference(
    before: tuple[Member, ...], after: tuple[Member, ...]
) -> tuple[tuple[Member, ...], tuple[int, ...]]:
    """Return who is another member than before, or a new one, and who is none any more."""
    known = {member.shard: member for member in before}
    changed = tuple(member for member in after if known.get(member.shard) != member)
    left = known.keys() - {member.shard for member in after}
    return changed, tuple(sorted(left))


def unfold(last: Lease, after: int, steps: Iterable[LeaseStep]) -> list[LeaseRun]:
    """Return the leases that follow `last`, of those that follow lease `after` by these steps.

    Empty if `last` does not reach as far as `after`, or they hold nothing that follows it.
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
    """A storage server: its name in the cluster file and where it listens ("host:port")."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    endpoint: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    #: Of the data directory with which it became part of its shard; "" before that. Another
    #: directory under the same name has forgotten what the server promised.
    fingerprint: Annotated[str, msgspec.Meta(max_length=64)] = ""


@lru_cache(maxsize=16_384)
def fingerprint(identity: str) -> str:
    """Return what everybody may know of a data directory's secret identity; of "": ""."""
    return blake2b(identity.encode(), digest_size=16).hexdigest() if identity else ""


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """Where a shard is: its replicas (the primary first), their view, and its state."""

    shard: ShardId
    view: View
    state: ShardState
    replicas: Annotated[tuple[Replica, ...], msgspec.Meta(min_length=1, max_length=16)]

    def has_servers_of(self, other: Placement) -> bool:
        """Whether both are of the same servers, in the same order, whatever their directories."""
        return [(one.name, one.endpoint) for one in self.replicas] == [
            (one.name, one.endpoint) for one in other.replicas
        ]


@lru_cache(maxsize=64)
def _schedule(members: tuple[Member, ...]) -> Schedule:
    return Schedule([(member.shard, member.weight) for member in members])
