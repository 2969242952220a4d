"""History of a simulation's clients: their calls and results, recorded in virtual time.

Calls and results are recorded in their order, each with a unique time: events of the same
nanosecond are moved on by as many nanoseconds as needed. So the rules of `tests/history` see
every pair of a result and a later call.

The history numbers payloads, whatever bytes they have. A record with the payload, key and timestamp
of no insert is a foreign one. Invariant: the judged data is, byte for byte, the data that `write`
writes and `scripts/check_history.py` reads (docs/history.md).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tests.history import events, report
from tests.history.observed import DID_NOT_HAPPEN, gather
from tests.history.payloads import FOREIGN, PER_CLIENT
from tests.history.rules import check
from ziplog.client.common.requests import (
    BarrierRequest,
    FetchRequest,
    InsertRequest,
    ReadRequest,
    SealRequest,
    SubscribeRequest,
    SyncRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.errors import NoSuchRecordError, OutcomeUnknownError, TrimmedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tests.history.observed import Observed
    from tests.history.rules import Judgement
    from ziplog.types import Record, RecordId

    Request = (
        InsertRequest
        | ReadRequest
        | SealRequest
        | SubscribeRequest
        | FetchRequest
        | BarrierRequest
        | TailRequest
        | TrimRequest
        | SyncRequest
        | ResolveRequest
    )

#: The process of events of the cluster itself.
CLUSTER: Final = "cluster"
#: Number of violations in a failure's text; further ones are counted.
_NAMED: Final = 10
_TEXT: Final = 300

_encode: Final = msgspec.json.Encoder().encode


class _Pending:
    def __repr__(self) -> str:
        return "pending"


#: The result of an operation that has not ended.
PENDING: Final = _Pending()


@dataclass(slots=True)
class Operation:
    """One call of a client."""

    #: Its index in the history.
    number: int
    client: str
    request: Request
    #: Virtual time, nanoseconds; unique in a history.
    called: int
    #: The subscription's operation of a `FetchRequest` or `BarrierRequest`, the insert's of a
    #: `ResolveRequest`.
    of: int | None = None
    #: None while it is open.
    returned: int | None = None
    #: Its result, or the raised exception.
    result: Any = PENDING

    def __str__(self) -> str:
        end = "..." if self.returned is None else str(self.returned)
        sealed = "sealed " if getattr(self.request, "sealed", False) else ""
        name = type(self.request).__name__.removesuffix("Request").lower()
        what = f"{sealed}{name}{_details(self)}"
        return f"[{self.number}] {self.client} {self.called}-{end} {what} -> {_brief(self.result)}"


def _details(operation: Operation) -> str:
    """Return the important parts of a request."""
    match operation.request:
        case InsertRequest(payloads=payloads, after=after):
            return f"({', '.join(map(repr, payloads))}, after {after})"
        case ReadRequest(rid=rid) | TrimRequest(rid=rid) | SealRequest(rid=rid):
            return f"({rid})"
        case SubscribeRequest(start=start, follow=follow, shards=shards):
            only = "" if shards is None else f", shards {sorted(shards)}"
            return f"({start}{'' if follow else ', to the end'}{only})"
        case FetchRequest() | BarrierRequest() | ResolveRequest():
            return f"(of [{operation.of}])"
    return "()"


def _brief(result: object) -> str:
    """Return a short form of a result."""
    if isinstance(result, BaseException):
        return f"{type(result).__name__}: {str(result)[:80]}"
    records = getattr(result, "records", None)
    if records is not None:
        rows = ", ".join(f"{r.rid}={r.payload!r}" for r in records)
        return f"[{rows}]{', ended' if result.ended else ''}"  # type: ignore[attr-defined]
    if hasattr(result, "payload"):
        return f"{result.rid}={result.payload!r}"  # type: ignore[attr-defined]
    if isinstance(result, list):
        return f"[{', '.join(map(str, result))}]"
    return str(result)


class _File:
    """One process's history, with the parts of a path that its readers need."""

    def __init__(self, process: str, number: int) -> None:
        self.process: Final = process
        #: Prefix of its payloads' numbers.
        self.number: Final = number
        self.lines: Final[list[bytes]] = []
        self.ops = 0
        self.payloads = number * PER_CLIENT
        #: From an operation's number to its op in this file; a fetch has its subscription's.
        self.op_of: Final[dict[int, int]] = {}
        #: From a client's subscription number to the operation that started it.
        self.subscriptions: Final[dict[int, int]] = {}

    @property
    def name(self) -> str:
        return f"{self.process}{events.SUFFIX}"

    def open(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(b"".join(self.lines))


class History:
    """All calls of all clients.

    Args:
        note: information about the run for readers, such as its seed. JSON.

    """

    def __init__(self, **note: Any) -> None:
        #: In the order of their calls.
        self.operations: Final[list[Operation]] = []
        #: Operations that have not ended, by number.
        self.open: Final[dict[int, Operation]] = {}
        self._note: Final = note
        self._files: Final[dict[str, _File]] = {}
        self._digest: Final = blake2b(digest_size=8)
        self._at = 0
        self._clock = 0
        #: From an inserted payload to its number, key and timestamp.
        self._payloads: Final[dict[bytes, tuple[int, bytes | None, int]]] = {}
        #: From the id of an unknown outcome to its insert; the operation's result keeps it alive.
        self._doubts: Final[dict[int, int]] = {}

    # --- recording ---

    def call(self, client: str, at: int, request: Request, *, resumes: int | None = None) -> int:
        """Record a client's call, before it is made; return the operation's number.

        Args:
            client: its name. A restarted client has a new name.
            at: virtual time in nanoseconds, not before any recorded event.
            request: the request. A payload is inserted once in a history.
            resumes: for a subscription that starts at the `position` of another one of this client:
                the other one's operation. The two count as one.

        """
        file, number = self._file(client), len(self.operations)
        operation = Operation(number, client, request, self._moment(at))
        self._digest.update(b"%b calls " % client.encode())
        if isinstance(request, FetchRequest | BarrierRequest):
            operation.of = file.subscriptions[request.subscription]
        if isinstance(request, FetchRequest):
            assert operation.of is not None
            file.op_of[number] = file.op_of[operation.of]
        else:
            file.ops += 1
            file.op_of[number] = file.ops
            self._line(file, self._called(file, operation, resumes))
        self.operations.append(operation)
        self.open[number] = operation
        return number

    def returned(self, operation: int, at: int, result: Any) -> None:
        """Record the result of a call.

        Args:
            operation: its number.
            at: virtual time in nanoseconds, not before any recorded event.
            result: the result, or the exception object.

        """
        done = self.open.pop(operation)
        self._digest.update(b"returned %d " % operation)
        done.returned, done.result = self._moment(at), result
        file = self._files[done.client]
        op, time = file.op_of[operation], done.returned
        if isinstance(result, BaseException):
            if isinstance(result, OutcomeUnknownError) and result.doubt is not None:
                self._doubts.setdefault(id(result.doubt), operation)
            self._line(file, _failed(op, time, result))
            return
        if isinstance(done.request, SubscribeRequest):
            file.subscriptions[result] = operation
            return
        for event in self._results(op, time, done.request, result):
            self._line(file, event)

    def invoked(self, client: str, at: int, process: int, steps: Sequence[events.Step]) -> int:
        """Record the start of a transaction; return its number in the client's file.

        Args:
            client: its name.
            at: virtual time in nanoseconds, not before any recorded event.
            process: the client's sequential worker that runs it.
            steps: its planned steps.

        """
        file = self._file(client)
        file.ops += 1
        self._line(file, events.Invoke(file.ops, self._moment(at), process, list(steps)))
        return file.ops

    def committed(
        self, client: str, op: int, at: int, steps: Sequence[events.Step], gsn: int = 0
    ) -> None:
        """Record a commit, and its position, if the transaction wrote and received one."""
        self._line(self._file(client), events.Ok(op, self._moment(at), list(steps), gsn))

    def not_committed(
        self, client: str, op: int, at: int, steps: Sequence[events.Step], error: BaseException,
        *, is_known: bool,
    ) -> None:  # fmt: skip
        """Record a failed transaction: without effect, or (not `is_known`) perhaps with one."""
        kind = events.Fail if is_known else events.Info
        text, name = str(error)[:_TEXT], type(error).__name__
        line = kind(op, self._moment(at), name, list(steps), text)
        self._line(self._file(client), line)

    def losses(self, at: int, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Record the losses of the status document: (shard, start, stop), gsns."""
        self._line(self._file(CLUSTER), events.Losses(self._moment(at), sorted(ranges)))

    def placements(self, seen: Iterable[tuple[int, int, int, list[str]]]) -> None:
        """Record the regions of the shards' servers: (virtual time, shard, view, regions)."""
        for row in seen:
            self._line(self._file(CLUSTER), events.PlacementIs(*row))

    def left(self, at: int, shard: int) -> None:
        """Record the reply to an operator that a shard has left the log."""
        self._line(self._file(CLUSTER), events.Left(self._moment(at), shard))

    def fault(self, at: int, text: str) -> None:
        """Record a fault, for readers of the history."""
        self._line(self._file(CLUSTER), events.Fault(self._moment(at), text))

    def _moment(self, at: int) -> int:
        """Return a time for the current event, later than all before."""
        assert at >= self._clock, f"time runs back: from {self._clock} to {at}"
        self._clock = at
        self._digest.update(b"%d " % at)
        self._at = max(at, self._at + 1)
        return self._at

    def _file(self, process: str) -> _File:
        file = self._files.get(process)
        if file is None:
            file = self._files[process] = _File(process, len(self._files) + 1)
            self._line(file, events.Header(events.VERSION, process, self._note))
        return file

    def _line(self, file: _File, event: events.Event) -> None:
        line = _encode(event) + b"\n"
        file.lines.append(line)
        self._digest.update(b"%b %b" % (file.process.encode(), line))

    # --- lines ---

    def _called(self, file: _File, operation: Operation, resumes: int | None) -> events.Event:
        """Return the event of a call."""
        op, at = file.op_of[operation.number], operation.called
        match operation.request:
            case InsertRequest() as request:
                payloads = self._new_payloads(file, request)
                asked = request.min_regions
                return events.Insert(op, at, request.after.gsn, payloads, request.sealed, asked)
            case ResolveRequest(outcome=doubt):
                operation.of = self._doubts[id(doubt)]
                return events.Resolve(op, at, file.op_of[operation.of])
            case ReadRequest(rid=rid):
                return events.Read(op, at, rid.gsn, rid.shard)
            case SubscribeRequest(start=start, follow=follow, shards=shards):
                former = 0 if resumes is None else file.op_of[resumes]
                return events.Subscribe(op, at, start.gsn, follow, former, sorted(shards or ()))
            case SyncRequest():
                return events.Sync(op, at)
            case TailRequest(sealed=sealed):
                return events.Tail(op, at, sealed)
            case SealRequest(rid=rid):
                return events.Seal(op, at, rid.gsn)
            case BarrierRequest():
                assert operation.of is not None
                return events.Barrier(op, at, file.op_of[operation.of])
            case TrimRequest(rid=rid):
                return events.Trim(op, at, rid.gsn)
        raise AssertionError(f"no operation of a history: {operation.request!r}")

    def _new_payloads(self, file: _File, request: InsertRequest) -> list[int]:
        """Number the payloads of an insert."""
        assert request.many or len(request.payloads) == 1, (
            "an insert of several payloads has many=True: else its error does not contain which"
            " of them are in the log"
        )
        numbers = []
        for index, payload in enumerate(request.payloads):
            assert payload not in self._payloads, f"{payload!r} is inserted a second time"
            file.payloads += 1
            self._payloads[payload] = (
                file.payloads, request.key_of(index), request.timestamp_us,
            )  # fmt: skip
            numbers.append(file.payloads)
        return numbers

    def _number(self, record: Record) -> int:
        """Return the number of a record's payload; `FOREIGN`: no client inserted it."""
        number, *rest = self._payloads.get(record.payload, (FOREIGN, None, 0))
        return number if rest == [record.key, record.timestamp_us] else FOREIGN

    def _results(self, op: int, at: int, request: Request, result: Any) -> Sequence[events.Event]:
        """Return the events of a call's result."""
        match request:
            case InsertRequest():
                return [events.Inserted(op, at, *_columns(result))]
            case ResolveRequest():
                return [events.Resolved(op, at, *_columns(result))]
            case ReadRequest(rid=rid):
                # A record of a position that was not requested is foreign.
                return [
                    events.Found(op, at, self._number(result) if result.rid == rid else FOREIGN)
                ]
            case SyncRequest():
                return [events.Synced(op, at, result.gsn)]
            case TailRequest():
                return [events.TailIs(op, at, result.gsn)]
            case SealRequest():
                return [events.Sealed(op, at)]
            case BarrierRequest():
                return [events.Barred(op, at, result.gsn)]
            case TrimRequest():
                return [events.Trimmed(op, at)]
        assert isinstance(request, FetchRequest)
        records = result.records
        found: list[events.Event] = []
        if records:
            numbers = [self._number(record) for record in records]
            rids = _columns([record.rid for record in records])
            found.append(events.Delivered(op, at, *rids, numbers))
        if result.ended:
            found.append(events.Ended(op, at))
        return found

    # --- the whole history ---

    def digest(self) -> str:
        """Return a hash of all recorded events, in their order."""
        return self._digest.hexdigest()

    def lines(self) -> dict[str, list[bytes]]:
        """Return the lines of each process's history file (docs/history.md), with line ends."""
        return {process: list(file.lines) for process, file in self._files.items()}

    def write(self, directory: Path) -> None:
        """Write the files for `scripts/check_history.py`; create the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        for file in self._files.values():
            (directory / file.name).write_bytes(b"".join(file.lines))

    def observed(self) -> Observed:
        """Return the data that the rules judge."""
        return gather(self._files.values())  # type: ignore[arg-type]  # `open` and `name` will do

    def judge(self, *, allow_loss: bool = False) -> Judgement:
        """Check the history against the rules of `tests/history`.

        Args:
            allow_loss: positions that were reported as lost may be missing.

        """
        return check(self.observed(), allow_loss=allow_loss)

    def check(self, *, allow_loss: bool = False) -> Judgement:
        """Judge; raise AssertionError with the first violations and related operations."""
        judgement = self.judge(allow_loss=allow_loss)
        violations, observed = judgement.violations, judgement.observed
        rows = [f"{v.rule}: {v.text} [{observed.where(v.source)}]" for v in violations[:_NAMED]]
        if len(violations) > _NAMED:
            rows.append(f"... and {len(violations) - _NAMED} more")
        rows += report.traces(observed, violations)
        assert not violations, "the history violates rules:\n" + "\n".join(rows)
        return judgement


def certainly_did_not_happen(error: BaseException) -> bool:
    """Whether an insert with this error is not in the log, except the rids in `results`."""
    return type(error).__name__ in DID_NOT_HAPPEN


def _columns(rids: Sequence[RecordId | None]) -> tuple[list[int], list[int]]:
    """Return the gsns and shards of rids; gsn 0: None."""
    return [rid.gsn if rid else 0 for rid in rids], [rid.shard if rid else 0 for rid in rids]


def _failed(op: int, at: int, error: BaseException) -> events.Failed:
    """Return the event of a failed call."""
    gsns, shards = _columns(getattr(error, "results", None) or [])
    return events.Failed(
        op,
        at,
        type(error).__name__,
        retriable=bool(getattr(error, "retriable", False)),
        text=str(error)[:_TEXT],
        gsns=gsns,
        shards=shards,
        first=_named(error),
    )


def _named(error: BaseException) -> int:
    """Return the gsn in an error; 0 if it has none."""
    if isinstance(error, TrimmedError):
        return error.first.gsn
    return error.rid.gsn if isinstance(error, NoSuchRecordError) else 0
