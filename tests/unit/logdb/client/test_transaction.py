"""Transactions above the core: their reads and writes, and their ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb import wire
from logdb.client import arguments
from logdb.client.requests import CommitRequest, GetRequest, ScanRequest, ValidateRequest
from logdb.client.scanning import OpenScan
from logdb.client.transaction import TransactionScan, TransactionSets
from logdb.errors import TooManyReadsError, TransactionAborted, TransactionClosed
from logdb.values import decode_value
from tests.properties import examples
from tests.unit.logdb.client.fakes import FakeDatabase, v
from tests.unit.ziplog.client.fakes import S
from ziplog.core.entries import decode_body
from ziplog.errors import (
    DeadlineError,
    OutcomeUnknownError,
    RecordTooLargeError,
    UnavailableError,
)
from ziplog.types import RecordId

LARGEST = 1 << 20


@pytest.fixture
def db() -> FakeDatabase:
    return FakeDatabase().open()


def get(db: FakeDatabase, sets: TransactionSets, *keys: bytes) -> list[bytes | None]:
    return db.drive(sets.get(keys, db.harness.until()))


def scan(db: FakeDatabase, sets: TransactionSets, **bounds: Any) -> list[tuple[Any, Any]]:
    asked = arguments.bounds(
        bounds.get("start"), bounds.get("stop"), bounds.get("prefix"), bounds.get("limit")
    )
    rows: list[tuple[Any, Any]] = []
    start: bytes | None = None if asked.is_empty else asked.start
    left = asked.limit
    while start is not None and left != 0:
        page, start = db.drive(sets.page(asked, start, left, db.harness.until()))
        left = None if left is None else left - len(page)
        rows += map(asked.row, page)
    return rows


def commit(db: FakeDatabase, sets: TransactionSets) -> RecordId | None:
    db.drive(sets.commit(db.harness.until()))
    return sets.position


def asked(db: FakeDatabase) -> list[Any]:
    kinds = (wire.Get, wire.Scan, wire.Validate)
    return [message for message in db.first.received if isinstance(message, kinds)]


# --- reading ---


def test_own_writes_and_repeated_reads_need_no_request(db: FakeDatabase) -> None:
    db.put(b"k", 1)
    sets = TransactionSets(LARGEST)
    sets.write(b"mine", v(2))
    assert get(db, sets, b"mine", b"k", b"k", b"absent") == [v(2), v(1), v(1), None]
    assert [message.keys for message in asked(db)] == [[b"k", b"absent"]]
    sets.write(b"k", None)
    assert get(db, sets, b"k", b"absent", b"mine") == [None, None, v(2)]
    assert len(asked(db)) == 1


def test_each_read_is_validated_against_all_earlier_ones(db: FakeDatabase) -> None:
    db.put(b"a", 1)
    sets = TransactionSets(LARGEST)
    get(db, sets, b"a")
    scan(db, sets, prefix=b"x")
    get(db, sets, b"b")
    last = asked(db)[-1]
    assert [read.key for read in last.reads] == [b"a"]
    assert [(r.start, r.stop) for r in last.ranges] == [(b"x", b"y")]
    rid = db.write(b"a", 2)
    db.run(lambda: db.first.passed >= rid.gsn)
    with pytest.raises(TransactionAborted):
        get(db, sets, b"c")
    assert sets.status == "aborted"
    with pytest.raises(TransactionClosed):
        get(db, sets, b"a")
    # The error cannot be suppressed: leaving the block raises it again.
    assert sets.is_undecided
    with pytest.raises(TransactionAborted):
        commit(db, sets)
    sets.rollback()


def test_reads_of_two_tasks_are_validated_against_each_other(db: FakeDatabase) -> None:
    db.put(b"a", 1)
    sets = TransactionSets(LARGEST)
    one, two = (sets.get([key], db.harness.until()) for key in (b"a", b"b"))
    first, second = next(one), next(two)
    answer = db.result(db.harness.call(second))
    other = db.result(db.harness.call(first))
    with pytest.raises(StopIteration):
        two.send(answer)
    # The other task's reply was not validated against this read, so it is requested again.
    again = one.send(other)
    assert isinstance(again, GetRequest)
    assert [read.key for read in again.reads] == [b"b"]


def test_exists_in_a_transaction(db: FakeDatabase) -> None:
    db.put(b"k", 1)
    sets = TransactionSets(LARGEST)

    def exists(key: bytes) -> bool:
        return db.drive(sets.exists(key, db.harness.until()))

    assert exists(b"k")
    assert not exists(b"l")
    sets.write(b"l", v(1))
    sets.write(b"k", None)
    assert exists(b"l")
    assert not exists(b"k")
    assert len(asked(db)) == 2
    # The version is known, the value is not.
    other = TransactionSets(LARGEST)
    db.drive(other.exists(b"k", db.harness.until()))
    assert get(db, other, b"k") == [v(1)]
    assert len(next(other.validate(0)).reads) == 1, "a key is in the read set once"
    assert [read.key for read in asked(db)[-1].reads] == [b"k"]


# --- ends ---


def test_a_transaction_commits_what_it_read_and_wrote(db: FakeDatabase) -> None:
    sets = TransactionSets(LARGEST)
    get(db, sets, b"k")
    sets.write(b"k", v(1))
    assert commit(db, sets) == RecordId(db.log[-1][0], sets.position.shard)  # type: ignore[union-attr]
    assert sets.status == "committed"
    assert db.get(b"k") == [v(1)]
    for use in (lambda: sets.write(b"k", v(2)), lambda: commit(db, sets)):
        with pytest.raises(TransactionClosed, match="committed"):
            use()
    # It may stand in a `finally`.
    sets.rollback()
    assert sets.status == "committed"


def test_a_read_only_transaction_is_validated_at_its_end(db: FakeDatabase) -> None:
    db.put(b"k", 1)
    sets = TransactionSets(LARGEST)
    get(db, sets, b"k")
    assert commit(db, sets) == db.first.state.position
    assert len(db.commits()) == 1
    late = TransactionSets(LARGEST)
    get(db, late, b"k")
    db.put(b"k", 2)
    with pytest.raises(TransactionAborted):
        commit(db, late)


def test_an_empty_transaction_sends_nothing() -> None:
    sets = TransactionSets(LARGEST)
    assert list(sets.commit(0)) == []
    assert sets.status == "committed"


def test_a_rollback_leaves_nothing(db: FakeDatabase) -> None:
    sets = TransactionSets(LARGEST)
    sets.write(b"k", v(1))
    sets.rollback()
    sets.rollback()
    assert not sets.is_undecided
    with pytest.raises(TransactionClosed, match="rolled back"):
        commit(db, sets)
    assert db.get(b"k") == [None]


def test_a_reply_after_the_end_of_a_transaction_is_no_read(db: FakeDatabase) -> None:
    sets = TransactionSets(LARGEST)
    read = sets.get([b"k"], db.harness.until())
    reply = db.result(db.harness.call(next(read)))
    sets.rollback()
    with pytest.raises(TransactionClosed, match="rolled back"):
        read.send(reply)


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_read_beside_a_commit_does_not_abort_it(db: FakeDatabase, is_committed: bool) -> None:
    """The reply may report the transaction's own write as a conflict."""
    sets = TransactionSets(LARGEST)
    get(db, sets, b"k")
    sets.write(b"k", v(1))
    read, end = sets.get([b"l"], db.harness.until()), sets.commit(db.harness.until())
    asked, commit = next(read), next(end)
    rid = db.result(db.harness.call(commit))
    conflict = db.result(db.harness.call(asked))
    assert isinstance(conflict, TransactionAborted)
    if is_committed:
        with pytest.raises(StopIteration):
            end.send(rid)
    with pytest.raises(TransactionClosed):
        read.throw(conflict)
    assert sets.status == ("committed" if is_committed else "committing")
    assert not sets.is_undecided


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnavailableError("no"), "open"),
        (DeadlineError("nothing was written"), "open"),
        (RecordTooLargeError(9, 8), "open"),
        (TransactionAborted([b"k"]), "aborted"),
        (OutcomeUnknownError("?", shard=0, seq=1), "in doubt"),
        (KeyboardInterrupt(), "in doubt"),
    ],
)
def test_the_status_after_a_failed_commit(error: BaseException, status: str) -> None:
    sets = TransactionSets(LARGEST)
    sets.write(b"k", v(1))
    steps = sets.commit(0)
    assert isinstance(next(steps), CommitRequest)
    with pytest.raises(TransactionClosed, match="committing"):
        sets.write(b"l", v(2))
    with pytest.raises(TransactionClosed, match="committing"):
        sets.rollback()
    with pytest.raises(type(error)):
        steps.throw(error)
    assert sets.status == status


