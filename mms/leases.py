"""Lease plan: when the next lease is due, its contents, and when it starts.

    no lease -> first lease, once the shards reported
    lease runs -> half-way through, the next one is proposed -> it starts when this one ends
    starts at once: work after idleness, other members, a failed or recovered shard, a new leader
    starts at once, rate limited to one an epoch and ten a second: other weights

A lease has at least 16 epochs, so that short epochs do not need many commands. Rules: at most one
proposal is pending, or lost; a lease that is needed at once meanwhile follows its outcome. The
longer the lease history, the rarer are leases that differ only in weights or epochs, so the history
stays bounded without a trim. Invariant: `starts` belongs to `last`, the
last committed lease.

See docs/protocol.md, sections 3 and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mms.state import MAX_LEASE_SIZE
from ziplog.core.distance import min_lease_ms, proposal_retry_ns
from ziplog.core.units import NS_PER_MS
from ziplog.core.view import NO_DIGEST, Lease

if TYPE_CHECKING:
    from ziplog.core.view import Member

_EPOCHS: Final = 16
_IDLE_EPOCH_MS: Final = 1000
#: Delay before a new proposal after a refused one.
_REFUSED_NS: Final = 10 * NS_PER_MS
#: Minimum interval between leases that are proposed early because of other members.
_MEMBERS_NS: Final = 1000 * NS_PER_MS
#: Token bucket for leases that start at once because of new weights: the interval between two in
#: the long run, and the number of tokens.
_MIN_WEIGHTS_INTERVAL_NS: Final = 100 * NS_PER_MS
#: The interval is at least this time for each member (it counts above 400 members).
_INTERVAL_PER_MEMBER_NS: Final = NS_PER_MS // 4
_WEIGHTS_BURST: Final = 10
#: The interval doubles with each such amount of lease history.
HISTORY_STEP_BYTES: Final = 4 * 1024 * 1024
#: Maximum of the interval: one hour.
_MAX_WEIGHTS_INTERVAL_NS: Final = 3_600_000 * NS_PER_MS


class LeasePlan:
    """Timing of leases at the leader; on followers, a record of them."""

    def __init__(self, epoch_ms: int, rtt_ms: int = 0) -> None:
        self._rtt_ms: Final = rtt_ms
        self._retry_ns: Final = proposal_retry_ns(rtt_ms)
        self._epoch_ms: Final = epoch_ms
        self._idle_ms: Final = max(_IDLE_EPOCH_MS, epoch_ms)
        #: The last committed lease, and when it starts by the local clock, in ns.
        self.last: Lease | None = None
        self.starts = 0
        self._previous: Lease | None = None
        #: When to propose again if the pending proposal is lost or refused, in ns; None: none is.
        self._retry_at: int | None = None
        self._at_once = True
        self._is_pending = False
        #: Another lease is needed at once after the pending proposal.
        self._is_next_at_once = False
        self._members_at: int | None = None
        #: When the last lease started that cut another one short.
        self._cut_at = 0
        #: Token bucket: when all leases with new weights so far are paid for.
        self._next_allowed_at = 0
        #: Interval between new weights because of the length of the history, in ns; 0: no limit.
        self.weights_interval_ns = 0

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the last committed lease."""
        return self.last.members if self.last is not None else ()

    def start_leading(self, now: int) -> None:
        """Start to lead: when the last lease started is unknown, so the next starts at once."""
        self.starts = now
        self._retry_at = None
        self._at_once = True
        self._is_pending = self._is_next_at_once = False

    def due_at(
        self, now: int, *, active: bool, other_members: bool, other_weights: bool = False
    ) -> int:
        """Return when to propose the next lease, in ns; `now` or earlier means at once."""
        if self._retry_at is not None:
            return self._retry_at
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
            self._cut_at + self._epoch_ms * NS_PER_MS,
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
        """Store the length of the lease history; all of it is kept until the log is trimmed."""
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
        """Return the lease to propose; a lease with other weights may start at once."""
        last = self.last
        epoch_ms = self._epoch_ms if active else self._idle_ms
        epochs, epoch_size = shape(epoch_ms, self._rtt_ms)
        self._retry_at = now + self._retry_ns
        self._is_pending, self._is_next_at_once = True, False
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
        """Whether the next lease must keep the weights of the last one, to extend its run."""
        return self.weights_interval_ns > 0 and not self._at_once and now < self._weights_due()

    def _allow_new_weights(self, now: int) -> None:
        """Let a lease with other weights start at once, if the rate limit permits it."""
        if now >= self._weights_due():
            self._next_allowed_at = max(self._next_allowed_at, now) + self._weights_spacing
            self._at_once = True

    def propose_at_once(self) -> None:
        """Start the next lease at once, and propose it as soon as no other proposal is pending."""
        self._at_once = True
        if self._is_pending:
            self._is_next_at_once = True
        else:
            self._retry_at = None

    def on_refused(self, now: int) -> None:
        """Handle a refused lease: its base state had changed. Propose again soon."""
        self._retry_at = now + (0 if self._is_next_at_once else _REFUSED_NS)
        self._is_pending = self._is_next_at_once = False

    def on_committed(self, lease: Lease, now: int, *, leading: bool) -> None:
        """Handle a committed lease: it starts after the one before it, or at once.

        The leader decides when it starts; followers assume that it starts now.
        """
        previous = self.last
        at_once = previous is None or self._at_once or not leading
        ends = now if previous is None or at_once else self.starts + _length(previous)
        if at_once:
            self._cut_at = now
        self._previous, self.last, self.starts = previous, lease, max(now, ends)
        self._retry_at, self._at_once = None, self._is_next_at_once
        self._is_pending = self._is_next_at_once = False

    def on_restored(self, last: Lease | None, now: int) -> None:
        """Take the last lease of a snapshot."""
        self._previous, self.last, self.starts = None, last, now

    def current(self, now: int) -> list[Lease]:
        """Return the running lease, and the committed one that follows it, if any."""
        if self.last is None:
            return []
        if now < self.starts and self._previous is not None:
            return [self._previous, self.last]
        return [self.last]

    def epoch(self, now: int) -> int:
        """Return the epoch in which the servers are, approximately."""
        running = self.current(now)
        if not running:
            return 0
        lease = running[0]
        ends = self.starts if len(running) == 2 else self.starts + _length(lease)
        index = lease.epochs - 1 - (ends - now) // (lease.epoch_ms * NS_PER_MS)
        return lease.first_epoch + min(max(index, 0), lease.epochs - 1)


def shape(epoch_ms: int, rtt_ms: int) -> tuple[int, int]:
    """Return the number of epochs of a lease and their size in positions.

    A lease has a minimum length, as consensus carries at most ten leases a second (D32).
    """
    epochs = _EPOCHS
    while epochs * epoch_ms < min_lease_ms(rtt_ms):
        epochs *= 2
    return epochs, MAX_LEASE_SIZE // epochs


def _length(lease: Lease) -> int:
    return lease.epochs * lease.epoch_ms * NS_PER_MS
