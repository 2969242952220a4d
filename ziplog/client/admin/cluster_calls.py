"""Calls about the cluster as a whole: connect, the tail, trim, the status document.

Rule: each call is one question, asked again until its deadline (`service`). Invariant: a call that
was answered has no question open. See docs/protocol.md, sections 7 and 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.client.reads.tail import Survey
from ziplog.errors import DeadlineError, NoSuchRecordError, UnavailableError, ZiplogError
from ziplog.wire import StatusQuery, Trim

if TYPE_CHECKING:
    from ziplog.client.common.membership_client import Service
    from ziplog.client.common.requests import (
        ConnectRequest,
        StatusRequest,
        TailRequest,
        TrimRequest,
    )
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import Turn
    from ziplog.client.reads.tail import Surveys, Tails
    from ziplog.wire import StatusReply, TrimReply

_MS: Final = 1_000_000
#: A position that is not stable yet is trimmed again after so long.
_TRIM_AGAIN_NS: Final = 100 * _MS


class Errand(msgspec.Struct):
    """One such call under way."""

    deadline: int
    #: What to raise at the deadline.
    late: Callable[[], ZiplogError]
    #: The open question to the service; 0: none.
    question: int = 0
    survey: Survey | None = None
    #: When to `ask` again; 0: not.
    retry_at: int = 0
    ask: Callable[[], None] | None = None


class Upkeep:
    """All such calls of a client."""

    def __init__(self, turn: Turn, service: Service, routing: Routing, surveys: Surveys) -> None:
        self._turn: Final = turn
        self._service: Final = service
        self._routing: Final = routing
        self._surveys: Final = surveys
        self._errands: dict[int, Errand] = {}

    def _begin(self, call: int, deadline: int, late: Callable[[], ZiplogError]) -> Errand:
        errand = self._errands[call] = Errand(deadline, late)
        self._turn.wake_at(deadline)
        return errand

    def _end(self, call: int, result: Any) -> None:
        self.cancel(call)
        self._turn.complete(call, result)

    def cancel(self, call: int) -> None:
        """The user waits no longer."""
        errand = self._errands.pop(call, None)
        if errand is not None:
            self._service.forget(errand.question)
            if errand.survey is not None:
                self._surveys.cancel(errand.survey)

    def connect(self, call: int, request: ConnectRequest) -> None:
        """Learn the cluster."""

        def late() -> ZiplogError:
            tried = ", ".join(self._service.endpoints)
            return UnavailableError(
                f"no membership service answered at {tried}; check the address, and that the"
                " cluster runs"
            )

        def learned() -> None:
            if call in self._errands:
                self._end(call, self._routing.limits)

        self._begin(call, request.deadline, late)
        self._routing.refresh(learned)

    def status(self, call: int, request: StatusRequest) -> None:
        """Get the status document."""

        def answered(reply: StatusReply) -> None:
            self._end(call, reply.document)

        errand = self._begin(call, request.deadline, lambda: self._late("the status"))
        errand.question = self._service.ask(StatusQuery, answered)

    def tail(self, call: int, request: TailRequest) -> None:
        """Find where the log ends."""

        def answered(tails: Tails | DeadlineError) -> None:
            self._end(call, tails if isinstance(tails, DeadlineError) else tails.last)

        errand = self._begin(call, request.deadline, lambda: self._late("the tail"))
        errand.survey = self._surveys.start(request.deadline, answered, with_recent=False)

    def trim(self, call: int, request: TrimRequest) -> None:
        """Delete everything before a position, once it is stable."""
        rid = request.rid

        def answered(reply: TrimReply) -> None:
            errand = self._errands[call]
            errand.question = 0
            if reply.error == "no-such-position":
                self._end(call, NoSuchRecordError(rid, "no shard was ever given the position"))
            elif reply.error == "not-stable":
                errand.retry_at = self._turn.now + _TRIM_AGAIN_NS
                self._turn.wake_at(errand.retry_at)
            else:
                self._end(call, None)

        def ask() -> None:
            errand.question = self._service.ask(
                lambda cluster, number: Trim(cluster, number, rid.gsn), answered
            )

        errand = self._begin(call, request.deadline, lambda: self._late(f"a trim before {rid}"))
        errand.ask = ask
        ask()

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(
            f"the membership service of {self._routing} did not confirm {what} before the deadline"
        )

    def tick(self) -> None:
        """Ask again what is due; end what is late."""
        turn = self._turn
        for call, errand in list(self._errands.items()):
            if turn.now >= errand.deadline:
                self._end(call, errand.late())
                continue
            turn.wake_at(errand.deadline)
            if errand.retry_at and errand.ask is not None:
                if turn.now >= errand.retry_at:
                    errand.retry_at = 0
                    errand.ask()
                else:
                    turn.wake_at(errand.retry_at)

    def check(self) -> None:
        """Assert the invariant."""
        for errand in self._errands.values():
            assert self._turn.alarm <= errand.deadline, "a deadline would be missed"
