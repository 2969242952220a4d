"""A coordinator node: tails the log, decides transactions, and serves client requests.

Invariants: a decision is sent in the step that delivers its record; a request is answered from one
state that has passed everything the request must see; all waiting requests are bounded. A
coordinator knows only what is in the log, so another one can take over at any moment. See
docs/logdb.md, sections 4 to 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from logdb.cleaner.cleaner import Cleaner
from logdb.cleaner.settings import RoundSettings
from logdb.coordinator.cache import ValueCache
from logdb.coordinator.log_tailer import LogTailer
from logdb.coordinator.pending_requests import PendingRequest, PendingRequests
from logdb.coordinator.queries import Queries
from logdb.coordinator.sessions import Sessions
from logdb.coordinator.status import document
from logdb.records import TransactionId
from logdb.snapshots import Snapshots
from logdb.wire import (
    MAX_ENDPOINTS,
    MAX_KEYS,
    AwaitDecision,
    Decided,
    DropSnapshot,
    Get,
    Invalid,
    NotReady,
    Open,
    Opened,
    Scan,
    Status,
    StatusReply,
    TakeSnapshot,
    Validate,
    Watch,
)
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import Preferences
from ziplog.client.log_tasks import LogTasks, ignore
from ziplog.core.node import BatchEnd, Halt, Received, Send, Wakeup
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logdb.state import Applied, State
    from logdb.wire import KnownOutcome
    from ziplog.client.common.requests import Policy
    from ziplog.core.message import Message
    from ziplog.core.node import Effect, Event
    from ziplog.errors import ZiplogError

#: Interval between checks for expired requests and snapshots.
_EXPIRY_INTERVAL_NS: Final = NS_PER_S
#: Number of aborted transactions for which conflicts are kept, for late requests, and the
#: approximate bytes of these conflicts.
_MAX_ABORTS: Final = 10_000
_MAX_ABORT_BYTES: Final = 16 * 1024 * 1024
#: Approximate bytes of a conflict, without its key.
_CONFLICT_BYTES: Final = 64


class Settings(msgspec.Struct, frozen=True):
    """The settings of an operator."""

    #: Whether the coordinator writes checkpoints and trims the log.
    checkpoints: bool = True
    #: Records between two checkpoints; at least as many as there are keys.
    checkpoint_every: int = 100_000
    #: Size of the value cache, in bytes.
    cache_bytes: int = 64 * 1024 * 1024
    #: Timeout of the first connection to the log, in nanoseconds.
    connect_ns: int = 10 * NS_PER_S


class CoordinatorNode:
    """One coordinator, as a deterministic node."""

    def __init__(
        self,
        client: bytes,
        endpoints: Sequence[str],
        policy: Policy,
        *,
        now: int,
        endpoint: str = "",
        settings: Settings | None = None,
        region: str = "",
    ) -> None:
        """Make a coordinator; it starts with its first step.

        Args:
            client: 16 random bytes, never used by another client of the log.
            endpoints: "host:port" of the log's membership service.
            policy: selects the shards for what it inserts.
            now: monotonic nanoseconds.
            endpoint: the address of this coordinator, for the status.
            settings: the operator's settings.
            region: where it runs, so that it reads near; "": none.

        """
        self.settings: Final = settings or Settings()
        self._client: Final = client
        core = ClientCore(client, endpoints, Preferences(policy, region))
        self._calls: Final = LogTasks(core, now)
        self.endpoint: Final = endpoint
        #: Called each time the coordinator becomes ready.
        self.on_ready: Callable[[], None] = ignore
        #: The error that stopped the coordinator; None: it runs.
        self.failure: ZiplogError | None = None
        self.cache: Final = ValueCache(self.settings.cache_bytes)
        self.sessions: Final = Sessions()
        self.pending: Final = PendingRequests()
        #: Decisions about the last aborted transactions, by session and number.
        self._aborts: Final[dict[tuple[bytes, int], Decided]] = {}
        #: Approximate bytes of their conflicts.
        self._abort_bytes = 0
        #: By outcome: transactions decided since the process started, without those of a replay.
        self.decided: Final[dict[str, int]] = {}
        self._expire_at = now
        self._is_started = False
        self.snapshots: Snapshots
        self.cleaner: Cleaner | None = None
        self._queries: Queries
        self.tailer: Final = LogTailer(
            self._calls,
            connect_ns=self.settings.connect_ns,
            on_state=self._on_state,
            on_applied=self._on_applied,
            on_passed=self._on_passed,
            on_ready=self._on_tail_reached,
            on_failure=self._on_failure,
        )
        self._handlers: Final[dict[type[Message], Callable[[bytes, Any], None]]] = {
            Open: self._open,
            Get: self._read,
            Scan: self._read,
            Validate: self._validate,
            AwaitDecision: self._await_decision,
            Watch: self._watch,
            TakeSnapshot: self._take_snapshot,
            DropSnapshot: self._drop_snapshot,
            Status: self._status,
        }

    # --- events ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Handle one event; see `ziplog.core.node`."""
        calls = self._calls
        calls.now = now
        if not self._is_started:
            self._is_started = True
            self.tailer.start()
        if isinstance(event, Received) and type(event.message) in self._handlers:
            self._on_request(event.src, event.message)
        else:
            calls.step(event, now)
            if type(event) is Wakeup and now >= self._expire_at:
                self._expire()
        is_last = type(event) is BatchEnd
        if self.failure is None:
            self.tailer.poll(drained=is_last)
        if is_last and self.cleaner is not None and self.tailer.is_ready:
            self.cleaner.step(now)
        return calls.pop_effects() if calls.effects else []

    def next_wakeup(self) -> int | None:
        """Return the time of the next wake-up."""
        core = self._calls.core.next_wakeup()
        due = min(self._expire_at, self.tailer.next_wakeup())
        if self.cleaner is not None and self.tailer.is_ready:
            due = min(due, self.cleaner.next_wakeup())
        return due if core is None else min(core, due)

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self._calls.core.check()
        self.tailer.check()
        self.pending.check()
        assert len(self._aborts) <= _MAX_ABORTS
        assert 0 <= self._abort_bytes <= _MAX_ABORT_BYTES

    @property
    def is_ready(self) -> bool:
        """Whether it serves requests."""
        return self.tailer.is_ready

    @property
    def cluster(self) -> int:
        """The number of the log's cluster; 0 while it is unknown."""
        return self._calls.core.cluster

    def _send(self, route: bytes, message: Message) -> None:
        self._calls.effects.append(Send(route, message))

    # --- callbacks of the tailer ---

    def _on_state(self, state: State) -> None:
        """Serve requests from a new state; snapshots of the former state end."""
        self.snapshots = Snapshots(state)
        if self.cleaner is not None:
            self.cleaner.close()
        if self.settings.checkpoints:
            rounds = RoundSettings(every_records=self.settings.checkpoint_every)
            self.cleaner = Cleaner(state, self._calls, self._client[:8], rounds)
        # A random base of 62 bits, increased with each new state.
        base = (int.from_bytes(self._client[8:]) >> 2) + (self.tailer.starts << 32)
        self._queries = Queries(state, self.snapshots, self.cache, base)

    def _on_applied(self, applied: Applied) -> None:
        session, number, outcome = applied.id.session, applied.id.number, applied.outcome
        if self.tailer.is_ready:
            self.decided[outcome] = self.decided.get(outcome, 0) + 1
        if outcome == "committed":
            version = applied.position.gsn
            for key, value in applied.values:
                self.cache.put(key, version, value)
            if self.pending.has_watches:
                self.pending.mark_changed(applied.changed)
        route = self.sessions.route(session)
        waiters = self.pending.decision_waiters(session, number)
        if outcome == "committed" and route is None and not waiters:
            return
        decided = Decided(
            self.cluster, session, number, applied.position, outcome,
            applied.conflicts[:MAX_KEYS], applied.unchanged_since,
        )  # fmt: skip
        if outcome != "committed":
            self._keep_abort(decided)
        if self.tailer.is_ready:  # else: sent when the replay ends
            self._send_decision(decided, route, waiters)

    def _send_decision(
        self, decided: Decided, route: bytes | None, waiters: Iterable[PendingRequest]
    ) -> None:
        """Send a decision to its session and to the requests that wait for it, once per route."""
        if route is not None:
            self._send(route, decided)
        for request in waiters:
            self.pending.remove(request)
            if request.route != route:
                self._send(request.route, decided)

    def _keep_abort(self, decided: Decided) -> None:
        """Keep an abort with its conflicts; forget the oldest ones at the limits."""
        aborts, name = self._aborts, (decided.session, decided.number)
        if name in aborts:
            self._abort_bytes -= _bytes_of_conflicts(aborts.pop(name))
        aborts[name] = decided
        self._abort_bytes += _bytes_of_conflicts(decided)
        while len(aborts) > _MAX_ABORTS or self._abort_bytes > _MAX_ABORT_BYTES:
            self._abort_bytes -= _bytes_of_conflicts(aborts.pop(next(iter(aborts))))

    def _on_passed(self) -> None:
        if not self.tailer.is_ready:
            return  # A watcher may have received a newer state.
        for request in self.pending.pop_changed():
            self._check_watch(request)

    def _on_tail_reached(self) -> None:
        """Start serving; decisions and changes of the replay were not sent before."""
        for request in self.pending.all_decision_waiters():
            decided = self._decision(request.message)
            if decided is not None:
                self._reply(request, decided)
        self.pending.mark_all_changed()
        self._on_passed()
        self.on_ready()

    def _on_failure(self, error: ZiplogError) -> None:
        self.failure = error
        self._calls.effects.append(Halt(str(error)))

    # --- requests ---

    def _on_request(self, route: bytes, message: Any) -> None:
        # `DropSnapshot` has no reply, so it cannot be refused.
        refusal = None if type(message) is DropSnapshot else self._refusal(message)
        if refusal is None:
            self._handlers[type(message)](route, message)
        else:
            self._send(route, refusal)

    def _refusal(self, message: Any) -> NotReady | Invalid | None:
        """Return the refusal of a request; None: it is accepted."""
        if not self.tailer.is_ready and type(message) is not Status:
            reason = f"it is replaying the log, {self.tailer.progress}"
            return NotReady(self.cluster, message.request, reason)
        if message.cluster and message.cluster != self.cluster:
            detail = f"this coordinator follows cluster {self.cluster}"
            return Invalid(self.cluster, message.request, "wrong-cluster", detail)
        return None

    def _add_pending(
        self, route: bytes, message: Any, on_ready: Callable[[PendingRequest], None]
    ) -> PendingRequest | None:
        """Return a new pending request; None if it is pending already, or refused."""
        pending, now = self.pending, self._calls.now
        if pending.refresh(route, message, now):
            return None
        request = PendingRequest(route, message, now, on_ready)
        if reason := pending.refusal(request.size):
            self._send(route, NotReady(self.cluster, message.request, reason))
            return None
        return pending.add(request)

    def _reply(self, request: PendingRequest, answer: Message) -> None:
        self.pending.remove(request)
        self._send(request.route, answer)

    def _open(self, route: bytes, message: Open) -> None:
        self.sessions.set_route(message.session, route)
        endpoints = self._calls.core.endpoints[:MAX_ENDPOINTS]
        position = self.tailer.state.position
        self._send(route, Opened(self.cluster, message.request, endpoints, position))

    def _read(self, route: bytes, message: Get | Scan) -> None:
        """Answer a read once the state is recent enough; a snapshot read needs no wait."""
        if message.snapshot or (not message.fresh and message.at_least <= self.tailer.passed):
            self._send(route, self._queries.read(self.cluster, message, self._calls.now))
            return
        request = self._add_pending(route, message, self._read_now)
        if request is None:
            return
        if message.fresh:
            self.tailer.wait_for_tail(request)
        else:
            self.tailer.wait_for_position(message.at_least, request)

    def _read_now(self, request: PendingRequest) -> None:
        read = self._queries.read(self.cluster, request.message, self._calls.now)
        self._reply(request, read)

    def _validate(self, route: bytes, validate: Validate) -> None:
        def on_fresh(request: PendingRequest) -> None:
            self._reply(request, self._queries.validate(self.cluster, validate))

        request = self._add_pending(route, validate, on_fresh)
        if request is not None:
            self.tailer.wait_for_tail(request)

    def _await_decision(self, route: bytes, message: AwaitDecision) -> None:
        self.sessions.set_route(message.session, route)
        decided = self._decision(message)
        if decided is not None:
            self._send(route, decided)
            return
        request = self._add_pending(route, message, ignore)
        if request is not None:
            self.pending.wait_for_decision(request)

    def _decision(self, message: AwaitDecision) -> Decided | None:
        """Return the decision about a transaction, if it is known."""
        session, number = message.session, message.number
        aborted = self._aborts.get((session, number))
        if aborted is not None:
            return aborted
        known = self.tailer.state.decisions.outcome(TransactionId(session, number))
        if known is None:
            return None
        outcome: KnownOutcome = "committed" if known.committed else "aborted"
        return Decided(self.cluster, session, number, known.position, outcome, [])

    def _watch(self, route: bytes, watch: Watch) -> None:
        request = self._add_pending(route, watch, self._watch_now)
        if request is not None:
            self.tailer.wait_for_position(watch.at_least, request)

    def _watch_now(self, request: PendingRequest) -> None:
        self.pending.wait_for_change(request)
        self._check_watch(request)

    def _check_watch(self, request: PendingRequest) -> None:
        watch = request.message
        if self._queries.version(watch.key) != watch.version:
            self._reply(request, self._queries.watch(self.cluster, watch))

    def _take_snapshot(self, route: bytes, take: TakeSnapshot) -> None:
        def on_fresh(request: PendingRequest) -> None:
            taken = self._queries.take_snapshot(self.cluster, take, self._calls.now)
            self._reply(request, taken)

        self.sessions.set_route(take.session, route)
        request = self._add_pending(route, take, on_fresh)
        if request is not None:
            self.tailer.wait_for_tail(request)

    def _drop_snapshot(self, _route: bytes, drop: DropSnapshot) -> None:
        self._queries.drop_snapshot(drop.snapshot)

    def _status(self, route: bytes, status: Status) -> None:
        text = document(
            self.cluster,
            self.endpoint,
            self.tailer,
            self.cleaner,
            self.snapshots,
            self.sessions,
            self.pending,
            self.cache,
        )
        self._send(route, StatusReply(self.cluster, status.request, text))

    # --- time ---

    def _expire(self) -> None:
        """End requests and snapshots that have expired."""
        now = self._calls.now
        self._expire_at = now + _EXPIRY_INTERVAL_NS
        self.snapshots.expire(now)
        expired = self.pending.expired(now)
        for request in expired:
            message = request.message
            # If it still waits for the position that its client knows, our state is older.
            is_seen = type(message) is Watch and message.at_least <= self.tailer.passed
            if is_seen and self.tailer.is_ready:
                self._reply(request, self._queries.watch(self.cluster, message))
            else:
                self.pending.remove(request)
        if expired:
            self.tailer.drop_finished_waiters()


def _bytes_of_conflicts(decided: Decided) -> int:
    """Return the approximate bytes of the conflicts of an abort."""
    keys = decided.conflicts
    return sum(map(len, keys)) + _CONFLICT_BYTES * len(keys)
