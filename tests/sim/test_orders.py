"""Comparison of the linearizability search with a search of all orders on a second model."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.sim.linearizability import explain
from tests.sim.stories import Story, empty, no_op, record, rid, unknown
from ziplog.client.common.requests import (
    Fetched,
    FetchRequest,
    InsertRequest,
    ReadRequest,
    SealRequest,
    SubscribeRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.errors import DeadlineError, NoSuchRecordError, TrimmedError, UnavailableError
from ziplog.types import Record

if TYPE_CHECKING:
    from tests.sim.history import Operation

#: The return time of an operation without a result.
FOREVER = 10**9


class Log:
    """A second, simpler model of the log."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.sealed = 0  # up to here, inclusive
        self.empty: set[int] = set()
        self.trim = 0
        self.handed_out: dict[int, int] = {}

    def copy(self) -> Log:
        other = Log()
        other.records, other.empty = dict(self.records), set(self.empty)
        other.sealed, other.trim = self.sealed, self.trim
        other.handed_out = dict(self.handed_out)
        return other

    def put(self, gsn: int, payload: bytes) -> bool:
        if gsn in self.records or gsn <= self.sealed or gsn in self.empty:
            return False
        self.records[gsn] = payload
        return True

    def read(self, gsn: int, result: Any) -> bool:
        if isinstance(result, TrimmedError):
            return gsn < result.first.gsn <= self.trim
        if isinstance(result, NoSuchRecordError):
            if "no-op" in str(result):
                self.empty.add(gsn)
            return gsn not in self.records
        return self.records.get(gsn) == result.payload

    def seal(self, gsns: list[int]) -> bool:
        self.sealed = max([self.sealed, *gsns])
        return all(gsn in self.records for gsn in gsns)

    def close(self, gsn: int) -> bool:
        self.sealed = max(self.sealed, gsn)
        return True

    def fetch(self, number: int, start: int, result: Fetched, highest: int) -> bool:
        given = [(r.rid.gsn, r.payload) for r in result.records]
        knows_start = start >= 0 or number in self.handed_out or given
        start = self.handed_out.get(number, given[0][0] if start < 0 and given else start)
        end = given[-1][0] if given else 0
        if result.ended and start <= highest:
            end = max(end, highest)
        due = sorted((g, p) for g, p in self.records.items() if start <= g <= end)
        self.sealed = max(self.sealed, end)
        if end:
            self.handed_out[number] = max(start, end + 1)
        return due == given or not knows_start


