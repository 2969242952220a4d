"""Questions to coordinators: asked of one of them, again until answered, then of the next one.

All questions go to the *current* coordinator, but those about a snapshot, which go to whoever keeps
it. Rules: one that is silent is left for the next one, and all questions with it; an answer to any
copy of a question counts, whoever gives it; nothing is sent while no question is open. Invariant:
the alarm is never later than what a question waits for. See docs/logdb.md, sections 7 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

from logdb import wire
from logdb.errors import SnapshotExpired
from ziplog.core.node import Connect
from ziplog.errors import DeadlineError, UnavailableError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.common.step_context import StepContext
    from ziplog.core.message import Message
    from ziplog.errors import ZiplogError

_MS: Final = 1_000_000
#: A coordinator that is silent for so long, with a question open, is left for the next one.
PATIENCE_NS: Final = 300 * _MS
#: With a question open, and nothing heard, it is asked for a sign of life after so long.
_SIGN_AFTER_NS: Final = PATIENCE_NS // 2
#: A watch is asked again more seldom: it usually waits for long.
WATCH_PATIENCE_NS: Final = 1_000 * _MS
#: One that is there, and has not answered a question for so long, cannot: it may have lost the log.
_STUCK_NS: Final = 1_000 * _MS
#: Whoever was heard of in that time is there (docs/logdb.md, section 7).
ALIVE_NS: Final = 50 * _MS
#: The keeper of a snapshot that is silent for so long is gone, and the snapshot with it: if there
#: is somebody else to ask for another one, sooner.
_ONLY_KEEPER_NS: Final = 3_000 * _MS
_KEEPER_NS: Final = 1_000 * _MS
#: Of whoever gives less time, nothing can be expected.
_NO_TIME_NS: Final = 1 * _MS
#: One that is not ready is asked again after so long, doubling up to `PATIENCE_NS`.
_NOT_READY_PAUSE_NS: Final = 20 * _MS
_LONG_AGO: Final = -(2**62)
_REPLIES: Final[dict[type[Message], type[Message]]] = {
    wire.Open: wire.Opened,
    wire.Get: wire.Got,
    wire.Watch: wire.Got,
    wire.Scan: wire.Scanned,
    wire.Validate: wire.Validated,
    wire.TakeSnapshot: wire.SnapshotTaken,
    wire.Status: wire.StatusIs,
}
#: What is for this machine.
REPLIES: Final = frozenset(get_args(wire.Reply))


class Question:
    """Something that was asked and is not answered."""

    __slots__ = (
        "answer", "asked_at", "deadline", "message", "patience", "pause", "pinned", "retry_at",
        "sent_at", "since",
    )  # fmt: skip

    def __init__(
        self,
        message: Any,
        answer: Callable[[Any, bytes], None],
        deadline: int,
        pinned: bytes | None,
        now: int,
    ) -> None:
        self.message: Final = message
        #: Gets the reply or an exception, and who gave it.
        self.answer: Final = answer
        self.deadline: Final = deadline
        #: The only coordinator that can answer, if there is but one.
        self.pinned: Final = pinned
        self.asked_at: Final = now
        self.sent_at = now
        #: Since when it is asked of the same coordinator.
        self.since = now
        self.patience: Final = WATCH_PATIENCE_NS if type(message) is wire.Watch else PATIENCE_NS
        self.retry_at = now + self.patience
        self.pause = _NOT_READY_PAUSE_NS


class Coordinators:
    """The coordinators of one database, as a client sees them."""

    def __init__(self, turn: StepContext, endpoints: Sequence[str], session: bytes) -> None:
        """Make it; nothing is sent before somebody asks.

        Args:
            turn: the client's scratch pad.
            endpoints: where coordinators listen, one or more.
            session: whose decisions are to be told.

        """
        self._turn: Final = turn
        self._session: Final = session
        #: Names that no node of the log has, as both are connected over one transport.
        self._endpoints: Final = {b"coordinator " + e.encode(): e for e in endpoints}
        self._names: Final = list(self._endpoints)
        self._current = self._names[0]
        #: When it was last asked for a sign of life.
        self._sign_asked_at = _LONG_AGO
        self._connected: Final[set[bytes]] = set()
        #: When each was last heard of, and when it last gave an answer.
        self._heard: Final[dict[bytes, int]] = {}
        self._answered: Final[dict[bytes, int]] = {}
        #: Who knows the session.
        self._opened: Final[set[bytes]] = set()
        #: Coordinators that were found to follow another log than the one that answers.
        self._foreign: Final[set[bytes]] = set()
        #: When each last said that it cannot answer, and why.
        self._refusals: Final[dict[bytes, tuple[int, str]]] = {}
        self._questions: Final[dict[int, Question]] = {}
        #: Questions that any sign of life answers.
        self._signs: Final[set[int]] = set()
        #: The log's number; 0 while it is not known.
        self.cluster = 0
        #: The last position that a coordinator told.
        self.known = RID_GENESIS
        #: Called with each `Decided` of the session, and with the first `Opened`.
        self.on_decided: Callable[[wire.Decided], None]
        self.on_opened: Callable[[wire.Opened], None]

    # --- asking ---

    def ask(
        self,
        build: Callable[[int, int], Message],
        answer: Callable[[Any, bytes], None],
        deadline: int,
        pinned: bytes | None = None,
    ) -> int:
        """Ask `build(cluster, request)` and return the request.

        `answer` gets the reply or an exception, and the name of the coordinator.
        """
        number = self._turn.request()
        message = build(self.cluster, number)
        question = self._register(number, message, answer, deadline, pinned)
        self._send(pinned or self._current, question.message)
        if type(message) in _WAIT_LONG:
            self._ask_for_sign()
        return number

    def when_alive(self, answer: Callable[[Any, bytes], None], deadline: int) -> int:
        """Call back when there is a sign of life, at once if there was one just now.

        Returns the number of the question; 0 if it is answered.
        """
        turn, current = self._turn, self._current
        heard_at = self._answered.get(current, _LONG_AGO)
        if turn.now - heard_at <= ALIVE_NS and current in self._opened:
            answer(None, current)
            return 0
        number = turn.request()
        message = self._open(number)
        self._register(number, message, answer, deadline, None)
        self._signs.add(number)
        if len(self._signs) == 1:
            self._sign_asked_at = turn.now
            self._send(current, message)
        return number

    def forget(self, number: int) -> None:
        """Stop asking."""
        self._questions.pop(number, None)
        self._signs.discard(number)

    def tell(self, name: bytes, message: Message) -> None:
        """Send what has no answer."""
        self._send(name, message)

    def endpoint(self, name: bytes) -> str:
        """Return where a coordinator listens."""
        return self._endpoints[name]

    @property
    def description(self) -> str:
        """The endpoints, for errors."""
        return ", ".join(self._endpoints.values())

    def accept_log(self, cluster: int, endpoints: str) -> bool:
        """Take the log's own number; False if the coordinators named another one.

        Then the current coordinator follows a former cluster at the same endpoints: its answers do
        not count from now on.
        """
        if cluster == self.cluster:
            return True
        former, self.cluster = self.cluster, cluster
        self._opened.clear()
        self._answered.clear()
        self.known = RID_GENESIS
        self._foreign.add(self._current)
        reason = f"it follows cluster {former}, but the log at {endpoints} is cluster {cluster}"
        self._refuse(self._current, f"{reason}: stop that coordinator, and start another one")
        return False

    def _open(self, number: int) -> wire.Open:
        return wire.Open(self.cluster, number, self._session)

    def _ask_for_sign(self) -> None:
        """Let the current coordinator say at once that it is there; any answer will do."""
        self._sign_asked_at = self._turn.now
        self._send(self._current, self._open(self._turn.request()))

    def _register(
        self,
        number: int,
        message: Message,
        answer: Callable[[Any, bytes], None],
        deadline: int,
        pinned: bytes | None,
    ) -> Question:
        turn = self._turn
        question = Question(message, answer, deadline, pinned, turn.now)
        self._questions[number] = question
        self._wake_for(question)
        return question

    def _wake_for(self, question: Question) -> None:
        turn = self._turn
        turn.set_timer(min(question.retry_at, question.deadline))
        if turn.now < question.sent_at + _SIGN_AFTER_NS:
            turn.set_timer(question.sent_at + _SIGN_AFTER_NS)

    def _send(self, name: bytes, message: Message) -> None:
        if name not in self._connected:
            self._connected.add(name)
            self._turn.effects.append(Connect(name, self._endpoints[name]))
        self._turn.send(name, message)

    # --- answers ---

    def receive(self, src: bytes, reply: Any) -> None:
        """Take a message of a coordinator."""
        if src not in self._endpoints or (
            reply.cluster != self.cluster and self.cluster and type(reply) not in _MAY_NOT_KNOW
        ):
            self._turn.counters.protocol_errors += 1
            return
        self._heard[src] = self._turn.now
        kind = type(reply)
        if kind is wire.NotReady:
            self._not_ready(src, reply)
        elif kind is wire.Invalid:
            self._invalid(src, reply)
        else:
            self._good(src, kind, reply)

    def _good(self, src: bytes, kind: type[Message], reply: Any) -> None:
        position: RecordId | None = getattr(reply, "position", None)
        if position is not None and position > self.known:
            self.known = position
        self._answered[src] = self._turn.now
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
            self._answer(src, kind, reply)
        if self._signs and src == self._current and src in self._opened:
            for number in list(self._signs):
                self._end(number, None, src)

    def _answer(self, src: bytes, kind: type[Message], reply: Any) -> None:
        question = self._questions.get(reply.request)
        if question is None:
            if kind is wire.SnapshotTaken:
                # Nobody will read it.
                self._send(src, wire.DropSnapshot(self.cluster, reply.snapshot))
        elif _REPLIES.get(type(question.message)) is not kind:
            self._turn.counters.protocol_errors += 1
        elif reply.request not in self._signs:
            self._end(reply.request, reply, src)

    def _end(self, number: int, result: Any, src: bytes) -> None:
        question = self._questions.pop(number)
        self._signs.discard(number)
        question.answer(result, src)

    def _not_ready(self, src: bytes, reply: wire.NotReady) -> None:
        self._refuse(src, reply.reason)
        question = self._questions.get(reply.request)
        if question is not None:
            question.retry_at = min(question.retry_at, self._turn.now + question.pause)
            question.pause = min(2 * question.pause, PATIENCE_NS)
            self._turn.set_timer(question.retry_at)

    def _invalid(self, src: bytes, reply: wire.Invalid) -> None:
        if reply.code == "wrong-cluster":
            reason = f"it serves another log ({reply.detail})"
            if src in self._foreign and src in self._refusals:
                reason = self._refusals[src][1]  # found when the log answered: it says more
            self._foreign.add(src)
            self._refuse(src, reason)
        elif reply.request in self._questions:
            self._end(reply.request, SnapshotExpired(reply.detail), src)

    def _refuse(self, src: bytes, reason: str) -> None:
        """Go on to another coordinator, unless that said so too, just now."""
        now = self._turn.now
        self._refusals[src] = (now, reason)
        self._answered.pop(src, None)
        if src == self._current:
            refused_at, _ = self._refusals.get(self._next(), (_LONG_AGO, ""))
            if now - refused_at >= PATIENCE_NS:
                self._move_on()

    # --- time ---

    def tick(self) -> None:
        """Ask again what is due; end what is late."""
        turn = self._turn
        due = []
        for number, question in list(self._questions.items()):
            if turn.now >= question.deadline:
                if number in self._questions:
                    self._end(number, self._late(question), question.pinned or self._current)
            elif turn.now >= question.retry_at and not self._is_expired(number, question):
                due.append(question)
        self._ask_again(due)
        if any(map(self._needs_sign, self._questions.values())):
            self._ask_for_sign()
        for question in self._questions.values():
            self._wake_for(question)

    def _needs_sign(self, question: Question) -> bool:
        """Whether nothing was heard, or asked for, in the first half of a question's time."""
        since = question.sent_at
        return (
            question.pinned is None
            and self._turn.now >= since + _SIGN_AFTER_NS
            and self._sign_asked_at < since
            and self._heard.get(self._current, _LONG_AGO) < since
        )

    def _ask_again(self, due: list[Question]) -> None:
        free = [question for question in due if question.pinned is None]
        for question in due:
            if question.pinned is not None:
                self._repeat(question)
        if not free:
            return
        heard_at = self._heard.get(self._current, _LONG_AGO)
        if heard_at < max(question.sent_at for question in free) or self._is_stuck(free):
            self._move_on()
            return
        for question in free:
            self._repeat(question)

    def _is_stuck(self, questions: list[Question]) -> bool:
        """Whether the current coordinator should have answered one of these long ago."""
        since = [q.since for q in questions if type(q.message) is not wire.Watch]
        return bool(since) and self._turn.now - min(since) >= _STUCK_NS

    def _repeat(self, question: Question) -> None:
        question.sent_at = self._turn.now
        question.retry_at = question.sent_at + question.patience
        self._send(question.pinned or self._current, question.message)

    def _is_expired(self, number: int, question: Question) -> bool:
        """End a question about a snapshot whose keeper is gone."""
        keeper = question.pinned
        if keeper is None:
            return False
        heard_at = max(self._heard.get(keeper, _LONG_AGO), question.asked_at)
        if self._turn.now - heard_at < (_KEEPER_NS if len(self._names) > 1 else _ONLY_KEEPER_NS):
            return False
        where = self._endpoints[keeper]
        reason = f"the coordinator that kept it, at {where}, does not answer"
        self._end(number, SnapshotExpired(reason), keeper)
        return True

    def _next(self) -> bytes:
        index = self._names.index(self._current) + 1
        return self._names[index % len(self._names)]

    def _move_on(self) -> None:
        """Ask the next coordinator everything that is open; the same one if it is the only one."""
        if len(self._names) > 1:
            self._opened.discard(self._current)
            self._current = self._next()
        self._ask_for_sign()
        for number, question in self._questions.items():
            if question.pinned is None:
                question.sent_at = question.since = self._turn.now
                question.retry_at = question.sent_at + question.patience
                self._wake_for(question)
                if number not in self._signs:
                    self._send(self._current, question.message)

    def _late(self, question: Question) -> ZiplogError:
        said = [f"the one at {self._endpoints[n]}: {why}" for n, (_, why) in self._refusals.items()]
        if question.deadline <= question.asked_at + _NO_TIME_NS:
            what = "the time-out was over before a coordinator could answer: it needs longer"
        elif said:
            what = f"no coordinator was ready before the deadline ({'; '.join(said)})"
        elif max(self._heard.get(n, _LONG_AGO) for n in self._names) < question.asked_at:
            what = (
                f"no coordinator answered at {self.description} before the deadline; check the"
                " address, and that one runs (python -m logdb)"
            )
        elif type(question.message) is wire.Watch:
            key = question.message.key.decode(errors="backslashreplace")
            return DeadlineError(f"nobody changed {key!r} before the deadline; ask again")
        else:
            what = (
                f"the coordinator at {self._endpoints[question.pinned or self._current]} had no"
                " answer before the deadline: it waits for the log"
            )
        if not self.cluster or self._foreign.issuperset(self._names):
            return UnavailableError(what)
        if type(question.message) is wire.Open:
            # Somebody wanted to write.
            return DeadlineError(f"{what}; nothing was written, try again")
        return DeadlineError(f"{what}; try again")

    def check(self) -> None:
        """Assert the invariants."""
        assert self._signs <= self._questions.keys(), "a question was half forgotten"
        for question in self._questions.values():
            due = min(question.retry_at, question.deadline)
            assert self._turn.next_timer <= due, "a question would be forgotten"


#: Usually not answered for long: whether somebody is there is asked for besides.
_WAIT_LONG: Final = frozenset({wire.Ask, wire.Watch})
#: May come from a coordinator that has not found its log.
_MAY_NOT_KNOW: Final = frozenset({wire.NotReady, wire.Invalid})
