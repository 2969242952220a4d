"""Membership service: one node of it, as a deterministic state machine.

    follower --LeaderChanged(is_self)--> leader: creates the cluster, grants leases one ahead,
    announces committed state, parks silent or slow shards, trims, answers clients, removes and
    reinserts shards for the failure handler, adds and removes shards for operators
    leader --LeaderChanged--> follower: only answers with the leader's endpoint

Rule: only committed state is announced. State in memory (which servers are up, when a lease starts)
may be lost with the leader; that costs time, never a position.

Invariants: `check()`, those of `ClusterState`. See docs/protocol.md, sections 3, 5, 7, 8, 11, 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mms import membership_rules
from mms.announcements import Announcements
from mms.client_requests import ClientRequests
from mms.commands import (
    Barrier,
    CreateCluster,
    FinalizeShard,
    GrantLease,
    PlaceShard,
    RecordLoss,
    RemoveShard,
    RetireShard,
    SetFinalized,
    decode_command,
    decode_refusal,
)
from mms.failure_handlers import FailureHandlers
from mms.leases import LeasePlan
from mms.proposals import RETRY_NS
from mms.read_barriers import MAX_PENDING
from mms.reconfiguration import Reconfiguration
from mms.recoveries import Recoveries
from mms.servers import Servers
from mms.state import ClusterState
from mms.stragglers import Stragglers
from mms.weights import Weights
from ziplog.core.node import (
    Committed,
    Halt,
    LeaderChanged,
    LogWarning,
    PeersChanged,
    Propose,
    Received,
    ReportBadMessage,
    Restored,
    Send,
    Wakeup,
)
from ziplog.core.units import NS_PER_MS
from ziplog.core.view import Member, Placement
from ziplog.wire import (
    ChangeShard,
    Frontier,
    HandlerHeartbeat,
    Heartbeat,
    Hello,
    LeaseQuery,
    Rate,
    Refused,
    Reinsert,
    Remove,
    StatusQuery,
    Trim,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mms.commands import AnyCommand, Refusal
    from ziplog.config import ClusterConfig
    from ziplog.core.message import Message
    from ziplog.core.node import Effect, Event

#: Interval between checks of silence, weights and finalized epochs.
HOUSEKEEPING_NS: Final = 500 * NS_PER_MS
#: Time that the cluster stays active after an active server's heartbeat.
ACTIVE_NS: Final = 2000 * NS_PER_MS
#: Time that a new cluster waits for all servers: they would know of an old cluster.
CREATE_NS: Final = 1500 * NS_PER_MS
#: Time that the first lease waits for all shards; then it omits those that are missing.
FIRST_LEASE_NS: Final = 2000 * NS_PER_MS
#: Requests that only the leader answers, once there is a cluster.
_FOR_THE_LEADER: Final = frozenset({LeaseQuery, Trim, StatusQuery, Remove, Reinsert, ChangeShard})


class MembershipService:
    """One node of the membership service."""

    def __init__(
        self,
        config: ClusterConfig,
        name: str,
        *,
        pid: int,
        cluster: int,
        incarnation: int,
        now: int,
    ) -> None:
        """Start as a follower with no state; consensus delivers the rest.

        Args:
            config: the cluster file.
            name: this node's name in it.
            pid: this process.
            cluster: the number that a new cluster gets: random, 1 to 2**63 - 1.
            incarnation: random, new in every process, 0 to 2**63 - 1.
            now: monotonic nanoseconds.

        """
        assert 0 < cluster < 2**63
        self.config: Final = config
        self.name: Final = name
        self._new_cluster: Final = cluster
        self.state: Final = ClusterState()
        self.servers: Final = Servers()
        self.plan: Final = LeasePlan(config.epoch_ms)
        self.announcements: Final = Announcements(self.state, self.servers, self.plan)
        self._weights: Final = Weights()
        self._stragglers: Final = Stragglers()
        self._recoveries: Final = Recoveries(self.state)
        self._reconfiguration: Final = Reconfiguration(
            self.state, self.servers, (*config.mms, *config.failure_handlers)
        )
        self._failure_handlers: Final = FailureHandlers(config.failure_handlers)
        self._requests: Final = ClientRequests(
            config, name, self.state, self.servers, self.plan, self._failure_handlers,
            pid=pid, incarnation=incarnation,
        )  # fmt: skip
        self._leading = False
        self._active_until = 0
        self._leading_since = 0
        self._housekeeping_at = 0
        self._create_at = 0
        self._finalize_at = 0
        self._live: set[int] = set()
        self._has_other_weights = False
        self._has_warned = False
        self._changes: list[Placement] = []
        self._effects: list[Effect] = []
        self._now = now
        # Heartbeats may come before consensus has delivered the cluster's state.
        self.servers.place(membership_rules.configured(config), now)
        self._handlers: Final[Mapping[type[Message], Callable[[bytes, Any], None]]] = {
            Heartbeat: self._on_heartbeat,
            Rate: self._on_rate,
            Frontier: self._on_frontier,
            Hello: self._on_hello,
            LeaseQuery: self._on_read,
            Trim: self._on_read,
            StatusQuery: self._on_status_query,
            Remove: self._on_remove,
            Reinsert: self._on_reinsert,
            HandlerHeartbeat: self._on_handler_heartbeat,
            ChangeShard: self._on_change_shard,
        }

    # --- events ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Process one event; see `ziplog.core.node`."""
        self._now = now
        if self._leading and self._was_paused:
            self.servers.forgive_silence_before(now)  # heartbeats may have come meanwhile
        match event:
            case Received():
                self._on_received(event.src, event.message)
            case Committed():
                self._on_committed(event)
            case Wakeup():
                self._on_wakeup()
            case LeaderChanged():
                self._on_leader_changed(event)
            case PeersChanged():
                self._requests.connected = event.connected
            case Restored():
                self._on_restored(event.snapshot)
        effects, self._effects = self._effects, []
        return effects

    def next_wakeup(self) -> int | None:
        """Return this node's next wakeup; None for a follower."""
        if not self._leading:
            return None
        if not self.state.cluster:
            return self._create_at
        due = min(self._housekeeping_at, self._lease_due())
        changes = self._reconfiguration.next_wakeup()
        return min([due, *self._requests.next_wakeup(self._now), *changes])

    def _on_wakeup(self) -> None:
        if not self._leading:
            return
        if not self.state.cluster:
            self._create()
            return
        if self._now >= self._housekeeping_at:
            self._do_housekeeping()
        if self._now >= self._lease_due():
            self._propose_lease()
        self._effects += self._requests.propose_barrier(self._now)
        self._effects += self._requests.advance(self._now)
        self._advance_changes()

    def _on_received(self, src: bytes, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            self._reject(src, message, "the membership service does not accept this message")
            return
        if self.state.cluster and message.cluster not in {0, self.state.cluster}:
            here = f"this is cluster {self.state.cluster}"
            self._reject(src, message, f"it is for cluster {message.cluster}, but {here}")
            shard, request = getattr(message, "shard", 0), getattr(message, "request", 0)
            refused = Refused(self.state.cluster, shard, 0, 0, request, "wrong-cluster", here)
            self._effects.append(Send(src, refused))
            return
        leads = self._leading and self.state.cluster
        if type(message) in _FOR_THE_LEADER and not leads:
            self._effects.append(self._requests.not_leader(src, getattr(message, "request", 0)))
            return
        handler(src, message)

    def _reject(self, src: bytes, message: Message, why: str) -> None:
        self._effects.append(ReportBadMessage(src, f"{type(message).__name__}: {why}"))

    # --- consensus ---

    def _on_leader_changed(self, event: LeaderChanged) -> None:
        self._requests.leader = event.leader
        if event.is_self and not self._leading:
            self._leading = True
            self._leading_since = self._housekeeping_at = self._now
            self.plan.start_leading(self._now)
            self.servers.forgive_silence_before(self._now)
            self._weights.forget_rates()
            self._stragglers.clear()
            self._reconfiguration.start_leading(self._now)
            self._on_wakeup()
        elif not event.is_self and self._leading:
            self._leading = False
            self._recoveries.abandon()
            self._effects += self._requests.abandon()
            for src, request in self._reconfiguration.abandon():
                self._effects.append(self._requests.not_leader(src, request))

    def _create(self) -> None:
        """Create the cluster, unless it exists and only this directory has lost it."""
        if self.servers.missing and self._now < self._leading_since + CREATE_NS:
            self._create_at = self._leading_since + CREATE_NS
            return
        self._create_at = self._now + RETRY_NS
        others = membership_rules.other_clusters(self.servers) - {self._new_cluster}
        if others:
            if not self._has_warned:
                self._has_warned = True
                self._effects.append(LogWarning(
                    f"no cluster is created: storage servers belong to cluster {min(others)}."
                    " Restore the membership service's data directories; or, to start without the"
                    " old records, remove the data directories of all storage servers"
                ))  # fmt: skip
            return
        command = CreateCluster(
            self._new_cluster, self.config.name, membership_rules.configured(self.config),
            self.config.durability,
        )  # fmt: skip
        self._effects.append(Propose(command.encode()))

    def _on_committed(self, event: Committed) -> None:
        before, trim = self.state.last, self.state.trim
        result = self.state.apply(event.command)
        if result != event.result:
            self._effects.append(
                Halt(f"command result: here {result!r}, in consensus {event.result!r}")
            )
            return
        refusal = decode_refusal(result)
        if refusal == "malformed":
            return
        command = decode_command(event.command)
        if refusal:
            self._on_refused(command, refusal)
            return
        match command:
            case CreateCluster():
                self._check_config()
                self._on_placements()
            case GrantLease() if command.lease != before:
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
        if self.state.trim != trim:
            self.plan.set_history_size(self.state.history_bytes, self._now)
            self._announce()
        self._effects += self._requests.advance(self._now)
        self._advance_changes()

    def _on_refused(self, command: AnyCommand, refusal: Refusal) -> None:
        match command:
            case GrantLease():
                self.plan.on_refused(self._now)
            case RemoveShard():
                self._effects += self._recoveries.on_remove_command(command, refusal)
            case RecordLoss():
                self._recoveries.on_loss_recorded(command)
            case PlaceShard() | RetireShard() | FinalizeShard():
                self._effects += self._reconfiguration.on_refused(command, refusal)

    def _on_lease_granted(self, command: GrantLease) -> None:
        self.plan.on_committed(command.lease, self._now, leading=self._leading)
        self.plan.set_history_size(self.state.history_bytes, self._now)
        self._stragglers.on_lease(command.lease, self.plan.starts)
        self._weights.on_granted(command.lease.members)
        self._has_other_weights = self._weights.are_outdated()
        if command.placements:
            self.announcements.placements_changed_at = command.lease.number
            self._on_placements()
            self._effects += self._recoveries.on_lease_granted(command.placements)
        elif self.state.retired:
            self._reconfiguration.on_placements(self._now)
        self._announce()

    def _on_restored(self, snapshot: bytes) -> None:
        self.state.restore(snapshot)
        last = self.state.last
        self.announcements.placements_changed_at = last.number if last is not None else 0
        self.plan.on_restored(last, self._now)
        self.plan.set_history_size(self.state.history_bytes, self._now)
        self._weights.on_granted(self.plan.members)
        self._on_placements()
        self._check_config()

    def _check_config(self) -> None:
        """Halt if the cluster file contradicts the log: damaged, or of another cluster."""
        wrong = membership_rules.contradiction(self.state, self.config)
        if wrong:
            self._effects.append(Halt(wrong))
        self._effects += map(LogWarning, membership_rules.moved_nodes(self.state, self.config))

    def _on_placements(self) -> None:
        placements = self.state.placements.values()
        self.servers.place(placements, self._now)
        self._live = {placement.shard for placement in placements if placement.state == "live"}
        self._changes = []
        self._reconfiguration.on_placements(self._now)

    # --- leases ---

    def _is_active(self) -> bool:
        return self._now < self._active_until

    def _lease_due(self) -> int:
        now = self._now
        if not self._live:
            changes = (*self._changes, *self._recoveries.changes())
            if all(changed.state != "live" for changed in changes):
                return self._housekeeping_at  # no shard is ready
        return self.plan.due_at(
            now,
            active=now < self._active_until,
            other_members=bool(self._changes),
            other_weights=self._has_other_weights,
        )

    def _propose_lease(self) -> None:
        now = self._now
        changes = [*self._changes, *self._recoveries.changes()]
        members = self._members(changes)
        if not members:
            return
        if self._has_other_weights and members == self.plan.members:
            self._has_other_weights = False  # the weights fit again
            if now < self._lease_due():
                return
        shards = {member.shard for member in self.plan.members}
        others = bool(changes) or shards != {member.shard for member in members}
        lease = self.plan.propose(members, now, active=self._is_active(), other_members=others)
        self._effects.append(Propose(GrantLease(lease, changes).encode()))

    def _members(self, changes: list[Placement]) -> tuple[Member, ...]:
        placements = membership_rules.members(
            self.state, changes, self._reconfiguration.shards_to_drop(self._now)
        )
        weights = self._weights.for_shards(list(placements))
        return tuple(
            Member(shard, placement.view, weight)
            for (shard, placement), weight in zip(placements.items(), weights, strict=True)
        )

    @property
    def _was_paused(self) -> bool:
        """Whether this process, or its machine, was paused before this step."""
        return self._now - self._housekeeping_at > HOUSEKEEPING_NS * 2

    def _do_housekeeping(self) -> None:
        now = self._now
        if self._was_paused:
            self._stragglers.forget_checks()
        self._housekeeping_at = now + HOUSEKEEPING_NS
        self._effects += self._requests.reject_lost(now)
        if self.state.last is None:
            self._plan_first_lease()
            return
        self._stragglers.check_silent(self._live, now)
        self._change_members()
        if self._is_active() and now >= self._finalize_at:
            self._finalize_at = now + 2 * HOUSEKEEPING_NS
            self._finalize()

    def _plan_first_lease(self) -> None:
        waited = self._now >= self._leading_since + FIRST_LEASE_NS
        if waited or not self.servers.missing:
            self._changes = membership_rules.first_changes(self.state, self.servers)

    def _finalize(self) -> None:
        finalized = membership_rules.finalized(self.state, self.servers)
        if finalized > self.state.finalized:
            self._effects.append(Propose(SetFinalized(finalized).encode()))

    # --- storage servers ---

    def _on_heartbeat(self, src: bytes, message: Heartbeat) -> None:
        now = self._now
        server = self.servers.on_heartbeat(src, message, now)
        if server is None:
            self._reject(src, message, f"shard {message.shard} has no server {message.node}")
            return
        if not self._leading:
            return
        if not self.state.cluster:
            if not self.servers.missing:
                self._create_at = now
            return
        if message.active:
            self._active_until = now + max(ACTIVE_NS, self.plan.weights_interval_ns)
        last = self.state.last
        if last is None:
            if not self.servers.missing and not self._changes:
                self._plan_first_lease()
        elif self.announcements.is_behind(server, now):
            self._effects.append(self.announcements.announce(server, now))
        if server.index == 0 and server.shard in self._live and not server.is_in_limbo:
            self._observe_member(message)
        self._check_joining(server.shard)
        if now >= self._lease_due():
            self._propose_lease()
        self._effects += self._requests.advance(now)
        self._advance_changes()

    def _observe_member(self, message: Heartbeat) -> None:
        """Record a member's rate, and how late it is."""
        now, shard = self._now, message.shard
        if self._is_active():
            self._weights.observe(shard, message.rate_per_s)
            self._check_weights()
        has_readers = message.is_watched
        if self._stragglers.on_heartbeat(shard, message.frontier, now, is_watched=has_readers):
            self._change_members()

    def _check_weights(self) -> None:
        self._has_other_weights = self._has_other_weights or self._weights.are_outdated()

    def _change_members(self) -> None:
        self._stragglers.park(self._now, len(self._live))
        self._changes = membership_rules.member_changes(
            self.state, self.servers, self._stragglers, self._now
        )

    def _on_rate(self, src: bytes, message: Rate) -> None:
        if not self.servers.is_primary(src, message.shard, message.view):
            self._reject(src, message, f"the sender is not the primary of shard {message.shard}")
            return
        if self._leading and not message.per_s:
            self._reconfiguration.on_drained(message.shard)
            self._advance_changes()
        if not self._leading or message.shard not in self._live:
            return
        self._weights.set_rate(message.shard, message.per_s)
        self._check_weights()
        if self._now >= self._lease_due():
            self._propose_lease()

    def _announce(self) -> None:
        if self._leading:
            self._effects += self.announcements.announce_all(self._now)

    def _on_frontier(self, src: bytes, message: Frontier) -> None:
        if not self.servers.is_route_of(src, message.shard):
            self._reject(src, message, f"the sender is not a server of shard {message.shard}")
            return
        self.servers.raise_frontier(message.shard, message.frontier)
        self._effects += self._requests.advance(self._now)

    # --- the failure handler ---

    def _on_handler_heartbeat(self, src: bytes, message: HandlerHeartbeat) -> None:
        if not self._failure_handlers.on_heartbeat(message, self._now):
            self._reject(src, message, f"{message.node} is not a failure handler of this cluster")

    def _on_remove(self, src: bytes, message: Remove) -> None:
        self._effects += self._recoveries.on_remove(src, message, self._now)

    def _on_shard_removed(self, command: RemoveShard) -> None:
        """Drop the shard from the next lease, and announce it to its servers."""
        self._on_placements()
        self._stragglers.on_removed(command.shard)
        self._effects += self._recoveries.on_remove_command(command, "")
        if not self._leading:
            return
        self._announce_to_servers(command.shard)
        self._propose_lease_at_once()

    def _announce_to_servers(self, shard: int) -> None:
        """Announce the placement of one shard to its servers."""
        for server in self.servers.replicas(shard):
            if server.heartbeat is not None:
                self._effects.append(self.announcements.announce(server, self._now))

    def _on_reinsert(self, src: bytes, message: Reinsert) -> None:
        self._effects += self._recoveries.on_reinsert(src, message, self._now)
        self._return_shards()

    def _return_shards(self) -> None:
        """Grant a lease at once if it returns a shard and no such lease is pending."""
        if self._leading and self._recoveries.claim_lease(self._now):
            self._propose_lease_at_once()

    def _propose_lease_at_once(self) -> None:
        self.plan.propose_at_once()
        if self._now >= self._lease_due():
            self._propose_lease()

    # --- shard changes ---

    def _on_change_shard(self, src: bytes, message: ChangeShard) -> None:
        self._effects += self._reconfiguration.submit(src, message, self._now)
        self._advance_changes()

    def _on_shard_changed(self, command: PlaceShard | RetireShard | FinalizeShard) -> None:
        self._on_placements()
        shard = self._reconfiguration.on_applied(command)
        if self._leading and self.state.last is not None:
            self._announce_to_servers(shard)

    def _advance_changes(self) -> None:
        """Take the next steps for shards that join, leave and are finalized."""
        if not self._leading:
            return
        self._effects += self._reconfiguration.advance(self._now)
        if self._reconfiguration.claim_lease(self._now):
            self._propose_lease_at_once()

    def _check_joining(self, shard: int) -> None:
        """Make a joining shard live once all of its servers sent heartbeats."""
        placement = self.state.placements.get(shard)
        if placement is None or placement.state != "joining" or self.state.last is None:
            return
        is_noted = any(changed.shard == shard for changed in self._changes)
        is_ready = self.servers.has_reported(shard) and self.servers.holds_leases(shard)
        if is_ready and not is_noted:
            self._change_members()

    # --- clients ---

    def _on_hello(self, src: bytes, message: Hello) -> None:
        self._effects.append(self._requests.hello(src, message, self._now))

    def _on_read(self, src: bytes, message: LeaseQuery | Trim) -> None:
        self._effects += self._requests.submit(src, message, self._now)

    def _on_status_query(self, src: bytes, message: StatusQuery) -> None:
        self._effects.append(self._requests.status(src, message, self._now))

    def check(self) -> None:
        """Assert the invariants of this node and of its parts."""
        self.state.check()
        self._recoveries.check()
        self._reconfiguration.check()
        self._stragglers.check()
        self._weights.check(self.plan.members)
        assert self.plan.last == self.state.last
        assert {server.shard for server in self.servers} >= set(self.state.placements)
        waiting = len(self._requests)
        assert waiting <= MAX_PENDING
        assert self._leading or not waiting
