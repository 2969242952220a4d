"""A checkpoint's entries are those of one state, while the state changes (section 8)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.records import Commit, TransactionId, Write, encode
from logdb.snapshots import SnapshotCursor, Snapshots
from logdb.state import State
from tests.properties import examples
from tests.unit.logdb.histories import History, steps
from ziplog.errors import UnavailableError
from ziplog.types import Record, RecordId


@examples(300)
@given(steps, steps, st.integers(1, 3), st.integers(1, 3))
def test_a_cursor_returns_exactly_the_entries_of_its_state(
    first: list[Any], during: list[Any], slice_keys: int, pause: int
) -> None:
    written = History()
    for kind, what in first:
        written.write(kind, what)
    expected = written.state.versions.range(b"", None, 99)
    cursor = SnapshotCursor(written.state)
    assert cursor.image == written.state.image()
    rows = []
    for index, (kind, what) in enumerate(during):
        if index % pause == 0 and not cursor.is_done:
            found = cursor.rows(slice_keys)
            assert len(found) <= slice_keys
            rows += found
        written.write(kind, what)
    while not cursor.is_done:
        rows += cursor.rows(slice_keys)
    assert rows == expected
    assert cursor.image.keys == len(rows)
    assert not written.state.on_change


def put(gsn: int, *keys: bytes) -> Record:
    commit = Commit(TransactionId(b"s" * 8, gsn), 0, [], [], [Write(key, b"v") for key in keys])
    return Record(RecordId(gsn, 0), encode(commit), None, 0, 0)


def test_only_changes_after_the_cursor_are_kept() -> None:
    state = State()
    state.apply(put(1, b"a", b"b", b"c", b"d"))
    cursor = SnapshotCursor(state, max_entries=2)
    cursor.rows(2)
    state.apply(put(2, b"a", b"b", b"aa"))
    state.apply(put(3, b"c", b"d"))
    state.apply(put(4, b"c"))
    assert [key for key, _ in cursor.rows(1)] == [b"c"]
    state.apply(put(5, b"e"))
    assert [key for key, _ in cursor.rows(9)] == [b"d"]
    assert cursor.is_done


def test_a_key_that_appears_and_disappears_is_kept_once_until_it_is_passed() -> None:
    state = State()
    state.apply(put(1, b"a"))
    cursor = SnapshotCursor(state)
    for gsn in range(2, 20, 2):
        writes = [Write(b"a"), Write(b"new")]
        delete = Commit(TransactionId(b"d" * 8, gsn), 0, [], [], writes)
        state.apply(Record(RecordId(gsn, 0), encode(delete), None, 0, 0))
        assert list(cursor._deleted_keys) == [b"a"]
        if gsn < 18:
            state.apply(put(gsn + 1, b"a", b"new"))
            assert not len(cursor._deleted_keys)
    assert [key for key, _ in cursor.rows(1)] == [b"a"]
    assert not cursor.is_done
    assert not len(cursor._deleted_keys)


def test_a_cursor_fails_after_too_many_changes() -> None:
    state = State()
    cursor = SnapshotCursor(state, max_entries=2)
    state.apply(put(1, b"a", b"b"))
    assert not cursor.is_done
    state.apply(put(2, b"c"))
    with pytest.raises(UnavailableError, match="keys changed"):
        cursor.rows(1)
    assert not state.on_change


def test_a_cursor_fails_after_changes_of_too_many_bytes() -> None:
    state = State()
    cursor = SnapshotCursor(state, max_bytes=3_000)
    state.apply(put(1, b"a" * 1000, b"b" * 1000))
    state.apply(put(2, b"c" * 1000))
    with pytest.raises(UnavailableError, match="take more than 3,000 bytes"):
        cursor.rows(1)
    assert not state.on_change


def test_an_observer_that_stops_does_not_affect_others() -> None:
    state = State()
    cursor = SnapshotCursor(state, max_entries=0)
    snapshots = Snapshots(state)
    number = snapshots.take(0)
    state.apply(put(1, b"a"))
    assert snapshots.get(number, b"a", 0) is None
    with pytest.raises(UnavailableError, match="keys changed"):
        cursor.rows(1)


def test_a_closed_cursor_observes_nothing() -> None:
    state = State()
    cursor = SnapshotCursor(state)
    cursor.close()
    cursor.close()
    assert not state.on_change