def test_an_oversized_write_is_refused_immediately(db: FakeDatabase) -> None:
    sets = TransactionSets(LARGEST)
    with pytest.raises(RecordTooLargeError):  # noqa: PT012 - one of many is too many
        for number in range(10_000):
            sets.write(b"%01000d" % number, b"")
    commit(db, sets)
    assert db.commits()[-1].writes
    sets = TransactionSets(LARGEST)
    with pytest.raises(RecordTooLargeError):
        get(db, sets, *(b"%01000d" % number for number in range(2000)))
    with pytest.raises(TooManyReadsError, match=r"10001 keys.* limit is 10000"):
        get(db, sets, *(b"%d" % number for number in range(10_001)))
    assert sets.status == "open"


@examples(25)
@given(
    keys=st.lists(st.binary(max_size=1024), unique=True, max_size=60),
    reads=st.integers(0, 60),
    sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=5),
)
def test_a_record_is_at_most_its_counted_size(
    keys: list[bytes], reads: int, sizes: list[int]
) -> None:
    """What `Sizes` lets through fits: here, the limit is just what it counted."""
    db = FakeDatabase().open()
    sets = TransactionSets(LARGEST)
    if keys:
        get(db, sets, *keys[:reads])
    for number, key in enumerate(keys[reads:]):
        sets.write(key, bytes(sizes[number % len(sizes)]))
    commit(db, sets)
    counted = sets._sizes._size
    for _, insert in [(None, insert) for insert in db.inserts[-1:]]:
        payload = decode_body(insert.body, 1).payloads[0]
        inline = sum(len(w.value or b"") + 16 for w in db.commits()[-1].writes if w.value)
        assert len(payload) <= counted + inline


