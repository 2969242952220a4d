"""The short path of a lone single insert.

Most inserts of a client with one call at a time are alone: no other insert is in flight at the
shard, and all replicas ack the first copy, a backup with a wrong guess twice. Such an insert needs
neither an `InsertCall` nor an `InflightUnit`. Every other event first turns it into both (`take`),
and the state machines handle it as any insert.

Invariant: the same events at the same times have the same effects without this path.
See docs/protocol.md, section 4.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.entries import encode_keyless_body
from ziplog.core.node import Broadcast, Complete
from ziplog.types import RecordId
from ziplog.wire import Insert

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.client.common.requests import InsertRequest
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.copies import Copies
    from ziplog.client.inserts.inflight import ShardWindow
    from ziplog.wire import InsertAck


class PlainInsert:
    """An insert on the short path."""

    __slots__ = ("acks", "message", "number", "replicas", "request", "route", "sent_at", "target",
                 "took_slow_path", "window")  # fmt: skip

    def __init__(
        self,
        number: int,
        request: InsertRequest,
        window: ShardWindow,
        route: Route,
        message: Insert,
        sent_at: int,
    ) -> None:
        self.number: Final = number
        self.request: Final = request
        self.window: Final = window
        self.route: Final = route
        self.message: Final = message
        self.sent_at: Final = sent_at
        #: What its acks must name.
        self.target: Final = (message.cluster, message.shard, message.view, message.seq)
        self.replicas: Final = len(route.names)
        #: By server: its newest ack, of one gsn.
        self.acks: Final[dict[int, InsertAck]] = {}
        #: A backup acked, or corrected its ack, on the primary's decision.
        self.took_slow_path = False


class PlainInserts:
    """The short path of one client: at most one insert at a time."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        windows: Mapping[int, ShardWindow],
        copies: Copies,
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._windows: Final = windows
        self._copies: Final = copies
        #: The insert on this path; None: there is none.
        self.insert: PlainInsert | None = None

    def start(self, number: int, request: InsertRequest, shard: int) -> bool:
        """Send a single insert at an empty window; return False if it is none."""
        context, window = self._context, self._windows.get(shard)
        if window is None or not window.is_empty or not request.is_single or request.sealed:
            return False
        route = self._routing.route(shard)
        if route is None or route.state != "live" or context.expects_more:
            return False
        seq = window.next_seq
        now = context.now
        body = encode_keyless_body(request.timestamp_us, request.key, request.payloads, None)
        message = Insert(
            self._routing.cluster, shard, route.view, context.client, seq, seq, 0,
            request.after.gsn, 1, body, 1, window.since,
        )  # fmt: skip
        self.insert = PlainInsert(number, request, window, route, message, now)
        window.reported = seq
        window.next_seq = seq + 1
        context.set_timer(min(now + window.retransmit_timeout.ns, request.deadline))
        context.effects.append(Broadcast(route.names, message))
        return True

    def on_ack(self, ack: InsertAck) -> bool:
        """Count an ack; return False, with nothing changed, if the insert is no longer plain."""
        insert = self.insert
        if insert is None:
            return False
        gsns, server, acks = ack.gsns, ack.server, insert.acks
        if (
            (ack.cluster, ack.shard, ack.view, ack.seq) != insert.target
            or ack.copy > 1
            or server >= insert.replicas
            or len(gsns) != 1
            or gsns[0] <= insert.message.after
        ):
            return False
        known = acks.get(server)
        if known is not None:
            if known.incarnation == ack.incarnation and known.counter >= ack.counter:
                return True
            if known.gsns != gsns:
                insert.took_slow_path = True
        if ack.waited:
            insert.took_slow_path = True
        acks[server] = ack
        if len(acks) == insert.replicas:
            for other in acks.values():
                if other.gsns != gsns:
                    return True
            self._complete(insert, gsns[0])
        return True

    def _complete(self, insert: PlainInsert, gsn: int) -> None:
        context, window, sent_at = self._context, insert.window, insert.sent_at
        self.insert = None
        for server in insert.acks:
            window.answered_up_to[server] = sent_at
        self._copies.on_acks_agree()
        window.progress_at = now = context.now
        window.retransmit_timeout.observe_latency(now - sent_at)
        window.note_placed(insert.message.view, gsn)
        context.highest_gsn = max(context.highest_gsn, gsn)
        counters = context.counters
        counters.inserts += 1
        if insert.took_slow_path:
            counters.slow_path += 1
        else:
            counters.fast_path += 1
        context.effects.append(Complete(insert.number, [RecordId(gsn, window.shard)]))

    def take(self) -> PlainInsert | None:
        """Remove and return the insert: something happens that this path does not handle."""
        insert, self.insert = self.insert, None
        return insert

    def check(self) -> None:
        """Assert the invariant of the insert on this path."""
        insert = self.insert
        if insert is not None:
            due = insert.sent_at + insert.window.retransmit_timeout.ns
            assert self._context.next_timer <= min(due, insert.request.deadline)
            assert not insert.window.inflight
            gsns = {ack.gsns[0] for ack in insert.acks.values()}
            assert len(insert.acks) < insert.replicas or len(gsns) > 1