def tries_all_orders(operations: list[Operation]) -> bool:
    """Whether some order, with some outcome of unknown operations, explains all results."""
    done = [o for o in operations if o.returned is not None]
    acked: list[tuple[int, int]] = [
        (o.returned or 0, r.gsn)
        for o in done
        if isinstance(o.request, InsertRequest) and isinstance(o.result, list)
        for r in o.result
    ]
    trims = [
        (o.returned or 0, o.request.rid.gsn)
        for o in done
        if isinstance(o.request, TrimRequest) and o.result is None
    ]
    moments: list[tuple[int, int, Any]] = []  # called, returned, effect
    fates: list[tuple[int, Any]] = []  # unknown outcomes: called, possible effect

    def highest(rows: list[tuple[int, int]], before: int) -> int:
        return max((gsn for at, gsn in rows if at < before), default=0)

    for o in operations:
        result, request = o.result, o.request
        end = FOREVER if o.returned is None else o.returned
        match request:
            case InsertRequest() if isinstance(result, list):
                gsns = [r.gsn for r in result]
                if gsns != sorted(set(gsns)) or gsns[0] <= request.after.gsn:
                    return False
                moments += [
                    (o.called, end, lambda log, g=g, p=p: log.put(g, p))
                    for g, p in zip(gsns, request.payloads, strict=True)
                ]
                if request.sealed:
                    moments.append((o.called, end, lambda log, g=gsns: log.seal(g)))
            case SealRequest(rid=at) if end != FOREVER:
                moments.append((o.called, end, lambda log, g=at.gsn: log.close(g)))
            case InsertRequest() if not isinstance(result, UnavailableError):
                low = request.after.gsn + 1
                (payload,) = request.payloads
                fates.append((o.called, [
                    lambda log, g=g, p=payload: log.put(g, p) for g in range(low, 7)
                ]))  # fmt: skip
            case ReadRequest(rid=at) if end != FOREVER and not isinstance(result, DeadlineError):
                if isinstance(result, Record) and at.gsn < highest(trims, o.called):
                    return False
                moments.append((o.called, end, lambda log, g=at.gsn, r=result: log.read(g, r)))
            case FetchRequest() if end != FOREVER:
                assert o.of is not None
                begun = operations[o.of]
                assert isinstance(begun.request, SubscribeRequest)
                start, floor = begun.request.start.gsn, highest(acked, begun.called)
                first = min((r.rid.gsn for r in result.records), default=FOREVER)
                if first < highest(trims, begun.called):
                    return False
                start = start if start < 0 else max(start, 1)
                moments.append((
                    o.called, end,
                    lambda log, n=o.of, s=start, r=result, f=floor: log.fetch(n, s, r, f),
                ))  # fmt: skip
            case TailRequest(sealed=sealed) if end != FOREVER:
                asked = [(t.called, t.request.rid.gsn) for t in operations if _is_trim(t)]
                floor = highest(acked, o.called)
                if result.gsn < floor >= highest(asked, end):
                    return False
                if sealed:
                    moments.append((o.called, end, lambda log, g=result.gsn: log.close(g)))
            case TrimRequest(rid=at):

                def trim(log: Log, gsn: int = at.gsn) -> bool:
                    log.trim = max(log.trim, gsn)
                    log.sealed = max(log.sealed, gsn - 1)
                    return True

                if result is None:
                    moments.append((o.called, end, trim))
                else:
                    fates.append((o.called, [trim]))

    def go_on(log: Log, left: list[int], open_fates: list[int]) -> bool:
        if not left:
            return True
        first_end = min(moments[i][1] for i in left)
        for i in left:
            called, _, act = moments[i]
            after = log.copy()
            if (
                called <= first_end
                and act(after)
                and go_on(after, [j for j in left if j != i], open_fates)
            ):
                return True
        for i in open_fates:
            called, acts = fates[i]
            for act in acts if called <= first_end else ():
                after = log.copy()
                if act(after) and go_on(after, left, [j for j in open_fates if j != i]):
                    return True
        return False

    return go_on(Log(), list(range(len(moments))), list(range(len(fates))))


def tiny(seed: int) -> list[Operation]:
    """Return a short history of a correct log with up to three changes."""
    random = Random(seed)
    story, log = Story(), Log()
    number = story.subscribe(-9, -8, random.choice((-1, 0, 2)), follow=random.random() < 0.5)
    handed_out: list[int] = []
    payloads = iter(b"abcdefgh")
    count = random.randint(2, 6)
    for index in range(count):
        point = 100 * (index + 1)
        called = point - random.randint(1, 250)
        returned = point + random.randint(1, 250)
        match random.choice(
            ("insert", "insert", "insert", "read", "read", "fetch", "trim", "tail", "seal")
        ):
            case "insert":
                _tiny_insert(random, story, log, called, returned, next(payloads))
            case "read":
                gsn = random.randint(1, 5)
                result: Any = log.records.get(gsn, empty(gsn))
                if isinstance(result, NoSuchRecordError) and random.random() < 0.3:
                    result = no_op(gsn)
                    log.empty.add(gsn)
                if gsn < log.trim:
                    result = TrimmedError(rid(log.trim))
                story.read(called, returned, gsn, result)
            case "fetch":
                start = story.operations[number].request.start.gsn
                low = max([start, *(g + 1 for g in handed_out), 1])
                rows = sorted(row for row in log.records.items() if row[0] >= low)[:2]
                ended = not rows and random.random() < 0.5
                handed_out += [gsn for gsn, _ in rows]
                log.sealed = max([log.sealed, *(gsn for gsn, _ in rows)])
                story.fetch(called, returned, number, *rows, ended=ended)
            case "trim":
                gsn = random.randint(1, 4)
                log.trim = max(gsn, log.trim)
                log.sealed = max(gsn - 1, log.sealed)
                late = DeadlineError("late") if random.random() < 0.3 else None
                story.trim(called, returned if random.random() < 0.8 else None, gsn, late)
            case "tail":
                gsn, sealed = max(log.records, default=0), random.random() < 0.5
                log.sealed = max(log.sealed, gsn * sealed)
                story.tail(called, returned, gsn, sealed=sealed)
            case "seal":
                gsn = random.randint(1, 4)
                log.sealed = max(log.sealed, gsn)
                story.seal(called, returned, gsn)
    operations = story.operations
    for _ in range(random.choice((0, 1, 2, 3))):
        _change(random, operations)
    return _apart(operations)


