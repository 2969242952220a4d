"""Steps of operations on the sequential log of the linearizability check: effects and conditions.

tests/sim/linearizability.py specifies the log; each of its sentences is a condition on a state
here. Rule: a step is one operation's effect at one moment; only steps that returned must happen.
Invariant: the set of the steps that happened determines the state, regardless of their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.sim.history import Operation, certainly_did_not_happen
from ziplog.client.common.requests import (
    FetchRequest,
    InsertRequest,
    ReadRequest,
    SealRequest,
    SubscribeRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.errors import (
    ConfigError,
    DeadlineError,
    NoSuchRecordError,
    TrimmedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.types import Record, RecordId

#: The return time of a step that need not happen.
END: Final = 2**63 - 1
#: Texts of `NoSuchRecordError` for positions that stay empty (ziplog/client/reads/read.py).
_NO_OP: Final = "the position is a no-op"
_NOT_OWNED: Final = "does not own the position"

#: Payload, key and timestamp: equal at an insert and its readers.
Contents = tuple[bytes, bytes | None, int]


class Held(NamedTuple):
    """The record at a position."""

    shard: int
    contents: Contents

    def __str__(self) -> str:
        return f"{self.contents[0]!r} of shard {self.shard}"


#: A record that equals no other.
NOTHING: Final = Held(-1, (b"", None, 0))


class State(NamedTuple):
    """The log after the placed steps."""

    held: dict[int, Held]
    closed: int = 1
    #: (gsn, shard) of positions that the shard will never fill.
    never: frozenset[tuple[int, int]] = frozenset()
    trim: int = 0
    #: By the subscription's operation.
    positions: dict[int, int] = {}  # noqa: RUF012 - never changed, but replaced


@dataclass(eq=False)
class Step:
    """An operation's effect at one moment between its call and its result."""

    operation: Operation
    called: int
    #: `END`: it need not happen.
    returned: int
    #: Why it cannot have happened at all; "": it can.
    flaw: str = ""

    #: Its effect cannot conflict with another step.
    is_harmless = True

    def refusal(self, _state: State) -> str:
        """Return the reason why it cannot happen in a state; "" if it can."""
        return self.flaw

    def applied(self, state: State) -> State:
        """Return the state after it."""
        return state


@dataclass(eq=False)
class Put(Step):
    """One record of an insert appears at a position."""

    gsn: int = 0
    held: Held = NOTHING
    #: Some other step must not see it: set once all steps are known.
    is_harmless: bool = True

    def refusal(self, state: State) -> str:
        if self.flaw:
            return self.flaw
        if self.gsn in state.held:
            return f"{self.gsn} holds {state.held[self.gsn]}"
        if self.gsn < state.closed:
            return f"{self.gsn} was passed by a reader or a trim, up to {state.closed}"
        if (self.gsn, self.held.shard) in state.never:
            return f"{self.gsn} was reported as empty for ever"
        return ""

    def applied(self, state: State) -> State:
        return state._replace(held=state.held | {self.gsn: self.held})


@dataclass(eq=False)
class Found(Step):
    """A read returned a record."""

    gsn: int = 0
    held: Held = NOTHING

    def refusal(self, state: State) -> str:
        return self.flaw or _differs(state, self.gsn, self.held)


@dataclass(eq=False)
class Missing(Step):
    """A read returned that there is no record."""

    gsn: int = 0
    shard: int = 0
    is_for_ever: bool = False

    def refusal(self, state: State) -> str:
        held = state.held.get(self.gsn)
        return f"{self.gsn} holds {held}" if held and held.shard == self.shard else ""

    def applied(self, state: State) -> State:
        # No order has both this step and a record there, so it conflicts with no other step.
        row = {(self.gsn, self.shard)} if self.is_for_ever else set()
        return state._replace(never=state.never | row)


