"""Reads of one position.

    primary asked --silent--> others asked --silent--> all replicas asked, with a growing interval
                  --unstable, damaged, refused--> all replicas asked
    all asked --all of one view agree--> completed;  --they differ--> all asked again

Rules: a stable reply counts from any replica. An unstable reply counts only if all replicas of one
view, including the primary, agree (D42). "Not decided yet" counts only after replies of all
replicas in the primary's view, because a replaced primary may not know its shard's new view. While
the shard recovers, the client retries until the deadline.

Invariant: the replies kept are of one view. See docs/protocol.md, sections 6 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import Broadcast
from ziplog.core.units import NS_PER_MS
from ziplog.errors import DeadlineError, NoSuchRecordError, TrimmedError, UnavailableError
from ziplog.types import Record, RecordId
from ziplog.wire import Read, ReadReply

if TYPE_CHECKING:
    from ziplog.client.common.requests import ReadRequest
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.wire import Refused

#: Retransmission timeout of a read; it doubles up to the last value. A replica with a long queue
#: may need more time, and it answers every copy.
_MIN_RETRANSMIT_NS: Final = 50 * NS_PER_MS
_MAX_RETRANSMIT_NS: Final = 800 * NS_PER_MS
#: Interval before differing replicas are asked again; it doubles up to `_MIN_RETRANSMIT_NS`, or up
#: to the last value while their shard is not available.
_MIN_BACKOFF_NS: Final = 2 * NS_PER_MS
_MAX_BACKOFF_NS: Final = 500 * NS_PER_MS


class PendingRead:
    """One pending read."""

    __slots__ = (
        "asks_all", "backoff", "call", "damaged", "replies", "request", "retransmit_timeout",
        "retry_at", "view",
    )  # fmt: skip

    def __init__(self, call: int, request: ReadRequest) -> None:
        self.call: Final = call
        self.request: Final = request
        self.asks_all = False
        #: The newest reply of each replica, all of `view`.
        self.replies: dict[int, ReadReply] = {}
        self.view = 0
        #: Replicas that cannot read their own copy.
        self.damaged: set[int] = set()
        self.backoff = _MIN_BACKOFF_NS
        self.retransmit_timeout = _MIN_RETRANSMIT_NS
        self.retry_at = 0


class Reads:
    """The pending reads of a client."""

    def __init__(self, context: StepContext, routing: Routing) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._pending: dict[int, PendingRead] = {}
        self._requests: dict[int, int] = {}
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a read is pending."""
        return bool(self._pending)

    def start(self, call: int, request: ReadRequest) -> None:
        """Start a call."""
        context, rid = self._context, request.rid
        if rid.gsn < 1:
            context.complete(call, NoSuchRecordError(rid, "it is before every record"))
            return
        number = context.request()
        pending = self._pending[number] = PendingRead(call, request)
        self._requests[call] = number
        context.set_timer(request.deadline)
        if self._routing.route(rid.shard) is None:
            self._routing.refresh(lambda: self._send_if_known(number))
        else:
            self._send(number, pending)

    def cancel(self, call: int) -> None:
        """Cancel a call."""
        self._pending.pop(self._requests.pop(call, 0), None)

    def _send_if_known(self, number: int) -> None:
        pending = self._pending.get(number)
        if pending is not None and not pending.retry_at:
            if self._routing.route(pending.request.rid.shard) is None:
                shards = self._routing.shards
                self._fail_missing(
                    number, pending, f"there is no such shard; the shards are {shards}"
                )
            else:
                self._send(number, pending)

    def _send(self, number: int, pending: PendingRead, *, is_primary_silent: bool = False) -> None:
        """Send the read to the primary first, then to the other replicas, then to all."""
        context, routing, rid = self._context, self._routing, pending.request.rid
        route = routing.route(rid.shard)
        assert route is not None, "a read of an unknown shard"
        message = Read(routing.cluster, rid.shard, route.view, number, rid.gsn)
        if pending.asks_all:
            others = route.names[1:] if is_primary_silent else ()
            context.effects.append(Broadcast(others or route.names, message))
        else:
            context.send(route.names[0], message)
        pending.retry_at = context.now + max(pending.backoff, pending.retransmit_timeout)
        pending.retransmit_timeout = min(pending.retransmit_timeout * 2, _MAX_RETRANSMIT_NS)
        context.set_timer(pending.retry_at)

    def _grow_backoff(self, pending: PendingRead, route: Route) -> None:
        """Double the interval."""
        longest = _MAX_BACKOFF_NS if route.is_unavailable else _MIN_RETRANSMIT_NS
        pending.backoff = min(pending.backoff * 2, longest)

    def _on_routes_changed(self, shards: list[int]) -> None:
        """Retry the reads of shards with another view or state now."""
        for pending in self._pending.values():
            if pending.request.rid.shard in shards and pending.retry_at:
                pending.asks_all = True
                pending.backoff, pending.retransmit_timeout = _MIN_BACKOFF_NS, _MIN_RETRANSMIT_NS
                pending.retry_at = self._context.now
                self._context.set_timer(self._context.now)

    # --- replies ---

    def on_reply(self, reply: ReadReply) -> None:
        """Handle a replica's reply."""
        pending = self._pending.get(reply.request)
        route = self._routing.route(reply.shard)
        if pending is None or route is None or reply.gsn != pending.request.rid.gsn:
            return
        pending.retransmit_timeout = _MIN_RETRANSMIT_NS
        match reply.answer:
            case "record" if reply.stable:
                self._finish(reply.request, pending, _record(pending.request.rid, reply))
            case "no-op":
                self._fail_missing(reply.request, pending, "the position is a no-op")
            case "wrong-shard":
                what = f"shard {reply.shard} does not own the position"
                self._fail_missing(reply.request, pending, what)
            case "trimmed":
                self._find_first(reply.request, reply.first)
            case "unknown" if reply.stable:
                self._on_damaged_copy(reply, pending, route)
            case _:
                self._compare(reply, pending, route)

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
            self._send(reply.request, pending)
            return
        if len(pending.replies) < len(route.names) or reply.view != route.view:
            return
        replies = list(pending.replies.values())
        record = _record(pending.request.rid, reply)
        if all(r.answer == "record" and _record(pending.request.rid, r) == record for r in replies):
            self._finish(reply.request, pending, record)
            return
        is_in_view = all(r.answer in {"record", "not-yet"} for r in replies)
        if is_in_view and pending.replies[0].answer == "not-yet" and not route.is_unavailable:
            self._fail_missing(reply.request, pending, "the position is not decided yet")
            return
        pending.replies.clear()
        pending.retry_at = self._context.now + pending.backoff
        self._grow_backoff(pending, route)
        self._context.set_timer(pending.retry_at)

    def _on_damaged_copy(self, reply: ReadReply, pending: PendingRead, route: Route) -> None:
        """Handle a replica's damaged copy: ask the others, or fail if all copies are damaged."""
        pending.damaged.add(reply.server)
        if len(pending.damaged) >= len(route.names):
            what = f"no replica of shard {reply.shard} of {self._routing} can read"
            self._finish(
                reply.request, pending,
                UnavailableError(f"{what} {pending.request.rid}: lost, or not recovered yet"),
            )  # fmt: skip
        elif not pending.asks_all:
            pending.asks_all = True
            self._send(reply.request, pending)

    def on_refused(self, refused: Refused) -> bool:
        """Handle a refusal: ask all replicas soon; False if it is not for a read."""
        pending = self._pending.get(refused.request)
        if pending is None:
            return False
        self._context.counters.redirects += refused.code == "redirect"
        self._routing.refresh()
        pending.asks_all = True
        pending.retransmit_timeout = _MIN_RETRANSMIT_NS
        pending.retry_at = min(pending.retry_at, self._context.now + pending.backoff)
        pending.backoff = min(pending.backoff * 2, _MIN_RETRANSMIT_NS)
        self._context.set_timer(pending.retry_at)
        return True

    def _find_first(self, number: int, first: int) -> None:
        def found(shard: int) -> None:
            pending = self._pending.get(number)
            if pending is not None:
                self._finish(number, pending, TrimmedError(RecordId(first, shard)))

        self._routing.find_owner(first, found)

    def _fail_missing(self, number: int, pending: PendingRead, reason: str) -> None:
        self._finish(number, pending, NoSuchRecordError(pending.request.rid, reason))

    def _finish(self, number: int, pending: PendingRead, result: Record | Exception) -> None:
        del self._pending[number], self._requests[pending.call]
        self._context.counters.reads += not isinstance(result, Exception)
        self._context.complete(pending.call, result)

    # --- time ---

    def tick(self) -> None:
        """Retry the reads that are due; end the calls at their deadlines."""
        context = self._context
        for number, pending in list(self._pending.items()):
            rid, deadline = pending.request.rid, pending.request.deadline
            if context.now >= deadline:
                answers = dict.fromkeys(pending.damaged, "unknown")
                answers |= {reply.server: reply.answer for reply in pending.replies.values()}
                replies_text = ", ".join(
                    f"{server}: {answer}" for server, answer in answers.items()
                )
                what = f"timed out waiting for {self._routing.describe(rid.shard)} to read {rid}"
                error = DeadlineError(f"{what} (replies: {replies_text or 'none'})")
                self._finish(number, pending, error)
                continue
            context.set_timer(deadline)
            if pending.retry_at:
                if context.now >= pending.retry_at:
                    was_primary_only, pending.asks_all = not pending.asks_all, True
                    context.counters.retries += 1
                    route = self._routing.route(rid.shard)
                    assert route is not None, "a read of an unknown shard"
                    self._grow_backoff(pending, route)
                    self._send(number, pending, is_primary_silent=was_primary_only)
                context.set_timer(pending.retry_at)

    def check(self) -> None:
        """Assert the invariant."""
        for number, pending in self._pending.items():
            assert self._requests[pending.call] == number
            assert all(reply.view == pending.view for reply in pending.replies.values())
            assert self._context.next_timer <= pending.request.deadline, (
                "a deadline would be missed"
            )


def _record(rid: RecordId, reply: ReadReply) -> Record:
    return Record(rid, reply.payload, reply.key, reply.timestamp_us, reply.epoch)
