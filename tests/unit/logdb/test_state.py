"""The state is a pure function of the log, and the log's order a serial one (docs/logdb.md, 4)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from logdb.log_usage import LogUsage
from logdb.records import (
    MOVE_BYTES,
    CheckpointBegun,
    CheckpointDone,
    CheckpointPart,
    Commit,
    Decision,
    Entry,
    KeyRead,
    Move,
    Moved,
    TransactionId,
    Value,
    Write,
    decode,
    encode,
    value_at,
)
from logdb.snapshots import SnapshotCursor
from logdb.state import Applied, State
from tests.properties import examples
from tests.unit.logdb.histories import UNREADABLE, History, checkpoint, everything, restored, steps
from ziplog.types import Record, RecordId


def record(gsn: int, what: Any) -> Record:
    payload = what if isinstance(what, bytes) else encode(what)
    return Record(RecordId(gsn, 0), payload, None, 0, 0)


def commit(
    number: int, *writes: Write, reads: list[KeyRead] | None = None, began: int = 0
) -> Commit:
    return Commit(TransactionId(b"s" * 8, number), began, reads or [], [], list(writes))


def decision(applied: Applied | None) -> Any:
    """Return what coordinators must agree on."""
    return None if applied is None else replace(applied, unchanged_since=0)


@examples(400)
@given(steps)
def test_the_log_order_is_a_serial_order_of_committed_transactions(history: list[Any]) -> None:
    written = History()
    for kind, what in history:
        written.write(kind, what)
        if not written.records:
            continue
        expected, result = written.expected[-1], written.results[-1]
        if expected in {None, "repeated"}:
            assert result is None
        else:
            assert result is not None
            assert result.outcome == expected
            assert bool(result.conflicts) == (expected == "conflict")
            assert written.state.decisions.outcome(result.id) == Decision(
                result.id.session, result.id.number, result.position, expected == "committed"
            )
        # What readers find: every key's version, and its value at its place.
        rows = written.state.versions.range(b"", None, 100)
        assert {key: entry.version for key, entry in rows} == {
            key: version for key, (version, _) in written.present.items()
        }
        for key, entry in rows:
            place = written.log[entry.place.gsn]
            assert place.rid == entry.place
            value = value_at(decode(place.payload), key)
            assert value == written.present[key][1]
            assert len(value) == entry.size


@examples(300)
@given(steps, steps, steps, st.integers(1, 3))
def test_a_state_from_a_checkpoint_is_equal_and_decides_equally(
    first: list[Any], during: list[Any], then: list[Any], slice_keys: int
) -> None:
    written = History()
    for kind, what in first:
        written.write(kind, what)
    at = len(written.records)
    expected = everything(written.state)
    cursor = SnapshotCursor(written.state)
    rows = []
    for kind, what in during:
        if not cursor.is_done:
            rows += cursor.rows(slice_keys)
        written.write(kind, what)
    while not cursor.is_done:
        rows += cursor.rows(slice_keys)
    tailer = restored(*checkpoint(cursor, rows, 2))
    assert everything(tailer) == expected
    for kind, what in then:
        written.write(kind, what)
    results = [tailer.apply(each) for each in written.records[at:]]
    assert list(map(decision, results)) == list(map(decision, written.results[at:]))
    for mine, other in zip(results, written.results[at:], strict=True):
        # A checkpoint does not hold the last change before it.
        assert mine is None or other.unchanged_since <= mine.unchanged_since < mine.position.gsn
    assert everything(tailer) == everything(written.state)
    ends = [(decode(each.payload), each.rid.gsn) for each in written.records[at:]]
    trims = [min(end.trim, gsn) for end, gsn in ends if isinstance(end, CheckpointDone)]
    assert tailer.trimmed == max(trims, default=0)


@examples(200)
@given(steps)
def test_no_version_changes_after_the_last_change(history: list[Any]) -> None:
    written = History()
    versions: dict[bytes, int] = {}
    for kind, what in history:
        before = written.state.changed_at
        written.write(kind, what)
        state = written.state
        rows = state.versions.range(b"", None, 100)
        former, versions = versions, {key: entry.version for key, entry in rows}
        if versions != former:
            assert state.changed_at == state.position.gsn
        else:
            assert state.changed_at in {before, state.position.gsn}
        if written.results and (result := written.results[-1]) is not None:
            assert result.unchanged_since in {before, state.changed_at}
            assert result.unchanged_since < result.position.gsn


@examples(200)
@given(steps)
def test_live_bytes_match_the_present_entries(history: list[Any]) -> None:
    written = History()
    for kind, what in history:
        written.write(kind, what)
        rows = written.state.versions.range(b"", None, 100)
        segments = written.state.log_usage.export()
        firsts = [first for first, _, _ in segments]
        live = dict.fromkeys(firsts, 0)
        for key, entry in rows:
            home = max(first for first in firsts if first <= entry.place.gsn)
            live[home] += MOVE_BYTES + len(key) + entry.size
        assert [lives for _, _, lives in segments] == list(live.values())
        written.state.versions.check()


@examples(200)
@given(steps)
def test_a_move_changes_no_version(history: list[Any]) -> None:
    written = History()
    for kind, what in history:
        before = written.state.versions.range(b"", None, 100)
        written.write(kind, what)
        if kind == "move":
            after = written.state.versions.range(b"", None, 100)
            assert [(key, entry.version, entry.size) for key, entry in before] == [
                (key, entry.version, entry.size) for key, entry in after
            ]


def test_a_moved_value_is_read_where_it_is_and_a_stale_move_does_nothing() -> None:
    state = State()
    state.apply(record(1, commit(1, Write(b"k", b"old"))))
    state.apply(record(2, commit(2, Write(b"k", b"new"))))
    state.apply(record(3, Moved([Move(b"k", RecordId(1, 0), b"old")])))
    assert state.versions.get(b"k") == Entry(2, RecordId(2, 0), 3)
    state.apply(record(4, Moved([Move(b"k", RecordId(2, 0), b"new")])))
    assert state.versions.get(b"k") == Entry(2, RecordId(4, 0), 3)
    done = state.apply(record(5, commit(3, Write(b"k"), reads=[KeyRead(b"k", 2)])))
    assert done is not None
    assert done.outcome == "committed"
    state.apply(record(6, Moved([Move(b"k", RecordId(4, 0), b"new")])))
    assert state.versions.get(b"k") is None


def test_an_applied_commit_has_the_changed_keys_and_inline_values() -> None:
    state = State()
    state.apply(record(1, Value(b"big", b"x" * 9)))
    done = state.apply(
        record(
            2, commit(1, Write(b"big", rid=RecordId(1, 0), size=9), Write(b"k", b"v"), Write(b"d"))
        )
    )
    assert done is not None
    assert done.changed == [b"big", b"k", b"d"]
    assert done.values == [(b"k", b"v")]
    assert state.versions.get(b"big") == Entry(1, RecordId(1, 0), 9)
    assert state.versions.get(b"k") == Entry(2, RecordId(2, 0), 1)


def test_no_value_before_an_announced_horizon_enters_the_state() -> None:
    state = State()
    state.apply(record(1, Value(b"k", b"v")))
    state.apply(record(2, Value(b"k", b"w")))
    state.apply(record(3, CheckpointBegun(b"c" * 8, 2)))
    late = state.apply(record(4, commit(1, Write(b"k", rid=RecordId(1, 0), size=1))))
    assert late is not None
    assert late.outcome == "expired"
    there = state.apply(record(5, commit(2, Write(b"k", rid=RecordId(2, 0), size=1))))
    assert there is not None
    assert there.outcome == "committed"


def test_the_horizon_never_decreases_nor_passes_its_record() -> None:
    state = State()
    state.apply(record(5, CheckpointBegun(b"c" * 8, 2**63 - 1)))
    assert state.horizon == 5
    state.apply(record(6, CheckpointBegun(b"c" * 8, 1)))
    assert state.horizon == 5


def test_a_reference_to_a_later_value_is_a_conflict() -> None:
    state = State()
    for gsn, rid in [(5, RecordId(6, 0)), (6, RecordId(6, 0)), (7, RecordId(0, 0))]:
        done = state.apply(record(gsn, commit(gsn, Write(b"k", rid=rid, size=1))))
        assert done is not None
        assert done.outcome == "conflict"
        assert done.conflicts == [b"k"]
    assert len(state.versions) == 0


def test_the_first_foreign_record_is_remembered() -> None:
    state = State()
    state.apply(record(1, commit(1, Write(b"k", b"v"))))
    assert state.first_foreign == 0
    state.apply(record(3, b"not ours"))
    state.apply(record(4, b"nor this"))
    assert (state.first_foreign, state.first_unreadable, state.records) == (3, 0, 3)


def test_the_first_unreadable_record_is_remembered_and_ends_the_cut() -> None:
    state = State(log_usage=LogUsage(1, 1))
    for gsn in range(1, 6):
        state.apply(record(gsn, commit(gsn, Write(b"k", b"v"))))
    assert state.choose_cut() == 5
    state.apply(record(6, UNREADABLE))
    for gsn in range(7, 12):
        state.apply(record(gsn, commit(gsn, Write(b"k", b"v"))))
    assert (state.first_foreign, state.first_unreadable) == (0, 6)
    assert state.choose_cut() == 6


def test_foreign_records_do_not_count_as_bytes() -> None:
    state = State(log_usage=LogUsage(1, 1))
    state.apply(record(1, b"not ours"))
    assert (state.log_usage.log_bytes, state.log_usage.dead_bytes) == (0, 0)


def test_records_are_counted_from_the_position_of_the_checkpoint() -> None:
    state = State()
    for gsn in range(1, 11):
        state.apply(record(gsn, commit(gsn, Write(b"k", b"v"))))
    assert state.since_checkpoint == 10
    done = CheckpointDone(b"c" * 8, RecordId(7, 0), 0, [], 0, 1, 0, 0, 7, 0)
    state.apply(record(11, done))
    assert state.since_checkpoint == 3
    assert state.last_done == RecordId(11, 0)


def test_a_checkpoint_of_an_earlier_position_counts_no_records_again() -> None:
    state = State()
    for gsn in range(1, 11):
        state.apply(record(gsn, commit(gsn, Write(b"k", b"v"))))
    for gsn, records in [(11, 7), (12, 4)]:
        done = CheckpointDone(b"c" * 8, RecordId(records, 0), 0, [], 0, 1, 0, 0, records, 0)
        state.apply(record(gsn, done))
        assert state.since_checkpoint == 3


def test_a_complete_checkpoint_ends_all_rounds() -> None:
    state = State()
    state.apply(record(1, CheckpointBegun(b"c" * 8, 0)))
    state.apply(record(2, CheckpointBegun(b"d" * 8, 0)))
    assert len(state.begun) == 2
    state.apply(record(3, CheckpointDone(b"d" * 8, RecordId(2, 0), 0, [], 0, 0, 0, 0, 0, 0)))
    assert state.begun == {}


def test_the_records_of_a_checkpoint_are_not_counted() -> None:
    state = State()
    state.apply(record(1, commit(1, Write(b"k", b"v"))))
    state.apply(record(2, b"not ours"))
    done = CheckpointDone(b"c" * 8, RecordId(2, 0), 0, [], 0, 1, 0, 2, 2, 0)
    for gsn, ours in enumerate((CheckpointBegun(b"c" * 8, 0), CheckpointPart([], [], []), done), 3):
        state.apply(record(gsn, ours))
    assert state.records == 2
    assert state.since_checkpoint == 0


def test_segments_are_counted_until_the_log_is_trimmed() -> None:
    state = State(log_usage=LogUsage(1, 1))
    for gsn in range(1, 6):
        state.apply(record(gsn, commit(gsn, Write(b"k", b"v"))))
    state.apply(record(6, CheckpointBegun(b"c" * 8, 4)))
    assert [first for first, _, _ in state.log_usage.export()] == [1, 2, 3, 4, 5]
    state.apply(record(7, CheckpointDone(b"c" * 8, RecordId(6, 0), 0, [], 0, 1, 4, 0, 6, 3)))
    assert state.trimmed == 3
    assert [first for first, _, _ in state.log_usage.export()] == [3, 4, 5]


def test_the_trim_point_never_decreases_nor_passes_its_record() -> None:
    state = State()
    for gsn, trim, trimmed in [(5, 2**63 - 1, 5), (6, 3, 5), (7, 6, 6)]:
        state.apply(
            record(gsn, CheckpointDone(b"c" * 8, RecordId(2, 0), 0, [], 0, 1, 0, 0, 2, trim))
        )
        assert state.trimmed == trimmed


def test_observers_are_called_before_a_key_changes() -> None:
    state = State()
    received: list[Any] = []
    state.on_change.append(
        lambda key, former, entry: received.append((key, former, entry, state.versions.get(key)))
    )
    state.apply(record(1, commit(1, Write(b"k", b"v"), Write(b"absent"))))
    state.apply(record(2, commit(2, Write(b"k"))))
    first = Entry(1, RecordId(1, 0), 1)
    assert received == [
        (b"k", None, first, None),
        (b"absent", None, None, None),
        (b"k", first, None, first),
    ]


def test_a_record_is_applied_once() -> None:
    state = State()
    state.apply(record(1, b"x"))
    with pytest.raises(AssertionError):
        state.apply(record(1, b"x"))
