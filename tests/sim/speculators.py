"""Readers that speculate, in a run: clients of early delivery (docs/protocol.md, section 18).

What is confirmed is recorded as a subscription of the same start. So the rules of the history, and
those of deliveries, judge it like any reader's records (W2). `Promises` checks the events (W1, W3,
W4). `LocalState` applies each delivery at once, undoes what is void, and has output, with the
bookkeeping of `ziplog.speculation.process` (W6). A speculator also closes its speculation, and
continues at `position`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.sim.workload import FETCH_NS, FETCH_RECORDS, Reader
from ziplog.client.common.requests import (
    EventsRequest,
    Fetched,
    FetchRequest,
    ProgressRequest,
    SpeculateRequest,
    SubscribeRequest,
    UnsubscribeRequest,
)
from ziplog.core.units import NEVER
from ziplog.errors import TrimmedError
from ziplog.speculation import _Run
from ziplog.types import RID_GENESIS, Confirmed, Delivery, Failed, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sim.workload import Shared
    from ziplog.client.common.requests import EventBatch, Progress
    from ziplog.types import Event

#: Probability that a speculator closes its speculation and continues with another one.
_RESUMES: Final = 0.03
#: Maximum of its open deliveries.
_MAX_PENDING: Final = 200


class Promises:
    """What the events of one speculation promise."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        #: Deliveries that are neither confirmed nor void, in order: the local state to undo.
        self.open: Final[list[Record]] = []
        self._confirmed = 0
        #: Numbers of early deliveries, of failures, and of the deliveries that these withdrew.
        self.early = self.failures = self.withdrawn = 0

    def add(self, events: Sequence[Event]) -> list[Record]:
        """Check the next events; return the records that became final."""
        final: list[Record] = []
        for event in events:
            if type(event) is Delivery:
                self._deliver(event)
            elif type(event) is Confirmed:
                final += self._confirm(event.upto.gsn)
            elif type(event) is Failed:
                self._fail(event.after.gsn)
        return final

    def _deliver(self, event: Delivery) -> None:
        gsn = event.record.rid.gsn
        last = self.open[-1].rid.gsn if self.open else self._confirmed
        assert gsn > last, f"W1: {self._name} received {gsn} after {last}"
        self.open.append(event.record)
        self.early += event.speculative

    def _confirm(self, gsn: int) -> list[Record]:
        assert gsn > self._confirmed, f"W2: {self._name}: {gsn} confirmed after {self._confirmed}"
        self._confirmed = gsn
        count = sum(record.rid.gsn <= gsn for record in self.open)
        final = self.open[:count]
        del self.open[:count]
        return final

    def _fail(self, after: int) -> None:
        assert after >= self._confirmed, (
            f"W3: {self._name}: {after} failed, {self._confirmed} was confirmed"
        )
        kept = [record for record in self.open if record.rid.gsn <= after]
        assert len(kept) < len(self.open), f"W4: {self._name}: nothing is void behind {after}"
        self.withdrawn += len(self.open) - len(kept)
        self.open[:] = kept
        self.failures += 1


class LocalState:
    """An application whose local state is the list of the records that it applied."""

    def __init__(self, name: str, start: RecordId) -> None:
        self._name: Final = name
        self._run: Final = _Run(start, _MAX_PENDING)
        #: The applied records: those with output, and behind them those that may be void.
        self._applied: Final[list[Record]] = []

    def add(self, events: Sequence[Event]) -> list[Record]:
        """Take the next events; return the records that had output."""
        run, applied, emitted = self._run, self._applied, list[Record]()
        if events:
            run.add(list(events), is_closed=False)
        for record, _ in run.pop_void():
            last = applied.pop()
            assert last is record, f"W6: {self._name} undid {record.rid} before {last.rid}"
        if run.waiting:
            records = run.begin()
            applied += records
            run.end(records)
        while (final := run.next_final()) is not None:
            emitted.append(final[0])
            run.on_emitted()
        return emitted


class Speculator(Reader):
    """A client that follows the log by speculations."""

    def __init__(self, shared: Shared, name: str, *, shards: frozenset[int] | None = None) -> None:
        super().__init__(shared, name, shards=shards)
        self.promises = Promises(name)
        self._state = LocalState(name, RID_GENESIS)
        #: The promises of its earlier speculations.
        self._former: Final[list[Promises]] = []
        #: Number of events received, and the operation of the subscription in the history.
        self._taken = self._operation = 0
        self._resumes: int | None = None

    @property
    def early(self) -> int:
        """Number of early deliveries."""
        return sum(one.early for one in (*self._former, self.promises))

    @property
    def failures(self) -> int:
        """Number of failures."""
        return sum(one.failures for one in (*self._former, self.promises))

    @property
    def withdrawn(self) -> int:
        """Number of deliveries that failures withdrew."""
        return sum(one.withdrawn for one in (*self._former, self.promises))

    def begin(self) -> None:
        self._resumes = None  # it restarted under another name
        super().begin()

    def _subscribe(self, start: RecordId) -> None:
        self.first = start
        history, kernel = self.shared.history, self.shared.cluster.kernel
        plain = SubscribeRequest(self.deadline(120 * FETCH_NS), start, True, self.shards)
        self._operation = history.call(self.name, kernel.now, plain, resumes=self._resumes)
        self._resumes = None
        operation = self._operation
        request = SpeculateRequest(
            plain.deadline,
            start,
            True,
            self.shards,
            max_pending=_MAX_PENDING,
        )

        def opened(result: Any) -> None:
            history.returned(operation, kernel.now, result)
            self._former.append(self.promises)
            self.promises, self._taken = Promises(self.name), 0
            self._state = LocalState(self.name, start)
            self._subscribed(result)

        self.program().call(request, opened)

    def _fetch(self) -> None:
        request = EventsRequest(
            self.deadline(FETCH_NS), self._subscription, FETCH_RECORDS, self._taken
        )
        self.program().call(request, self._received)

    def _received(self, result: EventBatch | BaseException) -> None:
        if isinstance(result, TrimmedError):
            self._restart(result.first)
            return
        assert not isinstance(result, BaseException), f"a fetch of events raised {result!r}"
        assert result.first == self._taken, "events are missing"
        self._taken += len(result.events)
        final, emitted = self.promises.add(result.events), self._state.add(result.events)
        assert emitted == final, (
            f"W6: {self.name} had output for {[record.rid for record in emitted]},"
            f" {[record.rid for record in final]} are confirmed"
        )
        if final:
            history, kernel = self.shared.history, self.shared.cluster.kernel
            request = FetchRequest(NEVER, self._subscription, len(final))
            operation = history.call(self.name, kernel.now, request)
            history.returned(operation, kernel.now, Fetched(final, ended=False))
        if not self.shared.is_over and self.random.random() < _RESUMES:
            request_progress = ProgressRequest(NEVER, self._subscription, self._taken)
            self.program().call(request_progress, lambda found: self._continue(final, found))
        else:
            self._fetched(Fetched(final, ended=False))

    def _continue(self, final: list[Record], progress: Progress) -> None:
        """Continue with another speculation, where this one ends."""
        if final:
            self.delivered = final[-1].rid
        self.records += len(final)
        self._resumes = self._operation
        self._restart(progress.position)

    def _restart(self, start: RecordId) -> None:
        end = UnsubscribeRequest(self.deadline(FETCH_NS), self._subscription)
        self.program().call(end, lambda _: None)
        self._subscribe(start)
