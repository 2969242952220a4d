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
    from ziplog.client.common.step_context import Turn
    from ziplog.client.inserts.inflight import Unit

_MS: Final = 1_000_000
FIRST_PAUSE_NS: Final = 50 * _MS
#: The longest pause while somebody waits, and while nobody does.
LAST_PAUSE_NS: Final = 500 * _MS
IDLE_PAUSE_NS: Final = 5_000 * _MS
#: In one look, no more units of a shard are asked for.
LOOK_UNITS: Final = 64
_BY_TIMES_ASKED: Final = attrgetter("asked")


def is_held(unit: Unit, route: Route) -> bool:
    """Whether a unit must not be sent: nobody would take it, nobody wants it, or it could be late.

    What is still of a former view, while the shard is there, is in doubt, or tied (`lane`). The
    servers of a parked shard answer copies of their view: that it is there, or never will be.
    """
    is_answered = route.state == "parked" and unit.message.view == route.view
    return unit.message.view < route.view or (route.is_away and not is_answered)


class Search:
    """The questions of one lane."""

    __slots__ = ("_open", "_pause", "due")

    def __init__(self) -> None:
        #: When to look next.
        self.due = 0
        self._pause = FIRST_PAUSE_NS
        #: Units of the last look whose fate is not known.
        self._open = 0

    def hurry(self) -> None:
        """Something changed: look at once, and often again."""
        self.due = 0
        self._pause = FIRST_PAUSE_NS

    def decided(self) -> None:
        """Somebody knew of a unit: go on with others, once the last look is done."""
        self._pause = FIRST_PAUSE_NS
        self._open -= 1
        if self._open <= 0:
            self.due = 0

    def look(self, turn: Turn, route: Route, units: Iterable[Unit]) -> bool:
        """Ask for some of the units that are to be asked for, if it is time; whether it was."""
        sought = [
            unit
            for unit in units
            if (unit.is_suspect or is_held(unit, route)) and not unit.is_absent
        ]
        if not sought:
            return False
        longest = LAST_PAUSE_NS if any(unit.is_awaited for unit in sought) else IDLE_PAUSE_NS
        self.due = min(self.due, turn.now + longest)
        is_due = turn.now >= self.due
        if is_due:
            self._ask(turn, route, sought)
            self.due = turn.now + min(self._pause, longest)
            self._pause = min(self._pause * 2, longest)
        turn.wake_at(self.due)
        return is_due

    def _ask(self, turn: Turn, route: Route, sought: Sequence[Unit]) -> None:
        chosen = nsmallest(LOOK_UNITS, sought, key=_BY_TIMES_ASKED)
        self._open = len(chosen)
        for unit in chosen:
            unit.asked += 1
            unit.is_suspect = False
            message = unit.message
            question = Locate(
                message.cluster, message.shard, message.view, message.client, message.seq,
                message.since,
            )  # fmt: skip
            turn.effects.append(Broadcast(route.names, question))