def _tiny_insert(
    random: Random, story: Story, log: Log, called: int, returned: int, payload: int
) -> None:
    gsns = [
        g for g in range(1, 6) if g > log.sealed and g not in log.records | dict.fromkeys(log.empty)
    ]
    contents = bytes([payload])
    if not gsns or random.random() < 0.1:
        story.insert(called, returned, contents, UnavailableError("full"))
        return
    gsn = random.choice(gsns)
    after = random.choice((0, gsn - 1))
    fate = random.random()
    if fate < 0.85:
        log.records[gsn] = contents
    if fate < 0.65:
        sealed = random.random() < 0.4
        log.sealed = max(log.sealed, gsn * sealed)
        story.insert(called, returned, contents, [gsn], after, sealed=sealed)
    else:
        story.insert(called, returned if fate < 0.9 else None, contents, unknown(), after)


def _change(random: Random, operations: list[Operation]) -> None:
    """Change an operation's result, or its time."""
    index = random.randrange(1, len(operations))
    o = operations[index]
    result = o.result
    if o.returned is None or isinstance(o.request, TrimRequest) or random.random() < 0.25:
        by = random.randint(-300, 300)
        end = None if o.returned is None else o.returned + by
        operations[index] = replace(o, called=o.called + by, returned=end)
        return
    match o.request:
        case InsertRequest():
            result = [rid(random.randint(1, 5))]
        case ReadRequest(rid=at):
            result = random.choice((
                empty(at.gsn), no_op(at.gsn), TrimmedError(rid(at.gsn + 1)),
                record(at.gsn, bytes([random.choice(b"abc")])),
            ))  # fmt: skip
        case FetchRequest():
            gsns = sorted(random.sample(range(1, 6), random.randint(0, 2)))
            records = [record(g, bytes([random.choice(b"abc")])) for g in gsns]
            result = Fetched(random.choice((records, result.records[1:])), ended=not gsns)
        case TailRequest():
            result = rid(random.randint(0, 3))
    operations[index] = replace(o, result=result)


def _is_trim(operation: Operation) -> bool:
    return isinstance(operation.request, TrimRequest)


def _apart(operations: list[Operation]) -> list[Operation]:
    """Return the same operations with distinct times."""
    moments = sorted(
        [(o.called if o.number else -1000, o.number, 0) for o in operations]
        + [
            (o.returned if o.number else -999, o.number, 1)
            for o in operations
            if o.returned is not None
        ]
    )
    at = {(number, kind): index for index, (_, number, kind) in enumerate(moments)}
    return [
        replace(
            o,
            called=at[o.number, 0],
            returned=None if o.returned is None else at[o.number, 1],
        )
        for o in operations
    ]


def agrees(seed: int) -> bool:
    """Compare the search with all orders; return the common result."""
    operations = tiny(seed)
    explanation = explain(operations)
    expected = tries_all_orders(operations)
    text = "\n".join(map(str, operations))
    assert (explanation is None) == expected, f"seed {seed}:\n{text}\n{explanation}"
    return expected


@examples(300)
@given(st.integers(min_value=0, max_value=2**32))
def test_the_search_agrees_with_trying_all_orders(seed: int) -> None:
    agrees(seed)


def test_both_answers_are_common() -> None:
    found = [agrees(seed) for seed in range(300)]
    assert 60 < sum(found) < 240
