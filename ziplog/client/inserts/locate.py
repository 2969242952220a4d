"""What became of units that must not be sent again (docs/protocol.md, sections 4 and 11).

While a shard is recovered, and for what nobody waits for once it has a later view, all servers are
asked where a unit is (`Locate`), some units at a time, those first that were asked for least.
Rules: the question names the view of the unit's newest copy, as an older one would prove nothing;
between two looks lies a pause that grows while nothing is decided, so that a dead shard costs
little. Invariant: a unit that is known to be nowhere is not asked for.
"""

from __future__ import annotations

from heapq import nsmallest
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from ziplog.core.node import Broadcast
from ziplog.wire import Locate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.client.common.routing import Route
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import InflightUnit

_MS: Final = 1_000_000
MIN_BACKOFF_NS: Final = 50 * _MS
#: The longest pause while somebody waits, and while nobody does.
MAX_BACKOFF_NS: Final = 500 * _MS
MAX_UNAWAITED_BACKOFF_NS: Final = 5_000 * _MS
#: In one look, no more units of a shard are asked for.
MAX_LOCATES: Final = 64
_BY_LOCATE_COUNT: Final = attrgetter("asked")


def must_not_send(unit: InflightUnit, route: Route) -> bool:
    """Whether a unit must not be sent: nobody would take it, nobody wants it, or it could be late.

    What is still of a former view, while the shard is there, is in doubt, or tied (`window`). The
    servers of a parked shard answer copies of their view: that it is there, or never will be.
    """
    is_answered = route.state == "parked" and unit.message.view == route.view
    return unit.message.view < route.view or (route.is_unavailable and not is_answered)


class LocateQueries:
    """The questions of one lane."""

    __slots__ = ("_backoff", "_open", "due")

    def __init__(self) -> None:
        #: When to look next.
        self.due = 0
        self._backoff = MIN_BACKOFF_NS
        #: Units of the last look whose fate is not known.
        self._open = 0

    def expedite(self) -> None:
        """Something changed: look at once, and often again."""
        self.due = 0
        self._backoff = MIN_BACKOFF_NS

    def on_decided(self) -> None:
        """Somebody knew of a unit: go on with others, once the last look is done."""
        self._backoff = MIN_BACKOFF_NS
        self._open -= 1
        if self._open <= 0:
            self.due = 0

    def poll(self, context: StepContext, route: Route, units: Iterable[InflightUnit]) -> bool:
        """Ask for some of the units that are to be asked for, if it is time; whether it was."""
        candidates = [
            unit
            for unit in units
            if (unit.may_be_stale or must_not_send(unit, route)) and not unit.is_absent
        ]
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
            self.due = context.now + min(self._backoff, longest)
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
