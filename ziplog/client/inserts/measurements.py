"""What `ziplog.metrics` exports about one client.

Durations are counted on request only: `start` replaces the retransmission timeouts, which get the
latency of every unit anyway, by those that also count it. So a client without metrics counts
nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.inserts.retransmission import RetransmitTimeout
from ziplog.core.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ziplog.client.common.requests import Counters, MeasureRequest
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.common.unknown_outcome import UnknownOutcome
    from ziplog.client.inserts.inflight import ShardWindow
    from ziplog.client.inserts.insert_calls import InsertCall
    from ziplog.client.inserts.plain_inserts import PlainInserts


class Measurements:
    """Counters, durations and in-flight units of a client; any thread may read them."""

    def __init__(
        self, context: StepContext, windows: Mapping[int, ShardWindow], plain: PlainInserts
    ) -> None:
        self._context: Final = context
        self._windows: Final = windows
        self._plain: Final = plain
        #: Latencies of units since `start`; None: it was not called.
        self.durations: Histogram | None = None
        #: Returns the positions that each open subscription has not returned, `[start, stop)`.
        self.backlogs: Callable[[], list[tuple[int, int]]] = list
        self.is_closed = False

    @property
    def counters(self) -> Counters:
        """The counters of the client."""
        return self._context.counters

    @property
    def window_units(self) -> int:
        """Number of units in flight, at all shards."""
        inflight = sum(len(window.inflight) for window in list(self._windows.values()))
        return inflight + (self._plain.insert is not None)

    def start(self, number: int, _request: MeasureRequest) -> None:
        """Count durations from now on, and complete the call with this object."""
        if self.durations is None:
            self.durations = Histogram()
            for window in self._windows.values():
                window.retransmit_timeout = MeasuredTimeout(
                    self.durations, window.retransmit_timeout
                )
        self._context.complete(number, self)

    def timeout(self) -> RetransmitTimeout:
        """Return the retransmission timeout of a new window."""
        former = RetransmitTimeout(self._context.rtt_ms)
        return former if self.durations is None else MeasuredTimeout(self.durations, former)

    def note_failed(self, call: InsertCall, outcome: UnknownOutcome | None) -> None:
        """Count the records of a failed call that are not known to be in the log."""
        units = zip(call.unit_ranges, call.gsns, strict=True)
        records = sum(stop - start for (start, stop), gsns in units if gsns is None)
        if outcome is None:
            self.counters.failed += records
        else:
            self.counters.unknown += records


class MeasuredTimeout(RetransmitTimeout):
    """A retransmission timeout that also counts its samples by size."""

    __slots__ = ("_durations",)

    def __init__(self, durations: Histogram, former: RetransmitTimeout) -> None:
        """Continue the `former` timeout."""
        super().__init__()
        self._durations: Final = durations
        self.continue_from(former)

    def observe_latency(self, sample: int) -> None:
        """Count a latency, and update the timeout."""
        self._durations.add(sample)
        super().observe_latency(sample)
