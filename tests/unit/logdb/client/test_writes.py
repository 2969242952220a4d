"""A database's client: its writes, and their conflicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logdb import records
from logdb.client.arguments import READ_BYTES, WRITE_BYTES, Sizes
from logdb.client.requests import (
    CommitRequest,
    CompareAndPutRequest,
    GetRequest,
    PutRequest,
    ScanRequest,
)
from logdb.errors import TransactionAborted
from logdb.records import KeyRead, RangeRead
from tests.unit.logdb.client.fakes import FakeDatabase, v
from tests.unit.ziplog.client.fakes import MS
from ziplog import wire as log_wire
from ziplog.errors import RecordTooLargeError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def db() -> FakeDatabase:
    return FakeDatabase().open()


def sent(db: FakeDatabase) -> list[str]:
    """Return the kinds of what was sent, and not looked at; the rest of the log's upkeep aside."""
    return [type(message).__name__ for _, message in db.harness.sent]


def test_nothing_is_written_without_a_live_coordinator(db: FakeDatabase) -> None:
    db.first.is_dead = True
    db.harness.pass_time(100 * MS)
    with pytest.raises(UnavailableError, match="nothing was written"):
        db.put(b"k", 1)
    assert not db.inserts


def test_an_idle_period_costs_one_liveness_probe(db: FakeDatabase) -> None:
    db.harness.pass_time(100 * MS)
    calls = [db.begin(PutRequest, {b"k%d" % number: v(number)}) for number in range(3)]
    assert sent(db) == ["Open"]
    for call in calls:
        db.end(call)
    assert len(db.commits()) == 3


def test_large_values_are_inserted_first_and_small_ones_inlined(
    db: FakeDatabase,
) -> None:
    values = {b"large%d" % number: b"x" * 100_000 for number in range(4)} | {b"small": b"y"}
    rid = db.do(PutRequest, values)
    *stored, last = [records.decode(payload) for _, payload in db.log]
    assert all(isinstance(record, records.Value) for record in stored)
    assert isinstance(last, records.Commit)
    assert [w.key for w in last.writes if w.value is not None] == [b"small"]
    assert all(w.rid < rid for w in last.writes if w.rid is not None)
    # Not by chance.
    assert db.inserts[-1].after == max(w.rid.gsn for w in last.writes if w.rid is not None)
    assert db.get(b"large3", b"small") == [b"x" * 100_000, b"y"]


def test_a_large_value_is_inserted_after_the_reads(db: FakeDatabase) -> None:
    for number in range(5):
        found = db.do(GetRequest, [b"k"])
        reads = [KeyRead(b"k", found.versions[0])]
        db.inserts.clear()
        db.do(CommitRequest, reads, [], {b"k": bytes([number]) * 50_000})
        # A further copy may be one of an earlier commit, which a coordinator completed.
        made = [insert for insert in db.inserts if insert.copy == 1]
        assert made
        assert all(insert.after >= found.versions[0] for insert in made)
    assert db.harness.core.stats()["aborts"] == 0


def test_an_overtaken_blind_write_is_retried(db: FakeDatabase) -> None:
    overtaken = False

    def overtake() -> None:
        nonlocal overtaken
        if not overtaken and len(db.log) == 1:
            overtaken = True
            db.write(b"k", "faster")

    serve = db.serve

    def spy(name: str, message: Any) -> None:
        serve(name, message)
        overtake()

    db.serve = spy  # type: ignore[method-assign]
    db.do(PutRequest, {b"k": b"x" * 50_000})
    assert db.get(b"k") == [b"x" * 50_000]
    assert db.harness.core.stats()["repeated_puts"] == 1


def test_a_conflict_aborts_and_names_the_key(db: FakeDatabase) -> None:
    db.put(b"k", 1)
    call = db.increment(b"k")
    db.write(b"k", 7)
    db.first.is_stuck = False
    reads = [KeyRead(b"k", 1)]
    with pytest.raises(TransactionAborted) as caught:
        db.do(CommitRequest, reads, [], {b"k": v(2)})
    assert caught.value.conflicts == [b"k"]
    db.result(call)


