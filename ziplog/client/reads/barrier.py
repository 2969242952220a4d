"""Read barrier: an upper bound of the positions of all readers, from one shard's replicas.

    one shard asked --all its replicas reply in one view--> its next undecided position

A reader passes only decided positions. So no reader has passed the first position of any shard that
its replicas have not decided, and one shard is enough. Rules: the shard must own positions after
the client's, by the known leases. All replicas must reply in one view, as in a tail query (D50), so
that a replaced replica does not count. The client asks the shard that blocks its subscription most,
because that bound is the lowest. The replies to all copies of a request count, from each shard that
was asked: they are newer than the call. See docs/protocol.md, section 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.client.reads.tail import missing_servers, to_ask
from ziplog.core.units import NS_PER_MS
from ziplog.errors import ClosedError, DeadlineError
from ziplog.types import RecordId
from ziplog.wire import Tail, TailReply

if TYPE_CHECKING:
    from ziplog.client.common.requests import BarrierRequest
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.subscribe import Subscriptions

#: Interval before a silent replica, or another shard, is asked; it doubles up to `MAX_BACKOFF_NS`.
_MIN_BACKOFF_NS: Final = 10 * NS_PER_MS


class Barrier(PendingRequest, kw_only=True):
    """One pending call."""

    backoff: int = _MIN_BACKOFF_NS
    subscription: int
    #: The shard that is asked; None: no known shard can give a bound.
    shard: int | None = None
    #: The replies by server, of each shard that was asked.
    replies: dict[int, dict[int, TailReply]] = msgspec.field(default_factory=dict)


class Barriers(PendingRequests[Barrier]):
    """The pending barriers of a client."""

    MAX_BACKOFF_NS: ClassVar[int] = 200 * NS_PER_MS

    def __init__(
        self, context: StepContext, routing: Routing, subscriptions: Subscriptions
    ) -> None:
        super().__init__(context, routing)
        self._subscriptions: Final = subscriptions

    def start(self, call: int, request: BarrierRequest) -> None:
        """Start a call."""
        barrier = Barrier(call, request.deadline, subscription=request.subscription)
        self._add(barrier)
        self._add_number(barrier)
        self._send(barrier)

    def _send(self, barrier: Barrier) -> None:
        """Ask the replicas without a reply, or all, of the shard that is the slowest now."""
        context, routing = self._context, self._routing
        subscription = self._subscriptions.get(barrier.subscription)
        if subscription is None:
            self._finish(barrier, ClosedError(*self._subscriptions.CLOSED))
            return
        shard = barrier.shard = subscription.slowest()
        route = routing.route(shard) if shard is not None else None
        if route is not None:
            replies = barrier.replies.setdefault(route.shard, {})
            message = Tail(routing.cluster, route.shard, route.view, barrier.numbers[-1])
            missing = missing_servers(replies, route)
            for server in to_ask(missing, route, barrier.backoff):
                context.send(route.names[server], message)
            if not missing and self._conclude(barrier, route.shard):
                return
        self._retry_at(barrier, context.retry_at(barrier.backoff))

    def on_reply(self, reply: TailReply) -> None:
        """Handle a replica's reply, if it is for a barrier."""
        barrier = self._by_number.get(reply.request)
        route = self._routing.route(reply.shard)
        if barrier is None or route is None or reply.shard not in barrier.replies:
            return
        if reply.view > route.view:
            self._routing.refresh()
        if reply.view >= route.view:
            replies = barrier.replies[reply.shard]
            replies[reply.server] = reply
            if not missing_servers(replies, route):
                self._conclude(barrier, reply.shard)

    def _conclude(self, barrier: Barrier, shard: int) -> bool:
        """Complete the call if the shard's next position is known; return whether it is."""
        subscription = self._subscriptions.get(barrier.subscription)
        end = min(reply.end for reply in barrier.replies[shard].values())
        bound = subscription.next_owned(shard, end) if subscription is not None else None
        if bound is not None:
            self._finish(barrier, RecordId(bound, shard))
        return bound is not None

    def _result_at_deadline(self, barrier: Barrier) -> DeadlineError:
        where = "a shard" if barrier.shard is None else f"shard {barrier.shard}"
        what = f"timed out waiting for {where} of {self._routing} to report its position"
        return DeadlineError(what)
