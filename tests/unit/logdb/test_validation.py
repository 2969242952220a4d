"""The rules of a decision, one by one, in their order (docs/logdb.md, section 4)."""

from __future__ import annotations

from logdb.decisions import Decisions
from logdb.records import Commit, Entry, KeyRead, RangeRead, TransactionId, Write
from logdb.validation import Verdict, conflicts, decide
from logdb.versions import Versions
from ziplog.types import RecordId

ID = TransactionId(b"s" * 8, 7)


def versions(**present: int) -> Versions:
    made = Versions()
    for key, version in present.items():
        made.put(key.encode(), Entry(version, RecordId(version, 0), 1))
    return made


def commit(
    *,
    reads: list[KeyRead] | None = None,
    ranges: list[RangeRead] | None = None,
    writes: list[Write] | None = None,
    began: int = 50,
) -> Commit:
    return Commit(ID, began, reads or [], ranges or [], writes or [])


def verdict(
    state: Versions, record: Commit, decisions: Decisions | None = None, horizon: int = 0
) -> Verdict:
    return decide(state, decisions or Decisions(), record, 100, horizon)


def test_a_transaction_with_present_reads_commits() -> None:
    state = versions(k=5)
    reads = [KeyRead(b"k", 5), KeyRead(b"absent", 0)]
    ranges = [RangeRead(b"", None, state.digest(b"", None))]
    done = verdict(state, commit(reads=reads, ranges=ranges, writes=[Write(b"k", b"v")]))
    assert done == Verdict("committed")


def test_a_key_that_changed_appeared_or_vanished_is_a_conflict() -> None:
    state = versions(k=5, new=6)
    reads = [KeyRead(b"k", 4), KeyRead(b"new", 0), KeyRead(b"gone", 3), KeyRead(b"other", 0)]
    assert verdict(state, commit(reads=reads)) == Verdict("conflict", [b"k", b"new", b"gone"])
    assert conflicts(state, reads, []) == [b"k", b"new", b"gone"]


def test_a_phantom_is_a_conflict() -> None:
    before, after = versions(a=1, c=2), versions(a=1, b=3, c=2)
    whole = RangeRead(b"a", b"d", before.digest(b"a", b"d"))
    beside = RangeRead(b"b\0", None, before.digest(b"b\0", None))
    assert conflicts(before, [], [whole, beside]) == []
    assert verdict(after, commit(ranges=[whole, beside])) == Verdict("conflict", [b"a"])


def test_a_value_before_the_version_of_its_key_is_a_conflict() -> None:
    state = versions(k=5)
    for gsn, outcome in [(4, "conflict"), (5, "committed"), (6, "committed"), (99, "committed")]:
        done = verdict(state, commit(writes=[Write(b"k", rid=RecordId(gsn, 0))]))
        assert done.outcome == outcome, gsn
        assert done.conflicts == ([b"k"] if outcome == "conflict" else [])


def test_a_value_in_the_commit_record_and_a_deletion_have_no_write_conflict() -> None:
    writes = [Write(b"k", b"v"), Write(b"j")]
    assert verdict(versions(k=99, j=98), commit(writes=writes)).outcome == "committed"


def test_a_repeated_record_changes_nothing() -> None:
    decisions = Decisions()
    decisions.add(ID, RecordId(60, 0), False)
    record = commit(reads=[KeyRead(b"k", 9)])
    assert verdict(versions(), record, decisions).outcome == "repeated"


def test_a_transaction_that_began_before_the_floor_expires() -> None:
    decisions = Decisions(1)
    for number in (1, 2):
        decisions.add(TransactionId(b"t" * 8, number), RecordId(40 + number, 0), True)
    assert decisions.floor == 41
    assert verdict(versions(), commit(began=40), decisions).outcome == "expired"
    assert verdict(versions(), commit(began=41), decisions).outcome == "committed"


def test_a_copy_of_a_record_with_a_forgotten_decision_expires() -> None:
    decisions = Decisions(1)
    record = commit(began=50)
    decisions.add(record.id, RecordId(51, 0), True)
    assert verdict(versions(), record, decisions).outcome == "repeated"
    decisions.add(TransactionId(b"t" * 8, 1), RecordId(52, 0), True)
    assert verdict(versions(), record, decisions).outcome == "expired"


def test_a_value_before_the_horizon_always_expires() -> None:
    record = commit(
        reads=[KeyRead(b"k", 9)],
        writes=[Write(b"a", rid=RecordId(30, 0)), Write(b"b", rid=RecordId(29, 0))],
    )
    assert verdict(versions(), record, horizon=30).outcome == "expired"
    assert verdict(versions(), record, horizon=29).outcome == "conflict"
