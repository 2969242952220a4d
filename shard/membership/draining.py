"""A shard that leaves: it asks its clients to go elsewhere, says when it is drained, is sealed.

While it is leaving, its primary still takes what comes. Once it has no more positions, everything
that it owned is decided, and in the end on every disk: then its servers are *sealed*. Rule: sealed
is only said of what is on this server's own disk, and of what it knows to be on all others'.

See docs/protocol.md, section 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.wire import Leaving, Rate

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import Session

_MS: Final = 1_000_000
#: A client that goes on inserting is told again after so long.
LEAVING_INTERVAL_NS: Final = 50 * _MS
#: Nothing has arrived for so long: the shard is drained.
QUIET_NS: Final = 20 * _MS
#: Who is drained says so again after so long, until a lease is without it.
DRAINED_INTERVAL_NS: Final = 100 * _MS
#: How often it is looked whether the last mark has reached the disk.
_SEAL_CHECK_INTERVAL_NS: Final = 10 * _MS


class Draining:
    """One server's part in the departure of its shard."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self._reported_at = -(2**62)
        #: It is all but sealed: when to look again.
        self._seal_check_due: int | None = None

    # --- leaving ---

    def send_leaving(self, route: bytes, session: Session, now: int) -> None:
        """Beside the answer to an insert: ask its client to send what is new elsewhere."""
        state = self._state
        if state.server == 0 and now - session.leaving_sent_at >= LEAVING_INTERVAL_NS:
            session.leaving_sent_at = now
            state.send(route, Leaving(state.cluster, state.shard, state.view))

    @property
    def _is_draining(self) -> bool:
        """Whether the service waits for this server to say that the shard is drained."""
        state, last = self._state, self._state.clock.last
        return (
            state.server == 0
            and state.is_leaving
            and state.state == "up"
            and last is not None
            and last.view_of(state.shard) is not None
        )

    def tick(self, now: int, *, has_undecided: bool) -> None:
        """Say that the shard is drained, if it is and that is due."""
        due = self._report_due()
        if due is None or now < due:
            return
        if has_undecided:
            self._reported_at = (
                now + QUIET_NS - DRAINED_INTERVAL_NS
            )  # look again when some time has passed
            return
        self._reported_at = now
        state = self._state
        state.broadcast(state.service, Rate(state.cluster, state.shard, state.view, 0))

    def _report_due(self) -> int | None:
        if not self._is_draining:
            return None
        return max(self._state.last_insert + QUIET_NS, self._reported_at + DRAINED_INTERVAL_NS)

    def next_wakeup(self) -> int | None:
        """Return when something becomes due."""
        if not self._state.is_retired:
            return None
        due = self._report_due()
        return self._seal_check_due if due is None else due

    # --- sealed ---

    def on_batch_end(self, now: int) -> None:
        """Behind a batch: find out whether this server is sealed."""
        state, self._seal_check_due = self._state, None
        may_be = state.has_no_positions and state.is_retired and state.state == "up"
        if not may_be or not self._is_settled():
            state.is_sealed = False
        elif not state.is_sealed:
            state.is_sealed = state.store.backlog_bytes == 0
            if not state.is_sealed:
                self._seal_check_due = now + _SEAL_CHECK_INTERVAL_NS

    def _is_settled(self) -> bool:
        """Whether all is on the disks of all servers, and what this one wrote down says so."""
        state, clock = self._state, self._state.clock
        mark = state.store.mark
        return (
            mark is not None
            and clock.has_ended(mark.frontier)
            and clock.has_ended(state.stream.durable_end)
        )