# --- scans ---


KEYS = st.binary(max_size=3)
ROWS = st.dictionaries(KEYS, st.integers(0, 100), max_size=25)


@examples(60)
@given(
    stored=ROWS,
    written=st.dictionaries(KEYS, st.none() | st.integers(0, 100), max_size=10),
    start=st.none() | KEYS,
    stop=st.none() | KEYS,
    prefix=st.none() | KEYS,
    limit=st.none() | st.integers(0, 30),
    page=st.integers(1, 8),
)
def test_scans_return_the_rows_of_a_sorted_dictionary(
    stored: dict[bytes, int],
    written: dict[bytes, int | None],
    start: bytes | None,
    stop: bytes | None,
    prefix: bytes | None,
    limit: int | None,
    page: int,
) -> None:
    db = FakeDatabase().open()
    if stored:
        db.drive(_put(db, stored))
    if prefix is not None:
        start = stop = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logdb.client.transaction.PAGE_ROWS", page)
        patch.setattr("logdb.client.scanning.PAGE_ROWS", page)
        bounds = arguments.bounds(start, stop, prefix, limit)
        outside = OpenScan(bounds, db.harness.until)
        found = []
        while not outside.is_over:
            found += [bounds.row(row) for row in db.drive(outside.page())]
        for request in outside.close():
            db.result(db.harness.call(request))
        assert found == _expected(stored, start, stop, prefix, limit)
        sets = TransactionSets(LARGEST)
        for key, value in written.items():
            sets.write(key, None if value is None else v(value))
        merged = {k: x for k, x in (stored | written).items() if x is not None}
        rows = scan(db, sets, start=start, stop=stop, prefix=prefix, limit=limit)
        wanted = _expected(merged, start, stop, prefix, limit)
        is_bytes = any(bound is not None for bound in (start, stop, prefix))
        assert rows == wanted, is_bytes
        db.drive(sets.commit(db.harness.until()))


def _put(db: FakeDatabase, values: dict[bytes, int]) -> Any:
    sets = TransactionSets(LARGEST)
    for key, value in values.items():
        sets.write(key, v(value))
    return sets.commit(db.harness.until())


