"""When a primary ends epochs: it decides that the rest of them has no record of its shard.

    the stream flows, the last entry just now --> at most 2 ms late, behind a batch or in a pause
    nothing came for 40 ms --> by the clock, while somebody reads along; with lag-fix 50 ms apart
    nobody reads along --> only leases are ended, and only while the stream flows

Rule: this says when, and up to where; what is decided, and who owns it, is not its business.
See docs/protocol.md, sections 3 and 13.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.state.decision_log import STREAM_ACTIVE_NS

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

_MS: Final = 1_000_000
#: While inserts flow, an epoch may end so late.
EPOCH_END_DELAY_NS: Final = 2 * _MS
#: A shard that is read along and gets nothing ends epochs this far apart: whoever waits says so.
IDLE_EPOCH_INTERVAL_NS: Final = 50 * _MS


class EpochCloser:
    """The ends of one primary's epochs."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: When the stream last went on inside an epoch: a unit, or positions given up; in ns.
        self.last_activity_at = -(2**62)
        #: When what was over by the clock was decided last.
        self._closed_at = -(2**62)

    def min_gsn(self, now: int) -> int:
        """Return the first gsn that a record may get, by the clock.

        While inserts flow the backups take the epoch from the stream, not from their clocks. So it
        ends a little late, behind a batch: its token is then at the backups before the next insert,
        which they would otherwise guess into the former epoch. And only leases end if nobody reads.
        """
        clock, gap = self._state.clock, now - self.last_activity_at
        if gap >= STREAM_ACTIVE_NS:
            return clock.current_epoch_base(now)
        return self.first_open_gsn(
            now - EPOCH_END_DELAY_NS if gap < EPOCH_END_DELAY_NS else now, now
        )

    def first_open_gsn(self, then: int, now: int) -> int:
        """Return the first gsn that was not over at `then`, of those that are to be ended now."""
        clock = self._state.clock
        return (
            clock.current_epoch_base(then)
            if self._state.has_readers(now)
            else clock.current_lease_base(then)
        )

    def close_due(self, now: int) -> int:
        """End what is over by the clock: return the first gsn that is not; 0: it is not time."""
        flows = now - self.last_activity_at < STREAM_ACTIVE_NS
        if not flows and not (self._state.has_readers(now) and now >= self._quiet_until):
            return 0
        self._closed_at = now
        return self.min_gsn(now)

    @property
    def _quiet_until(self) -> int:
        """Until when no epoch is ended, though somebody reads along, while nothing comes."""
        return self._closed_at + (IDLE_EPOCH_INTERVAL_NS if self._state.config.lag_fix else 0)

    def next_close_at(self, now: int, *, is_awaited: bool) -> int | None:
        """Return when an epoch or a lease has to be ended, at the latest.

        `is_awaited`: units wait for positions.
        """
        clock, gap = self._state.clock, now - self.last_activity_at
        late = EPOCH_END_DELAY_NS if gap < EPOCH_END_DELAY_NS else 0
        if is_awaited or self._state.has_readers(now):
            turn = clock.next_epoch_at(now - late)
            if turn is not None and gap >= STREAM_ACTIVE_NS and not is_awaited:
                turn = max(turn, self._quiet_until)
        else:
            turn = clock.next_lease_at if gap < STREAM_ACTIVE_NS else None
        if turn is None or not late:
            return turn
        # Nothing may follow what came last: the next insert must find the epoch ended everywhere.
        return max(turn, self.last_activity_at + late)
