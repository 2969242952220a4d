"""Sending: the units of queued calls, as far as the in-flight window has room.

Calls with many records take turns, a unit each. Single inserts share units: the first is sent at
once. Those that come while it is in flight, appends, and those that come in the same batch as the
acks of such a unit wait for the end of the batch. They wait longer while two such units are in
flight.

See docs/protocol.md, section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.inserts.inflight import MAX_INFLIGHT_BYTES, InflightUnit
from ziplog.client.inserts.insert_calls import pop_unit
from ziplog.core.node import Broadcast
from ziplog.wire import Insert

if TYPE_CHECKING:
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import ShardWindow
    from ziplog.client.inserts.insert_calls import InsertCall
    from ziplog.client.inserts.plain_inserts import PlainInsert

#: With fewer units of single inserts in flight at a shard, a single insert is sent at once; with
#: fewer than the maximum, at the end of the batch.
IMMEDIATE_SINGLE_UNITS: Final = 1
MAX_SINGLE_UNITS: Final = 2


class Sender:
    """Sends the units of a client."""

    def __init__(self, context: StepContext, routing: Routing) -> None:
        self._context: Final = context
        self._routing: Final = routing
        #: Windows with single inserts that wait, by shard.
        self._grouping: Final[dict[int, ShardWindow]] = {}

    def queue(self, window: ShardWindow, call: InsertCall) -> None:
        """Send a call, or let it wait for room or for other single inserts."""
        if self._may_group(call):
            window.singles.append(call)
            self._grouping[window.shard] = window
            # Appends end together, when a frontier passes them, so their callers' next ones come
            # together.
            waits = self._context.expects_more or call.request.sealed
            if window.single_units < IMMEDIATE_SINGLE_UNITS and not waits:
                self._send_singles(window)
            return
        window.queue.append(call)
        if len(window.queue) == 1:
            self.fill(window)

    def _may_group(self, call: InsertCall) -> bool:
        """Whether a call may share a unit with others.

        A group waits for the latest `after` of its records, which must be known to exist.
        """
        return call.is_single and call.request.after.gsn <= self._context.highest_gsn

    def add_sent(self, call: InsertCall, plain: PlainInsert) -> None:
        """Add the only unit of a call, which was sent on the short path, to those in flight."""
        window = plain.window
        unit = _track(window, call, plain.message, plain.route, plain.sent_at)
        unit.took_slow_path = plain.took_slow_path
        if self._may_group(call):
            window.count_as_single(unit)

    def fill(self, window: ShardWindow) -> None:
        """Send queued units until the window is full, one unit of each call in turn."""
        route = self._routing.route(window.shard)
        if route is None or route.is_unavailable:
            return
        if window.singles:  # before further units of large calls, which may fill the window
            self._send_singles(window)
        queue = window.queue
        while queue and self._has_room(window):
            call = queue[0]
            self._launch(window, call, route)
            if call.sent == len(call.unit_ranges) or call.is_sequential:
                queue.popleft()  # It is queued again when its unit is placed.
            elif len(queue) > 1:
                queue.rotate(-1)

    def _has_room(self, window: ShardWindow) -> bool:
        """Whether another unit may be sent."""
        return window.bytes < MAX_INFLIGHT_BYTES and (
            not window.inflight
            or window.next_seq - next(iter(window.inflight))
            < self._routing.limits.max_unsettled_units
        )

    def on_batch_end(self) -> None:
        """Send the single inserts that arrived or waited since the last batch."""
        self._context.expects_more = False
        for window in list(self._grouping.values()):
            self._send_singles(window)

    def _send_singles(self, window: ShardWindow) -> None:
        """Send waiting single inserts, as many in a unit as fit, while few such units are sent."""
        route = self._routing.route(window.shard)
        if route is None or route.is_unavailable:
            return
        while window.singles and window.single_units < MAX_SINGLE_UNITS and self._has_room(window):
            unit = self._launch(window, pop_unit(window.singles), route)
            window.count_as_single(unit)
        if not window.singles:
            del self._grouping[window.shard]

    def _launch(self, window: ShardWindow, call: InsertCall, route: Route) -> InflightUnit:
        """Send the next unit of a call."""
        context = self._context
        start, stop = call.unit_ranges[call.sent]
        body = call.body(start, stop)
        if not call.sent:
            call.since = window.since
        seq = window.next_seq
        message = Insert(
            self._routing.cluster, window.shard, route.view, context.client, seq,
            window.first_incomplete, call.previous, call.floor, stop - start, body, 1, call.since,
            call.request.sealed and stop == len(call.request.payloads),
        )  # fmt: skip
        unit = _track(window, call, message, route, context.now)
        context.set_timer(unit.retransmit_at)
        window.route = route
        window.next_seq = seq + 1
        window.reported = message.first_incomplete
        # The primary first: each copy wakes a server, and a backup on this core may run at once,
        # before the next copy is sent. A batched forward does not overtake the copies.
        context.effects.append(Broadcast(route.names, message))
        return unit

    def check(self, window: ShardWindow) -> None:
        """Assert that waiting single inserts are sent at the end of a batch."""
        assert not window.singles or self._grouping[window.shard] is window


def _track(
    window: ShardWindow, call: InsertCall, message: Insert, route: Route, sent_at: int
) -> InflightUnit:
    """Add the next unit of a call, which is sent, to the units in flight."""
    unit = InflightUnit(call, call.sent, message, route, sent_at)
    unit.backoff = window.retransmit_timeout.ns
    unit.retransmit_at = sent_at + unit.backoff
    window.inflight[message.seq] = unit
    window.bytes += len(message.body)
    call.sent += 1
    call.previous = message.seq
    return unit
