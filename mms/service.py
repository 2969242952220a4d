"""The membership service: one node of it, as a deterministic state machine.

    follower --LeaderChanged(is_self)--> leader: creates the cluster, grants leases one ahead,
    announces what is committed, parks shards that are silent or late, trims, answers clients, takes
    shards out and back for the failure handler, and in and out for operators
    leader --LeaderChanged--> follower: only says who the leader is

Rule: nothing is told to anybody before it is committed. What is in memory only (who is up, when a
lease starts) may be lost with the leader; it costs time, never a position.

Invariants: `check()`, those of `ClusterState`. See docs/protocol.md, sections 3, 5, 7, 8, 11, 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mms import membership_rules
from mms.announcements import Announcements
from mms.client_requests import Answers
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
from mms.failure_handlers import Handlers
from mms.leases import LeasePlan
from mms.proposals import RETRY_NS
from mms.read_barriers import MAX_PENDING
from mms.reconfiguration import Reshaping
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

_MS: Final = 1_000_000
#: How often silence, weights and finalized epochs are looked at.
HOUSEKEEPING_NS: Final = 500 * _MS
#: The cluster is active for so long after a heartbeat that said so.
ACTIVE_NS: Final = 2000 * _MS
#: A new cluster waits so long for all servers: they would know of an old one.
CREATE_NS: Final = 1500 * _MS
#: The first lease waits so long for all shards, before it does without some.
FIRST_LEASE_NS: Final = 2000 * _MS
#: What only the leader answers, once there is a cluster.
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
        """Start as a follower that knows nothing; consensus tells the rest.

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
        self._reshaping: Final = Reshaping(
            self.state, self.servers, (*config.mms, *config.failure_handlers)
        )
        self._failure_handlers: Final = Handlers(config.failure_handlers)
        self._answers: Final = Answers(
            config, name, self.state, self.servers, self.plan, self._failure_handlers,
            pid=pid, incarnation=incarnation,
        )  # fmt: skip
        self._leading = False
        self._active_until = 0
        self._leads_since = 0
        self._housekeeping_at = 0
        self._create_at = 0
        self._finalize_at = 0
        self._live: set[int] = set()
        self._has_other_weights = False
        self._has_warned = False
        self._changes: list[Placement] = []
        self._out: list[Effect] = []
        self._now = now
        # Heartbeats may come before consensus has said what the cluster is.
        self.servers.place(membership_rules.configured(config), now)
        self._handlers: Final[Mapping[type[Message], Callable[[bytes, Any], None]]] = {
            Heartbeat: self._heartbeat,
            Rate: self._rate,
            Frontier: self._frontier,
            Hello: self._hello,
            LeaseQuery: self._ask,
            Trim: self._ask,
            StatusQuery: self._status_query,
            Remove: self._remove,
            Reinsert: self._reinsert,
            HandlerHeartbeat: self._handler_heartbeat,
            ChangeShard: self._change_shard,
        }

    # --- the one door ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.core.node`."""
        self._now = now
        if self._leading and self._was_stopped:
            self.servers.listen_from(now)  # they may not have been silent
        match event:
            case Received():
                self._received(event.src, event.message)
            case Committed():
                self._committed(event)
            case Wakeup():
                self._woke()
            case LeaderChanged():
                self._leader_changed(event)
            case PeersChanged():
                self._answers.connected = event.connected
            case Restored():
                self._restored(event.snapshot)
        out, self._out = self._out, []
        return out

    def next_wakeup(self) -> int | None:
        """Return when this node wants to be woken; a follower never does."""
        if not self._leading:
            return None
        if not self.state.cluster:
            return self._create_at
        due = min(self._housekeeping_at, self._lease_due())
        others = [*self._answers.next_wakeup(self._now), *self._reshaping.next_wakeup()]
        return min([due, *others])

    def _woke(self) -> None:
        if not self._leading:
            return
        if not self.state.cluster:
            self._create()
            return
        if self._now >= self._housekeeping_at:
            self._keep_house()
        if self._now >= self._lease_due():
            self._propose_lease()
        self._out += self._answers.raise_barrier(self._now)
        self._out += self._answers.advance(self._now)
        self._reshape()

    def _received(self, src: bytes, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            self._complain(src, message, "the membership service takes none")
            return
        if self.state.cluster and message.cluster not in {0, self.state.cluster}:
            here = f"this is cluster {self.state.cluster}"
            self._complain(src, message, f"it is of cluster {message.cluster}, and {here}")
            shard, request = getattr(message, "shard", 0), getattr(message, "request", 0)
            refused = Refused(self.state.cluster, shard, 0, 0, request, "wrong-cluster", here)
            self._out.append(Send(src, refused))
            return
        leads = self._leading and self.state.cluster
        if type(message) in _FOR_THE_LEADER and not leads:
            self._out.append(self._answers.not_leader(src, getattr(message, "request", 0)))
            return
        handler(src, message)

    def _complain(self, src: bytes, message: Message, why: str) -> None:
        self._out.append(ReportBadMessage(src, f"{type(message).__name__}: {why}"))

    # --- consensus ---

    def _leader_changed(self, event: LeaderChanged) -> None:
        self._answers.leader = event.leader
        if event.is_self and not self._leading:
            self._leading = True
            self._leads_since = self._housekeeping_at = self._now
            self.plan.lead(self._now)
            self.servers.listen_from(self._now)
            self._weights.forget()
            self._stragglers.clear()
            self._reshaping.lead(self._now)
            self._woke()
        elif not event.is_self and self._leading:
            self._leading = False
            self._recoveries.abandon()
            self._out += self._answers.abandon()
            for src, request in self._reshaping.abandon():
                self._out.append(self._answers.not_leader(src, request))

    def _create(self) -> None:
        """Create the cluster, unless it exists and only this directory has forgotten it."""
        if self.servers.missing and self._now < self._leads_since + CREATE_NS:
            self._create_at = self._leads_since + CREATE_NS
            return
        self._create_at = self._now + RETRY_NS
        others = membership_rules.other_clusters(self.servers) - {self._new_cluster}
        if others:
            if not self._has_warned:
                self._has_warned = True
                self._out.append(LogWarning(
                    f"no cluster is created: storage servers are of cluster {min(others)}, of which"
                    " nothing is known here. Put the membership service's data directories back; or"
                    " to begin anew without the old records, remove those of all storage servers"
                ))  # fmt: skip
            return
        command = CreateCluster(
            self._new_cluster, self.config.name, membership_rules.configured(self.config),
            self.config.durability,
        )  # fmt: skip
        self._out.append(Propose(command.encode()))

    def _committed(self, event: Committed) -> None:
        before, trim = self.state.last, self.state.trim
        result = self.state.apply(event.command)
        if result != event.result:
            self._out.append(
                Halt(f"consensus applied a command as {event.result!r}, not {result!r}")
            )
            return
        refusal = decode_refusal(result)
        if refusal == "malformed":
            return
        command = decode_command(event.command)
        if refusal:
            self._was_refused(command, refusal)
            return
        match command:
            case CreateCluster():
                self._check_config()
                self._placed()
            case GrantLease() if command.lease != before:
                self._granted(command)
            case Barrier():
                self._out += self._answers.passed(command, self._now)
            case RemoveShard():
                self._shard_removed(command)
            case RecordLoss():
                self._recoveries.recorded(command)
                self._bring_back()
            case PlaceShard() | RetireShard() | FinalizeShard():
                self._shard_changed(command)
        if self.state.trim != trim:
            self.plan.keep(self.state.history_bytes, self._now)
            self._announce()
        self._out += self._answers.advance(self._now)
        self._reshape()

    def _was_refused(self, command: AnyCommand, refusal: Refusal) -> None:
        match command:
            case GrantLease():
                self.plan.refused(self._now)
            case RemoveShard():
                self._out += self._recoveries.removal(command, refusal)
            case RecordLoss():
                self._recoveries.recorded(command)
            case PlaceShard() | RetireShard() | FinalizeShard():
                self._out += self._reshaping.refused(command, refusal)

    def _granted(self, command: GrantLease) -> None:
        self.plan.committed(command.lease, self._now, leading=self._leading)
        self.plan.keep(self.state.history_bytes, self._now)
        self._stragglers.begun(command.lease, self.plan.starts)
        self._weights.granted(command.lease.members)
        self._has_other_weights = self._weights.are_off()
        if command.placements:
            self.announcements.placed_with = command.lease.number
            self._placed()
            self._out += self._recoveries.returned(command.placements)
        elif self.state.retired:
            self._reshaping.placed(self._now)
        self._announce()

    def _restored(self, snapshot: bytes) -> None:
        self.state.restore(snapshot)
        last = self.state.last
        self.announcements.placed_with = last.number if last is not None else 0
        self.plan.restored(last, self._now)
        self.plan.keep(self.state.history_bytes, self._now)
        self._weights.granted(self.plan.members)
        self._placed()
        self._check_config()

    def _check_config(self) -> None:
        """Refuse to serve a log that the cluster file contradicts: it is damaged, or another's."""
        wrong = membership_rules.contradiction(self.state, self.config)
        if wrong:
            self._out.append(Halt(wrong))
        self._out += map(LogWarning, membership_rules.moved(self.state, self.config))

    def _placed(self) -> None:
        placements = self.state.placements.values()
        self.servers.place(placements, self._now)
        self._live = {placement.shard for placement in placements if placement.state == "live"}
        self._changes = []
        self._reshaping.placed(self._now)

    # --- leases ---

    def _is_active(self) -> bool:
        return self._now < self._active_until

    def _lease_due(self) -> int:
        now = self._now
        if not self._live:
            changes = (*self._changes, *self._recoveries.changes())
            if all(changed.state != "live" for changed in changes):
                return self._housekeeping_at  # no shard is ready
        return self.plan.due(
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
            self._has_other_weights = False  # they were other ones for a moment
            if now < self._lease_due():
                return
        shards = {member.shard for member in self.plan.members}
        others = bool(changes) or shards != {member.shard for member in members}
        lease = self.plan.propose(members, now, active=self._is_active(), other_members=others)
        self._out.append(Propose(GrantLease(lease, changes).encode()))

    def _members(self, changes: list[Placement]) -> tuple[Member, ...]:
        placements = membership_rules.members(
            self.state, changes, self._reshaping.without(self._now)
        )
        weights = self._weights.of(list(placements))
        return tuple(
            Member(shard, placement.view, weight)
            for (shard, placement), weight in zip(placements.items(), weights, strict=True)
        )

    @property
    def _was_stopped(self) -> bool:
        """Whether this process, or its machine, did not run for a while before this step."""
        return self._now - self._housekeeping_at > HOUSEKEEPING_NS * 2

    def _keep_house(self) -> None:
        now = self._now
        if self._was_stopped:
            self._stragglers.pause()
        self._housekeeping_at = now + HOUSEKEEPING_NS
        self._out += self._answers.lost(now)
        if self.state.last is None:
            self._consider_first_lease()
            return
        self._stragglers.miss(self._live, now)
        self._change_members()
        if self._is_active() and now >= self._finalize_at:
            self._finalize_at = now + 2 * HOUSEKEEPING_NS
            self._finalize()

    def _consider_first_lease(self) -> None:
        waited = self._now >= self._leads_since + FIRST_LEASE_NS
        if waited or not self.servers.missing:
            self._changes = membership_rules.first_changes(self.state, self.servers)

    def _finalize(self) -> None:
        finalized = membership_rules.finalized(self.state, self.servers)
        if finalized > self.state.finalized:
            self._out.append(Propose(SetFinalized(finalized).encode()))

    # --- storage servers ---

    def _heartbeat(self, src: bytes, message: Heartbeat) -> None:
        now = self._now
        server = self.servers.hear(src, message, now)
        if server is None:
            self._complain(src, message, f"{message.node} is another server, or none")
            return
        if not self._leading:
            return
        if not self.state.cluster:
            if not self.servers.missing:
                self._create_at = now
            return
        if message.active:
            self._active_until = now + max(ACTIVE_NS, self.plan.thrift)
        last = self.state.last
        if last is None:
            if not self.servers.missing and not self._changes:
                self._consider_first_lease()
        elif self.announcements.lacks(server, now):
            self._out.append(self.announcements.tell(server, now))
        if server.index == 0 and server.shard in self._live and not server.is_in_limbo:
            self._look(message)
        self._join(server.shard)
        if now >= self._lease_due():
            self._propose_lease()
        self._out += self._answers.advance(now)
        self._reshape()

    def _look(self, message: Heartbeat) -> None:
        """Look at how fast a member is, and how late."""
        now, shard = self._now, message.shard
        if self._is_active():
            self._weights.observe(shard, message.rate_per_s)
            self._weigh()
        if self._stragglers.look(shard, message.frontier, now, is_watched=message.is_watched):
            self._change_members()

    def _weigh(self) -> None:
        self._has_other_weights = self._has_other_weights or self._weights.are_off()

    def _change_members(self) -> None:
        self._stragglers.park(self._now, len(self._live))
        self._changes = membership_rules.member_changes(
            self.state, self.servers, self._stragglers, self._now
        )

    def _rate(self, src: bytes, message: Rate) -> None:
        if not self.servers.is_primary(src, message.shard, message.view):
            self._complain(src, message, f"it is not from the primary of shard {message.shard}")
            return
        if self._leading and not message.per_s:
            self._reshaping.drained(message.shard)
            self._reshape()
        if not self._leading or message.shard not in self._live:
            return
        self._weights.told(message.shard, message.per_s)
        self._weigh()
        if self._now >= self._lease_due():
            self._propose_lease()

    def _announce(self) -> None:
        if self._leading:
            self._out += self.announcements.tell_all(self._now)

    def _frontier(self, src: bytes, message: Frontier) -> None:
        if not self.servers.is_of(src, message.shard):
            self._complain(src, message, f"it is not from shard {message.shard}")
            return
        self.servers.reach(message.shard, message.frontier)
        self._out += self._answers.advance(self._now)

    # --- the failure handler ---

    def _handler_heartbeat(self, src: bytes, message: HandlerHeartbeat) -> None:
        if not self._failure_handlers.hear(message, self._now):
            self._complain(src, message, f"{message.node} is no failure handler")

    def _remove(self, src: bytes, message: Remove) -> None:
        self._out += self._recoveries.remove(src, message, self._now)

    def _shard_removed(self, command: RemoveShard) -> None:
        """Do without the shard from now on, and let its servers know."""
        self._placed()
        self._stragglers.removed(command.shard)
        self._out += self._recoveries.removal(command, "")
        if not self._leading:
            return
        self._tell_servers(command.shard)
        self._hurry()

    def _tell_servers(self, shard: int) -> None:
        """Let the servers of one shard know how it is placed."""
        for server in self.servers.replicas(shard):
            if server.heartbeat is not None:
                self._out.append(self.announcements.tell(server, self._now))

    def _reinsert(self, src: bytes, message: Reinsert) -> None:
        self._out += self._recoveries.reinsert(src, message, self._now)
        self._bring_back()

    def _bring_back(self) -> None:
        """Grant a lease at once, if a shard comes back with it and none is on its way."""
        if self._leading and self._recoveries.claim_lease(self._now):
            self._hurry()

    def _hurry(self) -> None:
        self.plan.hurry()
        if self._now >= self._lease_due():
            self._propose_lease()

    # --- shards that come and go ---

    def _change_shard(self, src: bytes, message: ChangeShard) -> None:
        self._out += self._reshaping.ask(src, message, self._now)
        self._reshape()

    def _shard_changed(self, command: PlaceShard | RetireShard | FinalizeShard) -> None:
        self._placed()
        shard = self._reshaping.applied(command)
        if self._leading and self.state.last is not None:
            self._tell_servers(shard)

    def _reshape(self) -> None:
        """Do what can be done now for shards that join, leave and are finalized."""
        if not self._leading:
            return
        self._out += self._reshaping.advance(self._now)
        if self._reshaping.claim_lease(self._now):
            self._hurry()

    def _join(self, shard: int) -> None:
        """Let a shard begin to work once all of its servers were heard."""
        placement = self.state.placements.get(shard)
        if placement is None or placement.state != "joining" or self.state.last is None:
            return
        is_noted = any(changed.shard == shard for changed in self._changes)
        is_ready = self.servers.has_reported(shard) and self.servers.holds_leases(shard)
        if is_ready and not is_noted:
            self._change_members()

    # --- clients ---

    def _hello(self, src: bytes, message: Hello) -> None:
        self._out.append(self._answers.hello(src, message, self._now))

    def _ask(self, src: bytes, message: LeaseQuery | Trim) -> None:
        self._out += self._answers.ask(src, message, self._now)

    def _status_query(self, src: bytes, message: StatusQuery) -> None:
        self._out.append(self._answers.status(src, message, self._now))

    def check(self) -> None:
        """Assert the invariants of this node and of its parts."""
        self.state.check()
        self._recoveries.check()
        self._reshaping.check()
        self._stragglers.check()
        self._weights.check(self.plan.members)
        assert self.plan.last == self.state.last
        assert {server.shard for server in self.servers} >= set(self.state.placements)
        waiting = len(self._answers)
        assert waiting <= MAX_PENDING
        assert self._leading or not waiting
