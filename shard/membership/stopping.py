"""A clean stop: before the process ends, its shard is parked, so that no reader waits for it.

    serving --StopRequested--> leaving the leases --nothing waits for this server--> stopped

The server reports that it is stopping, and the membership service leaves its shard out of the next
lease. The server goes on until all positions that the shard owns are stable, and then for a moment,
in which it refuses the inserts of clients that do not know it yet. It does not wait if no other
shard goes on, or if the service is gone. See docs/protocol.md, section 13.11.
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
        self._notice_ns: Final = distance.stop_notice_ns(state.config.limits.rtt_ms)
        #: When the process may end at the latest, in ns; None: no `Stop` is to be ordered.
        self._stop_by: int | None = None
        #: When the shard has been out of the leases for long enough; None: it owns positions.
        self._spared_at: int | None = None
        #: When the service is gone, unless it announces something.
        self._gone_at = 0

    def request(self, now: int) -> None:
        """Leave the leases, then order `Stop`."""
        self._state.is_stopping = True
        self._stop_by = now + self._notice_ns + STOP_NS
        self.on_announcement(now)

    def on_announcement(self, now: int) -> None:
        """Note that the service is there: it answers each heartbeat of a server that stops."""
        self._gone_at = now + 3 * self._notice_ns

    def on_batch_end(self, now: int) -> None:
        """Order `Stop` if no reader waits for this server, or would if it stopped."""
        if self._stop_by is None:
            return
        if now >= self._stop_by or not self._is_awaited(now):
            self._stop_by = None
            self._state.effects.append(Stop())

    def _is_awaited(self, now: int) -> bool:
        state, last = self._state, self._state.clock.last
        if state.server_state != "up" or last is None or now >= self._gone_at:
            return False
        if all(member.shard == state.shard for member in last.members):
            return False  # No other shard goes on.
        is_out = state.has_no_positions and state.clock.has_ended(state.frontier)
        if not is_out and state.shard_state != "joining":
            self._spared_at = None
            return True
        if self._spared_at is None:
            # Clients still insert here, and an older lease may admit the shard again.
            self._spared_at = now + self._notice_ns
        return now < self._spared_at

    def next_wakeup(self) -> int | None:
        """Return when `Stop` may be due, in ns; None: after another event, or never."""
        if self._stop_by is None:
            return None
        return min(self._stop_by, self._gone_at, self._spared_at or self._stop_by)
