"""Tail queries: the end of the log, and the last record that readers agree on.

    service asked --> replicas asked --all of one view replied--> (last stable asked) --> completed

Rule: the service's read barrier names the shards that ever had positions. A shard counts when all
its replicas replied in the known view (D50). Every completed insert is on all of them, so the
highest filled position is an upper bound. One reply in a later view suffices, too: that view is
confirmed, the replica joined with all completed inserts, and none is placed in that view before the
service has it. A removed shard is asked like any other, until it is over: its servers may be gone,
and all its records were before the trim point.

See docs/protocol.md, sections 7, 11 and 13.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.errors import DeadlineError
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import LeaseQuery, Tail, TailReply

if TYPE_CHECKING:
    from ziplog.client.common.requests import TailRequest
    from ziplog.client.common.routing import Route
    from ziplog.core.view import Placement
    from ziplog.wire import LeaseHistory

#: Interval before a silent replica is asked again; it doubles up to `MAX_BACKOFF_NS`.
_MIN_BACKOFF_NS: Final = 50 * NS_PER_MS
#: The interval from which on the other replicas are asked again, too.
_ALL_FROM_NS: Final = 200 * NS_PER_MS


class LogTail(msgspec.Struct, frozen=True, gc=False):
    """The end of the log, or of the shards that were asked."""

    #: The last record; RID_GENESIS if there is none.
    last: RecordId
    #: The last stable record below every shard's frontier; None if it was not requested.
    recent: RecordId | None
    #: The first position that a shard may not have settled; the leases at the query had it.
    settled: int


class TailQuery(PendingRequest, kw_only=True):
    """One query to all shards, or to some; each round of requests has its own number."""

    backoff: int = _MIN_BACKOFF_NS
    with_recent: bool
    then: Callable[[LogTail | DeadlineError], None]
    #: It asks all shards.
    is_of_all: bool
    #: The position below which the last stable record is requested; 0 in the first round.
    below: int = 0
    #: The end of the leases that the service reported.
    stop: int = 1
    #: A shard that is not asked may have had records before this position.
    trim: int = 0
    last: RecordId = RID_GENESIS
    #: The ends of finalized shards, whose positions are all settled.
    limits: dict[int, int] = msgspec.field(default_factory=dict)
    #: The replies by server, of each shard that is asked.
    replies: dict[int, dict[int, TailReply]] = msgspec.field(default_factory=dict)
    #: When the requests of this round were sent; 0: some were sent twice.
    sent_at: int = 0


class TailQueries(PendingRequests[TailQuery]):
    """The pending tail queries of a client: tail calls, and those of opening subscriptions."""

    MAX_BACKOFF_NS: ClassVar[int] = 500 * NS_PER_MS

    def waiting_for(self) -> list[str]:
        """Return the shards without a reply for longer than one interval, each with its state."""
        shards: set[int] = set()
        for query in self._pending.values():
            if query.backoff > _MIN_BACKOFF_NS:
                shards.update(self._unanswered(query))
        return self._routing.describe_silent(sorted(shards))

    def unanswered(self, call: int) -> list[int]:
        """Return the shards without a complete reply to a call's query."""
        query = self._pending.get(call)
        return self._unanswered(query) if query is not None else []

    def _unanswered(self, query: TailQuery) -> list[int]:
        """Return the shards without a complete reply, except those that are not needed."""
        silent = [
            shard
            for shard, replies in query.replies.items()
            if (route := self._routing.route(shard)) is not None and _missing(replies, route)
        ]
        rest = query.replies.keys() - set(silent)
        highest = max((_highest(query, shard) for shard in rest), default=0)
        return [s for s in silent if s not in query.limits or query.limits[s] > highest]

    def start(self, call: int, request: TailRequest) -> None:
        """Start a tail call."""

        def complete(tails: LogTail | DeadlineError) -> None:
            result = tails if isinstance(tails, DeadlineError) else tails.last
            self._context.complete(call, result)

        self.query(call, request.deadline, complete, with_recent=False)

    def query(
        self,
        call: int,
        deadline: int,
        then: Callable[[LogTail | DeadlineError], None],
        *,
        with_recent: bool,
        shards: Collection[int] | None = None,
    ) -> None:
        """Start a call's query about these shards (None: all); call `then` with its result."""
        query = TailQuery(
            call, deadline, with_recent=with_recent, then=then, is_of_all=shards is None
        )
        self._add(query)
        self._add_number(query)
        lease = self._routing.lease

        def on_history(history: LeaseHistory) -> None:
            self._routing.update_placements(history.placements)
            if history.runs:
                query.stop = history.runs[-1].last.stop
            elif lease is not None:
                query.stop = lease.stop
            query.replies = {
                p.shard: {}
                for p in history.placements
                if _was_member(p)
                and (shards is None or p.shard in shards)
                and p.shard not in history.over
            }
            query.limits = {one.shard: one.limit for one in history.finalized}
            query.trim = history.trim if history.over and query.is_of_all else 0
            self._send(query)
            self._conclude(query)

        self._request_history(query, on_history)

    def _request_history(
        self, query: TailQuery, on_history: Callable[[LeaseHistory], None]
    ) -> None:
        lease = self._routing.lease
        gsn = lease.base if lease is not None else 1
        query.service_request = self._membership.send_request(
            lambda cluster, request: LeaseQuery(cluster, request, gsn), on_history
        )

    def _send(self, query: TailQuery) -> None:
        """Ask the replicas without a reply, or all of a shard that lacks one."""
        context, routing = self._context, self._routing
        query.sent_at = context.now if query.backoff == _MIN_BACKOFF_NS else 0
        for shard, replies in query.replies.items():
            route = routing.route(shard)
            assert route is not None, "a member without a placement"
            message = Tail(routing.cluster, shard, route.view, query.numbers[-1], query.below)
            for server in to_ask(_missing(replies, route), route, query.backoff):
                context.send(route.names[server], message)
        self._retry_at(query, context.retry_at(query.backoff))

    # --- replies ---

    def on_reply(self, reply: TailReply) -> None:
        """Handle a replica's reply."""
        query = self._by_number.get(reply.request)
        route = self._routing.route(reply.shard)
        if query is None or route is None or reply.shard not in query.replies:
            return
        if reply.server >= len(route.names):
            return
        if query.sent_at and reply.view == route.view:
            self._routing.proximity.observe(route.names[reply.server], query.sent_at)
        if reply.view >= route.view:
            query.replies[reply.shard][reply.server] = reply
            self._conclude(query)
        if reply.view > route.view:
            self._routing.refresh()

    def _retry(self, query: TailQuery) -> None:
        """Ask again; also ask the service whether the silent shards are over by now."""
        super()._retry(query)
        is_open = self._membership.is_open(query.service_request)
        if not is_open and any(map(self._routing.is_removed, self._unanswered(query))):
            self._request_history(query, lambda history: self._leave_out(query, history))

    def _leave_out(self, query: TailQuery, history: LeaseHistory) -> None:
        """Wait no longer for the shards that are over: their servers may be gone."""
        over = query.replies.keys() & history.over
        for shard in over:
            del query.replies[shard]
        if over:
            query.trim = history.trim if query.is_of_all else 0
            self._conclude(query)

    def _on_routes_changed(self, _shards: list[int]) -> None:
        """Ask for the missing replies now, because shards have another view or state."""
        for query in self._pending.values():
            if query.retry_at != NEVER:
                query.backoff = _MIN_BACKOFF_NS
                self._retry_at(query, self._context.now)

    def _silent_replicas(self, query: TailQuery) -> list[str]:
        """Return the replicas whose reply in their shard's newest view is missing and needed."""
        replicas: list[str] = []
        for shard in self._unanswered(query):
            route, replies = self._routing.route(shard), query.replies[shard]
            assert route is not None, "a member without a placement"
            state = "" if route.state == "live" else f", {route.state}"
            replicas += [
                f"{route.names[server].decode()} (shard {shard}{state})"
                for server in _missing(replies, route)
            ]
        return replicas

    def _conclude(self, query: TailQuery) -> None:
        """Complete the query if no reply is missing, or ask for the last stable record."""
        if self._silent_replicas(query):
            return
        if query.below:
            highest, shard = _last(query)
            recent = RecordId(highest, shard) if highest else RID_GENESIS
            self._finish(query, LogTail(query.last, recent, query.below))
            return
        # The highest replica of a shard counts: another one may not be able to read its last
        # record.
        filled, shard = _last(query)
        if filled < query.trim - 1:
            filled, shard = query.trim - 1, 0  # It was trimmed, and its shard is not known.
        query.last = RecordId(filled, shard) if filled else RID_GENESIS
        frontiers = [
            max(reply.frontier for reply in _newest(replies))
            for shard, replies in query.replies.items()
            if shard not in query.limits
        ]
        # A shard that joins now is not in the query, and has positions after these leases.
        settled = min([*frontiers, query.stop])
        if not query.with_recent or not query.replies:
            none = RID_GENESIS if query.with_recent else None
            self._finish(query, LogTail(query.last, none, settled))
            return
        query.below = settled
        query.replies = {shard: {} for shard in query.replies}
        self._forget_numbers(query)
        self._add_number(query)
        self._send(query)

    def _finish(self, query: TailQuery, result: LogTail | DeadlineError) -> None:
        self.cancel(query.call)
        query.then(result)

    def _result_at_deadline(self, query: TailQuery) -> DeadlineError:
        silent = ", ".join(self._silent_replicas(query)) or "the membership service"
        what = f"timed out waiting for {silent} of {self._routing}"
        return DeadlineError(f"{what} to report where the log ends")


