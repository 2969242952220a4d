"""Units for which the leases held have no positions, because of what they are to come after.

Whether the position that such a unit names exists at all, only the membership service knows: it is
asked, again and again, as long as the unit waits (docs/protocol.md, section 4, rule 10).
Invariant: at most `MAX_OPEN_QUERIES` questions are open.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING, Final

from ziplog.wire import LeaseQuery

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import HeldUnit
    from ziplog.wire import LeaseHistory

#: A question is asked again after so long.
QUERY_INTERVAL_NS: Final = 100_000_000
#: Questions to which an answer still counts.
MAX_OPEN_QUERIES: Final = 256


class UnitsAwaitingLease:
    """Such units of one primary."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self.units: dict[tuple[bytes, int], HeldUnit] = {}
        #: By request, the units that it was asked for.
        self._open_queries: Final[OrderedDict[int, list[HeldUnit]]] = OrderedDict()
        self._requests: Final = count(1)
        #: When to ask; None: there is nothing to ask.
        self.due: int | None = None

    def add(self, unit: HeldUnit, now: int) -> None:
        """Let a unit wait for another lease."""
        self.units[unit.client, unit.seq] = unit
        if unit.after >= self._state.clock.limit:
            self.due = self.due or now

    def remove(self, unit: HeldUnit) -> None:
        """Forget a unit, if it waits here."""
        self.units.pop((unit.client, unit.seq), None)

    def pop_all(self) -> dict[tuple[bytes, int], HeldUnit]:
        """Return all units, in order of arrival; they wait here no more."""
        units, self.units = self.units, {}
        return units

    def send_queries(self, now: int) -> None:
        """Ask for the positions that are beyond all leases held."""
        state = self._state
        waiting: dict[int, list[HeldUnit]] = {}
        for unit in self.units.values():
            if unit.after >= state.clock.limit:
                waiting.setdefault(unit.after, []).append(unit)
        self.due = now + QUERY_INTERVAL_NS if waiting else None
        for after in sorted(waiting)[:MAX_OPEN_QUERIES]:
            request = next(self._requests)
            self._open_queries[request] = waiting[after]
            state.broadcast(state.service, LeaseQuery(state.cluster, request, after))
        while len(self._open_queries) > MAX_OPEN_QUERIES or (self._open_queries and not waiting):
            self._open_queries.popitem(last=False)

    def on_history(self, history: LeaseHistory) -> list[HeldUnit]:
        """Take an answer; return the units that it is about, which still wait."""
        units = self._open_queries.pop(history.request, [])
        limit = self._state.clock.limit
        return [u for u in units if self.units.get((u.client, u.seq)) is u and u.after >= limit]
