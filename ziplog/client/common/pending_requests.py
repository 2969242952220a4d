"""Pending requests of one kind: what most of the client's state machines have in common.

    sent --no reply before `retry_at`--> sent again, and the interval doubles
         --replies--> completed;  --deadline--> ended

A subclass sends requests to servers under numbers, and finds the pending request of a reply by its
number. A number that is forgotten matches no reply. Requests to the membership service are retried
by the `MembershipClient`.

Invariant: each pending request is sent again, or ends, in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import msgspec

from ziplog.core.units import NEVER

if TYPE_CHECKING:
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.wire import Refused


class PendingRequest(msgspec.Struct):
    """One pending request of a caller."""

    call: int
    #: When it ends.
    deadline: int
    #: When to send it again; `NEVER` while no server is asked.
    retry_at: int = NEVER
    #: The interval before that.
    backoff: int = 0
    #: Its numbers at the servers.
    numbers: list[int] = msgspec.field(default_factory=list)
    #: The number of its last request to the membership service; 0: none.
    service_request: int = 0


PendingT = TypeVar("PendingT", bound=PendingRequest)


class PendingRequests(ABC, Generic[PendingT]):
    """The pending requests of one kind."""

    #: The interval between copies doubles up to this one.
    MAX_BACKOFF_NS: ClassVar[int] = NEVER

    def __init__(self, context: StepContext, routing: Routing) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._membership: Final = routing.membership
        #: By call.
        self._pending: Final[dict[int, PendingT]] = {}
        self._by_number: Final[dict[int, PendingT]] = {}
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a request is pending."""
        return bool(self._pending)

    def _add(self, pending: PendingT) -> None:
        self._pending[pending.call] = pending
        self._context.set_timer(pending.deadline)

    def _add_number(self, pending: PendingT) -> int:
        """Return a new number for a pending request."""
        number = self._context.request()
        self._by_number[number] = pending
        pending.numbers.append(number)
        return number

    def _forget_numbers(self, pending: PendingT) -> None:
        for number in pending.numbers:
            del self._by_number[number]
        pending.numbers.clear()

    def _retry_at(self, pending: PendingT, at: int) -> None:
        """Send a request again at `at`."""
        pending.retry_at = at
        self._context.set_timer(at)

    def cancel(self, call: int) -> None:
        """Cancel a call's request, if it has one here."""
        pending = self._pending.pop(call, None)
        if pending is not None:
            self._forget_numbers(pending)
            self._membership.cancel(pending.service_request)

    def _finish(self, pending: PendingT, result: Any) -> None:
        self.cancel(pending.call)
        self._context.complete(pending.call, result)

    def on_refused(self, refused: Refused) -> None:
        """Handle a refusal, if it is for a request of this kind."""
        pending = self._by_number.get(refused.request)
        if pending is not None:
            self._on_refusal(pending, refused)

    def _on_refusal(self, _pending: PendingT, _refused: Refused) -> None:
        """Handle a refusal of a request, perhaps of one in an older view."""
        self._routing.refresh()

    def _on_routes_changed(self, _shards: list[int]) -> None:
        """Handle other views or states of shards."""

    def tick(self) -> None:
        """Retry the requests that are due; end the calls at their deadlines."""
        context = self._context
        for pending in list(self._pending.values()):
            if context.now >= pending.deadline:
                self._finish(pending, self._result_at_deadline(pending))
                continue
            if context.now >= pending.retry_at:
                self._retry(pending)
            context.set_timer(min(pending.retry_at, pending.deadline))

    def _retry(self, pending: PendingT) -> None:
        """Send a request again, because replies are missing."""
        self._context.counters.retries += 1
        pending.backoff = min(pending.backoff * 2, self.MAX_BACKOFF_NS)
        self._routing.refresh()
        self._send(pending)

    def _send(self, pending: PendingT) -> None:
        """Send a request to the servers without a reply, and schedule the next time."""
        raise NotImplementedError

    @abstractmethod
    def _result_at_deadline(self, pending: PendingT) -> Any:
        """Return the result of a request that ends at its deadline: most often an error."""

    def check(self) -> None:
        """Assert the invariants."""
        for number, pending in self._by_number.items():
            assert number in pending.numbers
        for call, pending in self._pending.items():
            assert pending.call == call
            assert all(self._by_number[number] is pending for number in pending.numbers)
            assert self._context.next_timer <= min(pending.retry_at, pending.deadline), (
                "a retry or a deadline would be missed"
            )
