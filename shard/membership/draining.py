"""Draining a shard that leaves: redirects its clients, reports when it is drained, then sealed.

While the shard is leaving, its primary still accepts inserts. When the shard has no more positions,
the primary decides all that it owned. A server is *sealed* when all of it is on its own disk, and
known to be on all other servers' disks.

See docs/protocol.md, section 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core import distance
from ziplog.core.units import NS_PER_MS
from ziplog.wire import Leaving, Rate

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import Session

#: Interval between `Leaving` messages to a client that continues to insert.
LEAVING_INTERVAL_NS: Final = 50 * NS_PER_MS
#: Interval between reports that the shard is drained, until a lease excludes it.
DRAINED_INTERVAL_NS: Final = 100 * NS_PER_MS
#: Interval between checks whether the last watermark record is on the disk.
_SEAL_CHECK_INTERVAL_NS: Final = 10 * NS_PER_MS


class Draining:
    """One server's part in draining its shard."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: Time without an insert after which the shard is drained.
        self._quiet_ns: Final = distance.quiet_ns(state.config.limits.rtt_ms)
        #: When it may next report that the shard is drained, in ns.
        self._may_report_at = -(2**62)
        #: Time of the next check of the disk before the server is sealed; None: no check is due.
        self._seal_check_due: int | None = None

    # --- leaving ---

    def send_leaving(self, route: bytes, session: Session, now: int) -> None:
        """Ask a client that inserts here to send new inserts to other shards."""
        state = self._state
        if state.server == 0 and now - session.leaving_sent_at >= LEAVING_INTERVAL_NS:
            session.leaving_sent_at = now
            state.send(route, Leaving(state.cluster, state.shard, state.view))

    @property
    def _is_draining(self) -> bool:
        """Whether the membership service waits for this server to report the shard drained."""
        state, last = self._state, self._state.clock.last
        return (
            state.server == 0
            and state.is_leaving
            and state.server_state == "up"
            and last is not None
            and last.view_of(state.shard) is not None
        )

    def tick(self, now: int, *, has_undecided: bool) -> None:
        """Report that the shard is drained, if it is and the report is due."""
        due = self._report_due()
        if due is None or now < due:
            return
        if has_undecided:
            self._may_report_at = now + self._quiet_ns
            return
        self._may_report_at = now + DRAINED_INTERVAL_NS
        state = self._state
        state.broadcast(state.service, Rate(state.cluster, state.shard, state.view, 0))

    def _report_due(self) -> int | None:
        if not self._is_draining:
            return None
        return max(self._state.last_insert + self._quiet_ns, self._may_report_at)

    def next_wakeup(self) -> int | None:
        """Return the time of the next action, in ns; None: none is due."""
        if not self._state.is_retired:
            return None
        due = self._report_due()
        return self._seal_check_due if due is None else due

    # --- sealed ---

    def on_batch_end(self, now: int) -> None:
        """Check whether this server is sealed."""
        state, self._seal_check_due = self._state, None
        may_be = state.has_no_positions and state.is_retired and state.server_state == "up"
        if not may_be or not self._is_settled():
            state.is_sealed = False
        elif not state.is_sealed:
            state.is_sealed = state.store.backlog_bytes == 0
            if not state.is_sealed:
                self._seal_check_due = now + _SEAL_CHECK_INTERVAL_NS

    def _is_settled(self) -> bool:
        """Whether all entries are on all disks, by this server's own stored watermark record."""
        state, clock = self._state, self._state.clock
        mark = state.store.mark
        return (
            mark is not None
            and clock.has_ended(mark.frontier)
            and clock.has_ended(state.stream.durable_end)
        )
