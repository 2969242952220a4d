"""Outlines: how much of a range a shard stores, and the archives that serve it.

    all replicas asked --first reply, then all others or a grace period--> completed

Rules: only replies of the shard's known view, or of a later one, count. The service reports a
later view once all servers are back, which may be never. A replica that refuses is left out once
another one replied; until then the client asks it again. The reply that reaches farthest gives the
steps. If the servers of a removed shard do not reply, the client also asks the service for the trim
point: they may be gone (section 13.9).

Invariant: every pending call is retried, or ends, in time. See docs/protocol.md, section 14.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.client.common.requests import OutlineRequest
from ziplog.core.distance import outline_grace_ns
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.errors import ConfigError, DeadlineError
from ziplog.wire import LeaseQuery, Outline, Outlined

if TYPE_CHECKING:
    from ziplog.client.common.routing import Route
    from ziplog.wire import LeaseHistory, Refused

#: Interval before all replicas are asked again; it doubles up to `MAX_BACKOFF_NS`.
_MIN_BACKOFF_NS: Final = 50 * NS_PER_MS


class ShardOutline(msgspec.Struct, frozen=True):
    """A shard's part of a range, in steps of about equal size."""

    shard: int
    #: Every record before it was trimmed.
    trim: int
    #: (stop, bytes) of each step; it starts at the previous step's `stop`.
    steps: list[tuple[int, int]]
    #: The (host, port) of each replica's archive, if it has one; the nearest one's first.
    archives: list[tuple[str, int]]
    #: The number of segment files, of all its servers, that a trim to the range's end deletes.
    segments: int = 0


class OutlineQuery(PendingRequest, kw_only=True):
    """One pending call; after the first reply, it ends a grace period later at the latest."""

    backoff: int = _MIN_BACKOFF_NS
    request: OutlineRequest
    #: Gets the result of a query without a caller.
    on_result: Callable[[ShardOutline | Exception], None] | None = None
    #: By server.
    replies: dict[int, Outlined] = msgspec.field(default_factory=dict)
    refused: set[int] = msgspec.field(default_factory=set)


