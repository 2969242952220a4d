"""What a replica tells the membership service, every second and when something changes.

Rule: it says what is, never what should be (docs/protocol.md, sections 3, 5 and 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.view import NO_DIGEST, NodeState, ServerState
from ziplog.wire import Heartbeat

if TYPE_CHECKING:
    from shard.ordering.rate import RateReporter
    from shard.state.replica_state import ReplicaState

HEARTBEAT_NS: Final = 1_000_000_000
#: The primary of a shard that somebody reads along says it so often; with many shards, less often.
READERS_HEARTBEAT_NS: Final = HEARTBEAT_NS // 4
_MANY_MEMBERS: Final = 1000
#: What the membership service is told of a server's state.
_NODE_STATES: Final[dict[ServerState, NodeState]] = {
    "starting": "starting", "up": "up", "frozen": "up", "joined": "starting", "limbo": "limbo",
}  # fmt: skip


class HeartbeatSender:
    """One replica's heartbeats."""

    def __init__(self, state: ReplicaState, rates: RateReporter, now: int) -> None:
        self._state: Final = state
        self._rates: Final = rates
        #: When the next one is due.
        self.due = now
        self._was_active = False
        #: What of a shard that leaves was told last.
        self._last_sent = (state.shard_state, state.is_sealed)

    def on_batch_end(self, now: int) -> None:
        """Say at once that inserts come, after a pause, and what becomes of the shard."""
        active = self._is_active(now)
        if active and not self._was_active and self._state.state == "up":
            self.due = min(self.due, now)
        self._was_active = active
        if self._last_sent != (self._state.shard_state, self._state.is_sealed):
            self.due = now
        elif (
            self.due - now > READERS_HEARTBEAT_NS
            and self._state.server == 0
            and self._state.has_readers(now)
        ):  # fmt: skip
            self.due = min(self.due, now + self._readers_interval_ns)

    def send(self, now: int) -> None:
        """Say what this server is."""
        state, stream, config = self._state, self._state.stream, self._state.config
        last = state.clock.last
        self.due = now + HEARTBEAT_NS
        self._last_sent = (state.shard_state, state.is_sealed)
        state.broadcast(
            state.service,
            Heartbeat(
                state.cluster, config.name, config.endpoint, state.shard, state.view,
                state.incarnation, config.pid, _NODE_STATES[state.state], self._is_active(now),
                self._rates.average(now), state.frontier, stream.durable_end,
                last.number if last else 0, last.digest if last else NO_DIGEST, state.trim,
                stream.stable_record, stream.durable_record, config.identity,
                state.shard_state, state.has_readers(now), state.holes, state.is_sealed,
                state.has_gap, stream.stable_end,
            ),
        )  # fmt: skip

    @property
    def _readers_interval_ns(self) -> int:
        """How often the primary of a shard is heard that somebody reads along."""
        last = self._state.clock.last
        members = len(last.members) if last is not None else 0
        return min(
            HEARTBEAT_NS, READERS_HEARTBEAT_NS * max(members, _MANY_MEMBERS) // _MANY_MEMBERS
        )

    def _is_active(self, now: int) -> bool:
        return now - self._state.last_insert < HEARTBEAT_NS
