"""What the clients of a simulation did and saw, recorded in virtual time.

Calls and results come in the order in which they happen, and each gets a time of its own: what
happens in the same nanosecond is moved on by as many nanoseconds as it takes. So "this result was
there before that call" is never lost, and the rules of `scripts/history` judge every such pair.

A payload's number is given by the history, whatever bytes it has; a record whose payload, key and
timestamp are not those of one insert is a foreign one. Invariant: what is judged here is, byte for
byte, what `write` writes and `scripts/check_history.py` reads (docs/history.md).
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.client.common.requests import (
    FetchRequest,
    InsertRequest,
    ReadRequest,
    SubscribeRequest,
    SyncRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.errors import NoSuchRecordError, OutcomeUnknownError, TrimmedError

_SCRIPTS: Final = str(Path(__file__).resolve().parents[2] / "scripts")
if _SCRIPTS not in sys.path:  # the scripts are no package: their folder is where they are found
    sys.path.insert(0, _SCRIPTS)

import check_history  # noqa: E402
from history import events  # noqa: E402
from history.observed import DID_NOT_HAPPEN, gather  # noqa: E402
from history.payloads import FOREIGN, PER_CLIENT  # noqa: E402
from history.rules import check  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from history.observed import Observed
    from history.rules import Judgement

    from ziplog.types import Record, RecordId

    Request = (
        InsertRequest
        | ReadRequest
        | SubscribeRequest
        | FetchRequest
        | TailRequest
        | TrimRequest
        | SyncRequest
        | ResolveRequest
    )

#: What is said of the cluster, not of a client, stands in this process's file.
CLUSTER: Final = "cluster"
#: Violations that a failure's text names; the others are counted.
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

    #: Its number in the history, from 0.
    number: int
    client: str
    request: Request
    #: Virtual time, nanoseconds; no two events of a history have the same.
    called: int
    #: Of a `FetchRequest`: the subscription's operation; of a `ResolveRequest`: the insert's.
    of: int | None = None
    #: None while it is under way.
    returned: int | None = None
    #: What it returned, or the exception that it raised.
    result: Any = PENDING

    def __str__(self) -> str:
        end = "..." if self.returned is None else str(self.returned)
        what = f"{type(self.request).__name__.removesuffix('Request').lower()}{_details(self)}"
        return f"[{self.number}] {self.client} {self.called}-{end} {what} -> {_brief(self.result)}"


def _details(operation: Operation) -> str:
    """Return what matters of a request."""
    match operation.request:
        case InsertRequest(payloads=payloads, after=after):
            return f"({', '.join(map(repr, payloads))}, after {after})"
        case ReadRequest(rid=rid) | TrimRequest(rid=rid):
            return f"({rid})"
        case SubscribeRequest(start=start, follow=follow):
            return f"({start}{'' if follow else ', to the end'})"
        case FetchRequest() | ResolveRequest():
            return f"(of [{operation.of}])"
    return "()"


def _brief(result: object) -> str:
    """Return a result in few words."""
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
    """One process's history, as much of a path as its readers need."""

    def __init__(self, process: str, number: int) -> None:
        self.process: Final = process
        #: Stands in front of the numbers of its payloads.
        self.number: Final = number
        self.lines: Final[list[bytes]] = []
        self.ops = 0
        self.payloads = number * PER_CLIENT
        #: From an operation's number to its op here; fetches have that of their subscription.
        self.op_of: Final[dict[int, int]] = {}
        #: From what the client calls a subscription to the operation that began it.
        self.subscriptions: Final[dict[int, int]] = {}

    @property
    def name(self) -> str:
        return f"{self.process}{events.SUFFIX}"

    def open(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(b"".join(self.lines))


class History:
    """Everything that clients did.

    Args:
        note: what a reader may want to know of the run, such as its seed. JSON.

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
        #: From the identity of a doubt to its insert; the operation's result keeps it alive.
        self._doubts: Final[dict[int, int]] = {}

    # --- recording ---

    def call(self, client: str, at: int, request: Request, *, resumes: int | None = None) -> int:
        """Record that a client makes a call, before it is made; return the operation's number.

        Args:
            client: its name. One that is started again has another name: it knows nothing more.
            at: virtual time in nanoseconds, not before anything that was recorded.
            request: what it asks for. Every payload is inserted once in a history.
            resumes: of a subscription that starts at the `position` of another one of this client:
                that one's operation. The two count as one.

        """
        file, number = self._file(client), len(self.operations)
        operation = Operation(number, client, request, self._moment(at))
        self._digest.update(b"%b calls " % client.encode())
        if isinstance(request, FetchRequest):
            operation.of = file.subscriptions[request.subscription]
            file.op_of[number] = file.op_of[operation.of]
        else:
            file.ops += 1
            file.op_of[number] = file.ops
            self._line(file, self._called(file, operation, resumes))
        self.operations.append(operation)
        self.open[number] = operation
        return number

    def returned(self, operation: int, at: int, result: Any) -> None:
        """Record what a call returned, once it did.

        Args:
            operation: its number.
            at: virtual time in nanoseconds, not before anything that was recorded.
            result: what it returned, or the exception object.

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
        """Record that a client begins a transaction; return its number in the client's file.

        Args:
            client: its name.
            at: virtual time in nanoseconds, not before anything that was recorded.
            process: which of the client's lanes, each of which does one thing at a time.
            steps: what it means to do.

        """
        file = self._file(client)
        file.ops += 1
        self._line(file, events.Invoke(file.ops, self._moment(at), process, list(steps)))
        return file.ops

    def committed(
        self, client: str, op: int, at: int, steps: Sequence[events.Step], gsn: int = 0
    ) -> None:
        """Record that a transaction was committed, and where, if it wrote and was told that."""
        self._line(self._file(client), events.Ok(op, self._moment(at), list(steps), gsn))

    def not_committed(
        self, client: str, op: int, at: int, steps: Sequence[events.Step], error: BaseException,
        *, is_known: bool,
    ) -> None:  # fmt: skip
        """Record what a transaction raised: it took no effect, or (not `is_known`) it may have."""
        kind = events.Fail if is_known else events.Info
        text, name = str(error)[:_TEXT], type(error).__name__
        line = kind(op, self._moment(at), name, list(steps), text)
        self._line(self._file(client), line)

    def losses(self, at: int, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Record what the status document says may be lost: (shard, start, stop), gsns."""
        self._line(self._file(CLUSTER), events.Losses(self._moment(at), sorted(ranges)))

    def left(self, at: int, shard: int) -> None:
        """Record that an operator was told that a shard has left the log."""
        self._line(self._file(CLUSTER), events.Left(self._moment(at), shard))

    def fault(self, at: int, text: str) -> None:
        """Record what was done to the cluster, for those who read along."""
        self._line(self._file(CLUSTER), events.Fault(self._moment(at), text))

    def _moment(self, at: int) -> int:
        """Return a time for what happens now, later than all before."""
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

    # --- what a line says ---

    def _called(self, file: _File, operation: Operation, resumes: int | None) -> events.Event:
        """Return the event of a call."""
        op, at = file.op_of[operation.number], operation.called
        match operation.request:
            case InsertRequest() as request:
                return events.Insert(op, at, request.after.gsn, self._new_payloads(file, request))
            case ResolveRequest(outcome=doubt):
                operation.of = self._doubts[id(doubt)]
                return events.Resolve(op, at, file.op_of[operation.of])
            case ReadRequest(rid=rid):
                return events.Read(op, at, rid.gsn, rid.shard)
            case SubscribeRequest(start=start, follow=follow):
                former = 0 if resumes is None else file.op_of[resumes]
                return events.Subscribe(op, at, start.gsn, follow, former)
            case SyncRequest():
                return events.Sync(op, at)
            case TailRequest():
                return events.Tail(op, at)
            case TrimRequest(rid=rid):
                return events.Trim(op, at, rid.gsn)
        raise AssertionError(f"no operation of a history: {operation.request!r}")

    def _new_payloads(self, file: _File, request: InsertRequest) -> list[int]:
        """Number the payloads of an insert."""
        assert request.many or len(request.payloads) == 1, (
            "an insert of several payloads has many=True: else its error does not say which of"
            " them are in the log"
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
        """Return the number of what a record holds; `FOREIGN`: nobody inserted that."""
        number, *rest = self._payloads.get(record.payload, (FOREIGN, None, 0))
        return number if rest == [record.key, record.timestamp_us] else FOREIGN

    def _results(self, op: int, at: int, request: Request, result: Any) -> Sequence[events.Event]:
        """Return the events of what a call returned."""
        match request:
            case InsertRequest():
                return [events.Inserted(op, at, *_columns(result))]
            case ResolveRequest():
                return [events.Resolved(op, at, *_columns(result))]
            case ReadRequest(rid=rid):
                # The record of another position than was asked for is none of ours.
                return [
                    events.Found(op, at, self._number(result) if result.rid == rid else FOREIGN)
                ]
            case SyncRequest():
                return [events.Synced(op, at, result.gsn)]
            case TailRequest():
                return [events.TailIs(op, at, result.gsn)]
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

    # --- what it says as a whole ---

    def digest(self) -> str:
        """Return a hash of all that was recorded so far, in its order."""
        return self._digest.hexdigest()

    def lines(self) -> dict[str, list[bytes]]:
        """Return the lines of each process's history file (docs/history.md), with their ends."""
        return {process: list(file.lines) for process, file in self._files.items()}

    def write(self, directory: Path) -> None:
        """Write the files that `scripts/check_history.py` reads; the directory is made."""
        directory.mkdir(parents=True, exist_ok=True)
        for file in self._files.values():
            (directory / file.name).write_bytes(b"".join(file.lines))

    def observed(self) -> Observed:
        """Return what the rules judge."""
        return gather(self._files.values())  # type: ignore[arg-type]  # `open` and `name` will do

    def judge(self, *, allow_loss: bool = False) -> Judgement:
        """Hold the history against the rules of `scripts/history`.

        Args:
            allow_loss: positions that were reported as lost may be missing.

        """
        return check(self.observed(), allow_loss=allow_loss)

    def check(self, *, allow_loss: bool = False) -> Judgement:
        """Judge; raises AssertionError with the first violations and what else speaks of them."""
        judgement = self.judge(allow_loss=allow_loss)
        violations, observed = judgement.violations, judgement.observed
        rows = [f"{v.rule}: {v.text} [{observed.where(v.source)}]" for v in violations[:_NAMED]]
        if len(violations) > _NAMED:
            rows.append(f"... and {len(violations) - _NAMED} more")
        rows += check_history.traces(observed, violations)
        assert not violations, "the history breaks rules:\n" + "\n".join(rows)
        return judgement


def certainly_did_not_happen(error: BaseException) -> bool:
    """Whether an insert that raised this is not in the log, but for what `results` names."""
    return type(error).__name__ in DID_NOT_HAPPEN


def _columns(rids: Sequence[RecordId | None]) -> tuple[list[int], list[int]]:
    """Return the gsns and shards of rids; gsn 0: None."""
    return [rid.gsn if rid else 0 for rid in rids], [rid.shard if rid else 0 for rid in rids]


def _failed(op: int, at: int, error: BaseException) -> events.Failed:
    """Return the event of a call that raised."""
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
    """Return the gsn that an error names; 0 if it names none."""
    if isinstance(error, TrimmedError):
        return error.first.gsn
    return error.rid.gsn if isinstance(error, NoSuchRecordError) else 0