@dataclass(eq=False)
class Passed(Step):
    """A fetch returned records, or the end."""

    subscription: int = 0
    #: Start of the subscription; None: unknown, and no record was returned.
    start: int | None = 1
    rows: list[tuple[int, Held]] = field(default_factory=list)
    #: All records below were returned, by this fetch or earlier ones.
    stop: int = 1

    is_harmless = False

    def position(self, state: State) -> int:
        """Return the subscription's position in a state."""
        start = self.stop if self.start is None else self.start
        return state.positions.get(self.subscription, start)

    def refusal(self, state: State) -> str:
        if self.flaw:
            return self.flaw
        position = self.position(state)
        for gsn, held in self.rows:
            if gsn < position:
                return f"{gsn} was returned by a subscription that is at {position}"
            if wrong := _differs(state, gsn, held):
                return wrong
            position = gsn + 1
        here = {gsn for gsn, _ in self.rows}
        start = self.position(state)
        missing = [g for g in state.held if start <= g < self.stop and g not in here]
        if missing:
            gsn = min(missing)
            return f"{gsn}, which holds {state.held[gsn]}, was passed and not returned"
        return ""

    def applied(self, state: State) -> State:
        if self.stop == 1:  # it passed nothing
            return state
        stop = max(self.stop, state.positions.get(self.subscription, 1))
        return state._replace(
            closed=max(state.closed, stop),
            positions=state.positions | {self.subscription: stop},
        )


@dataclass(eq=False)
class Trimming(Step):
    """A trim point is committed."""

    stop: int = 0

    is_harmless = False

    def applied(self, state: State) -> State:
        return state._replace(closed=max(state.closed, self.stop), trim=max(state.trim, self.stop))


@dataclass(eq=False)
class Sealing(Step):
    """A position is sealed: nothing appears up to it any more."""

    stop: int = 0
    #: The positions of the append's records, which have appeared before.
    gsns: tuple[int, ...] = ()

    is_harmless = False

    def refusal(self, state: State) -> str:
        if self.flaw:
            return self.flaw
        absent = [gsn for gsn in self.gsns if gsn not in state.held]
        return f"{absent[0]} holds nothing" if absent else ""

    def applied(self, state: State) -> State:
        return state._replace(closed=max(state.closed, self.stop))


@dataclass(eq=False)
class Refused(Step):
    """A read or subscription received `TrimmedError`."""

    first: int = 0
    #: The requested position; None: the subscription's position.
    gsn: int | None = None
    subscription: int = 0

    def refusal(self, state: State) -> str:
        gsn = state.positions.get(self.subscription, 0) if self.gsn is None else self.gsn
        if gsn >= self.first:
            return f"{gsn} is not below {self.first}"
        if state.trim < self.first:
            return f"the trim point is {state.trim}, not {self.first}"
        return ""


def _differs(state: State, gsn: int, held: Held) -> str:
    there = state.held.get(gsn)
    if there == held:
        return ""
    return f"{gsn} holds {there or 'nothing'}, not {held}"


# --- from operations to steps --------------------------------------------------------------------


def steps_of(operations: Sequence[Operation], lost: Sequence[tuple[int, int, int]]) -> list[Step]:
    """Return the steps of a history.

    Args:
        operations: of the history.
        lost: (shard, start, stop): steps at these positions are omitted.

    """
    return _Steps(operations, lost).steps


