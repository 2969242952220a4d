"""Membership service: one node of it, as a deterministic state machine.

    follower --LeaderChanged(is_self)--> leader: creates the cluster, grants leases one ahead,
    announces committed state, parks silent or slow shards, trims, answers clients, keeps
    cursors, removes and reinserts shards for the failure handler, adds and removes shards and gives
    up regions for operators
    leader --LeaderChanged--> follower: answers with the leader's endpoint, and forwards what the
    failure handler and clients repeat

Rule: only committed state is announced. State in memory (which servers are up, when a lease starts)
may be lost with the leader; that costs time, never a position.

Invariants: `check()`, those of `ClusterState`. See docs/protocol.md, sections 3, 5, 7, 8, 11, 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mms import membership_rules
from mms.announcements import Announcements
from mms.client_forwarding import ClientForwarding, Forwarded, Reply
from mms.client_requests import ClientRequests
from mms.cluster_creation import ClusterCreation
from mms.commands import (
    AnyCursorCommand,
    Barrier,
    CreateCluster,
    FinalizeShard,
    GrantLease,
    PlaceShard,
    RaiseWire,
    RecordEvents,
    RecordLoss,
    RemoveShard,
    RetireShard,
    SetDurability,
    SetRegionLost,
    SetTrim,
    decode_command,
    decode_refusal,
)
from mms.durability import DurabilityLevel
from mms.event_recorder import EventRecorder
from mms.forwarding import Forwarding
from mms.lease_proposals import LeaseProposals
from mms.leases import LeasePlan
from mms.lost_regions import LostRegions
from mms.read_barriers import MAX_PENDING
from mms.reconfiguration import Reconfiguration
from mms.recoveries import Recoveries
from mms.servers import FailureHandlers, Servers
from mms.state import ClusterState
from mms.upgrades import Upgrades
from ziplog.core.node import Halt, LogWarning, Send
from ziplog.raft.service_node import ServiceNode
from ziplog.wire import (
    ChangeRegion,
    ChangeShard,
    CursorClaim,
    CursorEdit,
    CursorMoves,
    CursorQuery,
    CursorRelease,
    CursorRenewal,
    Echo,
    FinishUpgrade,
    Frontier,
    HandlerHeartbeat,
    Heartbeat,
    Hello,
    LeaseQuery,
    NodeInfo,
    NotLeader,
    Rate,
    Refused,
    Reinsert,
    Reinserted,
    Remove,
    Removed,
    StatusQuery,
    Trim,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mms.commands import AnyCommand, Refusal
    from mms.read_barriers import DecidedRequest, QueuedRead
    from mms.reconfiguration import AnyChange
    from ziplog.config import ClusterConfig
    from ziplog.core.message import Message
    from ziplog.core.node import Committed, Effect
    from ziplog.core.wire_use import WireUse


class MembershipService(ServiceNode):
    """One node of the membership service."""

    service = "the membership service"
    for_leader = frozenset(
        {
            LeaseQuery, Trim, StatusQuery, ChangeShard, ChangeRegion, FinishUpgrade,
            CursorClaim, CursorMoves, CursorRelease, CursorEdit, CursorRenewal, CursorQuery,
            Remove, Reinsert,
        }
    )  # fmt: skip
    state: ClusterState

    def __init__(
        self,
        config: ClusterConfig,
        name: str,
        *,
        pid: int,
        cluster: int,
        incarnation: int,
        now: int,
        publisher: str = "",
        wire_use: WireUse | None = None,
        wall_offset_ns: Callable[[], int] = lambda: 0,
        free_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Start as a follower; see `ServiceNode`.

        Args:
            config: the cluster file.
            name: this node's name in it.
            pid: this process.
            cluster: the number that a new cluster gets: random, 1 to 2**63 - 1.
            incarnation: random, new in every process, 0 to 2**63 - 1.
            now: monotonic nanoseconds.
            publisher: the endpoint at which the process publishes; "": nowhere.
            wire_use: the release, and the wire version in use; None: the first of both.
            wall_offset_ns: returns Unix time minus the time of `now`: dates events.
            free_bytes: returns the free space of its disk; None: unknown.

        """
        assert 0 < cluster < 2**63
        super().__init__(config, name, config.mms, now, wire_use)
        state = self.state = ClusterState()
        servers = self.servers = Servers(publisher)
        plan = self.plan = LeasePlan(config.epoch_ms, config.rtt_ms)
        self.announcements: Final = Announcements(state, servers, plan, publisher)
        self._creation: Final = ClusterCreation(config, servers, cluster)
        self._recoveries: Final = Recoveries(state)
        self._reconfiguration: Final = Reconfiguration(
            state, servers, (*config.mms, *config.failure_handlers), config.required_regions
        )
        self._leases: Final = LeaseProposals(
            state, servers, plan, self._recoveries, self._reconfiguration, config.rtt_ms
        )
        self._failure_handlers: Final = FailureHandlers(config.failure_handlers)
        self._upgrades: Final = Upgrades(
            config, name, state, servers, self._failure_handlers, self.wire_use.release
        )
        self._forwarding: Final = Forwarding(state, self._failure_handlers, self._upgrades.peers)
        self._client_forwarding: Final = ClientForwarding(self._upgrades.peers)
        self._durability: Final = DurabilityLevel(state, servers)
        self._lost_regions: Final = LostRegions(state, servers)
        self._events: Final = EventRecorder(state, wall_offset_ns)
        self._requests: Final = ClientRequests(
            config, name, state, servers, plan, self._failure_handlers, self._leadership,
            self._upgrades.peers, pid=pid, incarnation=incarnation, release=self.wire_use.release,
            wall_offset_ns=wall_offset_ns, free_bytes=free_bytes, handle=self._handle_after_barrier,
        )  # fmt: skip
        self._cursors: Final = self._requests.cursors
        # Heartbeats may come before consensus has delivered the cluster's state.
        servers.place(membership_rules.configured(config), now)
        self._handlers = {
            Heartbeat: self._on_heartbeat,
            Rate: self._on_rate,
            Frontier: self._on_frontier,
            Hello: self._on_hello,
            LeaseQuery: self._on_read,
            Trim: self._on_read,
            StatusQuery: self._on_status_query,
            Remove: self._on_remove,
            Reinsert: self._on_reinsert,
            **dict.fromkeys(
                (NotLeader, Removed, Reinserted, *Reply.__args__), self._on_forwarded_reply
            ),
            HandlerHeartbeat: self._on_handler_heartbeat,
            ChangeShard: self._on_change_shard,
            ChangeRegion: self._on_change_region,
            FinishUpgrade: self._on_finish_upgrade,
            NodeInfo: self._on_node_info,
            CursorClaim: self._on_cursor_claim,
            CursorMoves: self._on_cursor_moves,
            CursorRelease: self._on_cursor_release,
            CursorEdit: self._on_cursor_edit,
            CursorRenewal: self._on_cursor_renewal,
            CursorQuery: self._on_read,
        }

    @property
    def cluster(self) -> int:
        """The cluster's number; 0 until it is created."""
        return self.state.cluster

    # --- events ---

    def _check_pause(self, now: int) -> None:
        if self._is_leader and self._leases.was_paused(now):
            self.servers.forgive_silence_before(now)
            self._events.forgive_silence_before(now)
            self._cursors.forgive_silence_before(now)

    def next_wakeup(self) -> int | None:
        """Return this node's next wakeup; None for a follower."""
        if not self._is_leader:
            return None
        if not self.cluster:
            return self._creation.due_at
        due = min(self._leases.check_at, self._leases.due_at(self._now))
        changes = self._reconfiguration.next_wakeup()
        return min([due, *self._requests.next_wakeup(self._now), *changes])

    def _on_wakeup(self) -> None:
        if not self._is_leader:
            return
        now = self._now
        if not self.cluster:
            self._effects += self._creation.advance(now)
            return
        if now >= self._leases.check_at:
            self._effects += self._requests.reject_lost(now)
            self._effects += self._leases.check_members(now)
            self._effects += self._upgrades.peers.query(self.cluster, now)
            self._effects += self._durability.propose(self.plan.epoch(now), now)
            self._effects += self._lost_regions.end(now)
            self._effects += self._events.tick(self.servers, self._failure_handlers, now)
            self._effects += self._cursors.check_holds(now)
        self._effects += self._leases.propose(now)
        self._effects += self._requests.propose_barrier(now)
        self._effects += self._cursors.propose_moves(now)
        self._advance()

    @property
    def _can_lead(self) -> bool:
        return self._is_leader and bool(self.cluster)

    def _on_wrong_cluster(self, src: bytes, message: Message) -> None:
        super()._on_wrong_cluster(src, message)
        shard, request = getattr(message, "shard", 0), getattr(message, "request", 0)
        here = f"this is cluster {self.cluster}"
        refused = Refused(self.cluster, shard, 0, 0, request, "wrong-cluster", here)
        self._effects.append(Send(src, refused))

    def _start_leading(self) -> None:
        self._creation.start_leading(self._now)
        self._leases.start_leading(self._now)
        self.servers.forgive_silence_before(self._now)
        self._cursors.forgive_silence_before(self._now)
        self._reconfiguration.start_leading(self._now)
        self._durability.forget()
        self._events.start_leading(self.name, self._now)
        self._on_wakeup()

    def _stop_leading(self) -> None:
        self._recoveries.abandon()
        self._effects += self._requests.abandon()
        parts = (self._reconfiguration, self._upgrades, self._lost_regions)
        for src, request in [request for part in parts for request in part.abandon()]:
            self._redirect(src, request)

    # --- consensus ---

    def _on_committed(self, event: Committed) -> None:
        trim = self.state.trim
        result = self._apply(event)
        if result is None or (refusal := decode_refusal(result)) == "malformed":
            return
        command = decode_command(event.command)
        if isinstance(command, AnyCursorCommand):
            if self._is_leader:
                self._effects += self._cursors.on_decided(command, event.command, result, self._now)
            return
        if refusal:
            self._on_refused(command, refusal)
            return
        self._on_applied(command)
        # A command of a replay happened at another time, and its event was recorded then.
        if self._leadership.leader or isinstance(command, RecordEvents):
            self._events.on_applied(command, self._now)
        if self.state.trim != trim:
            self.plan.set_history_size(self.state.history_bytes, self._now)
            self._announce()
        self._advance()

    def _on_applied(self, command: AnyCommand) -> None:
        match command:
            case CreateCluster():
                self._check_config()
                self._on_placements()
            case GrantLease() if command.lease != self.plan.last:
                self._on_lease_granted(command)
            case Barrier():
                self._effects += self._requests.on_barrier(command, self._now)
            case RemoveShard():
                self._on_shard_removed(command)
            case RecordLoss():
                self._recoveries.on_loss_recorded(command)
                self._return_shards()
            case PlaceShard() | RetireShard() | FinalizeShard():
                self._on_shard_changed(command)
            case RaiseWire():
                self._effects += self.wire_use.on_report(self.state.wire)
                self._effects += self._upgrades.on_raised()
            case SetDurability():
                self._durability.forget()
            case SetRegionLost():
                self._effects += self._lost_regions.on_applied(command)

    def _on_refused(self, command: AnyCommand, refusal: Refusal) -> None:
        match command:
            case SetRegionLost():
                self._effects += self._lost_regions.on_refused(self._now)
            case SetTrim():
                self._effects += self._requests.on_trim_refused(command, self._now)
            case GrantLease():
                self.plan.on_refused(self._now)
            case RemoveShard():
                self._effects += self._recoveries.on_remove_command(command, refusal)
            case RecordLoss():
                self._recoveries.on_loss_recorded(command)
            case PlaceShard() | RetireShard() | FinalizeShard():
                self._effects += self._reconfiguration.on_refused(command, refusal)
                self._advance_changes()

    def _on_lease_granted(self, command: GrantLease) -> None:
        self._leases.on_granted(command.lease, self._now, leading=self._is_leader)
        if command.placements:
            self.announcements.placements_changed_at = command.lease.number
            self._on_placements()
            self._effects += self._recoveries.on_lease_granted(command.placements)
        elif self.state.retired:
            self._reconfiguration.on_placements(self._now)
        self._announce()

    def _on_restored(self) -> None:
        last = self.state.last
        self.announcements.placements_changed_at = last.number if last is not None else 0
        self._leases.on_restored(self._now)
        self._events.on_restored()
        self._on_placements()
        self._effects += self.wire_use.on_report(self.state.wire)
        self._check_config()

    def _check_config(self) -> None:
        """Halt if the cluster file contradicts the log: damaged, or of another cluster."""
        wrong = membership_rules.contradiction(self.state, self.config)
        if wrong:
            self._effects.append(Halt(wrong))
        self._effects += map(LogWarning, membership_rules.moved_nodes(self.state, self.config))

    def _on_placements(self) -> None:
        self.servers.place(self.state.placements.values(), self._now)
        self._leases.on_placements()
        self._reconfiguration.on_placements(self._now)

    # --- storage servers ---

    def _on_heartbeat(self, src: bytes, message: Heartbeat) -> None:
        now = self._now
        server = self.servers.on_heartbeat(src, message, now)
        if server is None:
            self._reject(src, message, f"shard {message.shard} has no server {message.node}")
            return
        if self.config.rtt_ms and message.sent_us:
            self._effects.append(Send(src, Echo(self.cluster, message.sent_us)))
        if not self._is_leader:
            self._effects += self.announcements.relay(server, now)
            return
        self._events.on_heartbeat(server, now)
        if not self.cluster:
            self._creation.on_heartbeat(now)
            return
        self._effects += self._upgrades.answer_heartbeat(src, message)
        self._leases.on_heartbeat(message, now)
        if self.announcements.is_due(server, now):
            self._effects.append(self.announcements.announce(server, now))
        if server.index == 0 and server.shard in self._leases.live and not server.is_in_limbo:
            self._leases.on_member(message, now)
        self._leases.check_shard(server, now)
        self._effects += self._leases.propose(now)
        self._advance()

    def _on_rate(self, src: bytes, message: Rate) -> None:
        if not self.servers.is_primary(src, message.shard, message.view):
            self._reject(src, message, f"the sender is not the primary of shard {message.shard}")
            return
        if not self._is_leader:
            return
        if not message.per_s:
            self._reconfiguration.on_drained(message.shard)
            self._advance_changes()
        self._effects += self._leases.on_rate(message.shard, message.per_s, self._now)

    def _on_frontier(self, src: bytes, message: Frontier) -> None:
        if not self.servers.is_route_of(src, message.shard):
            self._reject(src, message, f"the sender is not a server of shard {message.shard}")
            return
        self.servers.raise_frontier(message.shard, message.frontier)
        self._effects += self._requests.advance(self._now)

    def _announce(self) -> None:
        if self._is_leader:
            self._effects += self.announcements.announce_all(self._now)

    def _announce_to_servers(self, shard: int) -> None:
        """Announce the placement of one shard to its servers."""
        for server in self.servers.replicas(shard):
            if server.heartbeat is not None:
                self._effects.append(self.announcements.announce(server, self._now))

    # --- the failure handler ---

    def _on_handler_heartbeat(self, src: bytes, message: HandlerHeartbeat) -> None:
        if not self._failure_handlers.on_heartbeat(src, message, self._now):
            self._reject(src, message, f"{message.node} is not a failure handler of this cluster")
        elif self._can_lead:
            self._effects += self._upgrades.answer_heartbeat(src, message)

    def _on_remove(self, src: bytes, message: Remove) -> None:
        self._effects += self._recoveries.on_remove(src, message, self._now)

    def _on_shard_removed(self, command: RemoveShard) -> None:
        """Drop the shard from the next lease, and announce it to its servers."""
        self._on_placements()
        self._leases.on_removed(command.shard)
        self._effects += self._recoveries.on_remove_command(command, "")
        if self._is_leader:
            self._announce_to_servers(command.shard)
            self._effects += self._leases.propose_at_once(self._now)

    def _on_reinsert(self, src: bytes, message: Reinsert) -> None:
        self._effects += self._recoveries.on_reinsert(src, message, self._now)
        self._return_shards()

    def _return_shards(self) -> None:
        """Grant a lease at once if it returns a shard and no such lease is pending."""
        if self._is_leader and self._recoveries.claim_lease(self._now):
            self._effects += self._leases.propose_at_once(self._now)

    # --- forwarding ---

    def _on_request_for_leader(self, src: bytes, message: Any) -> None:
        """Redirect a request to the leader, and forward it if its source may not reach that."""
        super()._on_request_for_leader(src, message)
        leader = self._leadership.leader
        if isinstance(message, Remove | Reinsert):
            self._effects += self._forwarding.on_request(src, message, leader)
        elif isinstance(message, Forwarded):
            self._effects += self._client_forwarding.on_request(src, message, leader)

    def _on_forwarded_reply(self, src: bytes, message: Message) -> None:
        if not self._upgrades.peers.is_from_peer(src):
            self._reject(src, message, "the sender is not another node of the service")
            return
        if isinstance(message, Reply):
            self._effects += self._client_forwarding.on_reply(message)
        if isinstance(message, Removed | Reinserted | Refused):
            self._effects += self._forwarding.on_reply(message)

    # --- operators and clients ---

    def _on_change_shard(self, src: bytes, message: ChangeShard) -> None:
        self._effects += self._reconfiguration.submit(src, message, self._now)
        self._advance_changes()

    def _on_shard_changed(self, command: AnyChange) -> None:
        self._on_placements()
        shard = self._reconfiguration.on_applied(command)
        if self._is_leader and self.state.last is not None:
            self._announce_to_servers(shard)

    def _on_change_region(self, src: bytes, message: ChangeRegion) -> None:
        if self._lost_regions.would_answer(message, self._now):
            self._on_read(src, message)
        else:
            self._effects += self._lost_regions.submit(src, message, self._now)

    def _on_finish_upgrade(self, src: bytes, message: FinishUpgrade) -> None:
        if self._upgrades.would_refuse(message, self._now):
            self._on_read(src, message)
        else:
            self._effects += self._upgrades.submit(src, message, self._now)

    def _handle_after_barrier(self, src: bytes, message: DecidedRequest, now: int) -> list[Effect]:
        """Handle a request when all earlier proposals are decided."""
        if isinstance(message, ChangeRegion):
            return self._lost_regions.submit(src, message, now)
        if isinstance(message, CursorClaim):
            return self._cursors.claim(src, message, now)
        return self._upgrades.submit(src, message, now)

    def _on_node_info(self, src: bytes, message: NodeInfo) -> None:
        if not self._upgrades.peers.on_node_info(src, message, self._now):
            self._reject(src, message, "the sender is not another node of the service")

    def _advance(self) -> None:
        """Take the next steps of pending trims and of shard changes."""
        self._effects += self._requests.advance(self._now)
        self._advance_changes()

    def _advance_changes(self) -> None:
        """Take the next steps for shards that join, leave and are finalized."""
        if not self._is_leader:
            return
        self._effects += self._reconfiguration.advance(self._now)
        if self._reconfiguration.claim_lease(self._now):
            self._effects += self._leases.propose_at_once(self._now)

    def _on_hello(self, src: bytes, message: Hello) -> None:
        self._effects.append(self._requests.hello(src, message, self._now))

    def _on_read(self, src: bytes, message: QueuedRead) -> None:
        self._effects += self._requests.submit(src, message, self._now)

    def _on_status_query(self, src: bytes, message: StatusQuery) -> None:
        durability = self._durability.status(self.level)
        self._effects.append(self._requests.status(src, message, durability, self._now))

    # --- cursors ---

    def _on_cursor_claim(self, src: bytes, message: CursorClaim) -> None:
        if self._cursors.would_refuse(message, self._now):
            self._on_read(src, message)
        else:
            self._effects += self._cursors.claim(src, message, self._now)

    def _on_cursor_moves(self, src: bytes, message: CursorMoves) -> None:
        self._effects += self._cursors.move(src, message, self._now)

    def _on_cursor_release(self, src: bytes, message: CursorRelease) -> None:
        self._effects += self._cursors.release(src, message, self._now)

    def _on_cursor_edit(self, src: bytes, message: CursorEdit) -> None:
        self._effects += self._cursors.edit(src, message, self._now)

    def _on_cursor_renewal(self, src: bytes, message: CursorRenewal) -> None:
        self._effects.append(self._cursors.renew(src, message, self._now))

    def check(self) -> None:
        """Assert the invariants of this node and of its parts."""
        self.state.check()
        self.servers.check()
        self._recoveries.check()
        self._forwarding.check()
        self._client_forwarding.check()
        self._reconfiguration.check()
        self._leases.check()
        self._upgrades.check()
        self._lost_regions.check()
        self._cursors.check()
        assert self.plan.last == self.state.last
        assert {server.shard for server in self.servers} >= set(self.state.placements)
        waiting = len(self._requests)
        assert waiting <= MAX_PENDING
        assert self._is_leader or not waiting
