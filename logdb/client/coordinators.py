"""Queries of a client to coordinators, with retransmission and failover.

All queries go to the *current* coordinator, except those about a snapshot, which go to its owner.
If the current coordinator is silent, the client switches to the next one with all queries. A reply
to any copy of a query counts; a coordinator that replies late becomes the current one again if a
query waits for a live one. Nothing is sent while no query is open. Invariant: the timer is never
later than what a query waits for. See docs/logdb.md, sections 7 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

from logdb import wire
from logdb.errors import SnapshotExpired
from ziplog.client.common import other_nodes
from ziplog.core.node import Connect
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.errors import DeadlineError, UnavailableError, VersionError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.common.step_context import StepContext
    from ziplog.core.message import Message
    from ziplog.errors import ZiplogError
    from ziplog.wire import NodeInfo

#: Retransmission timeout; a coordinator that was silent for this time is replaced by the next one.
QUERY_TIMEOUT_NS: Final = 300 * NS_PER_MS
#: Silence after which a liveness probe is sent.
_PROBE_AFTER_NS: Final = QUERY_TIMEOUT_NS // 2
#: Retransmission timeout of a watch, which usually waits for long.
WATCH_TIMEOUT_NS: Final = NS_PER_S
#: Time without an answer after which a responsive coordinator is replaced: it may have lost the
#: log.
_STUCK_NS: Final = NS_PER_S
#: A coordinator that replied within this time is alive (docs/logdb.md, section 7).
ALIVE_NS: Final = 50 * NS_PER_MS
#: Silence after which a snapshot's coordinator is considered gone, and the snapshot expired: the
#: only coordinator, and one of several.
_ONLY_OWNER_TIMEOUT_NS: Final = 3_000 * NS_PER_MS
_OWNER_TIMEOUT_NS: Final = NS_PER_S
#: Shortest timeout within which a reply is expected.
_MIN_TIMEOUT_NS: Final = 1 * NS_PER_MS
#: First delay before a query is sent again to a coordinator that is not ready; it doubles up to
#: `QUERY_TIMEOUT_NS`.
_NOT_READY_BACKOFF_NS: Final = 20 * NS_PER_MS
_NEVER_HEARD: Final = -(2**62)
_REPLIES: Final[dict[type[Message], type[Message]]] = {
    wire.Open: wire.Opened,
    wire.Get: wire.Got,
    wire.Watch: wire.Got,
    wire.Scan: wire.Scanned,
    wire.Validate: wire.Validated,
    wire.TakeSnapshot: wire.SnapshotTaken,
    wire.Status: wire.StatusReply,
}
#: The messages that `Coordinators` handles.
REPLIES: Final = frozenset(get_args(wire.Reply))


class PendingQuery:
    """An open query."""

    __slots__ = (
        "backoff", "deadline", "message", "on_result", "pinned", "retry_at", "sent_at", "since",
        "started_at", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        message: Any,
        on_result: Callable[[Any, bytes], None],
        deadline: int,
        pinned: bytes | None,
        now: int,
    ) -> None:
        self.message: Final = message
        #: Called with the reply or an exception, and the coordinator's name.
        self.on_result: Final = on_result
        self.deadline: Final = deadline
        #: The only coordinator that can answer; None: any.
        self.pinned: Final = pinned
        self.started_at: Final = now
        self.sent_at = now
        #: When it was first sent to the present coordinator.
        self.since = now
        self.timeout: Final = WATCH_TIMEOUT_NS if type(message) is wire.Watch else QUERY_TIMEOUT_NS
        self.retry_at = now + self.timeout
        self.backoff = _NOT_READY_BACKOFF_NS


class Coordinators:
    """The coordinators of one database, as a client sees them."""

    def __init__(self, context: StepContext, endpoints: Sequence[str], session: bytes) -> None:
        """Prepare; nothing is sent before the first query.

        Args:
            context: state shared by the client's state machines.
            endpoints: addresses of coordinators, one or more.
            session: the client's session.

        """
        self._context: Final = context
        self._session: Final = session
        #: Names that no node of the log has, because both use one transport.
        self._endpoints: Final = {b"coordinator " + e.encode(): e for e in endpoints}
        self._names: Final = list(self._endpoints)
        self._current = self._names[0]
        #: When the last liveness probe was sent.
        self._probed_at = _NEVER_HEARD
        self._connected: Final[set[bytes]] = set()
        #: When each last sent a message, and when it last answered.
        self._last_heard: Final[dict[bytes, int]] = {}
        self._last_reply: Final[dict[bytes, int]] = {}
        #: By name: why there is no connection; "": it is established.
        self._problems: Final[dict[bytes, str]] = {}
        #: A coordinator does not speak this version of the wire format.
        self._is_version_wrong = False
        #: Coordinators that know the session.
        self._opened: Final[set[bytes]] = set()
        #: Coordinators that tail another log than the connected one.
        self._foreign: Final[set[bytes]] = set()
        #: When each last refused to answer, and why.
        self._refusals: Final[dict[bytes, tuple[int, str]]] = {}
        self._queries: Final[dict[int, PendingQuery]] = {}
        #: Queries that any message of a coordinator that knows the session answers.
        self._liveness_queries: Final[set[int]] = set()
        #: The cluster of the log; 0: unknown.
        self.cluster = 0
        #: The greatest position that a coordinator has reported.
        self.known_position = RID_GENESIS
        #: Called with each `Decided` of the session, and with the first `Opened`.
        self.on_decided: Callable[[wire.Decided], None]
        self.on_opened: Callable[[wire.Opened], None]

    # --- queries ---

    def send_query(
        self,
        build: Callable[[int, int], Message],
        on_result: Callable[[Any, bytes], None],
        deadline: int,
        pinned: bytes | None = None,
    ) -> int:
        """Send `build(cluster, request)` and return the request's number.

        `on_result` gets the reply or an exception, and the name of the coordinator.
        """
        number = self._context.request()
        message = build(self.cluster, number)
        query = self._register(number, message, on_result, deadline, pinned)
        self._send(pinned or self._current, query.message)
        if type(message) in _LONG_POLLS:
            self._probe()
        return number

    def wait_until_alive(self, on_result: Callable[[Any, bytes], None], deadline: int) -> int:
        """Call back when a coordinator is alive, immediately if the current one just replied.

        Returns the number of the query; 0 if it was answered immediately.
        """
        context, current = self._context, self._current
        last_heard = self._last_reply.get(current, _NEVER_HEARD)
        if context.now - last_heard <= ALIVE_NS and current in self._opened:
            on_result(None, current)
            return 0
        number = context.request()
        message = self._open(number)
        self._register(number, message, on_result, deadline, None)
        self._liveness_queries.add(number)
        if len(self._liveness_queries) == 1:
            self._probed_at = context.now
            self._send(current, message)
        return number

    def forget(self, number: int) -> None:
        """Cancel a query."""
        self._queries.pop(number, None)
        self._liveness_queries.discard(number)

    def post(self, name: bytes, message: Message) -> None:
        """Send a message without a reply."""
        self._send(name, message)

    def endpoint(self, name: bytes) -> str:
        """Return a coordinator's address."""
        return self._endpoints[name]

    @property
    def description(self) -> str:
        """The endpoints, for errors."""
        return ", ".join(self._endpoints.values())

    def accept_cluster(self, cluster: int, endpoints: str) -> bool:
        """Set the cluster of the connected log; return False if the coordinators named another one.

        In that case the current coordinator tails a former cluster at the same endpoints, and its
        answers no longer count.
        """
        if cluster == self.cluster:
            return True
        former, self.cluster = self.cluster, cluster
        self._opened.clear()
        self._last_reply.clear()
        self.known_position = RID_GENESIS
        self._foreign.add(self._current)
        reason = f"it follows cluster {former}, but the log at {endpoints} is cluster {cluster}"
        self._on_refusal(self._current, f"{reason}: stop that coordinator and start a new one")
        return False

    def _open(self, number: int) -> wire.Open:
        return wire.Open(self.cluster, number, self._session)

    def _probe(self) -> None:
        """Probe the current coordinator; any message proves that it is alive."""
        self._probed_at = self._context.now
        self._send(self._current, self._open(self._context.request()))

    def _register(
        self,
        number: int,
        message: Message,
        on_result: Callable[[Any, bytes], None],
        deadline: int,
        pinned: bytes | None,
    ) -> PendingQuery:
        context = self._context
        query = PendingQuery(message, on_result, deadline, pinned, context.now)
        self._queries[number] = query
        self._set_timer_for(query)
        return query

    def _set_timer_for(self, query: PendingQuery) -> None:
        context = self._context
        context.set_timer(min(query.retry_at, query.deadline))
        if context.now < query.sent_at + _PROBE_AFTER_NS:
            context.set_timer(query.sent_at + _PROBE_AFTER_NS)

    def _send(self, name: bytes, message: Message) -> None:
        if name not in self._connected:
            self._connected.add(name)
            self._context.effects.append(Connect(name, self._endpoints[name]))
        self._context.send(name, message)

    # --- connections ---

    def has(self, name: bytes) -> bool:
        """Whether a connection is one to a coordinator."""
        return name in self._endpoints

    def on_connection_changed(self, name: bytes, problem: str) -> None:
        """Before any coordinator replied, try the next one at once, or end all queries."""
        self._problems[name] = problem
        if not problem or self._last_heard:
            return
        if all(map(self._problems.get, self._names)):
            kind = VersionError if self._is_version_wrong else UnavailableError
            for number, query in list(self._queries.items()):
                result = kind(self._describe_silence())
                self._finish(number, result, query.pinned or self._current)
        elif name == self._current:
            self._switch_coordinator()

    def on_node_info(self, name: bytes, info: NodeInfo) -> None:
        """Note why a node is no coordinator for this client: its service or its version."""
        self._is_version_wrong |= other_nodes.speaks_another_version(info)
        self.on_connection_changed(name, other_nodes.describe(info))

    def _describe_silence(self) -> str:
        attempts = ", ".join(
            f"{self._endpoints[name]} ({other_nodes.outcome(self._problems.get(name))})"
            for name in self._names
        )
        return (
            f"no coordinator replied at {attempts}; check the address, and that a coordinator is"
            " running (python -m logdb, or: ziplog up --logdb)"
        )

    # --- replies ---

    def receive(self, src: bytes, reply: Any) -> None:
        """Handle a message of a coordinator."""
        if src not in self._endpoints or (
            reply.cluster != self.cluster and self.cluster and type(reply) not in _MAY_PRECEDE_LOG
        ):
            self._context.counters.protocol_errors += 1
            return
        self._last_heard[src] = self._context.now
        kind = type(reply)
        if kind is wire.NotReady:
            self._on_not_ready(src, reply)
        elif kind is wire.Invalid:
            self._on_invalid(src, reply)
        else:
            self._on_reply(src, kind, reply)

    def _on_reply(self, src: bytes, kind: type[Message], reply: Any) -> None:
        position: RecordId | None = getattr(reply, "position", None)
        if position is not None and position > self.known_position:
            self.known_position = position
        self._last_reply[src] = self._context.now
        self._refusals.pop(src, None)
        if kind is wire.Decided:
            if reply.session == self._session:
                self.on_decided(reply)
        else:
            if kind is wire.Opened:
                self._opened.add(src)
                self._foreign.discard(src)
                if not self.cluster:
                    self.cluster = reply.cluster
                    self.on_opened(reply)
            self._on_answer(src, kind, reply)
        if self._liveness_queries and src in self._opened:
            if src != self._current:
                # It is slow, not dead; to wait for the other one could take as long.
                self._opened.discard(self._current)
                self._current = src
            for number in list(self._liveness_queries):
                self._finish(number, None, src)

    def _on_answer(self, src: bytes, kind: type[Message], reply: Any) -> None:
        query = self._queries.get(reply.request)
        if query is None:
            if kind is wire.SnapshotTaken:
                # The snapshot is not needed any more.
                self._send(src, wire.DropSnapshot(self.cluster, reply.snapshot))
        elif _REPLIES.get(type(query.message)) is not kind:
            self._context.counters.protocol_errors += 1
        elif reply.request not in self._liveness_queries:
            self._finish(reply.request, reply, src)

    def _finish(self, number: int, result: Any, src: bytes) -> None:
        query = self._queries.pop(number)
        self._liveness_queries.discard(number)
        query.on_result(result, src)

    def _on_not_ready(self, src: bytes, reply: wire.NotReady) -> None:
        self._on_refusal(src, reply.reason)
        query = self._queries.get(reply.request)
        if query is not None:
            query.retry_at = min(query.retry_at, self._context.now + query.backoff)
            query.backoff = min(2 * query.backoff, QUERY_TIMEOUT_NS)
            self._context.set_timer(query.retry_at)

    def _on_invalid(self, src: bytes, reply: wire.Invalid) -> None:
        if reply.code == "wrong-cluster":
            reason = f"it serves another log ({reply.detail})"
            if src in self._foreign and src in self._refusals:
                reason = self._refusals[src][1]  # found through the log: more specific
            self._foreign.add(src)
            self._on_refusal(src, reason)
        elif reply.request in self._queries:
            self._finish(reply.request, SnapshotExpired(reply.detail), src)

    def _on_refusal(self, src: bytes, reason: str) -> None:
        """Record a refusal; switch to the next coordinator unless that one refused just now."""
        now = self._context.now
        self._refusals[src] = (now, reason)
        self._last_reply.pop(src, None)
        if src == self._current:
            refused_at, _ = self._refusals.get(self._next_name(), (_NEVER_HEARD, ""))
            if now - refused_at >= QUERY_TIMEOUT_NS:
                self._switch_coordinator()

    # --- time ---

    def tick(self) -> None:
        """Retransmit due queries, and end expired ones."""
        context = self._context
        due = []
        for number, query in list(self._queries.items()):
            if context.now >= query.deadline:
                if number in self._queries:
                    self._finish(number, self._deadline_error(query), query.pinned or self._current)
            elif context.now >= query.retry_at and not self._expire_if_owner_silent(number, query):
                due.append(query)
        self._retransmit_due(due)
        if any(map(self._needs_probe, self._queries.values())):
            self._probe()
        for query in self._queries.values():
            self._set_timer_for(query)

    def _needs_probe(self, query: PendingQuery) -> bool:
        """Whether the first half of a query's timeout passed without a message or a probe."""
        since = query.sent_at
        return (
            query.pinned is None
            and self._context.now >= since + _PROBE_AFTER_NS
            and self._probed_at < since
            and self._last_heard.get(self._current, _NEVER_HEARD) < since
        )

    def _retransmit_due(self, due: list[PendingQuery]) -> None:
        free = [query for query in due if query.pinned is None]
        for query in due:
            if query.pinned is not None:
                self._retransmit(query)
        if not free:
            return
        last_heard = self._last_heard.get(self._current, _NEVER_HEARD)
        if last_heard < max(query.sent_at for query in free) or self._is_stuck(free):
            self._switch_coordinator()
            return
        for query in free:
            self._retransmit(query)

    def _is_stuck(self, queries: list[PendingQuery]) -> bool:
        """Whether the current coordinator has left a query unanswered for too long."""
        since = [q.since for q in queries if type(q.message) is not wire.Watch]
        return bool(since) and self._context.now - min(since) >= _STUCK_NS

    def _retransmit(self, query: PendingQuery) -> None:
        query.sent_at = self._context.now
        query.retry_at = query.sent_at + query.timeout
        self._send(query.pinned or self._current, query.message)

    def _expire_if_owner_silent(self, number: int, query: PendingQuery) -> bool:
        """End a query about a snapshot if the snapshot's coordinator is gone."""
        owner = query.pinned
        if owner is None:
            return False
        last_heard = max(self._last_heard.get(owner, _NEVER_HEARD), query.started_at)
        if self._context.now - last_heard < (
            _OWNER_TIMEOUT_NS if len(self._names) > 1 else _ONLY_OWNER_TIMEOUT_NS
        ):
            return False
        endpoint = self._endpoints[owner]
        reason = f"its coordinator at {endpoint} does not reply"
        self._finish(number, SnapshotExpired(reason), owner)
        return True

    def _next_name(self) -> bytes:
        index = self._names.index(self._current) + 1
        return self._names[index % len(self._names)]

    def _switch_coordinator(self) -> None:
        """Send all open queries to the next coordinator, or again to the only one."""
        if len(self._names) > 1:
            self._opened.discard(self._current)
            self._current = self._next_name()
        self._probe()
        for number, query in self._queries.items():
            if query.pinned is None:
                query.sent_at = query.since = self._context.now
                query.retry_at = query.sent_at + query.timeout
                self._set_timer_for(query)
                if number not in self._liveness_queries:
                    self._send(self._current, query.message)

    def _deadline_error(self, query: PendingQuery) -> ZiplogError:
        refusals = [
            f"the one at {self._endpoints[n]}: {why}"
            for n, (at, why) in self._refusals.items()
            if at >= query.started_at
        ]
        if query.deadline <= query.started_at + _MIN_TIMEOUT_NS:
            reason = "the timeout is too short for a coordinator to reply: increase it"
        elif refusals:
            reason = f"timed out: no coordinator was ready ({'; '.join(refusals)})"
        elif max(self._last_heard.get(n, _NEVER_HEARD) for n in self._names) < query.started_at:
            reason = f"timed out: {self._describe_silence()}"
        elif type(query.message) is wire.Watch:
            key = query.message.key.decode(errors="backslashreplace")
            return DeadlineError(f"timed out: {key!r} did not change; call again to wait longer")
        else:
            reason = (
                f"timed out: the coordinator at {self._endpoints[query.pinned or self._current]}"
                " did not answer, because it waits for the log"
            )
        if not self.cluster or self._foreign.issuperset(self._names):
            return UnavailableError(reason)
        if type(query.message) is wire.Open:
            # The query precedes a write.
            return DeadlineError(f"{reason}; nothing was written, try again")
        return DeadlineError(f"{reason}; try again")

    def check(self) -> None:
        """Assert the invariants."""
        assert self._liveness_queries <= self._queries.keys(), "a liveness query is not open"
        for query in self._queries.values():
            due = min(query.retry_at, query.deadline)
            assert self._context.next_timer <= due, "a query has no timer"


#: Usually answered late, so a liveness probe is sent along.
_LONG_POLLS: Final = frozenset({wire.AwaitDecision, wire.Watch})
#: Replies that a coordinator may send before it knows its cluster.
_MAY_PRECEDE_LOG: Final = frozenset({wire.NotReady, wire.Invalid})
