"""The results of inserts: what a call returns once all its records are placed.

An append returns later, when its last position is sealed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from ziplog.client.common.unknown_outcome import UnknownOutcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import InflightUnit, ShardWindow
    from ziplog.client.inserts.insert_calls import InsertCall
    from ziplog.client.seals.seals import Seals
    from ziplog.errors import OutcomeUnknownError
    from ziplog.types import RecordId


class Results:
    """Returns rids to the callers of a client's inserts."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        windows: Mapping[int, ShardWindow],
        seals: Seals,
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._windows: Final = windows
        self._seals: Final = seals

    def place(self, window: ShardWindow, unit: InflightUnit, gsns: list[int]) -> list[int]:
        """Note that a unit is placed; return the numbers of the calls that this completes."""
        self._count(window, unit, gsns)
        call = unit.call
        if call is None:
            return []
        call.gsns[unit.index] = gsns
        call.open -= 1
        if not call.open:
            return self._complete(call)
        if call.is_sequential:
            window.queue.append(call)
        elif window.is_blocked_by_view_change:
            self._context.set_timer(self._context.now)
        return []

    def _count(self, window: ShardWindow, unit: InflightUnit, gsns: list[int]) -> None:
        context, counters = self._context, self._context.counters
        window.note_placed(unit.message.view, gsns[-1])
        context.highest_gsn = max(context.highest_gsn, gsns[-1])
        counters.inserts += len(gsns)
        if unit.took_slow_path:
            counters.slow_path += len(gsns)
        else:
            counters.fast_path += len(gsns)

    def _complete(self, call: InsertCall) -> list[int]:
        """Complete a call with placed units, or those of a group; return their numbers."""
        completed = call.pop_results()
        self._context.expects_more |= len(completed) > 1
        for each, rids in completed:
            self.note_returned(rids)
            request = each.request
            if request.sealed:
                self._context.counters.appends += len(rids)
                error = partial(_unsealed_error, each.shard, rids, each.many)
                self._seals.wait(
                    each.number, rids[-1].gsn, request.deadline, rids, error, each.shard
                )
            else:
                self._context.complete(each.number, rids)
        return [each.number for each, _ in completed]

    def resolve(self, number: int, deadline: int, outcome: UnknownOutcome) -> None:
        """Complete a `resolve()` call whose outcome is known."""
        results = list(outcome.results)
        self.note_returned(results)
        if outcome.is_append:
            last = max((rid.gsn for rid in results if rid is not None), default=0)
            self._seals.wait(number, last, deadline, results, outcome.unsealed_error, outcome.shard)
        else:
            self._context.complete(number, results)

    def note_returned(self, rids: Sequence[RecordId | None]) -> None:
        """Note that a caller receives these records, which a `sync` may have reported as lost."""
        if self._context.has_losses:
            for rid in filter(None, rids):
                self._windows[rid.shard].note_returned(rid.gsn)


def _unsealed_error(
    shard: int,
    rids: Sequence[RecordId],
    many: bool,
    awaited: str,
) -> OutcomeUnknownError:
    """Return the error of an append whose records are placed, and wait for `awaited`."""
    outcome = UnknownOutcome(shard, [*rids], (), many=many, is_append=True)
    return outcome.unsealed_error(awaited)
