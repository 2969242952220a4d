"""Retransmission of units with overdue acks.

A unit is retransmitted when it is due if a server refused it, if it must be sent in another view,
or if servers passed it over (`ShardWindow.was_passed_over`). Every other unit is most likely in a
server's queue, so it is not overdue while acks of other units arrive. Without such acks for one
retransmission timeout, the client may retransmit the oldest unit and doubles the timeout. That copy
needs `retransmission.Budget`, unless the timeout is at its maximum.

See docs/protocol.md, section 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ziplog.client.inserts.locate import must_not_send
from ziplog.client.inserts.retransmission import MAX_BACKOFF_NS, Budget
from ziplog.core.node import Broadcast
from ziplog.core.units import NEVER, NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import InflightUnit, ShardWindow
    from ziplog.client.inserts.shard_selector import ShardSelector

#: Maximum backoff between copies of a unit for which no caller waits.
_MAX_UNAWAITED_BACKOFF_NS: Final = 5_000 * NS_PER_MS
#: Maximum number of bytes that are retransmitted to a shard in one tick.
_MAX_RETRANSMIT_BYTES: Final = 1024 * 1024


class Copies:
    """Retransmits the units of a client."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        shard_selector: ShardSelector,
        reject: Callable[[ShardWindow, InflightUnit], None],
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._shard_selector: Final = shard_selector
        self._reject: Final = reject
        self._budget: Final = Budget()
        #: Note that all acks of a unit agree.
        self.on_acks_agree: Final = self._budget.earn

    def on_copy_answered(self, window: ShardWindow) -> None:
        """Note that a server answered a further copy as the first one.

        The copy before it, or its ack, was lost; a queue was not the cause.
        """
        self._budget.refund()
        window.retransmit_timeout.reset()
        window.probe_at = 0

    def retransmit_due(self, window: ShardWindow, route: Route) -> None:
        """Retransmit the units of a shard that are due."""
        context = self._context
        allowance = _MAX_RETRANSMIT_BYTES
        for unit in list(window.inflight.values()):
            if unit.message.seq not in window.inflight or must_not_send(unit, route):
                continue
            if context.now >= unit.retransmit_at:
                if unit.pending_error is not None and self._end_misfit(window, unit):
                    continue
                if allowance <= 0:
                    context.set_timer(context.now + window.retransmit_timeout.ns // 4)
                    break
                if self._is_overdue(window, unit) and self._may_retransmit(window, unit):
                    allowance -= len(unit.message.body)
                    self._retransmit(window, unit, route)
            context.set_timer(unit.retransmit_at)

    def _end_misfit(self, window: ShardWindow, unit: InflightUnit) -> bool:
        """Reject a unit that does not fit, at the right time.

        Returns False if another unit of its call may be placed. Then both are retransmitted: the
        primary refuses the units that follow a refused one.
        """
        now, at = self._context.now, window.rejected_at(unit)
        if at == NEVER:
            unit.may_be_queued = False
            return False
        if now >= at:
            self._reject(window, unit)
        else:
            self._context.set_timer(min(at, now + window.retransmit_timeout.ns // 4))
        return True

    def _is_overdue(self, window: ShardWindow, unit: InflightUnit) -> bool:
        """Whether a unit that is due is also overdue; if not, postpone it."""
        unit.retransmit_at = window.overdue_at(unit)
        return unit.retransmit_at <= self._context.now

    def _may_retransmit(self, window: ShardWindow, unit: InflightUnit) -> bool:
        """Whether another copy is needed, or the budget allows it; if not, postpone the unit."""
        if window.was_passed_over(unit):
            return True
        now = self._context.now
        if now < window.probe_at:
            unit.retransmit_at = window.probe_at
            return False
        is_free = window.retransmit_timeout.is_longest
        window.retransmit_timeout.back_off()
        window.probe_at = now + window.retransmit_timeout.ns
        if is_free or self._budget.spend():
            return True
        self._avoid(window, window.retransmit_timeout.ns)
        unit.retransmit_at = window.probe_at
        return False

    def _retransmit(self, window: ShardWindow, unit: InflightUnit, route: Route) -> None:
        context = self._context
        longest = MAX_BACKOFF_NS if unit.has_waiter else _MAX_UNAWAITED_BACKOFF_NS
        unit.backoff = max(min(unit.backoff * 2, longest), window.retransmit_timeout.ns)
        unit.retransmit_at = context.now + unit.backoff
        unit.last_sent, unit.may_be_queued = context.now, True
        unit.message = replace(unit.message, copy=unit.copies + 1)
        unit.is_absent_in_newer_view, unit.no_space = False, ""
        context.counters.retries += 1
        context.effects.append(Broadcast(route.names, unit.message))
        self._avoid(window, unit.backoff)

    def _avoid(self, window: ShardWindow, pause: int) -> None:
        """Refresh the placements and prefer other shards, because this one does not answer."""
        self._routing.refresh_often(self._context.now + pause)
        self._shard_selector.avoid(window, pause)

    def check(self, window: ShardWindow, route: Route | None, locate_at: int) -> None:
        """Assert that each unit is retransmitted, or located at `locate_at`, in time."""
        context = self._context
        for unit in window.inflight.values():
            due = unit.retransmit_at
            if route is not None and must_not_send(unit, route):
                due = locate_at if not unit.is_absent else NEVER
            assert context.next_timer <= max(due, context.now + window.retransmit_timeout.ns // 4)
            assert all(unit.message.seq in outcome.open for outcome, _ in unit.outcomes)