def test_a_range_that_changed_aborts(db: FakeDatabase) -> None:
    db.put(b"a", 1)
    page = db.do(ScanRequest, b"", None, 10)
    db.put(b"b", 1)
    with pytest.raises(TransactionAborted):
        db.do(CommitRequest, [], [page.range], {b"c": v(1)})
    fresh = db.do(ScanRequest, b"", None, 10)
    assert isinstance(fresh.range, RangeRead)
    db.do(CommitRequest, [], [fresh.range], {b"c": v(1)})


def test_a_value_is_separate_if_the_record_is_full(db: FakeDatabase) -> None:
    reads = [KeyRead(b"%01000d" % number, 0) for number in range(1030)]
    sizes = Sizes(1 << 20)  # What lets the user go on as long as there is room without values.
    sizes.add(len(reads) * (1000 + READ_BYTES) + len(b"k") + WRITE_BYTES)
    db.do(CommitRequest, reads, [], {b"k": b"x" * 15_000})
    value, record = [records.decode(payload) for _, payload in db.log]
    assert isinstance(value, records.Value)
    assert isinstance(record, records.Commit)
    assert db.get(b"k") == [b"x" * 15_000]


def test_a_commit_record_that_is_too_large_is_refused(db: FakeDatabase) -> None:
    reads = [KeyRead(b"%01000d" % number, 0) for number in range(2000)]
    with pytest.raises(RecordTooLargeError):
        db.do(CommitRequest, reads, [], {b"k": v(1)})
    assert not db.commits()


@pytest.mark.parametrize(
    ("present", "expected", "is_equal"),
    [(1, 1, True), (1, 2, False), (None, None, True), (1, None, False), ([1, 2], [1, 2], True)],
)
def test_test_and_put_compares_values(
    db: FakeDatabase, present: Any, expected: Any, *, is_equal: bool
) -> None:
    db.put(b"k", present)
    assert db.do(CompareAndPutRequest, {b"k": expected}, {b"l": v(9)}) is is_equal
    assert db.get(b"l") == [v(9) if is_equal else None]


def test_test_and_put_of_an_absent_key(db: FakeDatabase) -> None:
    assert db.do(CompareAndPutRequest, {b"k": None}, {b"k": v(1)}) is True
    assert db.do(CompareAndPutRequest, {b"k": None}, {b"k": v(1)}) is False
    assert db.do(CompareAndPutRequest, {b"k": 1}, {}) is True
    assert db.do(CompareAndPutRequest, {b"k": 2}, {}) is False


def before_its_insert(db: FakeDatabase, act: Callable[[], object]) -> None:
    """Let something happen when the client's next record is on its way."""
    serve = db.serve

    def spy(name: str, message: Any) -> None:
        if isinstance(message, log_wire.Insert):
            db.serve = serve  # type: ignore[method-assign]
            act()
        serve(name, message)

    db.serve = spy  # type: ignore[method-assign]


def test_an_overtaken_test_and_put_is_retried(db: FakeDatabase) -> None:
    db.put(b"k", 1)
    before_its_insert(db, lambda: db.write(b"k", 1))
    assert db.do(CompareAndPutRequest, {b"k": 1}, {b"k": v(2)}) is True
    assert db.get(b"k") == [v(2)]
    before_its_insert(db, lambda: db.write(b"k", 7))
    assert db.do(CompareAndPutRequest, {b"k": 2}, {b"k": v(3)}) is False
    assert db.get(b"k") == [v(7)]
    assert db.harness.core.stats()["aborts"] == 2


def test_a_difference_in_an_old_state_is_read_again(db: FakeDatabase) -> None:
    db.put(b"k", 1)
    db.first.is_stuck = True
    db.write(b"k", 2)
    call = db.begin(CompareAndPutRequest, {b"k": 2}, {b"l": v(1)})
    db.later(100, lambda: setattr(db.first, "is_stuck", False))
    db.later(100, db.first.follow)
    assert db.end(call) is True


def test_a_fresh_read_waits_for_what_completed_before(db: FakeDatabase) -> None:
    db.first.is_stuck = True
    db.write(b"k", 1)
    call = db.begin(GetRequest, [b"k"], True)
    db.later(100, lambda: setattr(db.first, "is_stuck", False))
    db.later(100, db.first.follow)
    assert db.end(call).values == [v(1)]
