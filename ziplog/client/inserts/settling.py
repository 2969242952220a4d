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
    from ziplog.client.common.step_context import Turn
    from ziplog.client.inserts.inflight import Lane

_S: Final = 1_000_000_000
#: So many units are reported as soon as nothing is under way.
MANY_UNITS: Final = 64
#: A silent client reports after so long, and after each of these pauses again.
PAUSES_NS: Final = (1 * _S, 5 * _S, 25 * _S)


class _Silence(msgspec.Struct):
    """Since its last insert a client had nothing under way at a shard."""

    next_seq: int
    due: int
    reports: int = 0


class Settling:
    """The reports of a client."""

    def __init__(self, turn: Turn, routing: Routing, lanes: Mapping[int, Lane]) -> None:
        self._turn: Final = turn
        self._routing: Final = routing
        self._lanes: Final = lanes
        self._silences: Final[dict[int, _Silence]] = {}

    def emptied(self, lane: Lane) -> None:
        """Report, if many units are settled that no insert told of; nothing is under way."""
        if lane.next_seq - lane.reported >= MANY_UNITS:
            self._report(lane)

    def tick(self) -> None:
        """Report what is due."""
        for shard, lane in self._lanes.items():
            if lane.unsettled or lane.queue:
                continue
            silence = self._silences.get(shard)
            if silence is None or silence.next_seq != lane.next_seq:
                silence = _Silence(lane.next_seq, self._turn.now + PAUSES_NS[0])
                self._silences[shard] = silence
            if silence.reports < len(PAUSES_NS) and self._turn.now >= silence.due:
                self._report(lane)
                silence.due = self._turn.now + PAUSES_NS[silence.reports]
                silence.reports += 1
            if silence.reports < len(PAUSES_NS):
                self._turn.wake_at(silence.due)

    def end(self) -> None:
        """Report everything: there will be no more inserts."""
        for lane in self._lanes.values():
            self._report(lane)

    def _report(self, lane: Lane) -> None:
        route, turn = self._routing.route(lane.shard), self._turn
        if route is None or route.is_away or lane.next_seq == 1:
            return
        below = lane.reported = lane.first_incomplete
        message = Settled(self._routing.cluster, lane.shard, route.view, turn.client, below)
        turn.effects.append(Broadcast(route.names, message))
