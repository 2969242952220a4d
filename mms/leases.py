"""When the next lease is due, what it looks like, and when it starts.

    no lease -> first lease, once the shards reported
    lease runs -> half-way through, the next one is proposed -> it starts when this one ends
    at once: work after idleness, other members, a shard that failed or is back, a new leader
    at once, but an epoch after the last one that began so, and ten a second: other weights

A lease has 16 epochs or more, so that short epochs do not mean many commands. Rules: at most one
proposal is under way; the longer the history is, the rarer are leases that differ in weights or
epochs only, so that it stays bounded without a trim. Invariant: `starts` belongs to `last`, the
last committed lease.

See docs/protocol.md, sections 3 and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mms.proposals import RETRY_NS
from mms.state import MAX_LEASE_SIZE
from ziplog.core.view import NO_DIGEST, Lease

if TYPE_CHECKING:
    from ziplog.core.view import Member

_MS: Final = 1_000_000
_EPOCHS: Final = 16
_IDLE_EPOCH_MS: Final = 1000
#: No lease is nominally shorter: consensus carries at most ten commands a second (D32).
_MIN_LEASE_MS: Final = 160
#: A proposal that was refused is made again after this time.
_REFUSED_NS: Final = 10 * _MS
#: Leases that start at once for new members' sake keep this distance.
_MEMBERS_NS: Final = 1000 * _MS
#: Leases that start at once for new weights' sake: one in this time in the long run, and so many at
#: first.
_MIN_WEIGHTS_INTERVAL_NS: Final = 100 * _MS
#: With more than 400 members, so long for each of them: a lease costs everybody time for all.
_INTERVAL_PER_MEMBER_NS: Final = _MS // 4
_WEIGHTS_BURST: Final = 10
#: Other weights cost twice as much with each so many bytes of runs in the history.
HISTORY_STEP_BYTES: Final = 4 * 1024 * 1024
#: They cost no more than this: an hour.
_MAX_WEIGHTS_INTERVAL_NS: Final = 3_600_000 * _MS


class LeasePlan:
    """The timing of leases at the leader; elsewhere a record of them."""

    def __init__(self, epoch_ms: int) -> None:
        self._epoch_ms: Final = epoch_ms
        self._idle_ms: Final = max(_IDLE_EPOCH_MS, epoch_ms)
        #: The last committed lease, and when it starts by our clock, in ns.
        self.last: Lease | None = None
        self.starts = 0
        self._previous: Lease | None = None
        self._proposed_at: int | None = None
        self._at_once = True
        self._members_at: int | None = None
        #: When the last lease began that ended another one early.
        self._cut_at = 0
        #: Until when all leases for new weights' sake are paid for.
        self._next_allowed_at = 0
        #: How long leases stay the same because the history of them is long, in ns.
        self.weights_interval_ns = 0

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the last committed lease."""
        return self.last.members if self.last is not None else ()

    def start_leading(self, now: int) -> None:
        """Begin to lead: nobody knows when the last lease started, so the next does at once."""
        self.starts = now
        self._proposed_at = None
        self._at_once = True

    def due_at(
        self, now: int, *, active: bool, other_members: bool, other_weights: bool = False
    ) -> int:
        """Return when to propose the next lease, in ns; not later than `now`: now."""
        if self._proposed_at is not None:
            return self._proposed_at + RETRY_NS
        last = self.last
        if last is None or self._at_once or (active and last.epoch_ms != self._epoch_ms):
            return now
        half = self.starts + _length(last) // 2
        if other_members:
            since = self._members_at
            half = now if since is None else min(half, since + _MEMBERS_NS)
        return min(half, self._weights_due()) if other_weights else half

    def _weights_due(self) -> int:
        return max(
            self._cut_at + self._epoch_ms * _MS,
            self._next_allowed_at - (_WEIGHTS_BURST - 1) * self._weights_spacing,
        )

    @property
    def _weights_spacing(self) -> int:
        return max(
            _MIN_WEIGHTS_INTERVAL_NS,
            len(self.members) * _INTERVAL_PER_MEMBER_NS,
            self.weights_interval_ns,
        )

    def set_history_size(self, history_bytes: int, now: int) -> None:
        """Note how long the history is; all of it is kept until the log is trimmed."""
        doublings = min(history_bytes // HISTORY_STEP_BYTES, 20)
        self.weights_interval_ns = (
            min(_MIN_WEIGHTS_INTERVAL_NS << doublings, _MAX_WEIGHTS_INTERVAL_NS) if doublings else 0
        )
        self._next_allowed_at = min(
            self._next_allowed_at, now + _WEIGHTS_BURST * self._weights_spacing
        )

    def propose(
        self, members: tuple[Member, ...], now: int, *, active: bool, other_members: bool
    ) -> Lease:
        """Return the lease to propose. Other weights than the last one's are worth it at once."""
        last = self.last
        epoch_ms = self._epoch_ms if active else self._idle_ms
        epochs, epoch_size = shape(epoch_ms)
        self._proposed_at = now
        if last is None or (active and last.epoch_ms != epoch_ms) or other_members:
            self._at_once = True
        if other_members:
            self._members_at = now
        elif last is not None and self._keeps_weights(now):
            members = last.members
        elif last is not None and not self._at_once and members != last.members:
            self._allow_new_weights(now)
        if last is None:
            return Lease(1, NO_DIGEST, 1, 0, epochs, epoch_size, epoch_ms, members)
        same = members == last.members
        return last.following(
            last.members if same else members,
            epochs=epochs,
            epoch_size=epoch_size,
            epoch_ms=epoch_ms,
        )

    def _keeps_weights(self, now: int) -> bool:
        """Whether the next lease is to have the weights of the last one, to be of the same run."""
        return self.weights_interval_ns > 0 and not self._at_once and now < self._weights_due()

    def _allow_new_weights(self, now: int) -> None:
        """Have a lease with other weights start at once, if one may."""
        if now >= self._weights_due():
            self._next_allowed_at = max(self._next_allowed_at, now) + self._weights_spacing
            self._at_once = True

    def propose_at_once(self) -> None:
        """Propose the next lease at once, and start it at once: a shard failed, or is back."""
        self._proposed_at = None
        self._at_once = True

    def on_refused(self, now: int) -> None:
        """Note that a lease was refused: what it was made from had changed. Make another soon."""
        self._proposed_at = now + _REFUSED_NS - RETRY_NS

    def on_committed(self, lease: Lease, now: int, *, leading: bool) -> None:
        """Note that a lease was committed: it starts after the one before it, or at once.

        When it starts is the leader's to say; the others take it that it does so now.
        """
        previous = self.last
        at_once = previous is None or self._at_once or not leading
        ends = now if previous is None or at_once else self.starts + _length(previous)
        if at_once:
            self._cut_at = now
        self._previous, self.last, self.starts = previous, lease, max(now, ends)
        self._proposed_at, self._at_once = None, False

    def on_restored(self, last: Lease | None, now: int) -> None:
        """Note the last lease of a snapshot."""
        self._previous, self.last, self.starts = None, last, now

    def current(self, now: int) -> list[Lease]:
        """Return the lease that runs, and the one that will follow if it is committed."""
        if self.last is None:
            return []
        if now < self.starts and self._previous is not None:
            return [self._previous, self.last]
        return [self.last]

    def epoch(self, now: int) -> int:
        """Return the epoch that servers are in, about."""
        running = self.current(now)
        if not running:
            return 0
        lease = running[0]
        ends = self.starts if len(running) == 2 else self.starts + _length(lease)
        index = lease.epochs - 1 - (ends - now) // (lease.epoch_ms * _MS)
        return lease.first_epoch + min(max(index, 0), lease.epochs - 1)


def shape(epoch_ms: int) -> tuple[int, int]:
    """Return the number of epochs of a lease and their size in positions."""
    epochs = _EPOCHS
    while epochs * epoch_ms < _MIN_LEASE_MS:
        epochs *= 2
    return epochs, MAX_LEASE_SIZE // epochs


def _length(lease: Lease) -> int:
    return lease.epochs * lease.epoch_ms * _MS