class OutlineQueries(PendingRequests[OutlineQuery]):
    """The pending outline queries of a client."""

    MAX_BACKOFF_NS: ClassVar[int] = 500 * NS_PER_MS

    def start(self, call: int, request: OutlineRequest) -> None:
        """Start a call."""
        self._start(OutlineQuery(call, request.deadline, request=request))

    def query_archives(
        self, shard: int, gsn: int, on_found: Callable[[int, list[tuple[str, int]]], None]
    ) -> int:
        """Query a shard's trim point and archives; see `ziplog.client.reads.known_rows`."""

        def on_result(result: ShardOutline | Exception) -> None:
            if isinstance(result, ShardOutline):
                on_found(result.trim, result.archives)
            else:  # The shard has no placement any more.
                on_found(0, [])

        call = -self._context.request()
        request = OutlineRequest(NEVER, shard, gsn, gsn + 1)
        self._start(OutlineQuery(call, NEVER, request=request, on_result=on_result))
        return call

    def _start(self, query: OutlineQuery) -> None:
        request = query.request
        self._add(query)
        self._add_number(query)
        if self._routing.route(request.shard) is not None:
            self._send(query)
        else:
            query.service_request = self._routing.look_up(lambda: self._on_looked_up(query))

    def _on_looked_up(self, query: OutlineQuery) -> None:
        """Ask the shard, or fail if it does not exist."""
        if query.call not in self._pending:
            return
        shard, known = query.request.shard, self._routing.shards
        if self._routing.route(shard) is None:
            self._finish(query, ConfigError("shard", shard, f"one of {known}"))
        elif query.retry_at == NEVER:
            self._send(query)

    def _send(self, query: OutlineQuery) -> None:
        """Ask the replicas without a reply."""
        context, routing, request = self._context, self._routing, query.request
        route = routing.route(request.shard)
        assert route is not None, "a query of a shard without a placement"
        message = Outline(
            routing.cluster, route.shard, route.view, query.numbers[-1], request.start,
            request.stop,
        )  # fmt: skip
        query.refused.clear()
        for server, name in enumerate(route.names):
            if server not in query.replies:
                context.send(name, message)
        self._retry_at(query, context.retry_at(query.backoff))

    def _retry(self, query: OutlineQuery) -> None:
        """Ask again; also find out whether the range was trimmed, so that no server is needed."""
        super()._retry(query)
        shard, gsn = query.request.shard, query.request.start

        def on_history(history: LeaseHistory) -> None:
            if history.trim >= query.request.stop:
                self._finish(query, ShardOutline(shard, history.trim, [], []))

        is_asked = self._membership.is_open(query.service_request)
        if self._routing.is_removed(shard) and not query.replies and not is_asked:
            query.service_request = self._membership.send_request(
                lambda cluster, request: LeaseQuery(cluster, request, gsn), on_history
            )

    # --- replies ---

    def on_reply(self, reply: Outlined) -> None:
        """Handle a replica's reply."""
        query = self._by_number.get(reply.request)
        route = self._routing.route(reply.shard)
        if query is None or route is None or reply.shard != query.request.shard:
            return
        if reply.view != route.view or reply.server >= len(route.names):
            self._routing.refresh()
        if reply.view < route.view or reply.server >= len(route.names):
            return
        if _is_sound(reply):
            query.replies[reply.server] = reply
            context = self._context
            grace_until = context.now + outline_grace_ns(context.rtt_ms)
            query.deadline = min(query.deadline, grace_until)
            self._context.set_timer(query.deadline)
            self._conclude(query, route)
        else:
            self._context.counters.protocol_errors += 1

    def _on_refusal(self, query: OutlineQuery, refused: Refused) -> None:
        """Handle a refusal, perhaps of an older view."""
        self._routing.refresh()
        route = self._routing.route(refused.shard)
        if route is not None and refused.shard == query.request.shard:
            query.refused.add(refused.server)
            self._conclude(query, route)

    def _conclude(self, query: OutlineQuery, route: Route) -> None:
        """Complete the call if it has a reply and no other is expected."""
        replied = query.replies.keys() | query.refused
        is_due = len(replied) >= len(route.names) or self._context.now >= query.deadline
        if query.replies and is_due:
            self._finish(query, self._outline(query, route))

    def _on_routes_changed(self, shards: list[int]) -> None:
        """Ask all replicas again, because their shard has another view or other endpoints."""
        for query in [o for o in self._pending.values() if o.request.shard in shards]:
            query.replies.clear()
            query.deadline = query.request.deadline
            self._retry_at(query, self._context.now)

    def _finish(self, query: OutlineQuery, result: ShardOutline | Exception) -> None:
        if query.on_result is None:
            super()._finish(query, result)
        else:
            self.cancel(query.call)
            query.on_result(result)

    def _result_at_deadline(self, query: OutlineQuery) -> ShardOutline | DeadlineError:
        request, routing = query.request, self._routing
        if query.replies:
            route = routing.route(request.shard)
            assert route is not None, "a shard with replies without a placement"
            return self._outline(query, route)
        where = routing.describe(request.shard)
        what = f"timed out waiting for a server of {where} to report what it stores of"
        return DeadlineError(f"{what} [{request.start}, {request.stop})")

    def _outline(self, query: OutlineQuery, route: Route) -> ShardOutline:
        replies = query.replies
        best = max(replies.values(), key=_reach)
        archives = [
            (_host(route.names[server].decode()), replies[server].archive_port)
            for server in self._routing.read_order(route) or range(len(route.names))
            if server in replies and replies[server].archive_port
        ]
        trim = max(reply.trim for reply in replies.values())
        segments = sum(reply.segments for reply in replies.values())
        return ShardOutline(
            query.request.shard, trim, [(step.stop, step.size) for step in best.steps], archives,
            segments,
        )  # fmt: skip


def _reach(reply: Outlined) -> tuple[int, int]:
    return reply.steps[-1].stop if reply.steps else 0, len(reply.steps)


def _is_sound(reply: Outlined) -> bool:
    return all(before.stop < step.stop for before, step in pairwise(reply.steps))


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")
