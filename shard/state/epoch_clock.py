"""The leases that a server holds, and the epoch that its clock is in.

A lease begins when the membership service said it would, by this server's own monotonic clock, and
its epochs follow at their nominal length. Without a next lease the clock stays in the last epoch.
Time decides only which positions are taken next, never who owns them, so clocks that differ cost
latency and no-ops but no safety (D39). Invariant: leases held form one digest chain (D30), which
begins with the first lease after the trim point, or with the first one that this server needs.

See docs/protocol.md, section 3.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.core.view import KEPT_RUNS, MAX_RUNS_BYTES, LeaseRun, unfold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.core.view import Lease, LeaseStep

_NS_PER_MS: Final = 1_000_000
#: How many leases of a run are verified one by one: more than a month of idleness.
_MAX_VERIFIED: Final = 200_000


class LeaseConflictError(Exception):
    """The membership service named two descriptors for one lease: halt."""


class EpochClock:
    """The leases held by one server of `shard`."""

    def __init__(self, shard: int) -> None:
        self.shard: Final = shard
        #: The lease in force; None until the first one begins.
        self.lease: Lease | None = None
        #: When `lease` began, in ns.
        self._lease_began_at = 0
        #: Leases that are yet to begin, with the time when each does.
        self._upcoming: deque[tuple[int, Lease]] = deque()
        #: The newest leases, the last one included, in order and without a gap.
        self.recent: deque[LeaseRun] = deque(maxlen=KEPT_RUNS)
        #: There was a lease without the shard behind one with it.
        self.was_excluded = False
        #: The shard owns nothing from here on, by the leases held now or before.
        self.own_stop = 0
        #: The shard has left, and owns nothing from here on; 0: that is not known.
        self.left_at = 0

    @property
    def last(self) -> Lease | None:
        """The last lease that this server holds."""
        return self.recent[-1].last if self.recent else None

    @property
    def limit(self) -> int:
        """The first gsn beyond every lease held; 0 if there is none."""
        return self.recent[-1].last.stop if self.recent else 0

    def restore(self, runs: list[LeaseRun], now: int) -> None:
        """Go on with the leases held before a restart, in the last epoch of the last one."""
        self.recent.extend(runs)
        self.own_stop = runs[0].first.base
        self._note_own(runs)
        self.lease = lease = runs[-1].last
        self._lease_began_at = now - lease.epochs * lease.epoch_ms * _NS_PER_MS

    def announce(self, runs: Sequence[LeaseRun], begins: int, now: int, skip_to: int = 0) -> bool:
        """Take committed leases, the last of which begins at `begins`; False if all were known.

        Leases between those held and the last one are over when the last one begins, or never
        begin: time decides only what is taken next. Leases before one that begins at `skip_to` or
        earlier may be missing: they were trimmed, or are more than a server keeps.

        Raises:
            LeaseConflictError: they contradict a lease held.

        """
        news = False
        for run in runs:
            news |= self._add_run(run, skip_to)
        self._note_own(runs)
        if news:
            while self._upcoming and self._upcoming[-1][0] >= begins:
                self._upcoming.pop()
            self._upcoming.append((begins, self.recent[-1].last))
        self.advance(now)
        return news

    def _note_own(self, runs: Sequence[LeaseRun]) -> None:
        """Note where the shard's own positions end, by leases that are held."""
        for run in runs:
            if run.last.stop <= self.limit and run.last.view_of(self.shard) is not None:
                self.own_stop = max(self.own_stop, run.last.stop)

    def unfold(self, after: int, steps: list[LeaseStep], digest: bytes) -> list[LeaseRun]:
        """Return the leases not held of those that follow lease `after`, told by what changes.

        Empty if what is held does not reach as far: the next heartbeat says so. `digest`: of the
        last one.

        Raises:
            LeaseConflictError: they are not what follows the leases held.

        """
        last = self.last
        runs = unfold(last, after, steps) if last is not None else []
        if runs and runs[-1].last.digest != digest:
            raise LeaseConflictError(f"lease {runs[-1].last.number} does not follow {last}")
        return runs

    def _add_run(self, run: LeaseRun, skip_to: int) -> bool:
        """Verify a run and keep it; False if it holds nothing new, or leaves a gap."""
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
                return False  # a gap: the next heartbeat asks for what is missing
            self.recent.clear()
            self._upcoming.clear()
            self.own_stop = run.first.base
            self.recent.append(run)
            self.was_excluded = True  # for all that is known
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
        """Compare what is told again with what is held, where both are known exactly."""
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
            began, self.lease = self._upcoming.popleft()
            self._lease_began_at = min(began, now)

    def current_epoch_base(self, now: int) -> int:
        """Return the first gsn of the epoch that the clock is in; 0 without a lease."""
        if self._upcoming:
            self.advance(now)
        lease = self.lease
        if lease is None:
            return 0
        index = (now - self._lease_began_at) // (lease.epoch_ms * _NS_PER_MS)
        return lease.base + max(0, min(index, lease.epochs - 1)) * lease.epoch_size

    def current_lease_base(self, now: int) -> int:
        """Return the first gsn of the lease that is in force; 0 without one."""
        if self._upcoming:
            self.advance(now)
        return self.lease.base if self.lease is not None else 0

    @property
    def next_lease_at(self) -> int | None:
        """When the next lease begins, in ns; None if none is known."""
        return self._upcoming[0][0] if self._upcoming else None

    def next_epoch_at(self, now: int) -> int | None:
        """Return when the next epoch begins, in ns; None if no next one is known."""
        lease = self.lease
        turn = self._upcoming[0][0] if self._upcoming else None
        if lease is None:
            return turn
        length = lease.epoch_ms * _NS_PER_MS
        index = (now - self._lease_began_at) // length + 1
        if index < lease.epochs:
            end = self._lease_began_at + index * length
            return end if turn is None else min(end, turn)
        return turn

    @property
    def positions_end_at(self) -> int | None:
        """When the shard has no more positions, by the leases held; None: it still has some.

        Its last lease is over when any later one begins.
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
        """Return the held lease that holds `gsn`, if it is still known."""
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
        """Return the first position at or after `gsn` that the shard owns, as far as is known.

        That is the end of the leases held if they have no such position.
        """
        lease = self.lease
        if lease is not None and lease.base <= gsn < lease.stop:
            owned = lease.next_owned(self.shard, gsn)
            if owned < lease.stop:
                return owned
            gsn = owned
        while (run := self._run_of(gsn)) is not None:
            # All leases of a run are alike: if the rest of one and the next have none, none has.
            for _ in range(2):
                lease = run.lease_at(gsn)
                gsn = lease.next_owned(self.shard, gsn)
                if gsn < lease.stop:
                    return gsn
                if gsn >= run.last.stop:
                    break
            else:
                gsn = run.last.stop
        return gsn

    def first_slots(self, floor: int, count: int) -> list[int]:
        """Return the first `count` consecutive owned gsns of one epoch from `floor` on.

        Empty if the leases held have none.
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
        """How many positions an epoch of the last lease has for this shard; 0: it is no member."""
        last = self.last
        if last is None or last.view_of(self.shard) is None:
            return 0
        return last.schedule.slot_from(self.shard, last.epoch_size)

    def epoch_at(self, gsn: int) -> int:
        """Return the epoch of a gsn that was just taken."""
        lease = self.lease_of(gsn)
        assert lease is not None, "a position outside the leases held"
        return lease.epoch_at(gsn)

    def begins_epoch(self, gsn: int) -> bool:
        """Whether an epoch begins at `gsn`, as far as is known."""
        lease = self.lease_of(gsn)
        return lease is None or (gsn - lease.base) % lease.epoch_size == 0

    def owns(self, gsn: int) -> bool | None:
        """Whether the shard owns `gsn`; None if the lease is not known (any more, or yet)."""
        lease = self.lease_of(gsn)
        return None if lease is None else lease.owner(gsn) == self.shard

    def slots_between(self, start: int, stop: int) -> int | None:
        """Return how many owned slots lie from `start` to `stop` (negative backwards).

        None if they are not of one epoch, or their lease is not known.
        """
        lease = self.lease_of(start)
        if lease is None or not lease.base <= stop < lease.stop:
            return None
        if lease.epoch_at(start) != lease.epoch_at(stop):
            return None
        return lease.slot(self.shard, stop) - lease.slot(self.shard, start)

    def runs_after(self, number: int, digest: bytes) -> list[LeaseRun]:
        """Return the kept leases that follow lease `number`, which has this digest; 0: all.

        If they do not fit a message, the oldest of them.
        """
        found: list[LeaseRun] = []
        for run in reversed(self.recent):
            if run.last.number <= number:
                break
            found.append(run.after(number, digest) if run.first.number <= number else run)
        size, runs = 0, found[::-1]
        for index, run in enumerate(runs):
            size += run.max_bytes
            if index and size > MAX_RUNS_BYTES:
                return runs[:index]
        return runs


def _verify_inside(run: LeaseRun, held: Lease) -> None:
    """Verify that a run which holds the lease `held` goes on with just that lease repeated."""
    steps = run.last.number - held.number
    if steps > _MAX_VERIFIED:
        return
    lease = held
    for _ in range(steps):
        lease = lease.following()
    if lease != run.last:
        raise LeaseConflictError(f"lease {run.last.number} does not follow {held}")
