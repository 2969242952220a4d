"""Calls about the whole cluster: connect, tail, trim, status document.

Each call is one request that is retried until its deadline (`membership_client`).

Invariant: a completed call has no open request. See docs/protocol.md, sections 7 and 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.client.reads.tail import TailQuery
from ziplog.core.units import NS_PER_MS
from ziplog.errors import DeadlineError, NoSuchRecordError, UnavailableError, ZiplogError
from ziplog.wire import StatusQuery, Trim

if TYPE_CHECKING:
    from ziplog.client.common.membership_client import MembershipClient
    from ziplog.client.common.requests import (
        ConnectRequest,
        StatusRequest,
        TailRequest,
        TrimRequest,
    )
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.tail import LogTail, TailQueries
    from ziplog.wire import StatusReply, TrimReply

#: Interval between trim requests for a position that is not stable yet.
_TRIM_RETRY_NS: Final = 100 * NS_PER_MS


class PendingCall(msgspec.Struct):
    """One pending call."""

    deadline: int
    #: Returns the error at the deadline.
    deadline_error: Callable[[], ZiplogError]
    #: Number of the open request to the service; 0: none.
    open_request: int = 0
    tail_query: TailQuery | None = None
    #: When to call `send` again; 0: never.
    retry_at: int = 0
    send: Callable[[], None] | None = None


class ClusterCalls:
    """The pending cluster calls of a client."""

    def __init__(
        self,
        context: StepContext,
        membership: MembershipClient,
        routing: Routing,
        tail_queries: TailQueries,
    ) -> None:
        self._context: Final = context
        self._membership: Final = membership
        self._routing: Final = routing
        self._tail_queries: Final = tail_queries
        self._pending: dict[int, PendingCall] = {}

    def _start(
        self, call: int, deadline: int, deadline_error: Callable[[], ZiplogError]
    ) -> PendingCall:
        pending = self._pending[call] = PendingCall(deadline, deadline_error)
        self._context.set_timer(deadline)
        return pending

    def _finish(self, call: int, result: Any) -> None:
        self.cancel(call)
        self._context.complete(call, result)

    def cancel(self, call: int) -> None:
        """Cancel a call."""
        pending = self._pending.pop(call, None)
        if pending is not None:
            self._membership.cancel(pending.open_request)
            if pending.tail_query is not None:
                self._tail_queries.cancel(pending.tail_query)

    def connect(self, call: int, request: ConnectRequest) -> None:
        """Get the cluster's description from the membership service."""

        def deadline_error() -> ZiplogError:
            tried = ", ".join(self._membership.endpoints)
            return UnavailableError(
                f"no membership service answered at {tried}; check the address, and that the"
                " cluster runs"
            )

        def on_refreshed() -> None:
            if call in self._pending:
                self._finish(call, self._routing.limits)

        self._start(call, request.deadline, deadline_error)
        self._routing.refresh(on_refreshed)

    def status(self, call: int, request: StatusRequest) -> None:
        """Get the status document."""

        def on_reply(reply: StatusReply) -> None:
            self._finish(call, reply.document)

        pending = self._start(call, request.deadline, lambda: self._deadline_error("the status"))
        pending.open_request = self._membership.send_request(StatusQuery, on_reply)

    def tail(self, call: int, request: TailRequest) -> None:
        """Get the end of the log."""

        def on_reply(tails: LogTail | DeadlineError) -> None:
            self._finish(call, tails if isinstance(tails, DeadlineError) else tails.last)

        pending = self._start(call, request.deadline, lambda: self._deadline_error("the tail"))
        pending.tail_query = self._tail_queries.start(request.deadline, on_reply, with_recent=False)

    def trim(self, call: int, request: TrimRequest) -> None:
        """Delete all records before a position, once it is stable."""
        rid = request.rid

        def on_reply(reply: TrimReply) -> None:
            pending = self._pending[call]
            pending.open_request = 0
            if reply.error == "no-such-position":
                self._finish(call, NoSuchRecordError(rid, "no shard owns the position yet"))
            elif reply.error == "not-stable":
                pending.retry_at = self._context.now + _TRIM_RETRY_NS
                self._context.set_timer(pending.retry_at)
            else:
                self._finish(call, None)

        def send() -> None:
            pending.open_request = self._membership.send_request(
                lambda cluster, number: Trim(cluster, number, rid.gsn), on_reply
            )

        pending = self._start(
            call, request.deadline, lambda: self._deadline_error(f"a trim before {rid}")
        )
        pending.send = send
        send()

    def _deadline_error(self, what: str) -> DeadlineError:
        return DeadlineError(
            f"the membership service of {self._routing} did not confirm {what} before the deadline"
        )

    def tick(self) -> None:
        """Retry the requests that are due; end the calls at their deadlines."""
        context = self._context
        for call, pending in list(self._pending.items()):
            if context.now >= pending.deadline:
                self._finish(call, pending.deadline_error())
                continue
            context.set_timer(pending.deadline)
            if pending.retry_at and pending.send is not None:
                if context.now >= pending.retry_at:
                    pending.retry_at = 0
                    pending.send()
                else:
                    context.set_timer(pending.retry_at)

    def check(self) -> None:
        """Assert the invariant."""
        for pending in self._pending.values():
            assert self._context.next_timer <= pending.deadline, "a deadline would be missed"
