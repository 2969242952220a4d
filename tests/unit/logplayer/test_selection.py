"""Which records a task gets, and how they are cut into batches."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from logplayer import selection
from logplayer.contract import TargetSpec
from logplayer.partitions import partition_of, size_of
from logplayer.ring import Ring
from logplayer.selection import Cut, Selection
from tests.properties import examples
from tests.unit.logplayer.world import no_connection
from ziplog.types import Record, RecordId


def record(gsn: int, key: bytes | None = None, payload: bytes = b"x") -> Record:
    return Record(RecordId(gsn, 0), payload, key, 0, 0)


def spec(**more: Any) -> TargetSpec:
    return TargetSpec(name="db", connect=no_connection, stores_position=True, **more)


def ring_of(records: list[Record], partitions: int = 1) -> Ring:
    ring = Ring(10**9, [partitions])
    ring.reset(1)
    ring.append(records, now=7)
    return ring


def selected(chosen: Selection, records: list[Record], partitions: int = 1) -> list[int]:
    if not records:
        return []
    return chosen.cut(ring_of(records, partitions), 0, 1, 10**9).origins


def test_partitions_are_those_of_the_documented_checksum() -> None:
    assert partition_of(record(5, b"billing"), 7) == crc32c(b"billing") % 7
    assert partition_of(record(5), 7) == crc32c(b"\0\0\0\0\0\0\0\5") % 7
    assert partition_of(record(5, b""), 7) == crc32c(b"") % 7


@examples(100)
@given(st.lists(st.none() | st.binary(max_size=3), max_size=30), st.integers(1, 9))
def test_each_record_belongs_to_one_partition_and_equal_keys_to_the_same(
    keys: list[bytes | None], partitions: int
) -> None:
    records = [record(gsn, key) for gsn, key in enumerate(keys, 1)]
    parts = [
        selected(Selection(spec(partitions=partitions), n), records, partitions)
        for n in range(partitions)
    ]
    assert sorted(gsn for part in parts for gsn in part) == [one.rid.gsn for one in records]
    for part in parts:
        inner = {keys[gsn - 1] for gsn in part} - {None}
        others = {keys[gsn - 1] for other in parts if other is not part for gsn in other}
        assert not inner & others


def test_patterns_select_keys_as_text() -> None:
    chosen = Selection(spec(keys=("user-*", "order-?")), 0)
    keys = [b"user-1", b"user-", b"order-12", b"order-1", b"xuser-1", b"\xff", None, b"user-\n"]
    found = selected(chosen, [record(gsn, key) for gsn, key in enumerate(keys, 1)])
    assert found == [1, 2, 4, 8]


def test_patterns_are_case_sensitive() -> None:
    chosen = Selection(spec(keys=("User-*",)), 0)
    assert selected(chosen, [record(1, b"User-1"), record(2, b"user-1")]) == [1]


def test_a_map_may_drop_replace_and_multiply() -> None:
    def double(one: Record) -> Any:
        match one.rid.gsn % 3:
            case 0:
                return None
            case 1:
                return msgspec.structs.replace(one, payload=b"new")
        return [one, one]

    chosen = Selection(spec(map=double), 0)
    cut = chosen.cut(ring_of([record(gsn) for gsn in range(1, 7)]), 1, 1, 100)
    assert [one.payload for one in cut.records] == [b"new", b"x", b"x", b"new", b"x", b"x"]
    assert cut.origins == [1, 2, 2, 4, 5, 5]
    assert cut.positions() == [1, 2, 4, 5]


@pytest.mark.parametrize("result", [b"bytes", [b"bytes"], ("tuple",), 7])
def test_a_map_that_returns_something_else_is_a_bug(result: Any) -> None:
    chosen = Selection(spec(map=lambda _record: result), 0)
    with pytest.raises(TypeError, match="must return None, a record, or a list of records"):
        chosen.mapped(record(1))


def test_a_cut_ends_behind_its_last_record() -> None:
    ring = ring_of([record(2), record(5)])
    ring.extend(20)
    cut = Selection(spec(), 0).cut(ring, 1, 1, 100)
    assert (cut.start, cut.stop, cut.arrived) == (1, 6, 7)


def test_a_cut_without_records_covers_what_was_looked_at() -> None:
    ring = ring_of([record(2, b"a")])
    ring.extend(20)
    nothing = Selection(spec(keys=("z*",)), 0).cut(ring, 1, 1, 100)
    assert (nothing.records, nothing.stop) == ([], 20)
    nothing = Selection(spec(keys=("z*",)), 0).cut(ring, 1, 1, 9)
    assert nothing.stop == 9


def test_a_cut_stops_at_its_limit() -> None:
    cut = Selection(spec(), 0).cut(ring_of([record(gsn) for gsn in range(1, 9)]), 1, 1, 4)
    assert (cut.origins, cut.stop) == ([1, 2, 3], 4)


def test_a_cut_looks_at_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MAX_MAPPED", 3)
    ring = ring_of([record(gsn, b"a") for gsn in range(1, 9)])
    cut = Selection(spec(keys=("z*",)), 0).cut(ring, 1, 1, 100)
    assert cut.stop == 4
    assert Selection(spec(keys=("z*",)), 0).cut(ring, 1, 4, 100).stop == 7


@examples(150)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 60),
)
def test_cuts_follow_each_other_and_keep_the_bounds(
    sizes: list[int], most: int, most_bytes: int
) -> None:
    records = [record(3 * n, None, b"x" * size) for n, size in enumerate(sizes, 1)]
    ring, position = ring_of(records), 1
    chosen, found = Selection(spec(batch_records=most, batch_bytes=most_bytes), 0), []
    while position < ring.stop:
        cut = chosen.cut(ring, position, position, 10**9)
        assert cut.start == position < cut.stop
        assert 1 <= len(cut) <= most
        assert cut.size == sum(map(size_of, cut.records))
        assert cut.size <= most_bytes or len(cut) == 1
        found += cut.records
        position = cut.stop
    assert found == records


@examples(100)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=10), st.data())
def test_a_cut_splits_between_records_of_the_log(counts: list[int], data: st.DataObject) -> None:
    cut = Cut(1, 2 * len(counts) + 3, 0)
    for gsn, count in enumerate(counts, 1):
        cut.add([record(2 * gsn)] * count, 2 * gsn)
    at = data.draw(st.integers(1, cut.stop))
    head, tail = cut.head(at), cut.tail(at)
    assert head.records + tail.records == cut.records
    assert head.size + tail.size == cut.size
    assert (head.start, head.stop, tail.start, tail.stop) == (1, at, at, cut.stop)
    assert all(origin < at for origin in head.origins)
    assert all(origin >= at for origin in tail.origins)
