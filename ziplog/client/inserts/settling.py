"""`Settled` reports of an idle client, so that servers can forget its units.

Servers keep a unit until its client reports that its outcome is known; inserts carry that report.
An idle client sends it on its own: at once after many units, a few times more while it stays idle,
and when it closes. Rule: a report may be lost, since the next insert carries it again; so servers
do not answer it. See docs/protocol.md, section 4, rule 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.node import Broadcast
from ziplog.core.units import NS_PER_S
from ziplog.wire import Settled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import ShardWindow

#: Number of unreported units after which an idle client reports at once.
MANY_UNITS: Final = 64
#: Idle time before the first report, and intervals between the following ones.
PAUSES_NS: Final = (1 * NS_PER_S, 5 * NS_PER_S, 25 * NS_PER_S)


class _IdlePeriod(msgspec.Struct):
    """A period without inserts at one shard."""

    next_seq: int
    due: int
    reports: int = 0


class SettledReports:
    """The `Settled` reports of a client."""

    def __init__(
        self, context: StepContext, routing: Routing, windows: Mapping[int, ShardWindow]
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._windows: Final = windows
        self._idle: Final[dict[int, _IdlePeriod]] = {}

    def on_window_empty(self, window: ShardWindow) -> None:
        """Report now if many units are unreported; the window has become empty."""
        if window.next_seq - window.reported >= MANY_UNITS:
            self._report(window)

    def tick(self) -> None:
        """Send the reports that are due."""
        for shard, window in self._windows.items():
            if window.inflight or window.has_queue:
                continue
            idle = self._idle.get(shard)
            if idle is None or idle.next_seq != window.next_seq:
                idle = _IdlePeriod(window.next_seq, self._context.now + PAUSES_NS[0])
                self._idle[shard] = idle
            if idle.reports < len(PAUSES_NS) and self._context.now >= idle.due:
                self._report(window)
                idle.reports += 1
                if idle.reports < len(PAUSES_NS):
                    idle.due = self._context.now + PAUSES_NS[idle.reports]
            if idle.reports < len(PAUSES_NS):
                self._context.set_timer(idle.due)

    def send_all(self) -> None:
        """Report to all shards, because the client closes."""
        for window in self._windows.values():
            self._report(window)

    def _report(self, window: ShardWindow) -> None:
        route, context = self._routing.route(window.shard), self._context
        if route is None or route.is_unavailable or window.next_seq == 1:
            return
        below = window.reported = window.first_incomplete
        message = Settled(self._routing.cluster, window.shard, route.view, context.client, below)
        context.effects.append(Broadcast(route.names, message))