def _was_member(placement: Placement) -> bool:
    """Whether a shard ever had positions; otherwise its servers may never have run.

    The data directories of its servers are known from the first lease with the shard as a member.
    """
    if placement.state in {"finalized", "recovering"}:
        return any(replica.fingerprint for replica in placement.replicas)
    return placement.state != "joining"


def _last(query: TailQuery) -> tuple[int, int]:
    """Return the highest position that a reply of this round has, and its shard; zeros: none."""
    return max(((_highest(query, shard), shard) for shard in query.replies), default=(0, 0))


def _highest(query: TailQuery, shard: int) -> int:
    """Return the highest position in the replies of a shard."""
    newest = _newest(query.replies[shard])
    return max((r.last_below if query.below else r.filled for r in newest), default=0)


def _newest(replies: Mapping[int, TailReply]) -> list[TailReply]:
    """Return the replies of the newest view."""
    view = max((reply.view for reply in replies.values()), default=0)
    return [reply for reply in replies.values() if reply.view == view]


def _missing(replies: Mapping[int, TailReply], route: Route) -> list[int]:
    """Return the replicas to wait for: none if one of them replied in a view above the known one.

    The known view is at least the one that the service had after the call.
    """
    if any(reply.view > route.view for reply in replies.values()):
        return []
    return missing_servers(replies, route)


def to_ask(missing: list[int], route: Route, backoff: int) -> Collection[int]:
    """Return the replicas to ask, if some replies are missing: after a while, all.

    A replica that replied forwards the query to its peers, as the client may not reach them. Or it
    has joined a later view meanwhile.
    """
    return range(len(route.names)) if missing and backoff >= _ALL_FROM_NS else missing


def missing_servers(replies: Mapping[int, TailReply], route: Route) -> list[int]:
    """Return the replicas without a reply in the shard's newest known view."""
    view = max((reply.view for reply in replies.values()), default=0)
    view = max(view, route.view)
    return [s for s in range(len(route.names)) if s not in replies or replies[s].view != view]
