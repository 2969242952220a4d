"""Snapshots of former states (docs/logdb.md, section 9)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.errors import SnapshotExpired
from logdb.records import (
    CheckpointBegun,
    CheckpointDone,
    Commit,
    Entry,
    Move,
    Moved,
    TransactionId,
    Write,
    decode,
    encode,
    value_at,
)
from logdb.snapshots import Snapshots
from logdb.state import State
from tests.properties import examples
from tests.unit.logdb.histories import KEYS, History, Model, steps
from ziplog.types import Record, RecordId


def expected_rows(model: Model, start: bytes, stop: bytes | None, limit: int) -> list[Any]:
    rows = [
        (key, model[key][0])
        for key in sorted(model)
        if key >= start and (stop is None or key < stop)
    ]
    return rows[:limit]


def compare(written: History, snapshots: Snapshots, number: int, model: Model) -> None:
    """Hold a snapshot against what was there when it was taken."""
    is_readable = True
    for key in KEYS:
        try:
            entry = snapshots.get(number, key, 0)
        except SnapshotExpired:
            is_readable = False
            # Its place was not before its version, nor behind the trim.
            assert 0 < model[key][0] < written.state.trimmed
            continue
        assert (entry.version if entry else None) == (model[key][0] if key in model else None)
        if entry is not None:
            record = written.log[entry.place.gsn]
            assert value_at(decode(record.payload), key) == model[key][1]
    if is_readable:
        for start, stop, limit in [(b"", None, 99), (b"a\0", b"c", 99), (b"a", None, 2)]:
            rows = snapshots.range(number, start, stop, limit, 0)
            assert [(key, entry.version) for key, entry in rows] == expected_rows(
                model, start, stop, limit
            )


@examples(200)
@given(steps, st.integers(0, 2**32))
def test_a_snapshot_returns_the_state_of_its_moment(history: list[Any], seed: int) -> None:
    rnd = random.Random(seed)
    written = History()
    snapshots = Snapshots(written.state)
    held: dict[int, Model] = {}
    for kind, what in history:
        if rnd.random() < 0.3:
            number = snapshots.take(0)
            held[number] = dict(written.present)
        if held and rnd.random() < 0.2:
            number = rnd.choice(list(held))
            del held[number]
            snapshots.drop(number)
        written.write(kind, what)
        snapshots.check()
        assert len(snapshots) == len(held)
        for number, model in held.items():
            compare(written, snapshots, number, model)
    for number in held:
        snapshots.drop(number)
    snapshots.check()
    assert snapshots.entries == 0
    assert not written.state.on_change


@examples(200)
@given(steps, st.integers(0, 2**32), st.integers(0, 6), st.integers(0, 1500), st.integers(1, 3))
def test_former_entries_are_bounded_and_the_oldest_snapshot_expires_first(
    history: list[Any], seed: int, max_entries: int, max_bytes: int, max_versions: int
) -> None:
    rnd = random.Random(seed)
    written = History()
    snapshots = Snapshots(
        written.state, max_entries=max_entries, max_bytes=max_bytes, max_versions=max_versions
    )
    held: dict[int, Model] = {}
    for kind, what in history:
        if rnd.random() < 0.4:
            held[snapshots.take(0)] = dict(written.present)
        written.write(kind, what)
        snapshots.check()
        gone = [number for number in held if is_gone(snapshots, number)]
        assert gone == sorted(held)[: len(gone)]
        for number in gone:
            del held[number]
        for number, model in held.items():
            compare(written, snapshots, number, model)


def test_long_keys_expire_the_oldest_snapshot_first() -> None:
    state = State()
    snapshots = Snapshots(state, max_bytes=3_000)
    first = snapshots.take(0)
    state.apply(put(1, b"a" * 1000, b"b" * 1000))
    second = snapshots.take(0)
    state.apply(put(2, b"c" * 1000))
    assert is_gone(snapshots, first)
    assert not is_gone(snapshots, second)
    snapshots.check()


def is_gone(snapshots: Snapshots, number: int) -> bool:
    try:
        snapshots.get(number, b"no such key", 0)
    except SnapshotExpired:
        return True
    return False


def put(gsn: int, *keys: bytes) -> Record:
    writes = [Write(key, b"value") for key in keys]
    commit = Commit(TransactionId(b"s" * 8, gsn), 0, [], [], writes)
    return Record(RecordId(gsn, 0), encode(commit), None, 0, 0)


def test_an_unread_snapshot_expires_and_a_read_prolongs_it() -> None:
    state = State()
    snapshots = Snapshots(state, idle_ns=100)
    read, idle = snapshots.take(0), snapshots.take(10)
    snapshots.get(read, b"k", 50)
    snapshots.expire(109)
    assert len(snapshots) == 2
    snapshots.expire(110)
    with pytest.raises(SnapshotExpired):
        snapshots.get(idle, b"k", 110)
    snapshots.range(read, b"", None, 1, 120)
    snapshots.expire(219)
    assert len(snapshots) == 1
    snapshots.expire(220)
    assert not len(snapshots)
    snapshots.check()


def test_snapshots_of_one_state_share_it() -> None:
    state = State()
    snapshots = Snapshots(state, max_versions=1)
    one, other = snapshots.take(0), snapshots.take(0)
    state.apply(put(1, b"k"))
    assert snapshots.get(one, b"k", 0) is None
    snapshots.drop(one)
    assert snapshots.get(other, b"k", 0) is None
    snapshots.check()


def test_a_moved_value_is_read_at_its_new_place_without_a_copy() -> None:
    state = State()
    state.apply(put(1, b"k"))
    snapshots = Snapshots(state)
    number = snapshots.take(0)
    moved = Moved([Move(b"k", RecordId(1, 0), b"value")])
    state.apply(Record(RecordId(2, 0), encode(moved), None, 0, 0))
    assert snapshots.get(number, b"k", 0) == Entry(1, RecordId(2, 0), 5)
    assert snapshots.entries == 0


def test_a_replaced_and_trimmed_value_has_expired() -> None:
    state = State()
    state.apply(put(1, b"k", b"j"))
    snapshots = Snapshots(state)
    number = snapshots.take(0)
    state.apply(put(2, b"k"))
    assert snapshots.get(number, b"k", 0) == Entry(1, RecordId(1, 0), 5)
    begun = CheckpointBegun(b"c" * 8, 2)
    state.apply(Record(RecordId(3, 0), encode(begun), None, 0, 0))
    assert snapshots.get(number, b"k", 0) is not None
    done = CheckpointDone(b"c" * 8, RecordId(3, 0), 0, [], 0, 2, 2, 0, 3, 2)
    state.apply(Record(RecordId(4, 0), encode(done), None, 0, 0))
    with pytest.raises(SnapshotExpired, match="trimmed from the log"):
        snapshots.get(number, b"k", 0)
    assert snapshots.get(number, b"j", 0) is not None


def test_absent_keys_that_no_snapshot_has_are_forgotten() -> None:
    state = State()
    snapshots = Snapshots(state)
    older = snapshots.take(0)
    for gsn in range(1, 6001, 2):
        key = b"%d" % gsn
        state.apply(put(gsn, key))
        newer = snapshots.take(0)
        delete = Commit(TransactionId(b"d" * 8, gsn), 0, [], [], [Write(key)])
        state.apply(Record(RecordId(gsn + 1, 0), encode(delete), None, 0, 0))
        snapshots.drop(older)
        older = newer
        assert len(snapshots._deleted_keys) <= 1002
    assert snapshots.entries == 1


def test_a_key_that_appears_and_disappears_is_kept_once() -> None:
    state = State()
    state.apply(put(1, b"k"))
    snapshots = Snapshots(state)
    number = snapshots.take(0)
    for gsn in range(2, 20, 2):
        delete = Commit(TransactionId(b"d" * 8, gsn), 0, [], [], [Write(b"k")])
        state.apply(Record(RecordId(gsn, 0), encode(delete), None, 0, 0))
        assert len(snapshots._deleted_keys) == 1
        state.apply(put(gsn + 1, b"k"))
        assert not len(snapshots._deleted_keys)
    assert snapshots.entries == 1
    assert snapshots.range(number, b"", None, 9, 0) == [(b"k", Entry(1, RecordId(1, 0), 5))]


def test_an_unknown_snapshot_has_expired() -> None:
    snapshots = Snapshots(State())
    snapshots.drop(7)
    with pytest.raises(SnapshotExpired):
        snapshots.range(7, b"", None, 1, 0)
