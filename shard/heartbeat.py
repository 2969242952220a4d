"""What a replica tells the membership service, every second and when something changes.

Rule: it says what is, never what should be (docs/protocol.md, sections 3, 5 and 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.view import NO_DIGEST, NodeState, ServerState
from ziplog.wire import Heartbeat

if TYPE_CHECKING:
    from shard.state import ReplicaState

HEARTBEAT_NS: Final = 1_000_000_000
#: What the membership service is told of a server's state.
_NODE_STATES: Final[dict[ServerState, NodeState]] = {
    "starting": "starting", "up": "up", "frozen": "up", "joined": "starting", "limbo": "limbo",
}  # fmt: skip


class Heart:
    """One replica's heartbeats."""

    def __init__(self, state: ReplicaState, now: int) -> None:
        self._state: Final = state
        #: When the next one is due.
        self.due = now
        self._was_active = False
        self._rate_from = (now, 0)
        self._rate_per_s = 0

    def drained(self, now: int) -> None:
        """Say at once that inserts come, after a pause."""
        active = self._is_active(now)
        if active and not self._was_active and self._state.state == "up":
            self.due = min(self.due, now)
        self._was_active = active

    def beat(self, now: int) -> None:
        """Say what this server is."""
        state, stream, config = self._state, self._state.stream, self._state.config
        last = state.clock.last
        self._measure_rate(now)
        self.due = now + HEARTBEAT_NS
        state.broadcast(
            tuple(node.name.encode() for node in config.mms),
            Heartbeat(
                state.cluster, config.name, config.endpoint, state.shard, state.view,
                state.incarnation, config.pid, _NODE_STATES[state.state], self._is_active(now),
                self._rate_per_s, state.frontier, stream.durable_end,
                last.number if last else 0, last.digest if last else NO_DIGEST, state.trim,
                stream.stable_record, stream.durable_record, config.identity,
            ),
        )  # fmt: skip

    def _is_active(self, now: int) -> bool:
        return now - self._state.last_insert < HEARTBEAT_NS

    def _measure_rate(self, now: int) -> None:
        since, count = self._rate_from
        elapsed = now - since
        if elapsed >= HEARTBEAT_NS // 4:
            placed = self._state.placed_records
            self._rate_per_s = (placed - count) * 1_000_000_000 // elapsed
            self._rate_from = (now, placed)
