"""Commits: from a record to the word of a coordinator (docs/logdb.md, section 7).

    inserted --Decided, unasked--> done          silence: `Ask`, again and again
             --outcome unknown--> the same record is inserted again, and asked for
             --deadline--> nothing can be in the log: DeadlineError; else OutcomeUnknownError

Rules: the same id always goes with the same bytes; a decision counts whoever tells it, but
"expired" only if no other copy of the record may stand before the one that it is about. Invariant:
who waits for a decision asks for it, or has its record under way.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from logdb.tasks import OpenCalls
from logdb.wire import Ask, Decided
from ziplog.client.common.requests import NEVER, InsertRequest
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.errors import (
    DeadlineError,
    OutcomeUnknownError,
    ProtocolError,
    UnavailableError,
    ZiplogError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from logdb.client.coordinators import Coordinators
    from logdb.tasks import LogCalls
    from ziplog.client.common.step_context import StepContext
    from ziplog.types import RecordId

_MS: Final = 1_000_000
#: A decision that does not come by itself so long after the acks is asked for.
_ASK_AFTER_NS: Final = 50 * _MS
#: The log has so long for the first copy of a record, and twice as long for each next one.
_FIRST_TRY_NS: Final = 1_000 * _MS
#: A record that the log did not take is inserted again after so long, doubling up to the last.
_FIRST_PAUSE_NS: Final = 10 * _MS
_LAST_PAUSE_NS: Final = 500 * _MS


class Attempt:
    """One copy of a commit record that may be, or come, into the log."""

    __slots__ = ("doubt", "rid")

    def __init__(self) -> None:
        #: Where it is, once that is known.
        self.rid: RecordId | None = None
        #: What the log calls its fate while that is not known.
        self.doubt: Any = None


class CommitDoubt:
    """A commit that nobody knew the fate of at its deadline. Written by the core only."""

    __slots__ = ("attempts", "number")

    def __init__(self, number: int, attempts: list[Attempt]) -> None:
        self.number: Final = number
        self.attempts: Final = attempts


class PendingCommit:
    """One commit under way, or one in doubt that somebody asks for."""

    __slots__ = (
        "after", "attempts", "deadline", "done", "is_over", "log_calls", "number", "pause",
        "payload", "question", "retry_at", "tries", "why",
    )  # fmt: skip

    def __init__(
        self, number: int, deadline: int, attempts: list[Attempt], done: Callable[[Any], None]
    ) -> None:
        self.number: Final = number
        self.deadline: Final = deadline
        #: Copies that may be in the log.
        self.attempts: Final = attempts
        #: Gets the `Decided`, an exception, or None: the record never will exist.
        self.done: Final = done
        #: None: it is only asked for.
        self.payload: bytes | None = None
        self.after: RecordId
        #: The number of the open `Ask`; 0: none.
        self.question = 0
        self.log_calls: Final = OpenCalls()
        #: When to ask, or to insert again.
        self.retry_at = NEVER
        self.pause = _FIRST_PAUSE_NS
        self.tries = 0
        #: What the log last said.
        self.why = ""
        self.is_over = False


class Commits:
    """All commits of a client."""

    def __init__(
        self, turn: StepContext, coordinators: Coordinators, session: bytes, wall_offset_us: int
    ) -> None:
        self._turn: Final = turn
        self._coordinators: Final = coordinators
        self._session: Final = session
        self._wall_offset_us: Final = wall_offset_us
        self._open: Final[dict[int, PendingCommit]] = {}
        self._last = 0
        #: The log; it is there when somebody commits.
        self.calls: LogCalls
        coordinators.on_decided = self.on_decided

    def next_number(self) -> int:
        """Return the number of a transaction that never had one."""
        self._last += 1
        return self._last

    def start(
        self,
        number: int,
        payload: bytes,
        after: RecordId,
        deadline: int,
        done: Callable[[Any], None],
    ) -> PendingCommit:
        """Insert a commit record after a position; `done` gets the `Decided` or an exception."""
        commit = PendingCommit(number, deadline, [], done)
        commit.payload, commit.after = payload, after
        self._open[number] = commit
        self._turn.set_timer(deadline)
        self._insert(commit)
        return commit

    def resolve(
        self, doubt: CommitDoubt, deadline: int, done: Callable[[Any], None]
    ) -> PendingCommit:
        """Ask what became of a commit; `done` gets None, too: the record never will exist."""
        commit = PendingCommit(doubt.number, deadline, doubt.attempts, done)
        former = self._open.get(doubt.number)
        if former is not None:
            self._end(former, _unknown(doubt, "somebody else asks for it now"))
        self._open[doubt.number] = commit
        self._turn.set_timer(deadline)
        self._ask(commit)
        for attempt in list(doubt.attempts):
            if attempt.doubt is not None:
                request = ResolveRequest(deadline, attempt.doubt)
                then = partial(self._resolved, commit, attempt)
                commit.log_calls.call(self.calls, request, then)
        return commit

    def cancel(self, commit: PendingCommit) -> None:
        """Nobody waits for a commit any more."""
        if commit.is_over:
            return
        commit.is_over = True
        del self._open[commit.number]
        self._coordinators.forget(commit.question)
        if commit.log_calls:
            commit.log_calls.cancel(self.calls)

    # --- the log ---

    def _insert(self, commit: PendingCommit) -> None:
        assert commit.payload is not None, "a commit in doubt is not inserted again"
        now = self._turn.now
        deadline = min(commit.deadline, now + (_FIRST_TRY_NS << commit.tries))
        commit.tries += 1
        attempt = Attempt()
        commit.attempts.append(attempt)
        stamp = now // 1000 + self._wall_offset_us
        request = InsertRequest(deadline, [commit.payload], commit.after, None, stamp)
        commit.log_calls.call(self.calls, request, partial(self._inserted, commit, attempt))

    def _inserted(self, commit: PendingCommit, attempt: Attempt, result: Any) -> None:
        now = self._turn.now
        if isinstance(result, list):
            attempt.rid = result[0]
            if not commit.question:
                self._look_at(commit, now + _ASK_AFTER_NS)
            return
        commit.why = str(result)
        if isinstance(result, (OutcomeUnknownError, ProtocolError)):
            # What servers contradict each other about may be in the log, too.
            attempt.doubt = getattr(result, "doubt", None)
            if not commit.is_over and now < commit.deadline:
                self._ask(commit)
                self._insert(commit)
            return
        commit.attempts.remove(attempt)
        if commit.is_over:
            return
        if isinstance(result, UnavailableError):
            commit.pause = min(2 * commit.pause, _LAST_PAUSE_NS)
            self._look_at(commit, now + commit.pause)
        elif not commit.attempts:
            self._end(commit, result)

    def _resolved(self, commit: PendingCommit, attempt: Attempt, result: Any) -> None:
        if isinstance(result, ZiplogError):
            return
        attempt.doubt = None
        attempt.rid = result[0]
        if attempt.rid is None:
            commit.attempts.remove(attempt)
            if not commit.attempts and not commit.is_over:
                self._end(commit, None)

    # --- coordinators ---

    def _ask(self, commit: PendingCommit) -> None:
        if commit.question:
            return
        session, number = self._session, commit.number
        commit.question = self._coordinators.ask(
            lambda cluster, request: Ask(cluster, request, session, number),
            lambda _result, _src: None,
            # It ends with the commit.
            NEVER,
        )

    def on_decided(self, decided: Decided) -> None:
        """Take a coordinator's word."""
        commit = self._open.get(decided.number)
        if commit is not None and _is_final(commit.attempts, decided):
            self._end(commit, decided)

    def _look_at(self, commit: PendingCommit, at: int) -> None:
        commit.retry_at = min(commit.retry_at, at)
        self._turn.set_timer(commit.retry_at)

    def _end(self, commit: PendingCommit, result: Any) -> None:
        commit.is_over = True
        del self._open[commit.number]
        self._coordinators.forget(commit.question)
        commit.done(result)

    # --- time ---

    def tick(self) -> None:
        """Insert and ask again what is due; end what is late. The log's core has ticked before."""
        turn = self._turn
        for commit in list(self._open.values()):
            if commit.is_over:
                continue
            if turn.now >= commit.deadline:
                self._end(commit, self._late(commit))
                continue
            if turn.now >= commit.retry_at:
                commit.retry_at = NEVER
                if any(attempt.rid is not None for attempt in commit.attempts):
                    self._ask(commit)
                elif commit.payload is not None and not commit.log_calls:
                    self._insert(commit)
            turn.set_timer(min(commit.retry_at, commit.deadline))

    def _late(self, commit: PendingCommit) -> ZiplogError:
        if not commit.attempts:
            why = f" ({commit.why})" if commit.why else ""
            return DeadlineError(
                f"the log did not take the commit record before the deadline{why};"
                " nothing was written: try again"
            )
        placed = [str(attempt.rid) for attempt in commit.attempts if attempt.rid is not None]
        if placed:
            why = f"its record is in the log at {placed[0]}, but no coordinator told the decision"
        else:
            why = commit.why or "the log had not confirmed its record"
        return _unknown(CommitDoubt(commit.number, commit.attempts), why)

    def check(self) -> None:
        """Assert the invariants."""
        for number, commit in self._open.items():
            assert number == commit.number
            assert not commit.is_over, "what is over waits"
            due = min(commit.retry_at, commit.deadline)
            assert self._turn.next_timer <= due, "a commit would be forgotten"
            assert commit.question or commit.log_calls or commit.retry_at < NEVER, "nobody asks"


def _is_final(attempts: list[Attempt], decided: Decided) -> bool:
    """Whether this can be no word on a copy of a record whose decision was forgotten.

    Such a copy expires; who is told of that late hears only that it was aborted.
    """
    if decided.outcome in {"committed", "conflict"}:
        return True
    if len(attempts) < 2:
        return True
    return all(a.rid is not None and a.rid >= decided.position for a in attempts)


def _unknown(doubt: CommitDoubt, why: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"the deadline passed while a transaction was committed: it may have taken effect ({why});"
        " resolve() waits until that is known",
        shard=-1,
        seq=doubt.number,
        doubt=doubt,
    )