class _Steps:
    """Builder of a history's steps."""

    def __init__(
        self, operations: Sequence[Operation], lost: Sequence[tuple[int, int, int]]
    ) -> None:
        self.steps: Final[list[Step]] = []
        self._operations: Final = {o.number: o for o in operations}
        self._lost: Final = lost
        #: The first observed position of each record.
        self._seen: Final[dict[Contents, RecordId]] = {}
        #: (time, gsn) of completed inserts and trims.
        self._acked: Final[list[tuple[int, int]]] = []
        self._trimmed: Final[list[tuple[int, int]]] = []
        #: (time, gsn) of calls of trim.
        self._trims: Final[list[tuple[int, int]]] = []
        #: By insert: (time, rids) returned by `resolve`.
        self._resolved: Final[dict[int | None, list[tuple[int, list[RecordId | None]]]]] = {}
        self._is_anything_trimmed = False
        for operation in operations:
            self._note(operation)
        for operation in operations:
            if isinstance(operation.request, InsertRequest):
                self._insert(operation)
        for operation in operations:
            self._take(operation)

    def _note(self, operation: Operation) -> None:
        """Collect the facts that building steps needs."""
        result, at = operation.result, operation.returned
        self._is_anything_trimmed |= isinstance(result, TrimmedError)
        if isinstance(operation.request, TrimRequest):
            self._trims.append((operation.called, operation.request.rid.gsn))
        if at is None or isinstance(result, BaseException):
            return
        match operation.request:
            case ReadRequest():
                self._seen.setdefault(_contents(result), result.rid)
            case FetchRequest():
                for record in result.records:
                    self._seen.setdefault(_contents(record), record.rid)
            case ResolveRequest():
                self._resolved.setdefault(operation.of, []).append((at, result))
            case TrimRequest(rid=rid):
                self._trimmed.append((at, rid.gsn))

    def _is_lost(self, rid: RecordId) -> bool:
        return any(shard == rid.shard and a <= rid.gsn < b for shard, a, b in self._lost)

    def _highest(self, rows: Iterable[tuple[int, int]], before: int) -> int:
        return max((gsn for at, gsn in rows if at < before), default=0)

    # --- inserts ---

    def _insert(self, operation: Operation) -> None:
        """Add a step for each record with a known position."""
        request = operation.request
        assert isinstance(request, InsertRequest)
        answers, never = self._answers(operation)
        for at, rids in answers:
            if len(rids) != len(request.payloads):
                flaw = f"{len(rids)} rids for {len(request.payloads)} records"
                self.steps.append(Step(operation, operation.called, at, flaw))
                return
        before: RecordId | None = None
        for index, payload in enumerate(request.payloads):
            contents = (payload, request.key_of(index), request.timestamp_us)
            answered = [(at, rid) for at, rids in answers if (rid := rids[index]) is not None]
            at, rid = min(answered) if answered else (END, self._seen.get(contents))
            if rid is None:
                continue
            flaw = _misplaced(rid, request.after, before)
            if index in never:
                flaw = f"{payload!r} was reported as never in the log"
            elif others := {str(other) for _, other in answered} - {str(rid)}:
                flaw = f"{payload!r} was reported at {rid}, and at {others.pop()}"
            before = rid
            if answered:
                self._acked.append((at, 0 if self._is_lost(rid) else rid.gsn))
            if flaw or not self._is_lost(rid):
                held = Held(rid.shard, contents)
                self.steps.append(Put(operation, operation.called, at, flaw, rid.gsn, held))
        if request.sealed and isinstance(operation.result, list):
            self._seal(operation, operation.result)

    def _seal(self, operation: Operation, rids: Iterable[RecordId | None]) -> None:
        """Add the step of a call that returned sealed records."""
        gsns = [rid.gsn for rid in rids if rid is not None]
        kept = tuple(rid.gsn for rid in rids if rid is not None and not self._is_lost(rid))
        called, returned, stop = operation.called, operation.returned, max(gsns, default=0) + 1
        assert returned is not None
        self.steps.append(Sealing(operation, called, returned, "", stop, kept))

    def _answers(
        self, operation: Operation
    ) -> tuple[list[tuple[int, list[RecordId | None]]], set[int]]:
        """Return the times and rids of an insert's answers, and its never placed records."""
        result, at = operation.result, operation.returned
        resolved = self._resolved.get(operation.number, [])
        never = {i for _, rids in resolved for i, rid in enumerate(rids) if rid is None}
        if at is None:
            return resolved, never
        if not isinstance(result, BaseException):
            return [(at, result), *resolved], never
        rids: list[RecordId | None] = getattr(result, "results", None) or []
        if certainly_did_not_happen(result):
            assert isinstance(operation.request, InsertRequest)
            count = len(operation.request.payloads)
            never |= {i for i in range(count) if not rids or rids[i] is None}
        return [(at, rids), *resolved] if rids else resolved, never

    # --- other operations ---

    def _take(self, operation: Operation) -> None:
        """Add the steps of an operation that returned."""
        at, result = operation.returned, operation.result
        if isinstance(operation.request, TrimRequest):
            self._trim(operation, operation.request)
        elif at is None:
            return
        elif isinstance(result, TrimmedError):
            self._refused(operation, at, result)
        elif isinstance(operation.request, ReadRequest):
            self._read(operation, at, operation.request.rid)
        elif isinstance(result, BaseException):
            return
        elif isinstance(operation.request, FetchRequest):
            self._fetch(operation, at)
        elif isinstance(operation.request, TailRequest):
            floor = self._highest(self._acked, operation.called)
            is_kept = floor >= self._highest(self._trims, at)
            flaw = f"{floor} was acknowledged before" if result.gsn < floor and is_kept else ""
            self.steps.append(Step(operation, operation.called, at, flaw))
            if operation.request.sealed:
                self.steps.append(Sealing(operation, operation.called, at, "", result.gsn + 1))
        elif isinstance(operation.request, SealRequest):
            self.steps.append(Sealing(operation, operation.called, at, "", result.gsn + 1))
        elif isinstance(operation.request, ResolveRequest):
            request = self._operations[operation.of or 0].request
            if isinstance(request, InsertRequest) and request.sealed:
                self._seal(operation, result)

    def _read(self, operation: Operation, at: int, rid: RecordId) -> None:
        result, called = operation.result, operation.called
        if self._is_lost(rid):
            return
        if isinstance(result, NoSuchRecordError):
            is_for_ever = _NO_OP in str(result) or _NOT_OWNED in str(result)
            self.steps.append(Missing(operation, called, at, "", rid.gsn, rid.shard, is_for_ever))
        elif not isinstance(result, BaseException):
            flaw = "" if result.rid == rid else f"{result.rid} was not requested"
            trim = self._highest(self._trimmed, called)
            if rid.gsn < trim:
                flaw = f"{trim} was trimmed before"
            held = Held(rid.shard, _contents(result))
            self.steps.append(Found(operation, called, at, flaw, rid.gsn, held))

    def _fetch(self, operation: Operation, at: int) -> None:
        result, subscribing = operation.result, self._subscription(operation)
        request = subscribing.request
        assert isinstance(request, SubscribeRequest)
        if request.shards is not None:
            self._fetch_of_shards(operation, at)
            return
        gsns = [record.rid.gsn for record in result.records]
        start, stop = _start(request), max(gsns, default=0) + 1
        if result.ended:
            # A subscription that starts after the end of the log ends without a request.
            floor = self._highest(self._acked, subscribing.called)
            stop = max(stop, floor + 1 if start is None or start <= floor else 1)
        elif not gsns:
            return
        trim = self._highest(self._trimmed, subscribing.called)
        flaw = f"{trim} was trimmed before" if min(gsns, default=END) < trim else ""
        rows = [
            (record.rid.gsn, Held(record.rid.shard, _contents(record)))
            for record in result.records
            if not self._is_lost(record.rid)
        ]
        if start is None and gsns:
            start = gsns[0]
        number = subscribing.number
        self.steps.append(Passed(operation, operation.called, at, flaw, number, start, rows, stop))

    def _fetch_of_shards(self, operation: Operation, at: int) -> None:
        """Add a step for each record: what else is below them is another shard's, or nothing.

        The rules of tests/history judge what such a subscription passes without a record.
        """
        trim = self._highest(self._trimmed, self._subscription(operation).called)
        for record in operation.result.records:
            gsn, shard = record.rid
            flaw = f"{trim} was trimmed before" if gsn < trim else ""
            if not self._is_lost(record.rid):
                held = Held(shard, _contents(record))
                self.steps.append(Found(operation, operation.called, at, flaw, gsn, held))

    def _trim(self, operation: Operation, request: TrimRequest) -> None:
        result, returned = operation.result, operation.returned
        if returned is None or isinstance(result, BaseException):
            did_nothing = isinstance(result, UnavailableError | NoSuchRecordError | ConfigError)
            if did_nothing and not isinstance(result, DeadlineError):
                return
            returned = END
        if returned != END or self._is_anything_trimmed:
            self.steps.append(Trimming(operation, operation.called, returned, "", request.rid.gsn))

    def _refused(self, operation: Operation, at: int, error: TrimmedError) -> None:
        request, called, number = operation.request, operation.called, 0
        gsn: int | None = None
        if isinstance(request, ReadRequest):
            gsn = request.rid.gsn
        elif isinstance(request, SubscribeRequest):
            gsn = _start(request)
        else:
            number = self._subscription(operation).number
        self.steps.append(Refused(operation, called, at, "", error.first.gsn, gsn, number))

    def _subscription(self, operation: Operation) -> Operation:
        assert operation.of is not None, "a fetch of no subscription"
        return self._operations[operation.of]


def _contents(record: Record) -> Contents:
    return record.payload, record.key, record.timestamp_us


def _start(request: SubscribeRequest) -> int | None:
    return None if request.start.gsn < 0 else max(request.start.gsn, 1)


def _misplaced(rid: RecordId, after: RecordId, before: RecordId | None) -> str:
    """Return the error in a record's position relative to its call; "" if there is none."""
    if rid.gsn <= after.gsn:
        return f"{rid} is not after {after}"
    if before is not None and rid.gsn <= before.gsn:
        return f"{rid} is not after {before}, where the record before it in its call is"
    if before is not None and rid.shard != before.shard:
        return f"{rid} is not at the shard of {before}"
    return ""
