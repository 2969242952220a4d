"""Units that wait for another lease, because their `after` is beyond the leases held.

Only the membership service knows whether such a position exists. The primary sends it a
`LeaseQuery` repeatedly while the unit waits (docs/protocol.md, section 4, rule 10).
Invariant: at most `MAX_OPEN_QUERIES` queries are open.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING, Final

from ziplog.core.units import NEVER
from ziplog.wire import LeaseQuery

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import HeldUnit
    from ziplog.wire import LeaseHistory

#: Interval between queries while units wait, in ns.
QUERY_INTERVAL_NS: Final = 100_000_000
#: Most queries of which a reply still counts.
MAX_OPEN_QUERIES: Final = 256


class UnitsAwaitingLease:
    """The units of one primary that wait for a lease."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self.units: dict[tuple[bytes, int], HeldUnit] = {}
        #: By request number, the units that the query is about.
        self._open_queries: Final[OrderedDict[int, list[HeldUnit]]] = OrderedDict()
        self._requests: Final = count(1)
        #: Time of the next query, in ns; NEVER: no unit needs one.
        self.due = NEVER

    def add(self, unit: HeldUnit, now: int) -> None:
        """Add a unit that waits for another lease."""
        self.units[unit.client, unit.seq] = unit
        if unit.after >= self._state.clock.limit and self.due == NEVER:
            self.due = now

    def remove(self, unit: HeldUnit) -> None:
        """Remove a unit, if it waits here."""
        self.units.pop((unit.client, unit.seq), None)

    def pop_all(self) -> dict[tuple[bytes, int], HeldUnit]:
        """Remove and return all units, in order of arrival."""
        units, self.units = self.units, {}
        return units

    def send_queries(self, now: int) -> None:
        """Query the positions that are beyond all leases held."""
        state = self._state
        waiting: dict[int, list[HeldUnit]] = {}
        for unit in self.units.values():
            if unit.after >= state.clock.limit:
                waiting.setdefault(unit.after, []).append(unit)
        self.due = now + QUERY_INTERVAL_NS if waiting else NEVER
        for after in sorted(waiting)[:MAX_OPEN_QUERIES]:
            request = next(self._requests)
            self._open_queries[request] = waiting[after]
            state.broadcast(state.service, LeaseQuery(state.cluster, request, after))
        while len(self._open_queries) > MAX_OPEN_QUERIES or (self._open_queries and not waiting):
            self._open_queries.popitem(last=False)

    def on_history(self, history: LeaseHistory) -> list[HeldUnit]:
        """Handle a reply; return the units of its query that still wait."""
        units = self._open_queries.pop(history.request, [])
        limit = self._state.clock.limit
        return [u for u in units if self.units.get((u.client, u.seq)) is u and u.after >= limit]
