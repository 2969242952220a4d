"""Read barrier: an upper bound of the positions of all readers, from one shard's replicas.

    one shard asked --all its replicas reply in one view--> its next undecided position

A reader passes only decided positions. So no reader has passed the first position of any shard that
its replicas have not decided, and one shard is enough. Rules: the shard must own positions after
the client's, by the known leases. All replicas must reply in one view, as in a tail query (D50), so
that a replaced replica does not count. The client asks the shard that blocks its subscription most,
because that bound is the lowest. See docs/protocol.md, section 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.client.reads.tail import missing_servers
from ziplog.core.units import NS_PER_MS
from ziplog.errors import ClosedError, DeadlineError
from ziplog.wire import Tail, TailReply

if TYPE_CHECKING:
    from ziplog.client.common.requests import BarrierRequest
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.subscribe import Subscriptions
    from ziplog.wire import Refused

#: Interval before a silent replica, or another shard, is asked; it doubles up to the last value.
_MIN_BACKOFF_NS: Final = 10 * NS_PER_MS
_MAX_BACKOFF_NS: Final = 200 * NS_PER_MS


class Barrier(msgspec.Struct):
    """One pending call."""

    call: int
    deadline: int
    subscription: int
    #: The shard that is asked; None: no known shard can give a bound.
    shard: int | None = None
    #: The replies of its replicas, by server.
    replies: dict[int, TailReply] = msgspec.field(default_factory=dict)
    retry_at: int = 0
    backoff: int = _MIN_BACKOFF_NS


class Barriers:
    """The pending barriers of a client."""

    def __init__(
        self, context: StepContext, routing: Routing, subscriptions: Subscriptions
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._subscriptions: Final = subscriptions
        #: By the number of the current round.
        self._barriers: Final[dict[int, Barrier]] = {}

    @property
    def waiting(self) -> bool:
        """Whether a call is pending."""
        return bool(self._barriers)

    def start(self, call: int, request: BarrierRequest) -> None:
        """Start a call."""
        self._context.set_timer(request.deadline)
        self._start_round(Barrier(call, request.deadline, request.subscription))

    def cancel(self, call: int) -> None:
        """Cancel a call."""
        for number in [n for n, barrier in self._barriers.items() if barrier.call == call]:
            del self._barriers[number]

    def _start_round(self, barrier: Barrier) -> None:
        """Start a round of requests; its replies are newer than the call."""
        context, routing = self._context, self._routing
        subscription = self._subscriptions.get(barrier.subscription)
        if subscription is None:
            context.complete(
                barrier.call, ClosedError("this subscription", "subscribe again to continue")
            )
            return
        number = context.request()
        self._barriers[number] = barrier
        barrier.shard, barrier.replies = subscription.slowest(), {}
        route = routing.route(barrier.shard) if barrier.shard is not None else None
        if route is not None:
            message = Tail(routing.cluster, route.shard, route.view, number)
            for name in route.names:
                context.send(name, message)
        barrier.retry_at = context.now + barrier.backoff
        context.set_timer(barrier.retry_at)

    def on_reply(self, reply: TailReply) -> bool:
        """Handle a replica's reply; False if it is not for a barrier."""
        barrier = self._barriers.get(reply.request)
        if barrier is None:
            return False
        route = self._routing.route(reply.shard)
        if route is None or reply.shard != barrier.shard:
            return True
        if reply.view > route.view:
            self._routing.refresh()
        if reply.view >= route.view:
            barrier.replies[reply.server] = reply
            if not missing_servers(barrier.replies, route):
                self._conclude(reply.request, barrier)
        return True

    def _conclude(self, number: int, barrier: Barrier) -> None:
        """Complete the call if the shard's next position is known; otherwise a later round does."""
        subscription = self._subscriptions.get(barrier.subscription)
        end = min(reply.end for reply in barrier.replies.values())
        assert barrier.shard is not None, "a reply without a request"
        bound = subscription.next_owned(barrier.shard, end) if subscription is not None else None
        if bound is not None:
            del self._barriers[number]
            self._context.complete(barrier.call, bound)

    def on_refused(self, refused: Refused) -> bool:
        """Handle a refusal, perhaps of an older view; False if it is not for a barrier."""
        if refused.request not in self._barriers:
            return False
        self._routing.refresh()
        return True

    def tick(self) -> None:
        """Retry the requests that are due; end the calls at their deadlines."""
        context = self._context
        for number, barrier in list(self._barriers.items()):
            if context.now >= barrier.deadline:
                del self._barriers[number]
                where = "a shard" if barrier.shard is None else f"shard {barrier.shard}"
                what = f"timed out waiting for {where} of {self._routing} to report its position"
                context.complete(barrier.call, DeadlineError(what))
            elif context.now >= barrier.retry_at:
                del self._barriers[number]
                context.counters.retries += 1
                barrier.backoff = min(barrier.backoff * 2, _MAX_BACKOFF_NS)
                self._routing.refresh()
                self._start_round(barrier)
            else:
                context.set_timer(min(barrier.retry_at, barrier.deadline))

    def check(self) -> None:
        """Assert the invariant."""
        for barrier in self._barriers.values():
            assert self._context.next_timer <= min(barrier.retry_at, barrier.deadline)
