"""Commits: from the commit record to a coordinator's decision (docs/logdb.md, section 7).

    inserted --`Decided`, unasked--> done        no decision: `AwaitDecision`, repeated
             --outcome unknown--> the same record is inserted again, and its decision requested
             --deadline--> DeadlineError if no copy can be in the log, else OutcomeUnknownError

All copies of a record have the same id and the same bytes. Every coordinator's decision counts, but
"expired" only if no other copy can precede the expired one. Invariant: an open commit has a request
for the decision, or an insert, or a retry timer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from logdb.wire import AwaitDecision, Decided
from ziplog.client.common.requests import InsertRequest
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.client.log_tasks import OpenCalls
from ziplog.core.units import NEVER, NS_PER_MS, NS_PER_S
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
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.log_tasks import LogTasks
    from ziplog.types import RecordId

#: Delay between the acks and the request for a decision that was not received.
_QUERY_AFTER_NS: Final = 50 * NS_PER_MS
#: Deadline of a record's first insert; it doubles with each further copy.
_FIRST_TRY_NS: Final = NS_PER_S
#: First and maximum delay before a refused record is inserted again; the delay doubles.
_FIRST_BACKOFF_NS: Final = 10 * NS_PER_MS
_LAST_BACKOFF_NS: Final = 500 * NS_PER_MS


class Attempt:
    """One copy of a commit record that may be in the log, or still reach it."""

    __slots__ = ("rid", "unknown")

    def __init__(self) -> None:
        #: Its position, once it is known.
        self.rid: RecordId | None = None
        #: The log's token for its unknown outcome.
        self.unknown: Any = None


class UnknownCommit:
    """A commit with an unknown outcome at its deadline. Written by the core only."""

    __slots__ = ("attempts", "number")

    def __init__(self, number: int, attempts: list[Attempt]) -> None:
        self.number: Final = number
        self.attempts: Final = attempts


class PendingCommit:
    """An open commit, or the resolution of one with an unknown outcome."""

    __slots__ = (
        "after",
        "attempts",
        "backoff",
        "deadline",
        "done",
        "is_over",
        "log_calls",
        "number",
        "payload",
        "query",
        "reason",
        "retry_at",
        "tries",
    )  # fmt: skip

    def __init__(
        self, number: int, deadline: int, attempts: list[Attempt], done: Callable[[Any], None]
    ) -> None:
        self.number: Final = number
        self.deadline: Final = deadline
        #: Copies that may be in the log.
        self.attempts: Final = attempts
        #: Called with the `Decided`, an exception, or None: the record will never exist.
        self.done: Final = done
        #: None: the outcome is only resolved, nothing is inserted.
        self.payload: bytes | None = None
        self.after: RecordId
        #: The number of the open `AwaitDecision`; 0: none.
        self.query = 0
        self.log_calls: Final = OpenCalls()
        #: When to request the decision, or to insert again.
        self.retry_at = NEVER
        self.backoff = _FIRST_BACKOFF_NS
        self.tries = 0
        #: The log's last error.
        self.reason = ""
        self.is_over = False


class Commits:
    """All commits of a client."""

    def __init__(
        self,
        context: StepContext,
        coordinators: Coordinators,
        session: bytes,
        wall_offset_ns: Callable[[], int],
    ) -> None:
        self._context: Final = context
        self._coordinators: Final = coordinators
        self._session: Final = session
        self._wall_offset_ns: Final = wall_offset_ns
        self._open: Final[dict[int, PendingCommit]] = {}
        self._last = 0
        #: The log; set before the first commit.
        self.calls: LogTasks
        coordinators.on_decided = self.on_decided

    def next_number(self) -> int:
        """Return an unused transaction number."""
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
        self._context.set_timer(deadline)
        self._insert(commit)
        return commit

    def resolve(
        self, unknown: UnknownCommit, deadline: int, done: Callable[[Any], None]
    ) -> PendingCommit:
        """Resolve a commit's outcome; `done` may also get None: the record will never exist."""
        commit = PendingCommit(unknown.number, deadline, unknown.attempts, done)
        former = self._open.get(unknown.number)
        if former is not None:
            self._finish(former, _unknown_outcome_error(unknown, "another call resolves it now"))
        self._open[unknown.number] = commit
        if not unknown.attempts:
            # An earlier call has found that no copy will ever exist.
            self._finish(commit, None)
            return commit
        self._context.set_timer(deadline)
        self._query_decision(commit)
        for attempt in list(unknown.attempts):
            if attempt.unknown is not None:
                request = ResolveRequest(deadline, attempt.unknown)
                then = partial(self._on_resolved, commit, attempt)
                commit.log_calls.call(self.calls, request, then)
        return commit

    def cancel(self, commit: PendingCommit) -> None:
        """Cancel a commit's call."""
        if commit.is_over:
            return
        commit.is_over = True
        del self._open[commit.number]
        self._coordinators.forget(commit.query)
        if commit.log_calls:
            commit.log_calls.cancel(self.calls)

    # --- the log ---

    def _insert(self, commit: PendingCommit) -> None:
        assert commit.payload is not None, "a resolution has no record to insert"
        now = self._context.now
        deadline = min(commit.deadline, now + (_FIRST_TRY_NS << commit.tries))
        commit.tries += 1
        attempt = Attempt()
        commit.attempts.append(attempt)
        stamp = (now + self._wall_offset_ns()) // 1000
        request = InsertRequest(deadline, [commit.payload], commit.after, None, stamp)
        commit.log_calls.call(self.calls, request, partial(self._on_inserted, commit, attempt))

    def _on_inserted(self, commit: PendingCommit, attempt: Attempt, result: Any) -> None:
        now = self._context.now
        if isinstance(result, list):
            attempt.rid = result[0]
            if not commit.query:
                self._schedule_retry(commit, now + _QUERY_AFTER_NS)
            return
        commit.reason = str(result)
        if isinstance(result, (OutcomeUnknownError, ProtocolError)):
            # The record may also be in the log if servers contradict each other.
            attempt.unknown = getattr(result, "doubt", None)
            if not commit.is_over and now < commit.deadline:
                self._query_decision(commit)
                self._insert(commit)
            return
        commit.attempts.remove(attempt)
        if commit.is_over:
            return
        if isinstance(result, UnavailableError):
            commit.backoff = min(2 * commit.backoff, _LAST_BACKOFF_NS)
            self._schedule_retry(commit, now + commit.backoff)
        elif not commit.attempts:
            self._finish(commit, result)

    def _on_resolved(self, commit: PendingCommit, attempt: Attempt, result: Any) -> None:
        if isinstance(result, ZiplogError):
            return
        attempt.unknown = None
        attempt.rid = result[0]
        if attempt.rid is None:
            commit.attempts.remove(attempt)
            if not commit.attempts and not commit.is_over:
                self._finish(commit, None)

    # --- coordinators ---

    def _query_decision(self, commit: PendingCommit) -> None:
        if commit.query:
            return
        session, number = self._session, commit.number
        commit.query = self._coordinators.send_query(
            lambda cluster, request: AwaitDecision(cluster, request, session, number),
            lambda _result, _src: None,
            # The query ends with the commit.
            NEVER,
        )

    def on_decided(self, decided: Decided) -> None:
        """Handle a coordinator's decision."""
        commit = self._open.get(decided.number)
        if commit is not None and _is_final(commit.attempts, decided):
            self._finish(commit, decided)

    def _schedule_retry(self, commit: PendingCommit, at: int) -> None:
        commit.retry_at = min(commit.retry_at, at)
        self._context.set_timer(commit.retry_at)

    def _finish(self, commit: PendingCommit, result: Any) -> None:
        commit.is_over = True
        del self._open[commit.number]
        self._coordinators.forget(commit.query)
        if commit.payload is None and commit.log_calls:
            # A late result would change the copies under a later resolution of the same commit.
            commit.log_calls.cancel(self.calls)
        commit.done(result)

    # --- time ---

    def tick(self) -> None:
        """Retry due commits, and end expired ones. The log's core has ticked before."""
        context = self._context
        for commit in list(self._open.values()):
            if commit.is_over:
                continue
            if context.now >= commit.deadline:
                self._finish(commit, self._deadline_error(commit))
                continue
            if context.now >= commit.retry_at:
                commit.retry_at = NEVER
                if any(attempt.rid is not None for attempt in commit.attempts):
                    self._query_decision(commit)
                elif commit.payload is not None and not commit.log_calls:
                    self._insert(commit)
            context.set_timer(min(commit.retry_at, commit.deadline))

    def _deadline_error(self, commit: PendingCommit) -> ZiplogError:
        if not commit.attempts:
            reason = f" ({commit.reason})" if commit.reason else ""
            return DeadlineError(
                f"timed out inserting the commit record{reason}; nothing was written, try again"
            )
        in_log = [str(attempt.rid) for attempt in commit.attempts if attempt.rid is not None]
        if in_log:
            reason = (
                f"its record is in the log at {in_log[0]}, but no coordinator reported the decision"
            )
        else:
            reason = commit.reason or "the log did not confirm its record"
        return _unknown_outcome_error(UnknownCommit(commit.number, commit.attempts), reason)

    def check(self) -> None:
        """Assert the invariants."""
        for number, commit in self._open.items():
            assert number == commit.number
            assert not commit.is_over, "a finished commit is open"
            due = min(commit.retry_at, commit.deadline)
            assert self._context.next_timer <= due, "a commit has no timer"
            assert commit.query or commit.log_calls or commit.retry_at < NEVER, (
                "a commit has no request, no insert and no retry"
            )


def _is_final(attempts: list[Attempt], decided: Decided) -> bool:
    """Whether the decision cannot be about a copy of a record with a forgotten decision.

    Such a copy expires; a late request for it is answered with "aborted" only.
    """
    if decided.outcome in {"committed", "conflict"}:
        return True
    if len(attempts) < 2:
        return True
    return all(a.rid is not None and a.rid >= decided.position for a in attempts)


def _unknown_outcome_error(unknown: UnknownCommit, reason: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"timed out committing a transaction: it may have taken effect ({reason}); call resolve()"
        " to wait for the outcome",
        shard=-1,
        seq=unknown.number,
        doubt=unknown,
    )
