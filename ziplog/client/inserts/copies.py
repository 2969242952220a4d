"""Which units are sent again, and when: those whose acks are overdue, as far as that is of use.

Rules: what a server refused, and what another view must get, is sent again when it is due; so is a
unit that servers passed over (`Lane.has_missed`). Everything else is most likely in a queue: while
other units are settled it is not overdue; when nothing is settled for a timeout, the oldest one may
be sent again, the timeout doubles, and the copy has to be paid for (`timeouts.Budget`), unless the
timeout cannot grow any more. See docs/protocol.md, section 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ziplog.client.inserts.locate import is_held
from ziplog.client.inserts.retransmission import Budget
from ziplog.core.node import Broadcast

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import Turn
    from ziplog.client.inserts.inflight import Lane, Unit
    from ziplog.client.inserts.shard_selector import Choice
    from ziplog.errors import ZiplogError

_MS: Final = 1_000_000
#: Pauses between the copies of a unit up to this; of one that no call waits for, up to that.
LAST_PAUSE_NS: Final = 2_000 * _MS
_DOUBTFUL_PAUSE_NS: Final = 5_000 * _MS
#: In one look, not more than this is sent again to a shard.
_REPEAT_BYTES: Final = 1024 * 1024


class Copies:
    """The further copies of a client's units."""

    def __init__(
        self,
        turn: Turn,
        routing: Routing,
        choice: Choice,
        reject: Callable[[Lane, Unit, ZiplogError], None],
    ) -> None:
        self._turn: Final = turn
        self._routing: Final = routing
        self._choice: Final = choice
        self._reject: Final = reject
        self._budget: Final = Budget()

    def settled(self) -> None:
        """Take the news that all acks of a unit agree."""
        self._budget.earn()

    def answered(self, lane: Lane) -> None:
        """Take the news that a server answered a further copy, and none before.

        The one before, or its ack, was lost, and no queue was in the way.
        """
        self._budget.refund()
        lane.timeout.reset()
        lane.probe_at = 0

    def look(self, lane: Lane, route: Route) -> None:
        """Send again what is due at a shard."""
        turn = self._turn
        allowance = _REPEAT_BYTES
        for unit in list(lane.unsettled.values()):
            if unit.message.seq not in lane.unsettled or is_held(unit, route):
                continue
            if turn.now >= unit.retry_at:
                if unit.verdict is not None:
                    self._reject(lane, unit, unit.verdict)
                    continue
                if allowance <= 0:
                    turn.wake_at(turn.now + lane.timeout.ns // 4)
                    break
                if self._is_overdue(lane, unit) and self._may_send(lane, unit):
                    allowance -= len(unit.message.body)
                    self._send(lane, unit, route)
            turn.wake_at(unit.retry_at)

    def _is_overdue(self, lane: Lane, unit: Unit) -> bool:
        """Whether a unit whose pause is over is to be sent again; if not, it is due later."""
        unit.retry_at = lane.overdue_at(unit)
        return unit.retry_at <= self._turn.now

    def _may_send(self, lane: Lane, unit: Unit) -> bool:
        """Whether another copy is needed for sure, or can be paid for; if not, it is due later."""
        if lane.has_missed(unit):
            return True
        now = self._turn.now
        if now < lane.probe_at:
            unit.retry_at = lane.probe_at
            return False
        is_free = lane.timeout.is_longest
        lane.timeout.back_off()
        lane.probe_at = now + lane.timeout.ns
        if is_free or self._budget.spend():
            return True
        self._avoid(lane, lane.timeout.ns)
        unit.retry_at = lane.probe_at
        return False

    def _send(self, lane: Lane, unit: Unit, route: Route) -> None:
        turn = self._turn
        longest = LAST_PAUSE_NS if unit.is_awaited else _DOUBTFUL_PAUSE_NS
        unit.pause = max(min(unit.pause * 2, longest), lane.timeout.ns)
        unit.retry_at = turn.now + unit.pause
        unit.last_sent, unit.is_expected = turn.now, True
        unit.message = replace(unit.message, copy=unit.copies + 1)
        unit.is_lost = False
        turn.counters.retries += 1
        turn.effects.append(Broadcast(route.names, unit.message))
        self._avoid(lane, unit.pause)

    def _avoid(self, lane: Lane, pause: int) -> None:
        """A shard lets this client wait: look whether it moved, and use others meanwhile."""
        self._routing.refresh()
        self._choice.avoid(lane, pause)
