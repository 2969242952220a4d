"""The epoch clock: the leases that a server holds, and the epoch of the current time.

A lease begins as the membership service announced, by this server's own monotonic clock, or close
to the end of the lease before (`begin_of`). Its epochs follow at their nominal length. Without a
next lease, the clock stays in the last epoch. Time determines only which positions are used next,
never which shard owns them. So clocks that differ cost latency and no-ops, but not safety (D39).
Invariants: the leases held form one digest chain (D30). It begins with the first lease after the
trim point, or the first one needed. It has the lease in force.

See docs/protocol.md, section 3.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.core.units import NS_PER_MS
from ziplog.core.view import KEPT_RUNS, LeaseRun, fitting, unfold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.core.view import Lease, LeaseStep

#: Most leases of a run that are verified one by one; an idle month has fewer.
_MAX_VERIFIED: Final = 200_000
#: The length of a lease over its longest shift from the end of the lease before.
_SHIFT_DIVISOR: Final = 128


class LeaseConflictError(Exception):
    """The membership service announced two descriptors for one lease: the server must halt."""

    def __init__(self, what: str) -> None:
        """Create the error; `what`: the contradiction."""
        super().__init__(
            f"{what}. The membership service has forgotten leases, as it does if an old copy of its"
            " directories is in their place: stop the cluster, move these directories away, and run"
            " `ziplog membership rebuild`"
        )


class EpochClock:
    """The leases held by one server of `shard`."""

    def __init__(self, shard: int) -> None:
        self.shard: Final = shard
        #: The lease in force; None until the first one begins.
        self.lease: Lease | None = None
        #: The first offset of the shard's positions in an epoch of `lease`, and their distance; 0:
        #: they have no common distance.
        self._stride = (0, 0)
        #: Time at which `lease` began, in ns.
        self._lease_began_at = 0
        #: How much the last lease begins before the moment planned for it, in ns.
        self._head_start = 0
        #: A lease was announced since the start, so the end of the last one is known.
        self._is_announced = False
        #: Leases that have not begun, each with its begin time.
        self._upcoming: deque[tuple[int, Lease]] = deque()
        #: The newest leases, the last one included, in order and without a gap.
        self.recent: deque[LeaseRun] = deque(maxlen=KEPT_RUNS)
        #: A lease without the shard followed a lease with it, or may have in the present view.
        self.was_excluded = False
        #: End of the shard's own positions, by the leases held now or before.
        self.own_stop = 0
        #: End of the positions of a shard that has left; 0: not known to have left.
        self.left_at = 0

    @property
    def last(self) -> Lease | None:
        """The last lease that this server holds."""
        return self.recent[-1].last if self.recent else None

    @property
    def limit(self) -> int:
        """The first gsn after all leases held; 0 without a lease."""
        return self.recent[-1].last.stop if self.recent else 0

    def restore(self, runs: list[LeaseRun], now: int) -> None:
        """Restore the leases held before a restart; resume in the last epoch of the last one."""
        self.recent.extend(runs)
        self.own_stop = runs[0].first.base
        self._note_own(runs)
        self.lease = lease = runs[-1].last
        self._stride = lease.schedule.stride(self.shard)
        self._lease_began_at = now - lease.epochs * lease.epoch_ms * NS_PER_MS

    def announce(
        self,
        runs: Sequence[LeaseRun],
        begins: int,
        now: int,
        skip_to: int = 0,
        *,
        head_start: int = 0,
    ) -> bool:
        """Add committed leases, the last of which begins at `begins`; False if all are known.

        The last one begins earlier by `head_start`. Leases between those held and the last one are
        over when the last one begins. Leases before one that begins at `skip_to` or earlier may be
        missing: they were trimmed, or are more than a server keeps. If the lease in force is one of
        them, the last one begins at once.

        Raises:
            LeaseConflictError: a lease contradicts one that is held.

        """
        news = False
        for run in runs:
            news |= self._add_run(run, skip_to)
        self._note_own(runs)
        if news:
            self._head_start = head_start
            begins -= head_start
            if self.lease is not None and self.lease.base < self.recent[0].first.base:
                begins = min(begins, now)  # the positions after those in force are not known
            while self._upcoming and self._upcoming[-1][0] >= begins:
                self._upcoming.pop()
            self._upcoming.append((begins, self.recent[-1].last))
            self._is_announced = True
        self.advance(now)
        return news

    def begin_of(self, runs: Sequence[LeaseRun], announced: int) -> int:
        """Return when the last of these leases begins: it follows the one before without a pause.

        These are planned times, without a head start.
        `announced` is late by the delay of the announcement, and delays vary. So the lease begins
        at the end of the lease before, shifted by at most 1/128 of its length towards `announced`.
        If they differ by more than half a lease, it begins at `announced`.
        """
        last, ends = self.last, self.ends_at
        if last is None or ends is None or not self._is_announced or not runs:
            return announced
        ends += self._head_start
        lease = runs[-1].last
        length = lease.epochs * lease.epoch_ms * NS_PER_MS
        if lease.number != last.number + 1 or abs(announced - ends) > length // 2:
            return announced
        shift = length // _SHIFT_DIVISOR
        return min(max(announced, ends - shift), ends + shift)

    def _note_own(self, runs: Sequence[LeaseRun]) -> None:
        """Record the end of the shard's own positions, by the leases held."""
        for run in runs:
            if run.last.stop <= self.limit and run.last.view_of(self.shard) is not None:
                self.own_stop = max(self.own_stop, run.last.stop)

    def unfold(self, after: int, steps: list[LeaseStep], digest: bytes) -> list[LeaseRun]:
        """Return the leases after lease `after` that are not held, rebuilt from their changes.

        Empty if the leases held end before `after`: the next heartbeat reports that. `digest`:
        of the last lease.

        Raises:
            LeaseConflictError: they do not follow the leases held.

        """
        last = self.last
        runs = unfold(last, after, steps) if last is not None else []
        if runs and runs[-1].last.digest != digest:
            raise LeaseConflictError(f"lease {runs[-1].last.number} does not follow {last}")
        return runs

    def _add_run(self, run: LeaseRun, skip_to: int) -> bool:
        """Verify a run and add it; return False if nothing in it is new, or it leaves a gap."""
        if not self.recent:
            self.own_stop = run.first.base
            self.recent.append(run)
            return True
        self._compare(run)
        held = self.recent[-1]
        last = held.last
        if run.last.number <= last.number:
            return False
        if run.first.number > last.number + 1:
            if run.first.base > skip_to:
                return False  # a gap: the next heartbeat requests the missing leases
            self.recent.clear()
            self._upcoming.clear()
            self.own_stop = run.first.base
            self.recent.append(run)
            self.was_excluded = True  # it may have been: the missing leases are unknown
            return True
        if run.first.number == last.number + 1:
            if run.first.predecessor != last.digest or run.first.base != last.stop:
                raise LeaseConflictError(f"lease {run.first.number} does not follow {last}")
            if last.view_of(self.shard) is not None and run.last.view_of(self.shard) is None:
                self.was_excluded = True
            if not last.repeats(run.first):
                self.recent.append(run)
                return True
        else:
            _verify_inside(run, last)
        added = run.last.number - last.number
        self.recent[-1] = LeaseRun(held.first, held.count + added, run.last)
        return True

    def _compare(self, run: LeaseRun) -> None:
        """Compare a repeated run with the leases held, where both are known exactly."""
        for held in self.recent:
            for known in (held.first, held.last):
                for received in (run.first, run.last):
                    if received.number == known.number and received != known:
                        raise LeaseConflictError(
                            f"lease {received.number} was announced twice: {received}"
                        )

    def advance(self, now: int) -> None:
        """Begin the leases that are due."""
        while self._upcoming and (self._upcoming[0][0] <= now or self.lease is None):
            began, lease = self._upcoming.popleft()
            if self.lease is None or lease.members != self.lease.members:
                self._stride = lease.schedule.stride(self.shard)
            self.lease = lease
            self._lease_began_at = min(began, now)

    def current_epoch_base(self, now: int) -> int:
        """Return the first gsn of the current epoch; 0 without a lease."""
        if self._upcoming:
            self.advance(now)
        lease = self.lease
        if lease is None:
            return 0
        index = (now - self._lease_began_at) // (lease.epoch_ms * NS_PER_MS)
        return lease.base + max(0, min(index, lease.epochs - 1)) * lease.epoch_size

    def current_lease_base(self, now: int) -> int:
        """Return the first gsn of the current lease; 0 without one."""
        if self._upcoming:
            self.advance(now)
        return self.lease.base if self.lease is not None else 0

    @property
    def ends_at(self) -> int | None:
        """Time at which the last lease ends, in ns; None without a lease."""
        if self.lease is None:
            return None
        began, lease = self._upcoming[-1] if self._upcoming else (self._lease_began_at, self.lease)
        return began + lease.epochs * lease.epoch_ms * NS_PER_MS

    @property
    def next_lease_at(self) -> int | None:
        """Time at which the next lease begins, in ns; None if none is known."""
        return self._upcoming[0][0] if self._upcoming else None

    def next_epoch_at(self, now: int) -> int | None:
        """Return the time at which the next epoch begins, in ns; None if none is known."""
        if self._upcoming:
            self.advance(now)
        lease, next_lease_at = self.lease, self.next_lease_at
        if lease is None:
            return next_lease_at
        length = lease.epoch_ms * NS_PER_MS
        index = (now - self._lease_began_at) // length + 1
        if index < lease.epochs:
            end = self._lease_began_at + index * length
            return end if next_lease_at is None else min(end, next_lease_at)
        return next_lease_at

    @property
    def positions_end_at(self) -> int | None:
        """Time at which the shard has no more positions, by the leases held; None: it has some.

        Its last lease ends when any later lease begins.
        """
        if self.lease is None:
            return None
        mine = (run for run in reversed(self.recent) if run.last.view_of(self.shard) is not None)
        run = next(mine, None)
        own = run.last.number if run is not None else 0
        leases = ((self._lease_began_at, self.lease), *self._upcoming)
        return next((begins for begins, lease in leases if lease.number > own), None)

    def has_ended(self, gsn: int) -> bool:
        """Whether the shard owns nothing from `gsn` on, in the leases held now or before."""
        if self.left_at and gsn >= self.left_at:
            return True
        return gsn >= self.own_stop or self.next_owned(gsn) >= self.limit

    def lease_of(self, gsn: int) -> Lease | None:
        """Return the lease that contains `gsn`, if it is still held."""
        lease = self.lease
        if lease is not None and lease.base <= gsn < lease.stop:
            return lease
        run = self._run_of(gsn)
        return None if run is None else run.lease_at(gsn)

    def _run_of(self, gsn: int) -> LeaseRun | None:
        for run in reversed(self.recent):
            if run.first.base <= gsn:
                return run if gsn < run.last.stop else None
        return None

    def next_owned(self, gsn: int) -> int:
        """Return the first position at or after `gsn` that the shard owns, by the leases held.

        Returns the end of the leases held if they have no such position.
        """
        lease = self.lease
        if lease is not None and lease.base <= gsn < lease.stop:
            first, distance = self._stride
            if distance:
                rest = (gsn - lease.base) % lease.epoch_size
                gap = (first - rest) % distance
                if rest + gap < lease.epoch_size:
                    return gsn + gap
            owned = lease.next_owned(self.shard, gsn)
            if owned < lease.stop:
                return owned
            gsn = owned
        while (run := self._run_of(gsn)) is not None:
            gsn = run.next_owned(self.shard, gsn)
            if gsn < run.last.stop:
                break
        return gsn

    def first_slots(self, floor: int, count: int) -> list[int]:
        """Return the first `count` consecutive owned gsns of one epoch, at or after `floor`.

        Empty if the leases held have no such gsns.
        """
        gsn = self.next_owned(floor)
        while (lease := self.lease_of(gsn)) is not None:
            gsns = lease.take(self.shard, gsn, count)
            if gsns:
                return gsns
            gsn = lease.epoch_base(lease.epoch_at(gsn) + 1)
            if lease.schedule.slot_from(self.shard, lease.epoch_size) < count:
                run = self._run_of(gsn - 1)
                assert run is not None, "a lease of no run"
                gsn = run.last.stop  # no epoch of these leases is large enough
            gsn = self.next_owned(gsn)
        return []

    @property
    def epoch_slots(self) -> int:
        """Positions of this shard in an epoch of the last lease; 0: it is not a member."""
        last = self.last
        if last is None or last.view_of(self.shard) is None:
            return 0
        return last.schedule.slot_from(self.shard, last.epoch_size)

    def epoch_at(self, gsn: int) -> int:
        """Return the epoch of a gsn within the leases held."""
        lease = self.lease_of(gsn)
        assert lease is not None, "a position outside the leases held"
        return lease.epoch_at(gsn)

    def begins_epoch(self, gsn: int) -> bool:
        """Whether an epoch begins at `gsn`; True if its lease is not known."""
        lease = self.lease_of(gsn)
        return lease is None or (gsn - lease.base) % lease.epoch_size == 0

    def owns(self, gsn: int) -> bool | None:
        """Whether the shard owns `gsn`; None if its lease is not held."""
        lease = self.lease_of(gsn)
        return None if lease is None else lease.owner(gsn) == self.shard

    def slots_between(self, start: int, stop: int) -> int | None:
        """Return the number of owned slots from `start` to `stop` (negative backwards).

        None if they are not in one epoch, or their lease is not held.
        """
        lease = self.lease_of(start)
        if lease is None or not lease.base <= stop < lease.stop:
            return None
        if lease.epoch_at(start) != lease.epoch_at(stop):
            return None
        return lease.slot(self.shard, stop) - lease.slot(self.shard, start)

    def runs_after(self, number: int, digest: bytes) -> list[LeaseRun]:
        """Return the leases held after lease `number`, which has this digest; 0: all leases.

        If they do not fit a message, returns the oldest of them.
        """
        found: list[LeaseRun] = []
        for run in reversed(self.recent):
            if run.last.number <= number:
                break
            found.append(run.after(number, digest) if run.first.number <= number else run)
        return fitting(found[::-1])


def _verify_inside(run: LeaseRun, held: Lease) -> None:
    """Verify that a run which contains the lease `held` only repeats that lease."""
    steps = run.last.number - held.number
    if steps > _MAX_VERIFIED:
        return
    lease = held
    for _ in range(steps):
        lease = lease.following()
    if lease != run.last:
        raise LeaseConflictError(f"lease {run.last.number} does not follow {held}")
