"""Inserts with an outcome that was unknown when their call ended (docs/protocol.md, section 4).

The units of such a call and the error that the caller got share one `UnknownOutcome`. It records
the outcome of each unit once. `resolve()` waits until each unit is known to be placed or absent.

Invariant: a pending `resolve()` waits for an outcome with open units, each of which is in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.client.common.requests import Request
from ziplog.errors import OutcomeUnknownError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext


class UnknownOutcome:
    """The open units of one call, and the rids that are known. Only the client node writes it."""

    __slots__ = (
        "calls", "is_append", "is_lost", "is_session_expired", "many", "open", "results", "shard",
    )  # fmt: skip

    def __init__(
        self,
        shard: int,
        results: list[RecordId | None],
        units: Iterable[tuple[int, tuple[int, int]]],
        *,
        many: bool,
        is_append: bool,
    ) -> None:
        """Create one from the seq of each open unit, and its payloads [start, stop)."""
        self.shard: Final = shard
        #: The rid of each payload; None: not known yet, or the record will never exist.
        self.results: Final = results
        self.open: Final = dict(units)
        #: The call was an `insert_many`.
        self.many: Final = many
        #: The call was an append: it returns once its records are sealed.
        self.is_append: Final = is_append
        #: Number of pending `resolve()` calls.
        self.calls = 0
        #: The outcome stays unknown, and whether it does because servers may have expired the
        #: session of this client.
        self.is_lost = self.is_session_expired = False

    def resolve_unit(self, seq: int, gsns: Sequence[int] | None) -> None:
        """Record the outcome of a unit: its gsns, or None if it will never exist."""
        start, stop = self.open.pop(seq)
        if gsns is not None:
            self.results[start:stop] = [RecordId(gsn, self.shard) for gsn in gsns]

    @property
    def seq(self) -> int:
        """The seq of the first open unit."""
        return next(iter(self.open))

    def error(self, where: str, acks: str) -> OutcomeUnknownError:
        """Return the error for a call with open units; `acks` describes the first unit's acks."""
        if self.is_session_expired:
            text = (
                f"an insert was in flight at {where}, and servers may have expired this client's"
                f" session since then: the insert may have happened (seq {self.seq})"
            )
        else:
            text = (
                f"the deadline passed while an insert was in flight at {where}: it may have"
                f" happened (seq {self.seq}; {acks}); resolve() waits until that is known"
            )
        error = OutcomeUnknownError(text, shard=self.shard, seq=self.seq, doubt=self)
        if self.many:
            error.results = list(self.results)
        return error

    def unsealed_error(self, awaited: str) -> OutcomeUnknownError:
        """Return the error for an append whose records are placed, and wait for `awaited`."""
        last = max(rid for rid in self.results if rid is not None)
        what = f"the last of {len(self.results)} records" if self.many else "the record"
        text = (
            f"the deadline passed: {what} is at {last}, but {awaited} has not passed it, so a"
            " record that is inserted later may still get before it; resolve() waits until that"
            " is over"
        )
        error = OutcomeUnknownError(text, shard=self.shard, seq=0, doubt=self)
        error.results = list(self.results)
        return error


class ResolveRequest(Request, frozen=True, gc=False):
    """Wait for a call's outcome. Result: the rid of each payload; None: it will never exist."""

    outcome: UnknownOutcome


class PendingResolve(PendingRequest, kw_only=True):
    """One pending `resolve()` call."""

    outcome: UnknownOutcome


class UnknownOutcomes(PendingRequests[PendingResolve]):
    """The pending `resolve()` calls of a client."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        unknown_error: Callable[[UnknownOutcome], OutcomeUnknownError],
        complete: Callable[[int, int, UnknownOutcome], None],
    ) -> None:
        """Create it.

        Args:
            context: the client's.
            routing: the client's.
            unknown_error: returns the error of a call that ends without the outcome.
            complete: completes a call, given its number, deadline and outcome.

        """
        super().__init__(context, routing)
        self._unknown_error: Final = unknown_error
        self._complete: Final = complete

    def start(self, call: int, request: ResolveRequest) -> None:
        """Start a call."""
        outcome = request.outcome
        if not outcome.open:
            self._complete(call, request.deadline, outcome)
            return
        self._add(PendingResolve(call, request.deadline, outcome=outcome))
        outcome.calls += 1

    def cancel(self, call: int) -> None:
        """Cancel a call, if it is pending."""
        pending = self._pending.get(call)
        if pending is not None:
            pending.outcome.calls -= 1
        super().cancel(call)

    def on_unit_resolved(
        self,
        outcomes: Iterable[tuple[UnknownOutcome, int | None]],
        seq: int,
        gsns: Sequence[int] | None,
    ) -> None:
        """Record where the records of a unit are; complete the calls whose last open unit it was.

        Args:
            outcomes: those of the unit, each with the position of its record in the unit; None: it
                has all records of the unit.
            seq: the unit's.
            gsns: the positions; None: the unit will never exist.

        """
        for outcome, index in outcomes:
            known = gsns if gsns is None or index is None else gsns[index : index + 1]
            outcome.resolve_unit(seq, known)
            if outcome.open or not outcome.calls:
                continue
            for pending in [p for p in self._pending.values() if p.outcome is outcome]:
                self.cancel(pending.call)
                self._complete(pending.call, pending.deadline, outcome)

    def on_lost(
        self,
        outcomes: Iterable[tuple[UnknownOutcome, object]],
        *,
        is_session_expired: bool = False,
    ) -> None:
        """Note that these outcomes, those of a unit, stay unknown; end their pending calls."""
        for outcome, _ in outcomes:
            outcome.is_lost, outcome.is_session_expired = True, is_session_expired
            for pending in [p for p in self._pending.values() if p.outcome is outcome]:
                self._finish(pending, self._unknown_error(outcome))

    def _result_at_deadline(self, pending: PendingResolve) -> OutcomeUnknownError:
        return self._unknown_error(pending.outcome)

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        assert all(pending.outcome.open for pending in self._pending.values()), "it is known"
        assert not any(pending.outcome.is_lost for pending in self._pending.values()), "no end"
