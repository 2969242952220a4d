"""`Locate` requests for units that acks may not complete (docs/protocol.md, sections 4 and 11).

While a shard recovers, and for units of ended calls after that, the client asks all servers where a
unit is, because it must not send the unit again. It also asks if some servers have acked a unit,
and another one does not answer: the client may not reach that one. It locates some units at a time,
those with the fewest requests first. Rules: a request names the view of the unit's newest copy,
because an older view would prove nothing; the interval grows while no outcome becomes known, so a
dead shard costs little.

Invariant: the client does not locate a unit that is known to be absent.
"""

from __future__ import annotations

from heapq import nsmallest
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from ziplog.core.node import Broadcast
from ziplog.core.units import NS_PER_MS
from ziplog.wire import Locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.client.common.routing import Route
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import InflightUnit, ShardWindow

MIN_BACKOFF_NS: Final = 50 * NS_PER_MS
#: Maximum interval while a caller waits for a unit, and otherwise.
MAX_BACKOFF_NS: Final = 500 * NS_PER_MS
MAX_UNAWAITED_BACKOFF_NS: Final = 5_000 * NS_PER_MS
#: Maximum number of units that are located at once, per shard.
MAX_LOCATES: Final = 64
_BY_LOCATE_COUNT: Final = attrgetter("locate_count")


def must_not_send(unit: InflightUnit, route: Route) -> bool:
    """Whether a unit must not be sent now: it could be placed late, or no server would accept it.

    A unit of an older view than its available shard's has an unknown outcome, or its call is
    blocked by the view change. Servers of a parked shard report the outcome of copies of their
    view.
    """
    is_reported = route.state == "parked" and unit.message.view == route.view
    return unit.message.view < route.view or (route.is_unavailable and not is_reported)


class LocateQueries:
    """The `Locate` requests of one shard."""

    __slots__ = ("_backoff", "_open", "due")

    def __init__(self) -> None:
        #: When to locate units next.
        self.due = 0
        self._backoff = MIN_BACKOFF_NS
        #: Number of units of the last batch without an outcome.
        self._open = 0

    def expedite(self) -> None:
        """Locate units now, and reset the interval."""
        self.due = 0
        self._backoff = MIN_BACKOFF_NS

    def on_decided(self) -> None:
        """Note that an outcome became known; locate more units after the last batch."""
        self._backoff = MIN_BACKOFF_NS
        self._open -= 1
        if self._open <= 0:
            self.due = 0

    def poll(self, context: StepContext, route: Route, window: ShardWindow) -> bool:
        """Locate units if any must be and the interval is over; return whether it sent requests."""
        candidates = [
            unit
            for unit in window.inflight.values()
            if (unit.may_be_stale or must_not_send(unit, route)) and not unit.is_absent
        ]
        if not candidates and context.now < window.avoid_until:
            candidates = window.partly_acked(context.now)
            self._backoff = MAX_BACKOFF_NS  # The servers may just be busy.
        if not candidates:
            return False
        longest = (
            MAX_BACKOFF_NS
            if any(unit.has_waiter for unit in candidates)
            else MAX_UNAWAITED_BACKOFF_NS
        )
        self.due = min(self.due, context.now + longest)
        is_due = context.now >= self.due
        if is_due:
            self._send_locates(context, route, candidates)
            self.due = context.retry_at(min(self._backoff, longest))
            self._backoff = min(self._backoff * 2, longest)
        context.set_timer(self.due)
        return is_due

    def _send_locates(
        self, context: StepContext, route: Route, candidates: Sequence[InflightUnit]
    ) -> None:
        chosen = nsmallest(MAX_LOCATES, candidates, key=_BY_LOCATE_COUNT)
        self._open = len(chosen)
        for unit in chosen:
            unit.locate_count += 1
            unit.may_be_stale = False
            message = unit.message
            locate = Locate(
                message.cluster, message.shard, message.view, message.client, message.seq,
                message.since,
            )  # fmt: skip
            context.effects.append(Broadcast(route.names, locate))
