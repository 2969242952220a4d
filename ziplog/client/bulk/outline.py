"""Outlines: how much of a range a shard stores, and the archives that serve it.

    all replicas asked --first reply, then all others or a grace period--> completed

Rules: only replies of the shard's current view count. A replica that refuses is left out once
another one replied; until then the client asks it again. The reply that reaches farthest gives the
steps.

Invariant: every pending call is retried, or ends, in time. See docs/protocol.md, section 14.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.client.common.requests import NEVER, OutlineRequest
from ziplog.core.units import NS_PER_MS
from ziplog.errors import ConfigError, DeadlineError
from ziplog.wire import Outline, Outlined

if TYPE_CHECKING:
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.wire import Refused

#: Time after the first reply after which missing replies are left out.
GRACE_NS: Final = 200 * NS_PER_MS
#: Interval before all replicas are asked again; it doubles up to the last value.
_MIN_BACKOFF_NS: Final = 50 * NS_PER_MS
_MAX_BACKOFF_NS: Final = 500 * NS_PER_MS


class ShardOutline(msgspec.Struct, frozen=True):
    """A shard's part of a range, in steps of about equal size."""

    shard: int
    #: Every record before it was trimmed.
    trim: int
    #: (stop, bytes) of each step; it starts at the previous step's `stop`.
    steps: list[tuple[int, int]]
    #: The (host, port) of each replica's archive, if it has one.
    archives: list[tuple[str, int]]


class OutlineQuery(msgspec.Struct):
    """One pending call."""

    call: int
    request: OutlineRequest
    #: Its request number at the servers.
    number: int
    #: By server.
    replies: dict[int, Outlined] = msgspec.field(default_factory=dict)
    refused: set[int] = msgspec.field(default_factory=set)
    #: When to complete the call with the replies so far; `NEVER` before the first reply.
    answer_at: int = NEVER
    #: When to ask again; `NEVER` while the shard's route is unknown.
    retry_at: int = NEVER
    backoff: int = _MIN_BACKOFF_NS


class OutlineQueries:
    """The pending outline queries of a client."""

    def __init__(self, context: StepContext, routing: Routing) -> None:
        self._context: Final = context
        self._routing: Final = routing
        #: By request number.
        self._open: Final[dict[int, OutlineQuery]] = {}
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a call is pending."""
        return bool(self._open)

    def start(self, call: int, request: OutlineRequest) -> None:
        """Start a call."""
        number = self._context.request()
        query = self._open[number] = OutlineQuery(call, request, number)
        self._context.set_timer(request.deadline)
        if self._routing.route(request.shard) is not None:
            self._query_replicas(query)
        else:
            self._routing.refresh(lambda: self._on_refreshed(query))

    def _on_refreshed(self, query: OutlineQuery) -> None:
        """Ask the shard after the first placements, or fail if it does not exist."""
        if query.number not in self._open:
            return
        shard, known = query.request.shard, self._routing.shards
        if self._routing.route(shard) is None:
            self._finish(query, ConfigError("shard", shard, f"one of {known}"))
        elif query.retry_at == NEVER:
            self._query_replicas(query)

    def cancel(self, call: int) -> None:
        """Cancel a call."""
        for number in [n for n, query in self._open.items() if query.call == call]:
            del self._open[number]

    def _query_replicas(self, query: OutlineQuery) -> None:
        """Ask the replicas without a reply."""
        context, routing, request = self._context, self._routing, query.request
        route = routing.route(request.shard)
        assert route is not None, "a query of a shard without a placement"
        message = Outline(
            routing.cluster, route.shard, route.view, query.number, request.start, request.stop
        )
        query.refused.clear()
        for server, name in enumerate(route.names):
            if server not in query.replies:
                context.send(name, message)
        query.retry_at = context.now + query.backoff
        context.set_timer(query.retry_at)

    # --- replies ---

    def on_reply(self, reply: Outlined) -> None:
        """Handle a replica's reply."""
        query = self._open.get(reply.request)
        route = self._routing.route(reply.shard)
        if query is None or route is None or reply.shard != query.request.shard:
            return
        if reply.view != route.view or reply.server >= len(route.names):
            self._routing.refresh()
        elif _is_sound(reply):
            query.replies[reply.server] = reply
            query.answer_at = min(query.answer_at, self._context.now + GRACE_NS)
            self._context.set_timer(query.answer_at)
            self._conclude(query, route)
        else:
            self._context.counters.protocol_errors += 1

    def on_refused(self, refused: Refused) -> bool:
        """Handle a refusal, perhaps of an older view; False if it is not for an outline."""
        query = self._open.get(refused.request)
        if query is None:
            return False
        self._routing.refresh()
        route = self._routing.route(refused.shard)
        if route is not None and refused.shard == query.request.shard:
            query.refused.add(refused.server)
            self._conclude(query, route)
        return True

    def _conclude(self, query: OutlineQuery, route: Route) -> None:
        """Complete the call if it has a reply and no other is expected."""
        replied = query.replies.keys() | query.refused
        is_due = len(replied) >= len(route.names) or self._context.now >= query.answer_at
        if query.replies and is_due:
            self._finish(query, _outline(query, route))

    def _on_routes_changed(self, shards: list[int]) -> None:
        """Ask all replicas again, because their shard has another view or other endpoints."""
        for query in [o for o in self._open.values() if o.request.shard in shards]:
            query.replies.clear()
            query.answer_at = NEVER
            query.retry_at = self._context.now
            self._context.set_timer(self._context.now)

    def _finish(self, query: OutlineQuery, result: ShardOutline | Exception) -> None:
        del self._open[query.number]
        self._context.complete(query.call, result)

    # --- time ---

    def tick(self) -> None:
        """Retry, complete or end the calls that are due."""
        context, routing = self._context, self._routing
        for query in list(self._open.values()):
            request = query.request
            if query.replies and context.now >= min(query.answer_at, request.deadline):
                route = routing.route(request.shard)
                assert route is not None, "a shard with replies without a placement"
                self._finish(query, _outline(query, route))
                continue
            if context.now >= request.deadline:
                where = routing.describe(request.shard)
                what = f"timed out waiting for a server of {where} to report what it stores of"
                error = DeadlineError(f"{what} [{request.start}, {request.stop})")
                self._finish(query, error)
                continue
            if context.now >= query.retry_at:
                context.counters.retries += 1
                query.backoff = min(query.backoff * 2, _MAX_BACKOFF_NS)
                routing.refresh()
                self._query_replicas(query)
            context.set_timer(min(query.retry_at, query.answer_at, request.deadline))

    def check(self) -> None:
        """Assert the invariant."""
        for number, query in self._open.items():
            assert query.number == number
            assert bool(query.replies) is (query.answer_at != NEVER)
            due = min(query.retry_at, query.answer_at, query.request.deadline)
            assert self._context.next_timer <= due, "a deadline would be missed"


def _outline(query: OutlineQuery, route: Route) -> ShardOutline:
    replies = query.replies
    best = max(replies.values(), key=_reach)
    archives = [
        (_host(route.names[server].decode()), reply.archive_port)
        for server, reply in sorted(replies.items())
        if reply.archive_port
    ]
    trim = max(reply.trim for reply in replies.values())
    return ShardOutline(
        query.request.shard, trim, [(step.stop, step.size) for step in best.steps], archives
    )


def _reach(reply: Outlined) -> tuple[int, int]:
    return reply.steps[-1].stop if reply.steps else 0, len(reply.steps)


def _is_sound(reply: Outlined) -> bool:
    return all(before.stop < step.stop for before, step in pairwise(reply.steps))


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")
