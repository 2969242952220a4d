"""Heartbeats of a replica to the membership service: every second, and at changes.

A heartbeat reports the server's state and progress (docs/protocol.md, sections 3, 5 and 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.units import NS_PER_S
from ziplog.core.view import NO_DIGEST, NodeState, ServerState
from ziplog.wire import Heartbeat

if TYPE_CHECKING:
    from shard.ordering.rate import RateReporter
    from shard.state.replica_state import ReplicaState

HEARTBEAT_NS: Final = NS_PER_S
#: The same of a server that is stopping; the service answers each one.
STOPPING_HEARTBEAT_NS: Final = HEARTBEAT_NS // 10
#: Interval between heartbeats of a primary with readers; longer with many shards.
READERS_HEARTBEAT_NS: Final = HEARTBEAT_NS // 4
_MANY_MEMBERS: Final = 1000
#: The reported node state of each server state.
_NODE_STATES: Final[dict[ServerState, NodeState]] = {
    "starting": "starting", "up": "up", "frozen": "up", "joined": "starting", "limbo": "limbo",
}  # fmt: skip


class HeartbeatSender:
    """Sends the heartbeats of one replica."""

    def __init__(self, state: ReplicaState, rates: RateReporter, now: int) -> None:
        self._state: Final = state
        self._rates: Final = rates
        #: Time of the next heartbeat, in ns.
        self.due = now
        self._was_active = False
        self._last_sent = self._urgent()

    def on_batch_end(self, now: int) -> None:
        """Send a heartbeat at once when inserts resume, or a state changes.

        The states are those of `_urgent`.
        """
        active = self._is_active(now)
        if active and not self._was_active and self._state.server_state == "up":
            self.due = min(self.due, now)
        self._was_active = active
        if self._last_sent != self._urgent():
            self.due = now
        elif (
            self.due - now > READERS_HEARTBEAT_NS
            and self._state.server == 0
            and self._state.has_readers(now)
        ):  # fmt: skip
            self.due = min(self.due, now + self._readers_interval_ns)

    def _urgent(self) -> tuple[object, ...]:
        """Return the facts whose changes the membership service must know at once."""
        state = self._state
        return (
            state.shard_state, state.is_sealed, state.full, state.level.reported, state.is_stopping
        )  # fmt: skip

    def on_persisted(self, now: int) -> None:
        """Send a heartbeat at once when a trim point is on the disk: a client waits for it."""
        if self._state.recorded_trim.update():
            self.due = now

    def send(self, now: int) -> None:
        """Send a heartbeat, and schedule the next one."""
        state, stream, config = self._state, self._state.stream, self._state.config
        last = state.clock.last
        self.due = now + (STOPPING_HEARTBEAT_NS if state.is_stopping else HEARTBEAT_NS)
        self._last_sent = self._urgent()
        state.broadcast(
            state.service,
            Heartbeat(
                state.cluster, config.name, config.endpoint, state.shard, state.view,
                state.incarnation, config.pid, _NODE_STATES[state.server_state],
                self._is_active(now), self._rates.average(now), state.frontier, stream.durable_end,
                last.number if last else 0, last.digest if last else NO_DIGEST, state.lasting_trim,
                stream.stable_record, stream.durable_record, config.identity,
                state.shard_state, state.has_readers(now), state.holes, state.is_sealed,
                state.has_gap, stream.stable_end, state.publisher, state.full,
                config.release.version, state.store.free_bytes, state.store.reserve_bytes,
                *config.release.wires, state.wire_use.wire, state.level.reported or "",
                config.region, state.round_trips.on_heartbeat_sent(now),
                state.is_stopping,
            ),
        )  # fmt: skip

    @property
    def _readers_interval_ns(self) -> int:
        """Interval between heartbeats of a primary with readers, in ns."""
        last = self._state.clock.last
        members = len(last.members) if last is not None else 0
        return min(
            HEARTBEAT_NS, READERS_HEARTBEAT_NS * max(members, _MANY_MEMBERS) // _MANY_MEMBERS
        )

    def _is_active(self, now: int) -> bool:
        return now - self._state.last_insert < HEARTBEAT_NS
