"""Reads of one position.

    primary asked --silent--> others asked --silent--> all replicas asked, with a growing interval
                  --unstable, damaged, refused--> all replicas asked
    all asked --all of one view agree--> completed;  --they differ--> all asked again

With a region: nearest replica asked --silent--> next one asked, and so on --silent--> all asked

Rules: a stable reply counts from any replica. An unstable reply counts only if all replicas of one
view, including the primary, agree (D42). "Not decided yet" counts only after replies of all
replicas in the primary's view, because a replaced primary may not know its shard's new view. While
the shard recovers, the client retries until the deadline. While all replicas are silent, it also
asks the service for the trim point: the servers of a shard that is over may be gone.

Invariant: the replies kept are of one view. See docs/protocol.md, sections 6, 11 and 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.client.common.requests import ReadRequest
from ziplog.client.common.routing import owner_in
from ziplog.core.node import Broadcast
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.errors import DeadlineError, NoSuchRecordError, TrimmedError, UnavailableError
from ziplog.types import Record, RecordId
from ziplog.wire import LeaseQuery, Read, ReadReply

if TYPE_CHECKING:
    from ziplog.client.common.routing import Route
    from ziplog.wire import LeaseHistory, Refused

#: Retransmission timeout of a read; it doubles up to the last value. A replica with a long queue
#: may need more time, and it answers every copy.
_MIN_RETRANSMIT_NS: Final = 50 * NS_PER_MS
_MAX_RETRANSMIT_NS: Final = 800 * NS_PER_MS
#: Interval before differing replicas are asked again; it doubles up to `_MIN_RETRANSMIT_NS`, or up
#: to the last value while their shard is not available.
_MIN_BACKOFF_NS: Final = 2 * NS_PER_MS
_MAX_BACKOFF_NS: Final = 500 * NS_PER_MS
#: Minimum interval before the second of several replicas is asked, in order of nearness. It is
#: twice the first one's round trip, and doubles with each replica.
_MIN_NEXT_NS: Final = 10 * NS_PER_MS


class PendingRead(PendingRequest, kw_only=True):
    """One pending read."""

    backoff: int = _MIN_BACKOFF_NS
    request: ReadRequest
    asks_all: bool = False
    #: The newest reply of each replica, all of `view`.
    replies: dict[int, ReadReply] = msgspec.field(default_factory=dict)
    view: int = 0
    #: The first position that was not trimmed, if the position was; 0: it was not.
    first: int = 0
    #: Replicas that cannot read their own copy.
    damaged: set[int] = msgspec.field(default_factory=set)
    retransmit_timeout: int = _MIN_RETRANSMIT_NS
    #: The replicas that are not asked yet, the nearest first; none without regions.
    order: list[int] = msgspec.field(default_factory=list)
    #: When each replica without a reply was asked, in order of nearness; none once all are asked.
    asked: dict[int, int] = msgspec.field(default_factory=dict)
    #: Interval between the last replica and the next one, in ns; 0: none was asked.
    next_interval: int = 0

    @property
    def is_shard_silent(self) -> bool:
        """Whether no replica has replied for a while."""
        return self.retransmit_timeout >= _MAX_RETRANSMIT_NS and not self.first


class Reads(PendingRequests[PendingRead]):
    """The pending reads of a client."""

    #: The last request for the trim point, and when it may be asked for again: once for all reads.
    _trim_query = 0
    _trim_query_due = 0

    def start(self, call: int, request: ReadRequest) -> None:
        """Start a call."""
        context, rid = self._context, request.rid
        if rid.gsn < 1:
            context.complete(call, NoSuchRecordError(rid, "it is before every record"))
            return
        pending = PendingRead(call, request.deadline, request=request)
        self._add(pending)
        self._add_number(pending)
        if self._routing.route(rid.shard) is None:
            pending.service_request = self._routing.look_up(lambda: self._send_if_known(pending))
        else:
            self._send(pending)

    def _send_if_known(self, pending: PendingRead) -> None:
        if pending.call in self._pending and pending.retry_at == NEVER:
            if self._routing.route(pending.request.rid.shard) is None:
                shards = self._routing.shards
                self._fail_missing(pending, f"there is no such shard; the shards are {shards}")
            else:
                self._send(pending)

    def _send(self, pending: PendingRead, *, is_primary_silent: bool = False) -> None:
        """Send the read to the primary first, then to the other replicas, then to all.

        With a region, send it to one replica after the other, the nearest first, then to all.
        """
        context, routing, rid = self._context, self._routing, pending.request.rid
        route = routing.route(rid.shard)
        assert route is not None, "a read of an unknown shard"
        if pending.retry_at == NEVER:
            pending.order = routing.read_order(route)
        message = Read(routing.cluster, rid.shard, route.view, pending.numbers[-1], rid.gsn)
        if pending.asks_all:
            pending.asked.clear()
            others = route.names[1:] if is_primary_silent else ()
            context.effects.append(Broadcast(others or route.names, message))
        elif pending.order:
            server = pending.order.pop(0)
            context.send(route.names[server], message)
            self._wait_for_next(pending, route.names[server])
            pending.asked[server] = context.now
            if pending.order:
                return
        else:
            context.send(route.names[0], message)
        self._retry_at(pending, context.retry_at(max(pending.backoff, pending.retransmit_timeout)))
        pending.retransmit_timeout = min(pending.retransmit_timeout * 2, _MAX_RETRANSMIT_NS)

    def _wait_for_next(self, pending: PendingRead, name: bytes) -> None:
        """Ask the next replica later: each interval is twice the last one."""
        pending.next_interval *= 2
        if not pending.next_interval:
            round_trip = self._routing.proximity.round_trip_ns(name)
            pending.next_interval = max(_MIN_NEXT_NS, 2 * round_trip)
        self._retry_at(pending, self._context.now + pending.next_interval)

    def _grow_backoff(self, pending: PendingRead, route: Route) -> None:
        """Double the interval."""
        longest = _MAX_BACKOFF_NS if route.is_unavailable else _MIN_RETRANSMIT_NS
        pending.backoff = min(pending.backoff * 2, longest)

    def _on_routes_changed(self, shards: list[int]) -> None:
        """Retry the reads of shards with another view or state now."""
        for pending in self._pending.values():
            if pending.request.rid.shard in shards and pending.retry_at != NEVER:
                pending.asks_all = True
                pending.backoff, pending.retransmit_timeout = _MIN_BACKOFF_NS, _MIN_RETRANSMIT_NS
                self._retry_at(pending, self._context.now)

    # --- replies ---

    def on_reply(self, reply: ReadReply) -> None:
        """Handle a replica's reply."""
        pending = self._by_number.get(reply.request)
        route = self._routing.route(reply.shard)
        if route is None or reply.server >= len(route.names):
            return
        if reply.view == route.view:
            self._observe(reply, pending, route)
        if pending is None or reply.gsn != pending.request.rid.gsn:
            return
        pending.retransmit_timeout = _MIN_RETRANSMIT_NS
        match reply.answer:
            case "record" if reply.stable:
                self._finish(pending, _record(pending.request.rid, reply))
            case "no-op":
                self._fail_missing(pending, "the position is a no-op")
            case "wrong-shard":
                what = f"shard {reply.shard} does not own the position"
                self._fail_missing(pending, what)
            case "trimmed":
                self._find_first(pending, reply.first)
            case "unknown" if reply.stable:
                self._on_damaged_copy(reply, pending, route)
            case _:
                self._compare(reply, pending, route)

    def _observe(self, reply: ReadReply, pending: PendingRead | None, route: Route) -> None:
        """Note how near a replica is, and that those asked before it and still silent failed."""
        proximity, names = self._routing.proximity, route.names
        if reply.answer == "unknown":
            proximity.on_failure(names[reply.server])
        else:
            proximity.on_reply(names[reply.server])
        sent_at = pending.asked.pop(reply.server, 0) if pending is not None else 0
        if pending is not None and sent_at:
            proximity.observe(names[reply.server], sent_at)
            for server, before in pending.asked.items():
                if before < sent_at:
                    proximity.on_failure(names[server])

    def _compare(self, reply: ReadReply, pending: PendingRead, route: Route) -> None:
        """Handle a reply that counts only if all replicas agree."""
        if reply.view != pending.view:
            if reply.view < pending.view:
                return
            pending.replies.clear()
            pending.view = reply.view
        if reply.view > route.view:
            self._routing.refresh()
        pending.replies[reply.server] = reply
        if not pending.asks_all:
            pending.asks_all = True
            self._send(pending)
            return
        if len(pending.replies) < len(route.names) or reply.view != route.view:
            return
        replies = list(pending.replies.values())
        record = _record(pending.request.rid, reply)
        if all(r.answer == "record" and _record(pending.request.rid, r) == record for r in replies):
            self._finish(pending, record)
            return
        is_in_view = all(r.answer in {"record", "not-yet"} for r in replies)
        if is_in_view and pending.replies[0].answer == "not-yet" and not route.is_unavailable:
            self._fail_missing(pending, "the position is not decided yet")
            return
        pending.replies.clear()
        self._retry_at(pending, self._context.now + pending.backoff)
        self._grow_backoff(pending, route)

    def _on_damaged_copy(self, reply: ReadReply, pending: PendingRead, route: Route) -> None:
        """Handle a replica's damaged copy: ask the others, or fail if all copies are damaged."""
        pending.damaged.add(reply.server)
        if len(pending.damaged) >= len(route.names):
            what = f"no replica of shard {reply.shard} of {self._routing} can read"
            error = UnavailableError(f"{what} {pending.request.rid}: lost, or not recovered yet")
            self._finish(pending, error)
        elif not pending.asks_all:
            pending.asks_all = True
            self._send(pending)

    def _on_refusal(self, pending: PendingRead, refused: Refused) -> None:
        """Handle a refusal: ask all replicas soon."""
        self._context.counters.redirects += refused.code == "redirect"
        self._routing.refresh()
        route = self._routing.route(refused.shard)
        if route is not None and refused.server < len(route.names):
            self._routing.proximity.on_failure(route.names[refused.server])
        pending.asks_all = True
        pending.retransmit_timeout = _MIN_RETRANSMIT_NS
        self._retry_at(pending, min(pending.retry_at, self._context.now + pending.backoff))
        pending.backoff = min(pending.backoff * 2, _MIN_RETRANSMIT_NS)

    def _find_first(self, pending: PendingRead, first: int) -> None:
        if not pending.first:
            pending.first = first
            pending.service_request = self._routing.find_owner(
                first, lambda owner: self._finish(pending, TrimmedError(RecordId(first, owner)))
            )

    def _fail_missing(self, pending: PendingRead, reason: str) -> None:
        self._finish(pending, NoSuchRecordError(pending.request.rid, reason))

    def _finish(self, pending: PendingRead, result: Record | Exception) -> None:
        self._context.counters.reads += not isinstance(result, Exception)
        super()._finish(pending, result)

    # --- time ---

    def _retry(self, pending: PendingRead) -> None:
        """Ask the next replica, or all; the primary is silent, if only the primary was asked."""
        self._context.counters.retries += 1
        if pending.order and not pending.asks_all:
            self._send(pending)
            return
        was_primary_only = not pending.asks_all and not pending.asked
        pending.asks_all = True
        route = self._routing.route(pending.request.rid.shard)
        assert route is not None, "a read of an unknown shard"
        self._grow_backoff(pending, route)
        self._send(pending, is_primary_silent=was_primary_only)
        if pending.is_shard_silent:
            self._query_trim(pending)

    def _query_trim(self, pending: PendingRead) -> None:
        """Find out whether a position was trimmed, without its shard's servers."""
        now, gsn = self._context.now, pending.request.rid.gsn
        if now < self._trim_query_due or self._membership.is_open(self._trim_query):
            return
        self._trim_query_due = now + _MAX_RETRANSMIT_NS

        def on_history(history: LeaseHistory) -> None:
            first = RecordId(history.trim, owner_in(history, history.trim))
            for each in list(self._pending.values()):
                if each.request.rid.gsn < first.gsn and each.is_shard_silent:
                    self._finish(each, TrimmedError(first))

        pending.service_request = self._trim_query = self._membership.send_request(
            lambda cluster, request: LeaseQuery(cluster, request, gsn), on_history
        )

    def _result_at_deadline(self, pending: PendingRead) -> DeadlineError | TrimmedError:
        if pending.first:
            return TrimmedError(RecordId(pending.first, 0))
        rid, answers = pending.request.rid, dict.fromkeys(pending.damaged, "unknown")
        answers |= {reply.server: reply.answer for reply in pending.replies.values()}
        replies_text = ", ".join(f"{server}: {answer}" for server, answer in answers.items())
        what = f"timed out waiting for {self._routing.describe(rid.shard)} to read {rid}"
        return DeadlineError(f"{what} (replies: {replies_text or 'none'})")

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        for pending in self._pending.values():
            assert all(reply.view == pending.view for reply in pending.replies.values())


def _record(rid: RecordId, reply: ReadReply) -> Record:
    return Record(rid, reply.payload, reply.key, reply.timestamp_us, reply.epoch)
