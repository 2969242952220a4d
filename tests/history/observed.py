"""Observed history: the content of all files, in columns; a million operations fit in memory.

Rule: this module only joins calls with their results; `tests.history.rules` interprets them. A call
without a result has an unknown outcome.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from tests.history import events, transactions
from tests.history.cursors import Cursors
from tests.history.events import HistoryError
from tests.history.players import Players
from tests.history.transactions import Transactions
from tests.history.violation import END, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

#: Outcomes of a record.
UNKNOWN, ACKED, NEVER = 0, 1, 2
#: Errors of an insert that say that nothing was inserted.
DID_NOT_HAPPEN: Final = frozenset(
    {
        "UnavailableError",
        "DeadlineError",
        "NoSuchRecordError",
        "RecordTooLargeError",
        "ConfigError",
    }
)
#: Public exceptions; any other name is an unmapped error.
PUBLIC_ERRORS: Final = DID_NOT_HAPPEN | {
    "OutcomeUnknownError",
    "CursorHeldError",
    "CursorLostError",
    "TrimmedError",
    "TrimHeldError",
    "ClosedError",
    "ProtocolError",
}
#: A source is a file's index and a line's number in one integer.
_LINE_BITS: Final = 40


@dataclass
class Records:
    """All records of insert calls, in columns."""

    payload: array[int] = field(default_factory=lambda: array("q"))
    called: array[int] = field(default_factory=lambda: array("q"))
    #: Time at which its position was known; `END`: never.
    acked: array[int] = field(default_factory=lambda: array("q"))
    after: array[int] = field(default_factory=lambda: array("q"))
    #: The acknowledged position; 0: not acknowledged.
    gsn: array[int] = field(default_factory=lambda: array("q"))
    shard: array[int] = field(default_factory=lambda: array("q"))
    state: array[int] = field(default_factory=lambda: array("b"))
    source: array[int] = field(default_factory=lambda: array("q"))
    #: The number of regions that its call requested; 0: none.
    min_regions: array[int] = field(default_factory=lambda: array("b"))
    #: 1: of an append.
    is_append: array[int] = field(default_factory=lambda: array("b"))
    #: Time at which its append returned; `END`: never.
    sealed: array[int] = field(default_factory=lambda: array("q"))
    #: 1: of the same call as the record before it.
    goes_on: array[int] = field(default_factory=lambda: array("b"))
    #: From a payload to its index in the columns.
    index: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.payload)


class Batch(NamedTuple):
    """Records that were delivered together: up to index `stop` of the columns, at a time."""

    stop: int
    at: int
    source: int


@dataclass
class Subscription:
    """One subscription, with all those that went on where it had stopped."""

    start: int
    source: int
    #: Time of the last call.
    called: int
    #: The shards whose records were requested; empty: all.
    only: frozenset[int] = frozenset()
    gsns: array[int] = field(default_factory=lambda: array("q"))
    shards: array[int] = field(default_factory=lambda: array("q"))
    payloads: array[int] = field(default_factory=lambda: array("q"))
    batches: list[Batch] = field(default_factory=list)
    #: Times of its calls, each with the number of records delivered before.
    parts: list[tuple[int, int]] = field(default_factory=list)
    #: It has `follow=False` and handed out everything that it had to.
    ended: bool = False
    #: Its end, in time: of its last part.
    at: int = END
    failed: events.Failed | None = None


class Reading(NamedTuple):
    """One `read_record` with a result."""

    called: int
    at: int
    gsn: int
    shard: int
    source: int
    #: The payload, or the error.
    result: int | events.Failed


class TailBound(NamedTuple):
    """One `sync` or `check_tail` with a result."""

    process: int
    called: int
    at: int
    gsn: int
    source: int


class Sealing(NamedTuple):
    """One `seal`, or one `check_tail(sealed=True)`, that returned."""

    at: int
    gsn: int
    is_tail: bool


class ReadBarrier(NamedTuple):
    """One `barrier` that returned."""

    called: int
    gsn: int
    #: The shards of its subscription; empty: all.
    only: frozenset[int]
    source: int


class Refusal(NamedTuple):
    """An insert that failed because its `after` position was never assigned."""

    called: int
    after: int
    source: int


class Trimming(NamedTuple):
    """One `trim`; `at` is `END` if it did not return."""

    called: int
    at: int
    gsn: int
    source: int


class _OpenInsert(NamedTuple):
    """An insert, or its `resolve`, without a result so far."""

    #: The index of its first record, and the number of its records.
    first: int
    count: int
    is_resolve: bool


class _OpenCall(NamedTuple):
    """Another call without a result so far."""

    call: Any
    source: int


class Observed:
    """Everything that is known of a history."""

    def __init__(self) -> None:
        self.files: Final[list[Path]] = []
        self.records: Final = Records()
        self.subscriptions: Final[list[Subscription]] = []
        self.readings: Final[list[Reading]] = []
        self.syncs: Final[list[TailBound]] = []
        #: Calls of `sync` that said that a record is lost; `gsn` is that record's.
        self.reported_losses: Final[list[TailBound]] = []
        self.tails: Final[list[TailBound]] = []
        self.seals: Final[list[Sealing]] = []
        self.barriers: Final[list[ReadBarrier]] = []
        self.trims: Final[list[Trimming]] = []
        self.refusals: Final[list[Refusal]] = []
        #: (shard, start, stop)
        self.losses: set[tuple[int, int, int]] = set()
        #: From a shard that has left the log to when that was known.
        self.left: Final[dict[int, int]] = {}
        #: By shard: the times from which on it had a view and spanned so many regions.
        self.spans: Final[dict[int, list[tuple[int, int, int]]]] = {}
        self.transactions: Final = Transactions()
        self.cursors: Final = Cursors()
        self.players: Final = Players()
        #: Violations within one file.
        self.violations: Final[list[Violation]] = []
        self.operations = 0
        self.lines = 0

    def where(self, source: int) -> str:
        """Return "file:line" of a source."""
        return f"{self.files[source >> _LINE_BITS].name}:{source & ((1 << _LINE_BITS) - 1)}"

    def process_of(self, source: int) -> int:
        """Return the index of the file of a source."""
        return source >> _LINE_BITS


def gather(paths: Iterable[Path]) -> Observed:
    """Read history files.

    Raises:
        HistoryError: one cannot be read, or is no history.

    """
    observed = Observed()
    for path in paths:
        process = len(observed.files)
        observed.files.append(path)
        _Process(observed, process << _LINE_BITS, path).take()
    return observed


class _Process:
    """Takes the lines of one file."""

    def __init__(self, observed: Observed, base: int, path: Path) -> None:
        self._observed: Final = observed
        self._records: Final = observed.records
        self._base: Final = base
        self._path: Final = path
        self._source = base
        #: Calls without a result so far, by number.
        self._open: Final[dict[int, _OpenInsert | _OpenCall]] = {}
        #: Inserts of unknown outcome: the first record, and the number of records.
        self._doubts: Final[dict[int, tuple[int, int]]] = {}
        self._subscriptions: Final[dict[int, Subscription]] = {}
        self._handlers: Final[dict[type, Callable[[Any], None]]] = {
            events.Insert: self._insert,
            events.Inserted: self._inserted,
            events.Delivered: self._delivered,
            events.Read: self._call,
            events.Found: self._found,
            events.Failed: self._failed,
            events.Resolve: self._resolve,
            events.Resolved: self._resolved,
            events.Subscribe: self._subscribe,
            events.Ended: self._ended,
            events.Sync: self._call,
            events.Synced: self._synced,
            events.Tail: self._call,
            events.TailIs: self._tail_is,
            events.Seal: self._call,
            events.Sealed: self._sealed,
            events.Barrier: self._call,
            events.Barred: self._barred,
            events.Trim: self._call,
            events.Trimmed: self._trimmed,
            events.Invoke: self._invoked,
            events.Ok: self._on_commit,
            events.Fail: self._on_failure,
            events.Info: self._on_failure,
            events.Losses: self._losses,
            events.Left: self._left,
            events.PlacementIs: self._placement_is,
            events.Fault: lambda _: None,
            **dict.fromkeys(get_args(events.CursorEvent), self._on_cursor),
            **dict.fromkeys(get_args(events.PlayerEvent), self._on_player),
        }

    def take(self) -> None:
        """Take all lines."""
        handlers, base, number = self._handlers, self._base, 0
        for number, event in events.read(self._path):
            self._source = base + number
            if number == 1:
                self._header(event)
                continue
            try:
                handlers[type(event)](event)
            except KeyError:
                what = "a second header" if isinstance(event, events.Header) else "no call for it"
                raise HistoryError(f"{self._path}:{number}: {what}") from None
        self._observed.lines += number
        for entry in self._open.values():
            if isinstance(entry, _OpenCall) and isinstance(entry.call, events.Trim):
                trim = Trimming(entry.call.at, END, entry.call.gsn, entry.source)
                self._observed.trims.append(trim)

    def _header(self, event: events.Event) -> None:
        if not isinstance(event, events.Header) or event.version != events.VERSION:
            raise HistoryError(f"{self._path}:1: no header of version {events.VERSION}")

    def _report_violation(self, rule: str, text: str, gsn: int = 0, payload: int = 0) -> None:
        self._observed.violations.append(Violation(rule, text, self._source, gsn, payload))

    def _call(self, event: events.Call) -> None:
        self._observed.operations += 1
        self._open[event.op] = _OpenCall(event, self._source)

    # --- inserts ---

    def _insert(self, event: events.Insert) -> None:
        self._observed.operations += 1
        records = self._records
        first = len(records)
        for number in event.payloads:
            if number in records.index:
                raise HistoryError(
                    f"{self._path}:{self._source - self._base}: payload {number} was inserted"
                    " before: the writer of a history must number each payload once"
                )
            records.index[number] = len(records)
            records.payload.append(number)
            records.called.append(event.at)
            records.acked.append(END)
            records.after.append(event.after)
            records.gsn.append(0)
            records.shard.append(0)
            records.state.append(UNKNOWN)
            records.source.append(self._source)
            records.min_regions.append(event.min_regions)
            records.is_append.append(event.sealed)
            records.sealed.append(END)
            records.goes_on.append(len(records) - 1 > first)
        self._open[event.op] = _OpenInsert(first, len(event.payloads), is_resolve=False)

    def _inserted(self, event: events.Inserted) -> None:
        first, count, _ = self._open.pop(event.op)
        if not count == len(event.gsns) == len(event.shards):
            self._report_violation(
                "results", f"an insert of {count} records returned {len(event.gsns)} rids"
            )
            return
        for index, gsn in enumerate(event.gsns, first):
            self._ack(index, gsn, event.shards[index - first], event.at)
            self._seal(index, event.at)

    def _seal(self, index: int, at: int) -> None:
        """Note that the call of a record returned; if it is an append, its place is sealed."""
        records = self._records
        if records.is_append[index]:
            records.sealed[index] = min(at, records.sealed[index])

    def _ack(self, index: int, gsn: int, shard: int, at: int) -> None:
        records = self._records
        payload, known = records.payload[index], records.gsn[index]
        if gsn < 1:
            self._report_violation(
                "results", f"payload {payload} was acknowledged at {gsn}", gsn, payload
            )
        elif known and (known, records.shard[index]) != (gsn, shard):
            position = f"{known}@{records.shard[index]}"
            self._report_violation(
                self._resolve_rule(index),
                f"payload {payload} is at {position}, and now at {gsn}@{shard}",
                gsn,
                payload,
            )
        elif records.state[index] == NEVER:
            self._report_violation(
                "resolve", f"payload {payload} did not exist, and does", gsn, payload
            )
        elif not known:
            records.gsn[index], records.shard[index] = gsn, shard
            records.acked[index], records.state[index] = at, ACKED

    def _resolve_rule(self, index: int) -> str:
        """Return the rule that a changed outcome of a record breaks."""
        return "unsealed" if self._records.is_append[index] else "resolve"

    def _resolve(self, event: events.Resolve) -> None:
        self._observed.operations += 1
        first, count = self._doubts[event.of]
        self._open[event.op] = _OpenInsert(first, count, is_resolve=True)

    def _resolved(self, event: events.Resolved) -> None:
        first, count, _ = self._open.pop(event.op)
        if not count == len(event.gsns) == len(event.shards):
            self._report_violation(
                "results", f"resolve: {len(event.gsns)} answers for {count} records"
            )
            return
        for index, gsn in enumerate(event.gsns, first):
            if gsn:
                self._ack(index, gsn, event.shards[index - first], event.at)
                self._seal(index, event.at)
            elif self._records.state[index] == ACKED:
                payload = self._records.payload[index]
                text = f"payload {payload} was there, and never was"
                self._report_violation(self._resolve_rule(index), text, 0, payload)
            else:
                self._records.state[index] = NEVER

    # --- failures ---

    def _failed(self, event: events.Failed) -> None:
        if event.error not in PUBLIC_ERRORS:
            self._report_violation("errors", f"{event.error} was raised: {event.text}")
        if (self._base, event.op) in self._observed.cursors.open:
            return
        if event.op in self._subscriptions:
            subscription = self._subscriptions[event.op]
            subscription.failed, subscription.at = event, event.at
            return
        entry = self._open.pop(event.op)
        if isinstance(entry, _OpenInsert):
            if not entry.is_resolve:
                self._insert_failed(event, entry.first, entry.count)
            return
        call, source = entry
        if isinstance(call, events.Read):
            reading = Reading(call.at, event.at, call.gsn, call.shard, source, event)
            self._observed.readings.append(reading)
        elif isinstance(call, events.Trim):
            self._observed.trims.append(Trimming(call.at, END, call.gsn, source))
        elif isinstance(call, events.Sync) and event.error == "NoSuchRecordError":
            process = self._observed.process_of(source)
            self._observed.reported_losses.append(
                TailBound(process, call.at, event.at, event.first, source)
            )

    def _insert_failed(self, event: events.Failed, first: int, count: int) -> None:
        for index, gsn in enumerate(event.gsns[:count], first):
            if gsn:
                self._ack(index, gsn, event.shards[index - first], event.at)
        if event.error == "NoSuchRecordError":
            records = self._records
            refusal = Refusal(records.called[first], records.after[first], self._source)
            self._observed.refusals.append(refusal)
        if event.error not in DID_NOT_HAPPEN:
            self._doubts[event.op] = (first, count)
            return
        state = self._records.state
        for index in range(first, first + count):
            if state[index] == UNKNOWN:
                state[index] = NEVER

    # --- transactions ---

    def _invoked(self, event: events.Invoke) -> None:
        self._observed.operations += 1
        self._observed.transactions.invoked(event, self._base, self._source)

    def _on_commit(self, event: events.Ok) -> None:
        self._observed.transactions.committed(event, self._base, self._source)

    def _on_failure(self, event: events.Fail | events.Info) -> None:
        if event.error not in PUBLIC_ERRORS | transactions.PUBLIC_ERRORS:
            self._report_violation("errors", f"{event.error} was raised: {event.text}")
        if isinstance(event, events.Fail):
            self._observed.transactions.failed(event, self._base, self._source)
        else:
            self._observed.transactions.on_result(event, self._base, self._source)

    # --- cursors and players ---

    def _on_cursor(self, event: events.CursorEvent) -> None:
        self._observed.operations += isinstance(event, events.Call)
        self._observed.cursors.on_event(event, self._base, self._source)

    def _on_player(self, event: events.PlayerEvent) -> None:
        self._observed.operations += isinstance(event, events.Call)
        self._observed.players.on_event(event, self._base, self._source)

    # --- the rest ---

    def _subscribe(self, event: events.Subscribe) -> None:
        self._observed.operations += 1
        if event.resumes:
            subscription = self._subscriptions[event.resumes]
            subscription.failed, subscription.at = None, END
        else:
            only = frozenset(event.shards)
            subscription = Subscription(event.start, self._source, event.at, only)
            self._observed.subscriptions.append(subscription)
        subscription.called = event.at
        subscription.parts.append((event.at, len(subscription.gsns)))
        self._subscriptions[event.op] = subscription

    def _delivered(self, event: events.Delivered) -> None:
        subscription = self._subscriptions[event.op]
        if not len(event.gsns) == len(event.shards) == len(event.payloads):
            raise HistoryError(f"{self._path}:{self._source - self._base}: columns differ")
        subscription.gsns.extend(event.gsns)
        subscription.shards.extend(event.shards)
        subscription.payloads.extend(event.payloads)
        subscription.batches.append(Batch(len(subscription.gsns), event.at, self._source))

    def _ended(self, event: events.Ended) -> None:
        subscription = self._subscriptions[event.op]
        subscription.ended, subscription.at = True, event.at

    def _found(self, event: events.Found) -> None:
        call, source = self._open.pop(event.op)
        reading = Reading(call.at, event.at, call.gsn, call.shard, source, event.payload)
        self._observed.readings.append(reading)

    def _synced(self, event: events.Synced) -> None:
        self._observed.syncs.append(self._tail_bound(event))

    def _tail_is(self, event: events.TailIs) -> None:
        call, _ = self._open[event.op]
        if call.sealed:
            self._observed.seals.append(Sealing(event.at, event.gsn, is_tail=True))
        self._observed.tails.append(self._tail_bound(event))

    def _sealed(self, event: events.Sealed) -> None:
        call, _ = self._open.pop(event.op)
        self._observed.seals.append(Sealing(event.at, call.gsn, is_tail=False))

    def _barred(self, event: events.Barred) -> None:
        call, source = self._open.pop(event.op)
        only = self._subscriptions[call.of].only
        self._observed.barriers.append(ReadBarrier(call.at, event.gsn, only, source))

    def _tail_bound(self, event: events.Synced | events.TailIs) -> TailBound:
        call, source = self._open.pop(event.op)
        process = self._observed.process_of(source)
        return TailBound(process, call.at, event.at, event.gsn, source)

    def _trimmed(self, event: events.Trimmed) -> None:
        call, source = self._open.pop(event.op)
        self._observed.trims.append(Trimming(call.at, event.at, call.gsn, source))

    def _losses(self, event: events.Losses) -> None:
        self._observed.losses.update(event.ranges)

    def _left(self, event: events.Left) -> None:
        left = self._observed.left
        left[event.shard] = min(event.at, left.get(event.shard, END))

    def _placement_is(self, event: events.PlacementIs) -> None:
        spans = self._observed.spans.setdefault(event.shard, [])
        spans.append((event.at, event.view, len(set(event.regions))))
