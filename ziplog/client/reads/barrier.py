"""How far any reader of the log is at most: a bound, by one shard's word.

    one shard asked --all its replicas answered, in one view--> its next undecided position

A reader passes only what every owner has decided. So nobody has passed the first position of *any*
shard that its replicas have not decided; and to ask one is enough. Rules: the shard owns positions
ahead of us, as far as we know the leases, else its word bounds nothing; all replicas answer in one
view, as in a survey of the tail (D50): whoever was replaced cannot have them all. We ask the shard
that our subscription waits for most: its bound is the least. See docs/protocol.md, section 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.client.reads.tail import missing_servers
from ziplog.errors import ClosedError, DeadlineError
from ziplog.wire import Tail, TailReply

if TYPE_CHECKING:
    from ziplog.client.common.requests import BarrierRequest
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.subscribe import Subscriptions
    from ziplog.wire import Refused

_MS: Final = 1_000_000
#: A silent replica is asked again after so long, doubling up to the last; so is another shard.
_MIN_BACKOFF_NS: Final = 10 * _MS
_MAX_BACKOFF_NS: Final = 200 * _MS


class Barrier(msgspec.Struct):
    """One question under way."""

    call: int
    deadline: int
    subscription: int
    #: The shard that is asked; None: none is known that could say it.
    shard: int | None = None
    #: What its replicas answered, by server.
    replies: dict[int, TailReply] = msgspec.field(default_factory=dict)
    retry_at: int = 0
    backoff: int = _MIN_BACKOFF_NS


class Barriers:
    """All such questions."""

    def __init__(
        self, context: StepContext, routing: Routing, subscriptions: Subscriptions
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._subscriptions: Final = subscriptions
        #: By the number of the present round.
        self._barriers: Final[dict[int, Barrier]] = {}

    @property
    def waiting(self) -> bool:
        """Whether a question is open."""
        return bool(self._barriers)

    def start(self, call: int, request: BarrierRequest) -> None:
        """Take a call."""
        self._context.set_timer(request.deadline)
        self._start_round(Barrier(call, request.deadline, request.subscription))

    def cancel(self, call: int) -> None:
        """The user waits no longer."""
        for number in [n for n, barrier in self._barriers.items() if barrier.call == call]:
            del self._barriers[number]

    def _start_round(self, barrier: Barrier) -> None:
        """Begin a round: its answers are of a later moment than the call."""
        context, routing = self._context, self._routing
        subscription = self._subscriptions.get(barrier.subscription)
        if subscription is None:
            context.complete(
                barrier.call, ClosedError("this subscription", "subscribe again to go on")
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
        """Take a replica's answer; False if it is of no question here."""
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
        """Answer, if the shard's next position is known; else a later round will."""
        subscription = self._subscriptions.get(barrier.subscription)
        end = min(reply.end for reply in barrier.replies.values())
        assert barrier.shard is not None, "who answers was asked"
        bound = subscription.next_owned(barrier.shard, end) if subscription is not None else None
        if bound is not None:
            del self._barriers[number]
            self._context.complete(barrier.call, bound)

    def on_refused(self, refused: Refused) -> bool:
        """Take a refusal: the shard may have another view; False if it is of no question here."""
        if refused.request not in self._barriers:
            return False
        self._routing.refresh()
        return True

    def tick(self) -> None:
        """Ask again what is due; end what is late."""
        context = self._context
        for number, barrier in list(self._barriers.items()):
            if context.now >= barrier.deadline:
                del self._barriers[number]
                who = f"shard {barrier.shard}" if barrier.shard is not None else "no shard"
                what = f"{who} of {self._routing} told how far it is before the deadline"
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
