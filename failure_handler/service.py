"""Failure handler: one node of it, as a deterministic state machine.

    follower --LeaderChanged(is_self)--> leader: conducts the recovery of every shard that needs one
    leader --LeaderChanged--> follower: receives the servers' reports, and names the leader

Rule: the candidate of a recovery and the state that a view begins with are committed before any
server acts on them. All else may be lost with the leader: servers repeat their reports.

Invariants: `check()`, those of `HandlerState` and of the parts. See docs/protocol.md, section 11.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from failure_handler.counters import Counters
from failure_handler.members import Members
from failure_handler.recovery import Recovery
from failure_handler.state import (
    Begin,
    Confirm,
    Decide,
    Finish,
    HandlerState,
    decode_command,
    decode_refusal,
)
from ziplog.core.node import (
    Broadcast,
    Committed,
    Connect,
    LogWarning,
    Send,
)
from ziplog.core.units import NS_PER_MS
from ziplog.raft.service_node import ServiceNode
from ziplog.wire import (
    ClusterInfo,
    Frozen,
    HandlerHeartbeat,
    Hello,
    NodeInfo,
    NotLeader,
    Obstacle,
    Order,
    Orders,
    OrdersQuery,
    Refused,
    Reinserted,
    Removed,
    Suspect,
)
from ziplog.wire.handler import MAX_OBSTACLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from failure_handler.state import AnyCommand
    from ziplog.config import ClusterConfig
    from ziplog.core.message import Message
    from ziplog.core.wire_use import WireUse
    from ziplog.wire import Durations, Value

#: Interval between heartbeats to the membership service, and between placement queries.
HEARTBEAT_NS: Final = 1000 * NS_PER_MS
#: Gap between two events after which this process counts as paused.
PAUSED_NS: Final = 3 * HEARTBEAT_NS // 2
#: Maximum number of nodes in one reply to a supervisor; the rest follow later.
MAX_ORDERS: Final = 4096
#: Time of a query that is not known any more.
_LONG_AGO: Final = -(2**62)
#: Number of the last placement queries; the times of earlier ones are dropped.
_KEPT_QUERIES: Final = 64
#: Interval between checks during a recovery.
TICK_NS: Final = 50 * NS_PER_MS


class FailureHandler(ServiceNode):
    """One node of the failure handler."""

    service = "the failure handler"
    for_leader = frozenset({OrdersQuery})
    state: HandlerState

    def __init__(
        self,
        config: ClusterConfig,
        name: str,
        *,
        pid: int,
        now: int,
        wire_use: WireUse | None = None,
        free_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Start as a follower; see `ServiceNode`.

        Args:
            config: the cluster file.
            name: this node's name in it.
            pid: this process.
            now: monotonic nanoseconds.
            wire_use: the release, and the wire version in use; None: the first of both.
            free_bytes: returns the free space of its disk; None: unknown.

        """
        super().__init__(config, name, config.failure_handlers, now, wire_use)
        self._free_bytes: Final = free_bytes
        self._pid: Final = pid
        self.state = HandlerState()
        self.members: Final = Members()
        self._service_nodes: Final = tuple(node.name.encode() for node in config.mms)
        #: The leader's recoveries, by shard.
        self._recoveries: dict[int, Recovery] = {}
        self._counters: Final = Counters()
        self._connected = False
        self._heartbeat_due = self._tick_due = now
        self._requests = 0
        #: When the last placement queries were sent, by their numbers.
        self._queried_at: Final[dict[int, int]] = {}
        self._handlers = {
            Suspect: self._on_suspect,
            Frozen: self._on_frozen,
            OrdersQuery: self._on_orders_query,
            ClusterInfo: self._on_cluster_info,
            Removed: self._on_removed,
            Reinserted: self._on_reinserted,
            Refused: self._on_refused,
            NotLeader: self._on_not_leader,
            NodeInfo: self._on_node_info,
        }

    @property
    def cluster(self) -> int:
        """The cluster's number; 0 while it is unknown."""
        return self.members.cluster

    # --- events ---

    def _check_pause(self, now: int) -> None:
        if now - self._now > PAUSED_NS:
            for recovery in self._recoveries.values():
                recovery.forgive_silence_before(now)

    def next_wakeup(self) -> int | None:
        """Return this node's next wakeup."""
        if not self._connected:
            return self._now
        if self._is_leader and any(recovery.is_busy for recovery in self._recoveries.values()):
            return min(self._heartbeat_due, self._tick_due)
        return self._heartbeat_due

    def _on_wakeup(self) -> None:
        now = self._now
        if not self._connected:
            self._connected = True
            for node in self.config.mms:
                self._effects.append(Connect(node.name.encode(), node.endpoint))
        if now >= self._heartbeat_due:
            self._send_heartbeat()
        self._advance_all()

    def _send_heartbeat(self) -> None:
        self._heartbeat_due = self._now + HEARTBEAT_NS
        release = self.wire_use.release
        heartbeat = HandlerHeartbeat(
            self.cluster, self.name, self._pid, self._is_leader,
            release.version, *release.wires, self.wire_use.wire, self._obstacles(),
            self._free_bytes(),
        )  # fmt: skip
        self._effects.append(Broadcast(self._service_nodes, heartbeat))
        self._query_placements()

    def _obstacles(self) -> list[Obstacle]:
        """Return the shards that cannot be recovered now; none if this node does not lead."""
        found = (
            Obstacle(shard, text)
            for shard, recovery in sorted(self._recoveries.items())
            if (text := recovery.obstacle(self._now))
        )
        return list(islice(found, MAX_OBSTACLES))

    def _query_placements(self) -> None:
        self._requests += 1
        self._queried_at[self._requests] = self._now
        if len(self._queried_at) > _KEPT_QUERIES:
            del self._queried_at[next(iter(self._queried_at))]
        self._effects.append(Broadcast(self._service_nodes, Hello(self.cluster, self._requests)))

    # --- consensus ---

    def _start_leading(self) -> None:
        self._heartbeat_due = self._now
        # Earlier reports may still be valid; silence before now means nothing.
        for shard in {*self.members.placements, *self.state.shards}:
            self._recovery(shard)
        self._advance_all()

    def _stop_leading(self) -> None:
        self._recoveries.clear()
        self._counters.stop_leading()
        self._heartbeat_due = self._now

    def _on_restored(self) -> None:
        self._advance_all()

    def _on_committed(self, event: Committed) -> None:
        result = self._apply(event)
        if result is None:
            return
        for recovery in self._recoveries.values():
            recovery.on_applied(event.command)
        if decode_refusal(result) or not self._is_leader:
            return
        command = decode_command(event.command)
        self._log_progress(command)
        self._count_progress(command)
        self._advance(command.shard)

    def _log_progress(self, command: AnyCommand) -> None:
        """Log the progress of a recovery for the operator."""
        match command:
            case Begin():
                attempt = command.attempt
                name = self._name_of(command.shard, attempt.candidate)
                text = f"recovery {attempt.recovery} begins in view {command.view}, from {name}"
            case Decide():
                decision = command.decision
                text = f"view {command.recovery} is decided; it begins with {decision.last} entries"
                if decision.lost_from:
                    text += f"; records from {decision.lost_from} on may be lost"
            case Finish():
                text = f"it is in the leases again, in view {command.view}"
            case Confirm():
                text = f"view {command.view} is confirmed: enough replicas hold it"
        self._effects.append(LogWarning(f"shard {command.shard}: {text}"))

    def _count_progress(self, command: AnyCommand) -> None:
        if isinstance(command, Begin):
            self._counters.on_begin(command.shard, self.members.of(command.shard), self._now)
        elif isinstance(command, Finish):
            self._counters.on_finish(command.shard, self._now)

    def metrics(self) -> tuple[list[Value], list[Durations]]:
        """Return what this node counts beside its commits."""
        return self._counters.metrics(self.members.placements)

    def _name_of(self, shard: int, server: int) -> str:
        members = self.members.of(shard)
        return members[server].name if server < len(members) else f"server {server}"

    # --- recoveries ---

    def _recovery(self, shard: int) -> Recovery:
        recovery = self._recoveries.get(shard)
        if recovery is None:
            recovery = self._recoveries[shard] = Recovery(
                shard,
                self.state,
                self.members,
                self._service_nodes,
                now=self._now,
                rtt_ms=self.config.rtt_ms,
            )
        return recovery

    def _advance(self, shard: int) -> None:
        if self._is_leader:
            self._effects += self._recovery(shard).advance(self._now)

    def _advance_all(self) -> None:
        self._tick_due = self._now + TICK_NS
        for shard in self._recoveries:
            self._advance(shard)

    # --- storage servers ---

    def _on_suspect(self, src: bytes, message: Suspect) -> None:
        if not self.cluster or message.cluster != self.cluster:
            return  # the server repeats its report until this node knows the cluster
        if self.members.on_suspect(src, message, self._now) is None:
            self._reject(src, message, f"shard {message.shard} has no server {message.node}")
        else:
            if self._is_leader and message.suspects:
                self._counters.on_suspicion(message.shard, self._now)
            self._advance(message.shard)

    def _on_frozen(self, src: bytes, message: Frozen) -> None:
        if self._is_leader and message.shard in self._recoveries:
            self._recovery(message.shard).on_frozen(src, message)
            self._advance(message.shard)

    # --- the membership service ---

    def _check_sender(self, src: bytes, message: Message) -> bool:
        """Return whether a message came over this node's own connection to the service.

        Reject any other.
        """
        if src in self._service_nodes:
            return True
        self._reject(src, message, "the sender is not the membership service")
        return False

    def _on_cluster_info(self, src: bytes, message: ClusterInfo) -> None:
        if not self._check_sender(src, message):
            return
        # A follower's state may be old; a leader lists itself first.
        if not message.mms or self.config.node(src.decode()).endpoint != message.mms[0]:
            return
        self.members.cluster = message.cluster
        queried_at = self._queried_at.get(message.request, _LONG_AGO)
        self.members.on_cluster_info(message.placements, message.lost_regions, queried_at)
        for shard in self.members.placements if self._is_leader else ():
            self._advance(shard)

    def _on_removed(self, src: bytes, message: Removed) -> None:
        if self._check_sender(src, message) and message.shard in self._recoveries:
            self._recovery(message.shard).on_removed(message)
            self._advance(message.shard)

    def _on_reinserted(self, src: bytes, message: Reinserted) -> None:
        if self._check_sender(src, message) and message.shard in self._recoveries:
            self._recovery(message.shard).on_reinserted(message)
            self._advance(message.shard)
            self._query_placements()

    def _on_refused(self, src: bytes, message: Refused) -> None:
        if not self._check_sender(src, message):
            return
        if message.code == "wrong-cluster":
            self._reject(src, message, message.detail)
        elif message.shard in self._recoveries:
            self._recovery(message.shard).on_refused(message.detail)
            self._advance(message.shard)

    def _on_not_leader(self, src: bytes, message: NotLeader) -> None:
        """Ignore it: all nodes of the service got the request, and the leader answers."""
        self._check_sender(src, message)

    def _on_node_info(self, src: bytes, message: NodeInfo) -> None:
        if self._check_sender(src, message) and message.wire:
            self._effects += self.wire_use.on_report(message.wire)

    # --- supervisors ---

    def _on_orders_query(self, src: bytes, message: OrdersQuery) -> None:
        missing = (
            Order(name, self.state.shards[shard].attempt.recovery)
            for shard, recovery in self._recoveries.items()
            for name in recovery.unreachable(self._now)
        )
        orders = list(islice(missing, MAX_ORDERS))
        self._effects.append(Send(src, Orders(self.cluster, message.request, orders)))

    def check(self) -> None:
        """Assert the invariants of this node and of its parts."""
        self.state.check()
        self.members.check()
        assert self._is_leader or not self._recoveries
        for shard, recovery in self._recoveries.items():
            assert shard == recovery.shard
            recovery.check()
