"""Reports what is settled while no insert would: servers forget it then.

Servers keep a unit until its client says that it is settled, and inserts say so. So a client that
falls silent reports it: at once after many units, some times more while the silence lasts, and at
its end. Rule: a report may be lost, as the next insert says the same; so it is not answered, and
sent a few times only. See docs/protocol.md, section 4, rule 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.node import Broadcast
from ziplog.wire import Settled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import ShardWindow

_S: Final = 1_000_000_000
#: So many units are reported as soon as nothing is under way.
MANY_UNITS: Final = 64
#: A silent client reports after so long, and after each of these pauses again.
PAUSES_NS: Final = (1 * _S, 5 * _S, 25 * _S)


class _IdlePeriod(msgspec.Struct):
    """Since its last insert a client had nothing under way at a shard."""

    next_seq: int
    due: int
    reports: int = 0


class SettledReports:
    """The reports of a client."""

    def __init__(
        self, context: StepContext, routing: Routing, windows: Mapping[int, ShardWindow]
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._windows: Final = windows
        self._idle: Final[dict[int, _IdlePeriod]] = {}

    def on_window_empty(self, window: ShardWindow) -> None:
        """Report, if many units are settled that no insert told of; nothing is under way."""
        if window.next_seq - window.reported >= MANY_UNITS:
            self._report(window)

    def tick(self) -> None:
        """Report what is due."""
        for shard, window in self._windows.items():
            if window.inflight or window.queue:
                continue
            idle = self._idle.get(shard)
            if idle is None or idle.next_seq != window.next_seq:
                idle = _IdlePeriod(window.next_seq, self._context.now + PAUSES_NS[0])
                self._idle[shard] = idle
            if idle.reports < len(PAUSES_NS) and self._context.now >= idle.due:
                self._report(window)
                idle.due = self._context.now + PAUSES_NS[idle.reports]
                idle.reports += 1
            if idle.reports < len(PAUSES_NS):
                self._context.set_timer(idle.due)

    def send_all(self) -> None:
        """Report everything: there will be no more inserts."""
        for window in self._windows.values():
            self._report(window)

    def _report(self, window: ShardWindow) -> None:
        route, context = self._routing.route(window.shard), self._context
        if route is None or route.is_unavailable or window.next_seq == 1:
            return
        below = window.reported = window.first_incomplete
        message = Settled(self._routing.cluster, window.shard, route.view, context.client, below)
        context.effects.append(Broadcast(route.names, message))
