"""The leases that a server holds, and the epoch that its clock is in.

A lease begins when the membership service said it would, by this server's own monotonic clock, and
its epochs follow at their nominal length. Without a next lease the clock stays in the last epoch.
Time decides only which positions are taken next, never who owns them, so clocks that differ cost
latency and no-ops but no safety (D39). Invariant: leases held form one digest chain (D30).

See docs/protocol.md, section 3.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.view import run_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.view import Lease, LeaseRun

_NS_PER_MS: Final = 1_000_000
#: Leases kept for subscribers that have not passed them yet.
_KEPT_LEASES: Final = 64
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
        self._began = 0
        #: Leases that are yet to begin, with the time when each does.
        self._coming: deque[tuple[int, Lease]] = deque()
        #: The newest leases, the last one included, in order.
        self.recent: deque[Lease] = deque(maxlen=_KEPT_LEASES)

    @property
    def last(self) -> Lease | None:
        """The last lease that this server holds."""
        return self.recent[-1] if self.recent else None

    @property
    def limit(self) -> int:
        """The first gsn beyond every lease held; 0 if there is none."""
        return self.recent[-1].stop if self.recent else 0

    def restore(self, lease: Lease, now: int) -> None:
        """Go on with a lease that was in force before a restart, in its last epoch."""
        self.recent.append(lease)
        self.lease = lease
        self._began = now - lease.epochs * lease.epoch_ms * _NS_PER_MS

    def announce(self, runs: Iterable[LeaseRun], begins: int, now: int) -> bool:
        """Take committed leases, the last of which begins at `begins`; False if all were known.

        Raises:
            LeaseConflictError: they contradict a lease held.

        """
        news = False
        for run in runs:
            news |= self._verify(run)
        if news:
            last = self.recent[-1]
            while self._coming and self._coming[-1][0] >= begins:
                self._coming.pop()
            self._coming.append((begins, last))
        self.turn(now)
        return news

    def _verify(self, run: LeaseRun) -> bool:
        held = self.last
        if held is None:
            self._hold(run)
            return True
        if run.last.number <= held.number:
            if run.last.number == held.number and run.last != held:
                raise LeaseConflictError(f"lease {held.number} was announced twice: {run.last}")
            return False
        if run.first.number == held.number + 1:
            if run.first.predecessor != held.digest or run.first.base != held.stop:
                raise LeaseConflictError(f"lease {run.first.number} does not follow {held}")
        elif run.first.number > held.number + 1:
            return False  # a gap: the next heartbeat asks for what is missing
        else:
            self._verify_inside(run, held)
        self._hold(run)
        return True

    def _verify_inside(self, run: LeaseRun, held: Lease) -> None:
        steps = run.last.number - held.number
        if steps > _MAX_VERIFIED:
            return
        lease = held
        for _ in range(steps):
            lease = lease.following()
        if lease != run.last:
            raise LeaseConflictError(f"lease {run.last.number} does not follow {held}")

    def _hold(self, run: LeaseRun) -> None:
        if run.count > 1 and (not self.recent or self.recent[-1].number < run.first.number):
            self.recent.append(run.first)
        self.recent.append(run.last)

    def turn(self, now: int) -> None:
        """Begin the leases that are due."""
        while self._coming and (self._coming[0][0] <= now or self.lease is None):
            began, self.lease = self._coming.popleft()
            self._began = min(began, now)

    def due(self, now: int) -> int:
        """Return the first gsn of the epoch that the clock is in; 0 without a lease."""
        if self._coming:
            self.turn(now)
        lease = self.lease
        if lease is None:
            return 0
        index = (now - self._began) // (lease.epoch_ms * _NS_PER_MS)
        return lease.base + max(0, min(index, lease.epochs - 1)) * lease.epoch_size

    def next_turn(self, now: int) -> int | None:
        """Return when the next epoch begins, in ns; None if no next one is known."""
        lease = self.lease
        turn = self._coming[0][0] if self._coming else None
        if lease is None:
            return turn
        length = lease.epoch_ms * _NS_PER_MS
        index = (now - self._began) // length + 1
        if index < lease.epochs:
            end = self._began + index * length
            return end if turn is None else min(end, turn)
        return turn

    @property
    def epoch_ns(self) -> int:
        """The nominal length of an epoch now."""
        return self.lease.epoch_ms * _NS_PER_MS if self.lease else 10 * _NS_PER_MS

    def lease_of(self, gsn: int) -> Lease | None:
        """Return the held lease that holds `gsn`, if it is still known."""
        lease = self.lease
        if lease is not None and lease.base <= gsn < lease.stop:
            return lease
        for other in reversed(self.recent):
            if other.base <= gsn < other.stop:
                return other
        return None

    def next_owned(self, gsn: int) -> int:
        """Return the first position at or after `gsn` that the shard owns, as far as is known.

        That is the end of the leases held if they have no such position.
        """
        for _ in range(_KEPT_LEASES + 1):
            lease = self.lease_of(gsn)
            if lease is None:
                break
            owned = lease.next_owned(self.shard, gsn)
            if owned < lease.stop:
                return owned
            gsn = lease.stop
        return gsn

    def take(self, floor: int, count: int) -> list[int]:
        """Return the first `count` consecutive owned gsns of one epoch from `floor` on.

        Empty if the leases held have none.
        """
        gsn = self.next_owned(floor)
        while (lease := self.lease_of(gsn)) is not None:
            gsns = lease.take(self.shard, gsn, count)
            if gsns:
                return gsns
            gsn = self.next_owned(lease.epoch_base(lease.epoch_at(gsn) + 1))
        return []

    def epoch_at(self, gsn: int) -> int:
        """Return the epoch of a gsn that was just taken."""
        lease = self.lease_of(gsn)
        assert lease is not None, "a position outside the leases held"
        return lease.epoch_at(gsn)

    def owns(self, gsn: int) -> bool | None:
        """Whether the shard owns `gsn`; None if the lease is not known (any more, or yet)."""
        lease = self.lease_of(gsn)
        return None if lease is None else lease.owner(gsn) == self.shard

    def slots_between(self, start: int, stop: int) -> int | None:
        """Return how many owned slots lie from `start` to `stop` (negative backwards).

        None if they are not of one lease.
        """
        lease = self.lease_of(start)
        if lease is None or not lease.base <= stop < lease.stop:
            return None
        return lease.slot(self.shard, stop) - lease.slot(self.shard, start)

    def runs_after(self, number: int) -> list[LeaseRun]:
        """Return the kept leases with a greater number, for a subscriber."""
        last = self.last
        if last is None or last.number <= number:
            return []
        return [run_of(lease) for lease in self.recent if lease.number > number]
