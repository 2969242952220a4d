"""Tail queries: the end of the log, and the last record that readers agree on.

    service asked --> replicas asked --all of one view replied--> (last stable asked) --> completed

Rule: the service's read barrier names the shards that ever had positions. A shard counts when all
its replicas replied in one view, the known one or a later one (D50). Every completed insert is on
all of them, so the highest filled position is an upper bound. The query waits for a shard that
recovers; it asks a removed shard like any other.

See docs/protocol.md, sections 7, 11 and 13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.client.common.requests import NEVER
from ziplog.core.units import NS_PER_MS
from ziplog.errors import DeadlineError
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import LeaseQuery, Tail, TailReply

if TYPE_CHECKING:
    from ziplog.client.common.membership_client import MembershipClient
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.core.view import Placement
    from ziplog.wire import LeaseHistory, Refused

#: Interval before a silent replica is asked again; it doubles up to the last value.
_MIN_BACKOFF_NS: Final = 50 * NS_PER_MS
_MAX_BACKOFF_NS: Final = 500 * NS_PER_MS


class LogTail(msgspec.Struct, frozen=True, gc=False):
    """The end of the log."""

    #: The last record; RID_GENESIS if there is none.
    last: RecordId
    #: The last stable record below every shard's frontier; None if it was not requested.
    recent: RecordId | None


class TailQuery(msgspec.Struct):
    """One query to all shards."""

    deadline: int
    with_recent: bool
    then: Callable[[LogTail | DeadlineError], None]
    #: Number of the current round; every round has its own.
    number: int = 0
    #: Number of the open request to the service; 0 after its reply.
    open_request: int = 0
    #: The position below which the last stable record is requested; 0 in the first round.
    below: int = 0
    last: RecordId = RID_GENESIS
    #: The replies by server, of each shard that is asked.
    replies: dict[int, dict[int, TailReply]] = msgspec.field(default_factory=dict)
    retry_at: int = NEVER
    backoff: int = _MIN_BACKOFF_NS


class TailQueries:
    """The pending tail queries of a client."""

    def __init__(
        self, context: StepContext, membership: MembershipClient, routing: Routing
    ) -> None:
        self._context: Final = context
        self._membership: Final = membership
        self._routing: Final = routing
        self._queries: dict[int, TailQuery] = {}
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a query is pending."""
        return bool(self._queries)

    def waiting_for(self) -> list[str]:
        """Return the shards without a reply for longer than one interval, each with its state."""
        shards: set[int] = set()
        for query in self._queries.values():
            if query.backoff > _MIN_BACKOFF_NS:
                shards.update(self._unanswered(query))
        states = {shard: self._routing.state(shard) for shard in sorted(shards)}
        return [
            f"shard {shard} ({'silent' if state == 'live' else state})"
            for shard, state in states.items()
        ]

    def _unanswered(self, query: TailQuery) -> list[int]:
        """Return the shards without a complete reply."""
        routes = {shard: self._routing.route(shard) for shard in query.replies}
        return [
            shard
            for shard, replies in query.replies.items()
            if (route := routes[shard]) is not None and missing_servers(replies, route)
        ]

    def start(
        self, deadline: int, then: Callable[[LogTail | DeadlineError], None], *, with_recent: bool
    ) -> TailQuery:
        """Start a query; call `then` with its result."""
        query = TailQuery(deadline, with_recent, then)
        self._context.set_timer(deadline)
        self._query_members(query)
        return query

    def cancel(self, query: TailQuery) -> None:
        """Cancel a query."""
        self._queries.pop(query.number, None)
        self._membership.cancel(query.open_request)

    def _start_round(self, query: TailQuery) -> None:
        self._queries.pop(query.number, None)
        query.number = self._context.request()
        self._queries[query.number] = query
        query.retry_at = NEVER

    def _query_members(self, query: TailQuery) -> None:
        self._start_round(query)
        lease = self._routing.lease
        gsn = lease.base if lease is not None else 1

        def on_history(history: LeaseHistory) -> None:
            query.open_request = 0
            self._routing.update_placements(history.placements)
            query.replies = {p.shard: {} for p in history.placements if _was_member(p)}
            self._query_replicas(query)
            self._conclude(query)

        query.open_request = self._membership.send_request(
            lambda cluster, request: LeaseQuery(cluster, request, gsn), on_history
        )

    def _query_replicas(self, query: TailQuery) -> None:
        """Ask the replicas without a reply."""
        context, routing = self._context, self._routing
        for shard, replies in query.replies.items():
            route = routing.route(shard)
            assert route is not None, "a member without a placement"
            message = Tail(routing.cluster, shard, route.view, query.number, query.below)
            for server in missing_servers(replies, route):
                context.send(route.names[server], message)
        query.retry_at = context.now + query.backoff
        context.set_timer(query.retry_at)

    # --- replies ---

    def on_reply(self, reply: TailReply) -> None:
        """Handle a replica's reply."""
        query = self._queries.get(reply.request)
        route = self._routing.route(reply.shard)
        if query is None or route is None or reply.shard not in query.replies:
            return
        if reply.view >= route.view:
            query.replies[reply.shard][reply.server] = reply
            self._conclude(query)
        if reply.view > route.view:
            self._routing.refresh()

    def on_refused(self, refused: Refused) -> bool:
        """Handle a refusal, perhaps of an older view; False if it is not for a tail query."""
        if refused.request not in self._queries:
            return False
        self._routing.refresh()
        return True

    def _on_routes_changed(self, _shards: list[int]) -> None:
        """Ask for the missing replies now, because shards have another view or state."""
        for query in self._queries.values():
            if query.retry_at != NEVER:
                query.backoff = _MIN_BACKOFF_NS
                query.retry_at = self._context.now
                self._context.set_timer(self._context.now)

    def _silent_replicas(self, query: TailQuery) -> list[str]:
        """Return the replicas without a reply in their shard's newest view."""
        replicas: list[str] = []
        for shard, replies in query.replies.items():
            route = self._routing.route(shard)
            assert route is not None, "a member without a placement"
            state = "" if route.state == "live" else f", {route.state}"
            replicas += [
                f"{route.names[server].decode()} (shard {shard}{state})"
                for server in missing_servers(replies, route)
            ]
        return replicas

    def _conclude(self, query: TailQuery) -> None:
        """Complete the query if no reply is missing, or ask for the last stable record."""
        if self._silent_replicas(query):
            return
        if query.below:
            self._finish(query, LogTail(query.last, self._recent(query)))
            return
        # The highest replica of a shard counts: another one may not be able to read its last
        # record.
        highest = [
            (max(reply.filled for reply in replies.values()), shard)
            for shard, replies in query.replies.items()
        ]
        filled, shard = max(highest, default=(0, 0))
        query.last = RecordId(filled, shard) if filled else RID_GENESIS
        if not query.with_recent or not query.replies:
            self._finish(query, LogTail(query.last, RID_GENESIS if query.with_recent else None))
            return
        query.below = min(
            max(reply.frontier for reply in replies.values()) for replies in query.replies.values()
        )
        query.replies = {shard: {} for shard in query.replies}
        self._start_round(query)
        self._query_replicas(query)

    def _recent(self, query: TailQuery) -> RecordId:
        highest, shard = max(
            (max(reply.last_below for reply in replies.values()), shard)
            for shard, replies in query.replies.items()
        )
        return RecordId(highest, shard) if highest else RID_GENESIS

    def _finish(self, query: TailQuery, result: LogTail | DeadlineError) -> None:
        self.cancel(query)
        query.then(result)

    # --- time ---

    def tick(self) -> None:
        """Retry the requests that are due; end the queries at their deadlines."""
        context = self._context
        for query in list(self._queries.values()):
            if context.now >= query.deadline:
                silent = ", ".join(self._silent_replicas(query)) or "the membership service"
                what = f"timed out waiting for {silent} of {self._routing}"
                self._finish(query, DeadlineError(f"{what} to report where the log ends"))
                continue
            if context.now >= query.retry_at:
                context.counters.retries += 1
                query.backoff = min(query.backoff * 2, _MAX_BACKOFF_NS)
                self._routing.refresh()
                self._query_replicas(query)
            context.set_timer(min(query.retry_at, query.deadline))

    def check(self) -> None:
        """Assert the invariant."""
        for number, query in self._queries.items():
            assert query.number == number
            assert self._context.next_timer <= min(query.retry_at, query.deadline)


def _was_member(placement: Placement) -> bool:
    """Whether a shard ever had positions; otherwise its servers may never have run.

    The data directories of its servers are known from the first lease with the shard as a member.
    """
    if placement.state in {"finalized", "recovering"}:
        return any(replica.fingerprint for replica in placement.replicas)
    return placement.state != "joining"


def missing_servers(replies: Mapping[int, TailReply], route: Route) -> list[int]:
    """Return the replicas without a reply in the shard's newest known view."""
    view = max((reply.view for reply in replies.values()), default=0)
    view = max(view, route.view)
    return [s for s in range(len(route.names)) if s not in replies or replies[s].view != view]
