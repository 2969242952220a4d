"""A coordinator: follows the log, decides transactions, and answers what clients ask.

Rules: decisions are told in the step in which their records were delivered; a question is answered
from one state, which has passed whatever it must see; everything that waits is bounded. It knows
nothing that is not in the log, so another one can take over at any moment.
See docs/logdb.md, sections 4 to 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from logdb.cleaner.cleaner import Cleaner
from logdb.cleaner.settings import RoundSettings
from logdb.coordinator.cache import ValueCache
from logdb.coordinator.log_tailer import Follower
from logdb.coordinator.pending_requests import Waitings
from logdb.coordinator.queries import Answers
from logdb.coordinator.sessions import Sessions
from logdb.coordinator.status import document
from logdb.records import TransactionId
from logdb.snapshots import Snapshots
from logdb.tasks import LogCalls, ignore
from logdb.wire import (
    MAX_ENDPOINTS,
    MAX_KEYS,
    Ask,
    Decided,
    DropSnapshot,
    Get,
    Invalid,
    NotReady,
    Open,
    Opened,
    Scan,
    Status,
    StatusIs,
    TakeSnapshot,
    Validate,
    Watch,
)
from ziplog.client.client_node import ClientCore
from ziplog.core.node import BatchEnd, Halt, Received, Send, Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logdb.coordinator.pending_requests import Waiting
    from logdb.state import Applied, State
    from logdb.wire import KnownOutcome
    from ziplog.client.common.requests import Policy
    from ziplog.core.message import Message
    from ziplog.core.node import Effect, Event
    from ziplog.errors import ZiplogError

_S: Final = 1_000_000_000
#: Looks for what waited, or was kept, for too long.
_LOOK_NS: Final = _S
#: The conflicts of as many aborted transactions are kept, for those who ask late.
_MAX_ABORTS: Final = 10_000


class Settings(msgspec.Struct, frozen=True):
    """What an operator may choose."""

    #: Whether it makes checkpoints and has the log trimmed.
    checkpoints: bool = True
    #: Records after which a checkpoint is due, or as many as there are keys if that is more.
    checkpoint_every: int = 100_000
    #: Bytes of values that are kept at hand.
    cache_bytes: int = 64 * 1024 * 1024
    #: How long the log may be silent at the start, in nanoseconds.
    connect_ns: int = 10 * _S


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
    ) -> None:
        """Make a coordinator; it begins with its first step.

        Args:
            client: 16 random bytes, never used by another client of the log.
            endpoints: "host:port" of the log's membership service.
            policy: chooses the shards of what it inserts.
            now: monotonic nanoseconds.
            endpoint: where clients reach it, for the status.
            settings: what an operator chose.

        """
        self.settings: Final = settings or Settings()
        self._client: Final = client
        self._calls: Final = LogCalls(ClientCore(client, endpoints, policy), now)
        self.endpoint: Final = endpoint
        #: Called each time that it has begun to answer.
        self.on_ready: Callable[[], None] = ignore
        #: Why it has ended; None: it goes on.
        self.failure: ZiplogError | None = None
        self.cache: Final = ValueCache(self.settings.cache_bytes)
        self.sessions: Final = Sessions()
        self.waitings: Final = Waitings()
        #: What was told about the last aborted transactions, by session and number.
        self._aborts: Final[dict[tuple[bytes, int], Decided]] = {}
        self._look_at = now
        self._is_begun = False
        self.snapshots: Snapshots
        self.cleaner: Cleaner | None = None
        self._answers: Answers
        self.follower: Final = Follower(
            self._calls,
            connect_ns=self.settings.connect_ns,
            on_state=self._take_state,
            on_applied=self._applied,
            on_passed=self._passed,
            on_ready=self._ready,
            on_failure=self._fail,
        )
        self._handlers: Final[dict[type[Message], Callable[[bytes, Any], None]]] = {
            Open: self._open,
            Get: self._read,
            Scan: self._read,
            Validate: self._validate,
            Ask: self._ask,
            Watch: self._watch,
            TakeSnapshot: self._take_snapshot,
            DropSnapshot: self._drop_snapshot,
            Status: self._status,
        }

    # --- the one door ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.core.node`."""
        calls = self._calls
        calls.now = now
        if not self._is_begun:
            self._is_begun = True
            self.follower.start()
        if isinstance(event, Received) and type(event.message) in self._handlers:
            self._question(event.src, event.message)
        else:
            calls.step(event, now)
            if type(event) is Wakeup and now >= self._look_at:
                self._look()
        is_last = type(event) is BatchEnd
        if self.failure is None:
            self.follower.turn(drained=is_last)
        if is_last and self.cleaner is not None and self.follower.is_ready:
            self.cleaner.step(now)
        return calls.take()

    def next_wakeup(self) -> int | None:
        """Return when this node wants to be woken."""
        core = self._calls.core.next_wakeup()
        due = min(self._look_at, self.follower.next_wakeup())
        if self.cleaner is not None and self.follower.is_ready:
            due = min(due, self.cleaner.next_wakeup())
        return due if core is None else min(core, due)

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self._calls.core.check()
        self.follower.check()
        self.waitings.check()
        assert len(self._aborts) <= _MAX_ABORTS

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return self.follower.is_ready

    @property
    def _cluster(self) -> int:
        return self._calls.core.cluster

    def _send(self, route: bytes, message: Message) -> None:
        self._calls.effects.append(Send(route, message))

    # --- what the follower tells ---

    def _take_state(self, state: State) -> None:
        """Answer from this state from now on; the snapshots of the former one are over."""
        self.snapshots = Snapshots(state)
        if self.cleaner is not None:
            self.cleaner.close()
        if self.settings.checkpoints:
            rounds = RoundSettings(every_records=self.settings.checkpoint_every)
            self.cleaner = Cleaner(state, self._calls, self._client[:8], rounds)
        # 62 random bits, and then one state after the other.
        base = (int.from_bytes(self._client[8:]) >> 2) + (self.follower.starts << 32)
        self._answers = Answers(state, self.snapshots, self.cache, base)

    def _applied(self, applied: Applied) -> None:
        session, number, outcome = applied.id.session, applied.id.number, applied.outcome
        if outcome == "committed":
            version = applied.position.gsn
            for key, value in applied.values:
                self.cache.put(key, version, value)
            if self.waitings.has_watches:
                self.waitings.touch(applied.changed)
        route = self.sessions.route(session)
        asking = self.waitings.decided(session, number)
        if outcome == "committed" and route is None and not asking:
            return
        decided = Decided(
            self._cluster, session, number, applied.position, outcome, applied.conflicts[:MAX_KEYS]
        )
        if outcome != "committed":
            self._remember(decided)
        if self.follower.is_ready:  # Who asked while it replays is told when that is done.
            self._tell(decided, route, asking)

    def _tell(self, decided: Decided, route: bytes | None, asking: Iterable[Waiting]) -> None:
        """Tell a decision to its session, and to those who asked for it: once a route."""
        if route is not None:
            self._send(route, decided)
        for waiting in asking:
            self.waitings.end(waiting)
            if waiting.route != route:
                self._send(waiting.route, decided)

    def _remember(self, decided: Decided) -> None:
        aborts = self._aborts
        aborts[decided.session, decided.number] = decided
        if len(aborts) > _MAX_ABORTS:
            del aborts[next(iter(aborts))]

    def _passed(self) -> None:
        if not self.follower.is_ready:
            return  # What was told already may be newer.
        for waiting in self.waitings.changed():
            self._look_at_key(waiting)

    def _ready(self) -> None:
        """Answer from now on; what was decided and changed on the way here was not noticed."""
        for waiting in self.waitings.undecided():
            decided = self._decision(waiting.question)
            if decided is not None:
                self._answer(waiting, decided)
        self.waitings.touch_all()
        self._passed()
        self.on_ready()

    def _fail(self, error: ZiplogError) -> None:
        self.failure = error
        self._calls.effects.append(Halt(str(error)))

    # --- questions ---

    def _question(self, route: bytes, question: Any) -> None:
        # To drop a snapshot has no answer, so it is not refused either.
        refusal = None if type(question) is DropSnapshot else self._refusal(question)
        if refusal is None:
            self._handlers[type(question)](route, question)
        else:
            self._send(route, refusal)

    def _refusal(self, question: Any) -> NotReady | Invalid | None:
        """Return why a request is not answered now, or never will be; None: it is."""
        if not self.follower.is_ready and type(question) is not Status:
            reason = f"it replays the log, is {self.follower.progress}"
            return NotReady(self._cluster, question.request, reason)
        if question.cluster and question.cluster != self._cluster:
            detail = f"this coordinator follows cluster {self._cluster}"
            return Invalid(self._cluster, question.request, "wrong-cluster", detail)
        return None

    def _wait(self, route: bytes, question: Any, then: Callable[[Waiting], None]) -> Waiting | None:
        """Return a request that waits from now on; None if it does already, or may not."""
        waitings, now = self.waitings, self._calls.now
        if waitings.repeated(route, question, now):
            return None
        if waitings.is_full:
            reason = f"{len(waitings):,} requests wait here already"
            self._send(route, NotReady(self._cluster, question.request, reason))
            return None
        return waitings.add(route, question, now, then)

    def _answer(self, waiting: Waiting, answer: Message) -> None:
        self.waitings.end(waiting)
        self._send(waiting.route, answer)

    def _open(self, route: bytes, question: Open) -> None:
        self.sessions.heard(question.session, route)
        endpoints = self._calls.core.endpoints[:MAX_ENDPOINTS]
        position = self.follower.state.position
        self._send(route, Opened(self._cluster, question.request, endpoints, position))

    def _read(self, route: bytes, question: Get | Scan) -> None:
        """Answer a read, once the state is new enough; a snapshot is what it is."""
        if question.snapshot or (not question.fresh and question.at_least <= self.follower.passed):
            self._send(route, self._answers.read(self._cluster, question, self._calls.now))
            return
        waiting = self._wait(route, question, self._read_now)
        if waiting is None:
            return
        if question.fresh:
            self.follower.when_fresh(waiting)
        else:
            self.follower.when_at(question.at_least, waiting)

    def _read_now(self, waiting: Waiting) -> None:
        read = self._answers.read(self._cluster, waiting.question, self._calls.now)
        self._answer(waiting, read)

    def _validate(self, route: bytes, validate: Validate) -> None:
        def now_fresh(waiting: Waiting) -> None:
            self._answer(waiting, self._answers.validated(self._cluster, validate))

        waiting = self._wait(route, validate, now_fresh)
        if waiting is not None:
            self.follower.when_fresh(waiting)

    def _ask(self, route: bytes, ask: Ask) -> None:
        self.sessions.heard(ask.session, route)
        decided = self._decision(ask)
        if decided is not None:
            self._send(route, decided)
            return
        waiting = self._wait(route, ask, ignore)
        if waiting is not None:
            self.waitings.for_decision(waiting)

    def _decision(self, ask: Ask) -> Decided | None:
        """Return what became of a transaction, if that is known."""
        session, number = ask.session, ask.number
        aborted = self._aborts.get((session, number))
        if aborted is not None:
            return aborted
        known = self.follower.state.decisions.outcome(TransactionId(session, number))
        if known is None:
            return None
        outcome: KnownOutcome = "committed" if known.committed else "aborted"
        return Decided(self._cluster, session, number, known.position, outcome, [])

    def _watch(self, route: bytes, watch: Watch) -> None:
        waiting = self._wait(route, watch, self._watch_now)
        if waiting is not None:
            self.follower.when_at(watch.at_least, waiting)

    def _watch_now(self, waiting: Waiting) -> None:
        self.waitings.for_change(waiting)
        self._look_at_key(waiting)

    def _look_at_key(self, waiting: Waiting) -> None:
        watch = waiting.question
        if self._answers.version(watch.key) != watch.version:
            self._answer(waiting, self._answers.watched(self._cluster, watch))

    def _take_snapshot(self, route: bytes, take: TakeSnapshot) -> None:
        def now_fresh(waiting: Waiting) -> None:
            taken = self._answers.snapshot_taken(self._cluster, take, self._calls.now)
            self._answer(waiting, taken)

        self.sessions.heard(take.session, route)
        waiting = self._wait(route, take, now_fresh)
        if waiting is not None:
            self.follower.when_fresh(waiting)

    def _drop_snapshot(self, _route: bytes, drop: DropSnapshot) -> None:
        self._answers.drop_snapshot(drop.snapshot)

    def _status(self, route: bytes, status: Status) -> None:
        text = document(
            self.endpoint,
            self.follower,
            self.cleaner,
            self.snapshots,
            self.sessions,
            self.waitings,
            self.cache,
        )
        self._send(route, StatusIs(self._cluster, status.request, text))

    # --- time ---

    def _look(self) -> None:
        """End what waited for too long."""
        now = self._calls.now
        self._look_at = now + _LOOK_NS
        self.snapshots.expire(now)
        late = self.waitings.late(now)
        for waiting in late:
            question = waiting.question
            # It may still wait for the position that its client knows: then we have an older state.
            is_seen = type(question) is Watch and question.at_least <= self.follower.passed
            if is_seen and self.follower.is_ready:
                self._answer(waiting, self._answers.watched(self._cluster, question))
            else:
                self.waitings.end(waiting)
        if late:
            self.follower.forget()
