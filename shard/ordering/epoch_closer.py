"""When the primary closes epochs, by turning the rest of them into no-ops.

    inserts arrive --> at most 2 ms after the epoch's end, after a batch or in a pause
    no insert for 40 ms --> by the clock, if the shard has readers; with lag-fix and short round
                               trips, every 50 ms
    no readers --> only leases are closed, and only while inserts arrive

This module determines the time and the gsn; `Primary` makes the decision.
See docs/protocol.md, sections 3 and 13.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core import distance
from ziplog.core.units import NEVER, NS_PER_MS

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

#: Time after the last unit, or the last positions given up, during which the stream, not the clock,
#: determines the epoch.
STREAM_ACTIVE_NS: Final = 40 * NS_PER_MS
#: Longest delay of an epoch's end while inserts arrive.
EPOCH_END_DELAY_NS: Final = 2 * NS_PER_MS
#: Most unstable decisions; above this, no more no-ops are decided, and no session expires.
MAX_UNSTABLE_DECISIONS: Final = 12_288


class EpochCloser:
    """Schedules the ends of one primary's epochs."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: Interval between closed epochs of an idle shard with readers. Readers that are near send
        #: wants, with lag-fix.
        config = state.config
        self._idle_interval_ns: Final = (
            distance.idle_epoch_interval_ns(config.limits.rtt_ms) if config.lag_fix else 0
        )
        #: Time of the last unit, or of the last positions given up, in ns.
        self.last_activity_at = -(2**62)
        #: Time when epochs were last closed by the clock, in ns.
        self._closed_at = -(2**62)

    def min_gsn(self, now: int) -> int:
        """Return the first gsn that a record may get, by the clock.

        While inserts arrive, the backups take the epoch from the stream, not from their clocks. So
        the epoch ends a little late, after a batch: the backups receive its end before the next
        insert, and do not guess that insert into the old epoch. Without readers, only leases end.
        """
        clock, gap = self._state.clock, now - self.last_activity_at
        if gap >= STREAM_ACTIVE_NS:
            return clock.current_epoch_base(now)
        return self.first_open_gsn(
            now - EPOCH_END_DELAY_NS if gap < EPOCH_END_DELAY_NS else now, now
        )

    def first_open_gsn(self, then: int, now: int) -> int:
        """Return the first gsn of the epoch (without readers: the lease) of the time `then`."""
        clock = self._state.clock
        return (
            clock.current_epoch_base(then)
            if self._state.has_readers(now)
            else clock.current_lease_base(then)
        )

    def can_skip(self) -> bool:
        """Whether no-ops may be decided: not while the backups are too far behind.

        In a finalized shard, no position is left to decide, even if this server missed leases.
        """
        state, stream = self._state, self._state.stream
        has_positions = state.is_compared and state.shard_state != "finalized"
        return stream.last - stream.stable < MAX_UNSTABLE_DECISIONS and has_positions

    def open_until(self, now: int) -> int:
        """Return the time until which a record may follow the last one without a closed epoch.

        Until then `min_gsn` does not exceed the end of the stream, if the shard gets no readers.
        0: an epoch is to be closed first.
        """
        clock, flows_until = self._state.clock, self.last_activity_at + STREAM_ACTIVE_NS
        if now >= flows_until or self._state.has_readers(now):
            base, until = clock.current_epoch_base(now), clock.next_epoch_at(now)
        else:
            base, until = clock.current_lease_base(now), clock.next_lease_at
            until = flows_until if until is None else min(until, flows_until)
        if base > self._state.stream.end:
            return 0
        return NEVER if until is None else until

    def close_due(self, now: int) -> int:
        """Return the gsn up to which epochs are to be closed now; 0: none is due."""
        if not self._closes_now(now):
            return 0
        self._closed_at = now
        return self.min_gsn(now)

    def _closes_now(self, now: int) -> bool:
        """Whether epochs that have ended are to be closed now."""
        flows = now - self.last_activity_at < STREAM_ACTIVE_NS
        return flows or (self._state.has_readers(now) and now >= self._quiet_until)

    def _is_overdue(self, now: int) -> bool:
        """Whether an epoch has ended and is open: an event came between its end and the wake-up."""
        end = self._state.stream.end
        if not self._closes_now(now) or (base := self.min_gsn(now)) <= end:
            return False
        return self._state.clock.next_owned(end) < base and self.can_skip()

    @property
    def _quiet_until(self) -> int:
        """Time until which an idle shard with readers closes no further epoch."""
        return self._closed_at + self._idle_interval_ns

    def next_close_at(self, now: int, *, is_awaited: bool) -> int | None:
        """Return the time at which an epoch or a lease is to be closed, in ns.

        `is_awaited`: units wait for positions.
        """
        clock, gap = self._state.clock, now - self.last_activity_at
        late = EPOCH_END_DELAY_NS if gap < EPOCH_END_DELAY_NS else 0
        if self._is_overdue(now):
            return max(now, self.last_activity_at + late)
        if is_awaited or self._state.has_readers(now):
            close_at = clock.next_epoch_at(now - late)
            if close_at is not None and gap >= STREAM_ACTIVE_NS and not is_awaited:
                close_at = max(close_at, self._quiet_until)
        else:
            close_at = clock.next_lease_at if gap < STREAM_ACTIVE_NS else None
        if close_at is None or not late:
            return close_at
        # Close the epoch in a pause, so that all replicas know its end before the next insert.
        return max(close_at, self.last_activity_at + late)
