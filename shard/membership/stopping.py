"""A clean stop: before the process ends, its shard is parked, so that no reader waits for it.

    serving --StopRequested--> leaving the leases --nothing waits for this server--> stopped

The server reports that it is stopping, and the membership service leaves its shard out of the next
lease. The server goes on until all positions that the shard owns are stable. It does not wait if it
cannot be spared, or if the service is gone. See docs/protocol.md, section 13.11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core import distance
from ziplog.core.node import Stop
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

#: Maximum time from the request until the process may end, on one site.
STOP_NS: Final = 2 * NS_PER_S


class Stopping:
    """The clean stop of one server."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: When the process may end at the latest, in ns; None: no `Stop` is to be ordered.
        self._stop_by: int | None = None
        #: Until then, the service may announce leases before it gets the report; None: past.
        self._noticed_at: int | None = None

    def request(self, now: int) -> None:
        """Leave the leases, then order `Stop`."""
        notice_ns = distance.stop_notice_ns(self._state.config.limits.rtt_ms)
        self._state.is_stopping = True
        self._noticed_at, self._stop_by = now + notice_ns, now + STOP_NS + 2 * notice_ns

    def on_batch_end(self, now: int) -> None:
        """Order `Stop` if no reader waits for this server, or would if it stopped."""
        if self._stop_by is None:
            return
        if self._noticed_at is not None and now >= self._noticed_at:
            self._noticed_at = None
        if now >= self._stop_by or not self._is_awaited(now):
            self._stop_by = None
            self._state.effects.append(Stop())

    def _is_awaited(self, now: int) -> bool:
        state, clock = self._state, self._state.clock
        last, ends_at = clock.last, clock.ends_at
        if state.state != "up" or last is None or ends_at is None:
            return False
        if all(member.shard == state.shard for member in last.members):
            return False  # No other shard goes on.
        if self._noticed_at is not None:
            return True
        if state.has_no_positions:
            return not clock.has_ended(state.frontier)
        return now < ends_at  # Without a further lease, the service has stopped, too.

    def next_wakeup(self) -> int | None:
        """Return when `Stop` may be due, in ns; None: after another event, or never."""
        state, due = self._state, self._stop_by
        if due is None or self._noticed_at is not None:
            return self._noticed_at
        if state.has_no_positions or state.clock.ends_at is None:
            return due
        return min(due, state.clock.ends_at)