def _expected(
    values: dict[bytes, int],
    start: bytes | None,
    stop: bytes | None,
    prefix: bytes | None,
    limit: int | None,
) -> list[tuple[Any, Any]]:
    rows = [
        (key, value)
        for key, value in sorted(values.items())
        if (start is None or key >= start)
        and (stop is None or key < stop)
        and (prefix is None or key.startswith(prefix))
    ]
    is_bytes = any(bound is not None for bound in (start, stop, prefix))
    shown = [(k if is_bytes else k.decode(errors="surrogateescape"), x) for k, x in rows]
    return shown[:limit]


def test_a_long_scan_reads_one_state(db: FakeDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdb.client.scanning.PAGE_ROWS", 2)
    for key in (b"a", b"b", b"c", b"d", b"e"):
        db.put(key, 1)
    scanning = OpenScan(arguments.bounds(None, None, None, None), db.harness.until)
    rows = db.drive(scanning.page())
    db.put(b"b", 2)
    db.put(b"d", 2)
    db.put(b"z", 2)
    while not scanning.is_over:
        rows += db.drive(scanning.page())
    assert [(key, decode_value(value)) for key, value in rows] == [
        (key, 1) for key in (b"a", b"b", b"c", b"d", b"e")
    ]
    kept = scanning.snapshot
    (drop,) = scanning.close()
    assert kept == drop.snapshot
    assert not scanning.close()


@pytest.mark.parametrize("closed_at", [1, 2, 3])
def test_a_scan_that_is_closed_while_it_waits_leaves_no_snapshot(
    db: FakeDatabase, monkeypatch: pytest.MonkeyPatch, closed_at: int
) -> None:
    monkeypatch.setattr("logdb.client.scanning.PAGE_ROWS", 2)
    for key in (b"a", b"b", b"c"):
        db.put(key, 1)
    scanning = OpenScan(arguments.bounds(None, None, None, None), db.harness.until)

    def steps() -> Any:
        requests, result, count = scanning.page(), None, 0
        while True:
            try:
                request = requests.send(result)
            except StopIteration as end:
                return end.value
            count += 1
            result = yield request
            if count == closed_at:
                yield from scanning.close()

    assert db.drive(steps()) == []
    assert scanning.is_over
    assert not scanning.close()
    db.run(lambda: len(db.first.snapshots) == 0)


def test_a_closed_scan_of_a_transaction_stays_closed(db: FakeDatabase) -> None:
    db.put(b"a", 1)
    sets = TransactionSets(LARGEST)
    bounds = arguments.bounds(None, None, None, None)
    scanning = TransactionScan(sets, bounds, db.harness.until)
    steps = scanning.page()
    reply = db.do(lambda _: next(steps))
    scanning.close()
    with pytest.raises(StopIteration) as end:
        steps.send(reply)
    assert end.value.value == []
    assert scanning.is_over


def test_a_short_scan_is_one_request(db: FakeDatabase) -> None:
    db.put(b"a", 1)
    scanning = OpenScan(arguments.bounds(None, None, None, None), db.harness.until)
    assert db.drive(scanning.page()) == [(b"a", v(1))]
    assert scanning.is_over
    assert not scanning.close()
    (message,) = asked(db)
    assert isinstance(message, wire.Scan)
    assert message.fresh


def test_a_write_at_the_end_of_a_range_is_no_row_of_it(db: FakeDatabase) -> None:
    sets = TransactionSets(LARGEST)
    sets.write(b"b", v(1))
    sets.write(b"c", v(2))
    assert scan(db, sets, start=b"a", stop=b"c") == [(b"b", 1)]


def test_phantoms_abort(db: FakeDatabase) -> None:
    db.put(b"a1", 1)
    sets = TransactionSets(LARGEST)
    assert scan(db, sets, prefix="a") == [("a1", 1)]
    sets.write(b"sum", v(1))
    db.put(b"b", 1)
    db.put(b"a2", 1)
    with pytest.raises(TransactionAborted):
        commit(db, sets)


def test_requests_carry_their_deadline(db: FakeDatabase) -> None:
    until = db.harness.until(3 * S)
    sets = TransactionSets(LARGEST)
    request = next(sets.get([b"k"], until))
    assert request.deadline == until
    request = next(sets.page(arguments.bounds(None, None, None, None), b"", None, until))
    assert isinstance(request, ScanRequest)
    assert request.deadline == until
    get(db, sets, b"k")
    request = next(sets.commit(until))
    assert isinstance(request, ValidateRequest)
    assert request.deadline == until
