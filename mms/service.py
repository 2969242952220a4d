"""The membership service: one node of it, as a deterministic state machine.

    follower --LeaderChanged(is_self)--> leader: creates the cluster, grants leases one ahead,
    announces what is committed, parks shards that are silent, trims, answers clients
    leader --LeaderChanged--> follower: only says who the leader is

Rule: nothing is told to anybody before it is committed. What is in memory only (who is up, when a
lease starts) may be lost with the leader; it costs time, never a position.

Invariants: `check()`, those of `ClusterState`. See docs/protocol.md, sections 3, 5, 7 and 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mms import decisions, status
from mms.leases import RETRY_NS, LeasePlan
from mms.questions import MAX_PENDING, Questions
from mms.servers import Servers
from mms.state import (
    Barrier,
    ClusterState,
    CreateCluster,
    GrantLease,
    SetFinalized,
    decode_command,
    decode_refusal,
)
from mms.trims import Trims
from mms.weights import Weights
from ziplog.node import (
    Broadcast,
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
)
from ziplog.view import LeaseRun, Member, Placement, run_of
from ziplog.wire import (
    ClusterInfo,
    Frontier,
    Heartbeat,
    Hello,
    LeaseAnnounced,
    LeaseHistory,
    LeaseQuery,
    Limits,
    NotLeader,
    Refused,
    StatusQuery,
    StatusReply,
    Trim,
    TrimReply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mms.questions import Question
    from mms.servers import Server
    from ziplog.config import ClusterConfig
    from ziplog.node import Effect, Event
    from ziplog.wire import Message, RefusalCode

_MS: Final = 1_000_000
#: How often silence, weights and finalized epochs are looked at.
HOUSEKEEPING_NS: Final = 500 * _MS
#: The cluster is active for so long after a heartbeat that said so.
ACTIVE_NS: Final = 2000 * _MS
#: The first lease waits so long for all shards, before it does without some.
FIRST_LEASE_NS: Final = 2000 * _MS
#: A server that was told something is not told it again for this long.
_TOLD_NS: Final = 500 * _MS
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
        #: Servers that hold a lease that was never committed: they were told to halt.
        self.contradictions = 0
        self._weights: Final = Weights()
        self._trims: Final = Trims(self.state, self.servers)
        self._leader = ""
        self._leading = False
        self._connected: tuple[str, ...] = ()
        self._active_until = 0
        self._leads_since = 0
        self._housekeeping_at = 0
        self._create_at = 0
        self._finalize_at = 0
        #: The lease with which placements last changed.
        self._placed_with = 0
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
            self._send_away(self._questions.abandon())
            for src, request in self._trims.abandon():
                self._not_leader(src, request)

    def _send_away(self, questions: list[Question]) -> None:
        for src, question in questions:
            self._not_leader(src, question.request)

    def _create(self) -> None:
        self._create_at = self._now + RETRY_NS
        command = CreateCluster(
            self._new_cluster, self.config.name, decisions.configured(self.config)
        )
        self._out.append(Propose(command.encode()))

    def _committed(self, event: Committed) -> None:
        before, trim = self.state.last, self.state.trim
        result = self.state.apply(event.command)
        if result != event.result:
            self._out.append(
                Halt(f"consensus applied a command as {event.result!r}, not {result!r}")
            )
            return
        if decode_refusal(result):
            return
        command = decode_command(event.command)
        match command:
            case CreateCluster():
                self._placed()
                self._leads_since = self._now
            case GrantLease() if command.lease != before:
                self._granted(command)
            case Barrier():
                self._answer_all(self._questions.passed(command))
        if self.state.trim != trim:
            self._announce()
        if self._trims:
            self._out += self._trims.advance(self._now)

    def _granted(self, command: GrantLease) -> None:
        self.plan.committed(command.lease, self._now, leading=self._leading)
        if command.placements:
            self._placed_with = command.lease.number
            self._placed()
        self._announce()

    def _restored(self, snapshot: bytes) -> None:
        self.state.restore(snapshot)
        last = self.state.last
        self._placed_with = last.number if last is not None else 0
        self.plan.restored(last, self._now)
        self._placed()

    def _placed(self) -> None:
        self.servers.place(self.state.placements.values(), self._now)
        self._changes = []

    # --- leases ---

    def _is_active(self) -> bool:
        return self._now < self._active_until

    def _lease_due(self) -> int:
        now = self._now
        if self.state.last is None and not self._changes:
            return self._housekeeping_at  # no shard is ready yet
        return self.plan.due(
            now, active=now < self._active_until, other_members=bool(self._changes)
        )

    def _propose_lease(self) -> None:
        now, members = self._now, self._members()
        if not members:
            return
        lease = self.plan.propose(
            members, now, active=self._is_active(), other_members=bool(self._changes)
        )
        self._out.append(Propose(GrantLease(lease, self._changes).encode()))

    def _members(self) -> tuple[Member, ...]:
        placements = self.state.placements | {p.shard: p for p in self._changes}
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
        if message.active:
            self._active_until = now + ACTIVE_NS
        last = self.state.last
        if last is None:
            if not self.servers.missing and not self._changes:
                self._consider_first_lease()
        elif self._lacks(server, message, last.number):
            self._tell(server, last.number)
        if now >= self._lease_due():
            self._propose_lease()
        if self._trims:
            self._out += self._trims.advance(now)

    def _lacks(self, server: Server, message: Heartbeat, last: int) -> bool:
        """Whether a server does not know what is committed, and was not told just now."""
        if server.told == last and self._now - server.told_at < _TOLD_NS:
            return False
        return (
            server.told == 0
            or message.lease != last
            or message.state == "starting"
            or message.trim < self.state.trim
            or self.state.contradicts(message.lease, message.digest)
        )

    def _tell(self, server: Server, last: int) -> None:
        assert server.heartbeat is not None
        message = server.heartbeat
        server.told, server.told_at = last, self._now
        if self.state.contradicts(message.lease, message.digest):
            self.contradictions += 1
            runs = [run_of(self.state.numbered(message.lease))]
        else:
            runs = self.state.runs_after(message.lease, message.digest)
        self._send(server.route, self._announcement(runs, with_placements=True))

    def _announce(self) -> None:
        """Tell every server that is heard what is new, once for all that lack the same."""
        last = self.state.last
        if not self._leading or last is None:
            return
        groups: dict[tuple[int, bytes, bool], list[bytes]] = {}
        for server in self.servers:
            message = server.heartbeat
            if message is None or server.state(self._now) == "down":
                continue
            if self.state.contradicts(message.lease, message.digest):
                self._tell(server, last.number)
                continue
            server.told, server.told_at = last.number, self._now
            unplaced = message.state == "starting" or message.lease < self._placed_with
            groups.setdefault((message.lease, message.digest, unplaced), []).append(server.route)
        for (number, digest, unplaced), routes in groups.items():
            runs = self.state.runs_after(number, digest)
            announcement = self._announcement(runs, with_placements=unplaced)
            self._out.append(Broadcast(tuple(routes), announcement))

    def _announcement(self, runs: list[LeaseRun], *, with_placements: bool) -> LeaseAnnounced:
        state = self.state
        starts_in_us = max(self.plan.starts - self._now, 0) // 1000
        placements = list(state.placements.values()) if with_placements else []
        return LeaseAnnounced(state.cluster, runs, starts_in_us, placements, state.trim)

    def _frontier(self, src: bytes, message: Frontier) -> None:
        if not self.servers.is_of(src, message.shard):
            self._complain(src, message, f"it is not from shard {message.shard}")
            return
        self.servers.reach(message.shard, message.frontier)
        if self._trims:
            self._out += self._trims.advance(self._now)

    # --- clients ---

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
                Limits(config.max_payload_bytes, config.max_key_bytes, config.max_unsettled_units),
            ),
        )  # fmt: skip

    def _ask(self, src: bytes, message: LeaseQuery | Trim) -> None:
        """Take a question that is answered behind a read barrier."""
        if not self._leading or not self.state.cluster:
            self._not_leader(src, message.request)
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
        if not self._leading or not self.state.cluster:
            self._not_leader(src, message.request)
            return
        found = status.document(
            self.config, self.state, self.servers,
            name=self.name, pid=self._pid, connected=self._connected,
            epoch=self.plan.epoch(self._now),
            finalized=decisions.finalized(self.state, self.servers), now=self._now,
        )  # fmt: skip
        self._send(src, StatusReply(self.state.cluster, message.request, found))

    def check(self) -> None:
        """Assert the invariants of this node and of its parts."""
        self.state.check()
        assert self.plan.last == self.state.last
        assert {server.shard for server in self.servers} >= set(self.state.placements)
        waiting = len(self._questions) + len(self._trims)
        assert waiting <= MAX_PENDING
        assert self._leading or not waiting
