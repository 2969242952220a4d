"""Proposes events of the cluster for the record: recoveries, shards, trims, states of nodes.

    committed command --> every node notes its event --> the leader proposes the noted events
    RecordEvents committed --> every node forgets them

So a new leader proposes what the former one did not. The leader also notes what it sees of nodes:
changed states, restarts, leaders. It compares with the record, so a new leader repeats nothing.
Rule: at most one proposal is pending, and the number of noted events is limited. An event that the
leader noted alone may be lost with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mms.commands import (
    ClusterEvent,
    CreateCluster,
    FinalizeShard,
    GrantLease,
    PlaceShard,
    RecordEvents,
    RecordLoss,
    RemoveShard,
    RetireShard,
    SetDurability,
    SetRegionLost,
    SetTrim,
)
from mms.proposals import RETRY_NS
from ziplog.core.nearness import named
from ziplog.core.node import Propose
from ziplog.core.units import NS_PER_S, NS_PER_US

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mms.commands import AnyCommand
    from mms.servers import FailureHandlers, Server, Servers
    from mms.state import ClusterState
    from ziplog.core.node import Effect

#: Interval between two looks at the states of all nodes.
CHECK_NS: Final = NS_PER_S
#: Time after the start or a pause of the leader until the next look: all nodes have sent
#: heartbeats by then.
_GRACE_NS: Final = 3 * NS_PER_S
#: Maximum number of events that wait, and of events in one command.
MAX_PENDING: Final = 64
_MAX_TEXT: Final = 200
#: Number of latest events that a repeated one is compared with.
_COMPARED: Final = 32
#: Kinds of events that may happen again with an equal text; others are those of one command.
_REPEATABLE: Final = frozenset({"leader", "node"})
_LEADS: Final = "leads its Raft group"
#: By state of a node: why.
_REASONS: Final = {
    "suspect": "suspect: no heartbeat for 2.5 s",
    "down": "down: no heartbeat for 5 s",
    "limbo": "limbo: it restarted and waits for a recovery",
}


class EventRecorder:
    """The events that are not in the record yet."""

    def __init__(self, state: ClusterState, wall_offset_ns: Callable[[], int]) -> None:
        """Start without events.

        Args:
            state: the replicated state.
            wall_offset_ns: returns Unix time minus the time of `now`.

        """
        self._state: Final = state
        self._wall_offset_ns: Final = wall_offset_ns
        self._pending: list[ClusterEvent] = []
        self._proposed_at: int | None = None
        self._check_at = 0
        #: Of each node: the state in its last event; of each server: its last process.
        self._states: dict[str, str] = {}
        self._incarnations: Final[dict[str, int]] = {}
        #: The servers that this leader has heard from.
        self._heard: Final[set[str]] = set()
        self._handler_leader = ""

    # --- noting ---

    def note(
        self,
        kind: str,
        text: str,
        now: int,
        *,
        shard: int = -1,
        node: str = "",
        is_new: bool = False,
    ) -> None:
        """Note an event, unless it waits or was recorded just now; `is_new`: it was not."""
        at_us = max((now + self._wall_offset_ns()) // NS_PER_US, 0)
        event = ClusterEvent(at_us, kind, text[:_MAX_TEXT], shard, node)
        known = (*self._pending, *self._state.history.events[-_COMPARED:])
        if is_new or kind in _REPEATABLE or all(_content(event) != _content(one) for one in known):
            self._pending = [*self._pending, event][-MAX_PENDING:]

    def on_applied(self, command: AnyCommand, now: int) -> None:
        """Note the event of a command that was applied."""
        match command:
            case CreateCluster():
                self.note("cluster", f"cluster {command.name} was created", now)
            case RemoveShard():
                text = f"recovery {command.recovery} begins in view {command.view}"
                self.note("recovery", text, now, shard=command.shard)
            case RecordLoss():
                text = f"positions {command.start} to {command.stop - 1} may be lost"
                self.note("loss", text, now, shard=command.shard)
            case GrantLease():
                for placement in command.placements:
                    lease = command.lease.number
                    text = f"{placement.state} in view {placement.view}, from lease {lease} on"
                    self.note("view", text, now, shard=placement.shard)
            case PlaceShard():
                names = ", ".join(replica.name for replica in command.placement.replicas)
                self.note("shard", f"added: {names}", now, shard=command.placement.shard)
            case RetireShard():
                self.note("shard", "removed", now, shard=command.shard)
            case FinalizeShard():
                self.note("shard", "finalized", now, shard=command.shard)
            case SetTrim() if command.gsn == self._state.trim:
                self.note("trim", f"trimmed before {command.gsn}", now)
            case SetDurability():
                text = f"durability {command.level} from epoch {command.epoch} on"
                self.note("cluster", text, now)
            case SetRegionLost():
                self._note_region(command.region, now, is_lost=command.is_lost)
            case RecordEvents():
                self._on_recorded(command)

    def _note_region(self, region: str, now: int, *, is_lost: bool) -> None:
        """Note that a region was given up or is back, unless its last event is the same one."""
        texts = [f"region {named([region])} {how}" for how in ("is back", "was given up")]
        known = (*self._state.history.events, *self._pending)
        last = next((one.text for one in reversed(known) if one.text in texts), texts[False])
        if last != texts[is_lost]:
            self.note("region", texts[is_lost], now, is_new=True)

    def _on_recorded(self, command: RecordEvents) -> None:
        self._proposed_at = None
        left = [_content(event) for event in self._pending]
        for event in command.events:
            if _content(event) in left:
                at = left.index(_content(event))
                del left[at], self._pending[at]

    def on_restored(self) -> None:
        """Forget the events that a snapshot has recorded: it replaced the commands that did."""
        recorded = {_content(one) for one in self._state.history.events}
        self._pending = [one for one in self._pending if _content(one) not in recorded]

    # --- the leader ---

    def start_leading(self, name: str, now: int) -> None:
        """Start to lead: the record has the last known states of nodes."""
        self._proposed_at, self._check_at = None, now + _GRACE_NS
        self._heard.clear()
        events = self._state.history.events
        self._states = {one.node: _state_in(one.text) for one in events if one.kind == "node"}
        leaders = [one.node for one in events if one.kind == "leader"]
        self._handler_leader = next((one for one in reversed(leaders) if one != name), "")
        self.note("leader", _LEADS, now, node=name)

    def forgive_silence_before(self, now: int) -> None:
        """Ignore silence before `now`: this node received nothing."""
        self._check_at = now + _GRACE_NS

    def on_heartbeat(self, server: Server, now: int) -> None:
        """Note that a server's process is another one."""
        heartbeat = server.heartbeat
        assert heartbeat is not None, "it came just now"
        before = self._incarnations.get(server.name)
        self._incarnations[server.name] = heartbeat.incarnation
        if before not in {None, heartbeat.incarnation}:
            # In a container every process has the same number, so an equal event may be another
            # one. But a restart before this leader's first heartbeat may be recorded already.
            text, is_new = f"restarted, process {heartbeat.pid}", server.name in self._heard
            self.note("restart", text, now, shard=server.shard, node=server.name, is_new=is_new)
        self._heard.add(server.name)

    def tick(self, servers: Servers, handlers: FailureHandlers, now: int) -> list[Effect]:
        """Note changed states once a second, and propose what is noted."""
        if now >= self._check_at:
            self._check_at = now + CHECK_NS
            for server in servers:
                state = server.state(now)
                if state != self._states.get(server.name, "up"):
                    reason = f"full: {server.full}" if state == "full" else _REASONS.get(state)
                    self._note_state(server.name, state, reason, now, shard=server.shard)
            self._check_handlers(handlers.status(now), now)
        return self._propose(now)

    def _check_handlers(self, statuses: Iterable[dict[str, Any]], now: int) -> None:
        for status in statuses:
            name, state = status["name"], status["state"]
            if state != self._states.get(name, "up"):
                self._note_state(name, state, _REASONS.get(state), now)
            if status["leader"] and name != self._handler_leader:
                self._handler_leader = name
                self.note("leader", _LEADS, now, node=name)

    def _note_state(
        self, name: str, state: str, reason: str | None, now: int, *, shard: int = -1
    ) -> None:
        """Note a node's new state; a start is over within a moment, and no event."""
        if state != "starting":
            self._states[name] = state
            self.note("node", reason or state, now, shard=shard, node=name)

    def _propose(self, now: int) -> list[Effect]:
        is_waiting = self._proposed_at is not None and now < self._proposed_at + RETRY_NS
        if not self._pending or is_waiting:
            return []
        self._proposed_at = now
        command = RecordEvents(self._state.history.last + 1, list(self._pending))
        return [Propose(command.encode())]


def _content(event: ClusterEvent) -> tuple[str, str, int, str]:
    """Return an event without its time, which differs between nodes."""
    return event.kind, event.text, event.shard, event.node


def _state_in(text: str) -> str:
    return text.partition(":")[0]
