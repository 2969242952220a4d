"""The membership service: one node of it, as a deterministic state machine.

    follower --LeaderChanged(is_self)--> leader: creates the cluster, grants leases one ahead,
    announces what is committed, parks shards that are silent, trims, answers clients, and takes
    shards out and back for the failure handler
    leader --LeaderChanged--> follower: only says who the leader is

Rule: nothing is told to anybody before it is committed. What is in memory only (who is up, when a
lease starts) may be lost with the leader; it costs time, never a position.

Invariants: `check()`, those of `ClusterState`. See docs/protocol.md, sections 3, 5, 7, 8, 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mms import decisions, status
from mms.announcements import Announcements
from mms.handlers import Handlers
from mms.leases import RETRY_NS, LeasePlan
from mms.questions import MAX_PENDING, Questions
from mms.recoveries import Recoveries
from mms.servers import Servers
from mms.state import (
    Barrier,
    ClusterState,
    CreateCluster,
    GrantLease,
    RecordLoss,
    RemoveShard,
    SetFinalized,
    decode_command,
    decode_refusal,
)
from mms.trims import Trims
from mms.weights import Weights
from ziplog.node import (
    Committed,
    Complain,
    Halt,
    LeaderChanged,
    PeersChanged,
    Propose,
    Received,
    Restored,
    Send,
    Wakeup,
    Warn,
)
from ziplog.view import Member, Placement, run_of
from ziplog.wire import (
    ClusterInfo,
    Frontier,
    HandlerHeartbeat,
    Heartbeat,
    Hello,
    LeaseHistory,
    LeaseQuery,
    Limits,
    NotLeader,
    Refused,
    Reinsert,
    Remove,
    StatusQuery,
    StatusReply,
    Trim,
    TrimReply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mms.questions import Question
    from mms.state import AnyCommand, Refusal
    from ziplog.config import ClusterConfig
    from ziplog.node import Effect, Event
    from ziplog.wire import Message, RefusalCode

_MS: Final = 1_000_000
#: How often silence, weights and finalized epochs are looked at.
HOUSEKEEPING_NS: Final = 500 * _MS
#: The cluster is active for so long after a heartbeat that said so.
ACTIVE_NS: Final = 2000 * _MS
#: A new cluster waits so long for all servers: they would know of an old one.
CREATE_NS: Final = 1500 * _MS
#: The first lease waits so long for all shards, before it does without some.
FIRST_LEASE_NS: Final = 2000 * _MS
#: Members of all leases in one `LeaseHistory`, so that it fits a frame.
_MAX_HISTORY_MEMBERS: Final = 200_000


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
        self._pid: Final = pid
        self._new_cluster: Final = cluster
        self.state: Final = ClusterState()
        self.servers: Final = Servers()
        self.plan: Final = LeasePlan(config.epoch_ms)
        self.announcements: Final = Announcements(self.state, self.servers, self.plan)
        self._weights: Final = Weights()
        self._trims: Final = Trims(self.state, self.servers)
        self._recoveries: Final = Recoveries(self.state)
        self._failure_handlers: Final = Handlers(config.failure_handlers)
        self._leader = ""
        self._leading = False
        self._connected: tuple[str, ...] = ()
        self._active_until = 0
        self._leads_since = 0
        self._housekeeping_at = 0
        self._create_at = 0
        self._finalize_at = 0
        self._has_members = False
        self._has_warned = False
        self._changes: list[Placement] = []
        self._questions: Final = Questions(incarnation)
        self._out: list[Effect] = []
        self._now = now
        # Heartbeats may come before consensus has said what the cluster is.
        self.servers.place(decisions.configured(config), now)
        self._handlers: Final[Mapping[type[Message], Callable[[bytes, Any], None]]] = {
            Heartbeat: self._heartbeat,
            Frontier: self._frontier,
            Hello: self._hello,
            LeaseQuery: self._ask,
            Trim: self._ask,
            StatusQuery: self._status_query,
            Remove: self._remove,
            Reinsert: self._reinsert,
            HandlerHeartbeat: self._handler_heartbeat,
        }

    # --- the one door ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.node`."""
        self._now = now
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
                self._connected = event.connected
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
        others = (self._questions.next_wakeup(), self._trims.next_wakeup(self._now))
        return min([due, *(other for other in others if other is not None)])

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
        self._raise_barrier()
        if self._trims:
            self._out += self._trims.advance(self._now)

    def _received(self, src: bytes, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            self._complain(src, message, "the membership service takes none")
            return
        if self.state.cluster and message.cluster not in {0, self.state.cluster}:
            here = f"this is cluster {self.state.cluster}"
            self._complain(src, message, f"it is of cluster {message.cluster}, and {here}")
            self._refuse(src, message, "wrong-cluster", here)
            return
        handler(src, message)

    def _refuse(self, src: bytes, message: Message, code: RefusalCode, detail: str) -> None:
        shard, request = getattr(message, "shard", 0), getattr(message, "request", 0)
        self._send(src, Refused(self.state.cluster, shard, 0, 0, request, code, detail))

    def _complain(self, src: bytes, message: Message, why: str) -> None:
        self._out.append(Complain(src, f"{type(message).__name__}: {why}"))

    def _send(self, dst: bytes, message: Message) -> None:
        self._out.append(Send(dst, message))

    # --- consensus ---

    def _leader_changed(self, event: LeaderChanged) -> None:
        self._leader = event.leader
        if event.is_self and not self._leading:
            self._leading = True
            self._leads_since = self._housekeeping_at = self._now
            self.plan.lead(self._now)
            self.servers.listen_from(self._now)
            self._woke()
        elif not event.is_self and self._leading:
            self._leading = False
            self._recoveries.abandon()
            self._send_away(self._questions.abandon())
            for src, request in self._trims.abandon():
                self._not_leader(src, request)

    def _send_away(self, questions: list[Question]) -> None:
        for src, question in questions:
            self._not_leader(src, question.request)

    def _create(self) -> None:
        """Create the cluster, unless it exists and only this directory has forgotten it."""
        if self.servers.missing and self._now < self._leads_since + CREATE_NS:
            self._create_at = self._leads_since + CREATE_NS
            return
        self._create_at = self._now + RETRY_NS
        others = decisions.other_clusters(self.servers) - {self._new_cluster}
        if others:
            if not self._has_warned:
                self._has_warned = True
                self._out.append(Warn(
                    f"no cluster is created: storage servers are of cluster {min(others)}, of which"
                    " nothing is known here. Put the membership service's data directories back; or"
                    " to begin anew without the old records, remove those of all storage servers"
                ))  # fmt: skip
            return
        command = CreateCluster(
            self._new_cluster, self.config.name, decisions.configured(self.config),
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
                self._check_durability()
                self._placed()
            case GrantLease() if command.lease != before:
                self._granted(command)
            case Barrier():
                self._answer_all(self._questions.passed(command))
            case RemoveShard():
                self._shard_removed(command)
            case RecordLoss():
                self._recoveries.recorded(command)
                self._bring_back()
        if self.state.trim != trim:
            self._announce()
        if self._trims:
            self._out += self._trims.advance(self._now)

    def _was_refused(self, command: AnyCommand, refusal: Refusal) -> None:
        match command:
            case GrantLease():
                self.plan.refused(self._now)
            case RemoveShard():
                self._out += self._recoveries.removal(command, refusal)
            case RecordLoss():
                self._recoveries.recorded(command)

    def _granted(self, command: GrantLease) -> None:
        self.plan.committed(command.lease, self._now, leading=self._leading)
        if command.placements:
            self.announcements.placed_with = command.lease.number
            self._placed()
            self._out += self._recoveries.returned(command.placements)
        self._announce()

    def _restored(self, snapshot: bytes) -> None:
        self.state.restore(snapshot)
        last = self.state.last
        self.announcements.placed_with = last.number if last is not None else 0
        self.plan.restored(last, self._now)
        self._placed()
        self._check_durability()

    def _check_durability(self) -> None:
        """Refuse to serve a log at another level than the one that its users were promised."""
        level, asked = self.state.durability, self.config.durability
        if self.state.cluster and level != asked:
            self._out.append(Halt(
                f"the log was made with durability = {level!r}; the cluster file says {asked!r},"
                f" but a log keeps its level. Write {level!r} there again, or make another log"
            ))  # fmt: skip

    def _placed(self) -> None:
        placements = self.state.placements.values()
        self.servers.place(placements, self._now)
        self._has_members = any(placement.state == "live" for placement in placements)
        self._changes = []

    # --- leases ---

    def _is_active(self) -> bool:
        return self._now < self._active_until

    def _lease_due(self) -> int:
        now = self._now
        if not (self._has_members or self._changes or self._recoveries.changes()):
            return self._housekeeping_at  # no shard is ready
        return self.plan.due(
            now, active=now < self._active_until, other_members=bool(self._changes)
        )

    def _propose_lease(self) -> None:
        now = self._now
        changes = [*self._changes, *self._recoveries.changes()]
        members = self._members(changes)
        if not members:
            return
        lease = self.plan.propose(
            members, now, active=self._is_active(), other_members=bool(changes)
        )
        self._out.append(Propose(GrantLease(lease, changes).encode()))

    def _members(self, changes: list[Placement]) -> tuple[Member, ...]:
        placements = self.state.placements | {p.shard: p for p in changes}
        placements = dict(sorted(placements.items()))
        shards = [shard for shard, p in placements.items() if p.state == "live"]
        weights = self._weights.of(shards)
        return tuple(
            Member(shard, placements[shard].view, weight)
            for shard, weight in zip(shards, weights, strict=True)
        )

    def _keep_house(self) -> None:
        now, late = self._now, self._now - self._housekeeping_at
        self._housekeeping_at = now + HOUSEKEEPING_NS
        if late > HOUSEKEEPING_NS * 2:
            self.servers.listen_from(now)  # we were stopped, they may not have been silent
        self._send_away(self._questions.lost(now))
        if self.state.last is None:
            self._consider_first_lease()
            return
        self._changes = decisions.member_changes(self.state, self.servers, now)
        if self._is_active() and now >= self._finalize_at:
            self._finalize_at = now + 2 * HOUSEKEEPING_NS
            self._weights.observe(decisions.rates(self.state, self.servers))
            self._finalize()

    def _consider_first_lease(self) -> None:
        waited = self._now >= self._leads_since + FIRST_LEASE_NS
        if waited or not self.servers.missing:
            self._changes = decisions.first_changes(self.state, self.servers)

    def _finalize(self) -> None:
        finalized = decisions.finalized(self.state, self.servers)
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
            self._active_until = now + ACTIVE_NS
        last = self.state.last
        if last is None:
            if not self.servers.missing and not self._changes:
                self._consider_first_lease()
        elif self.announcements.lacks(server, now):
            self._out.append(self.announcements.tell(server, now))
        if now >= self._lease_due():
            self._propose_lease()
        if self._trims:
            self._out += self._trims.advance(now)

    def _announce(self) -> None:
        if self._leading:
            self._out += self.announcements.tell_all(self._now)

    def _frontier(self, src: bytes, message: Frontier) -> None:
        if not self.servers.is_of(src, message.shard):
            self._complain(src, message, f"it is not from shard {message.shard}")
            return
        self.servers.reach(message.shard, message.frontier)
        if self._trims:
            self._out += self._trims.advance(self._now)

    # --- the failure handler ---

    def _handler_heartbeat(self, src: bytes, message: HandlerHeartbeat) -> None:
        if not self._failure_handlers.hear(message, self._now):
            self._complain(src, message, f"{message.node} is no failure handler")

    def _remove(self, src: bytes, message: Remove) -> None:
        if self._leads_cluster(src, message.request):
            self._out += self._recoveries.remove(src, message, self._now)

    def _shard_removed(self, command: RemoveShard) -> None:
        """Do without the shard from now on, and let its servers know."""
        self._placed()
        self._out += self._recoveries.removal(command, "")
        if not self._leading:
            return
        for server in self.servers.replicas(command.shard):
            if server.heartbeat is not None:
                self._out.append(self.announcements.tell(server, self._now))
        self._hurry()

    def _reinsert(self, src: bytes, message: Reinsert) -> None:
        if self._leads_cluster(src, message.request):
            self._out += self._recoveries.reinsert(src, message, self._now)
            self._bring_back()

    def _bring_back(self) -> None:
        """Grant a lease at once, if a shard comes back with it and none is on its way."""
        if self._leading and self._recoveries.is_ready(self._now):
            self._hurry()

    def _hurry(self) -> None:
        self.plan.hurry()
        if self._now >= self._lease_due():
            self._propose_lease()

    # --- clients ---

    def _leads_cluster(self, src: bytes, request: int) -> bool:
        """Whether this node may answer; otherwise it says who may."""
        if self._leading and self.state.cluster:
            return True
        self._not_leader(src, request)
        return False

    def _not_leader(self, src: bytes, request: int) -> None:
        endpoint = next((n.endpoint for n in self.config.mms if n.name == self._leader), "")
        self._send(src, NotLeader(self.state.cluster, request, endpoint))

    def _hello(self, src: bytes, message: Hello) -> None:
        state, config = self.state, self.config
        if not state.cluster:
            self._not_leader(src, message.request)
            return
        nodes = sorted(config.mms, key=lambda node: node.name != self._leader)
        self._send(
            src,
            ClusterInfo(
                state.cluster, message.request, state.name, config.durability,
                [node.endpoint for node in nodes], list(state.placements.values()),
                [run_of(lease) for lease in self.plan.current(self._now)], state.trim,
                Limits(
                    config.max_payload_bytes, config.max_key_bytes, config.max_unsettled_units,
                    config.session_timeout_s,
                ),
            ),
        )  # fmt: skip

    def _ask(self, src: bytes, message: LeaseQuery | Trim) -> None:
        """Take a question that is answered behind a read barrier."""
        if not self._leads_cluster(src, message.request):
            return
        if len(self._questions) + len(self._trims) >= MAX_PENDING:
            self._refuse(src, message, "full", f"{MAX_PENDING} questions wait already")
            return
        self._questions.take(src, message)
        self._raise_barrier()

    def _raise_barrier(self) -> None:
        barrier = self._questions.raise_barrier(self._now)
        if barrier is not None:
            self._out.append(Propose(barrier.encode()))

    def _answer_all(self, questions: list[Question]) -> None:
        for src, question in questions:
            if isinstance(question, LeaseQuery):
                self._answer_history(src, question)
            else:
                self._begin_trim(src, question)

    def _answer_history(self, src: bytes, question: LeaseQuery) -> None:
        state = self.state
        runs = state.runs_from(question.gsn, _MAX_HISTORY_MEMBERS)
        placements = list(state.placements.values())
        self._send(src, LeaseHistory(state.cluster, question.request, runs, placements, state.trim))

    def _begin_trim(self, src: bytes, question: Trim) -> None:
        state, last = self.state, self.state.last
        if last is None or question.gsn >= last.stop:
            error = TrimReply(state.cluster, question.request, state.trim, "no-such-position")
            self._send(src, error)
            return
        self._trims.begin(src, question.request, question.gsn, self._now)

    def _status_query(self, src: bytes, message: StatusQuery) -> None:
        if not self._leads_cluster(src, message.request):
            return
        found = status.document(
            self.config, self.state, self.servers, self._failure_handlers,
            name=self.name, pid=self._pid, connected=self._connected,
            epoch=self.plan.epoch(self._now),
            finalized=decisions.finalized(self.state, self.servers), now=self._now,
        )  # fmt: skip
        self._send(src, StatusReply(self.state.cluster, message.request, found))

    def check(self) -> None:
        """Assert the invariants of this node and of its parts."""
        self.state.check()
        self._recoveries.check()
        assert self.plan.last == self.state.last
        assert {server.shard for server in self.servers} >= set(self.state.placements)
        waiting = len(self._questions) + len(self._trims)
        assert waiting <= MAX_PENDING
        assert self._leading or not waiting
