"""The ring against a list of all records: what it covers, drops and keeps."""

from __future__ import annotations

import tracemalloc
from bisect import bisect_left
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from logplayer.partitions import partition_of, size_of
from logplayer.ring import _CUT_RECORDS, RECORD_BYTES, Ring
from tests.properties import examples
from ziplog.types import Record, RecordId


def record(gsn: int, size: int = 10, key: bytes | None = None) -> Record:
    return Record(RecordId(gsn, 0), b"x" * size, key, 0, 0)


def memory_of(record: Record) -> int:
    return size_of(record) + RECORD_BYTES


class Model:
    """All records that were added, and the bound."""

    def __init__(self, memory_bytes: int, start: int) -> None:
        self.memory_bytes, self.start, self.stop = memory_bytes, start, start
        self.kept: list[Record] = []

    def append(self, records: list[Record]) -> None:
        self.kept += records
        if records:
            self.stop = records[-1].rid.gsn + 1
        while len(self.kept) > 1 and sum(map(memory_of, self.kept)) > self.memory_bytes:
            self.start = self.kept.pop(0).rid.gsn + 1


@examples(200)
@given(
    st.integers(1, 6 * RECORD_BYTES),
    st.lists(
        st.one_of(
            st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=6),
            st.integers(1, 9),
        ),
        max_size=20,
    ),
)
def test_a_ring_is_the_last_part_of_the_log(
    memory: int, acts: list[list[tuple[int, int]] | int]
) -> None:
    ring, model = Ring(memory), Model(memory, 7)
    ring.reset(7)
    for act in acts:
        if isinstance(act, int):
            ring.extend(ring.stop + act)
            model.stop += act
        else:
            gsn, records = model.stop - 1, []
            for gap, size in act:
                gsn += gap
                records.append(record(gsn, size))
            ring.append(records, now=3)
            model.append(records)
        ring.check()
        assert (ring.start, ring.stop) == (model.start, model.stop)
        assert len(ring) == len(model.kept)
        assert ring.size == sum(map(memory_of, model.kept))
        gsns = [one.rid.gsn for one in model.kept]
        for position in range(ring.start, ring.stop + 1):
            assert ring.covers(position)
            index = ring.index(position)
            ahead = model.kept[bisect_left(gsns, position) :]
            assert ring.records[index:] == ahead
            assert ring.ahead(position) == sum(map(memory_of, ahead))
        assert not ring.covers(ring.start - 1)
        assert not ring.covers(ring.stop + 1)


def test_a_record_above_the_bound_stays_until_the_next_one() -> None:
    ring = Ring(RECORD_BYTES)
    ring.reset(1)
    ring.append([record(1, 100)], now=0)
    assert len(ring) == 1
    ring.append([record(2, 100)], now=0)
    assert (ring.start, len(ring)) == (2, 1)


def test_a_ring_forgets_dropped_records() -> None:
    ring = Ring(10 * (10 + RECORD_BYTES))
    ring.reset(1)
    for gsn in range(1, 30_000):
        ring.append([record(gsn)], now=gsn)
    assert len(ring) == 10
    assert len(ring.records) < 10_000
    assert ring.arrived(ring.index(29_999)) == 29_999
    ring.check()


def test_the_memory_of_a_dropped_record_is_free_at_once() -> None:
    ring = Ring(3 * (1000 + RECORD_BYTES))
    for gsn in range(1, 100):
        ring.append([record(gsn, 1000)], now=0)
        assert sum(map(size_of, ring.records)) <= 3000


@examples(60)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=12),
    st.sampled_from([2, 5]),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_ring_finds_the_records_of_each_partition(
    batches: list[list[int]], count: int, most: int, is_small: bool
) -> None:
    with patch("logplayer.ring._CUT_RECORDS", 5):
        ring = Ring(8 * RECORD_BYTES if is_small else 10**9, [1, 2, 5])
        ring.reset(1)
        gsn = 0
        for keys in batches:
            records = [record(gsn := gsn + 2, key=b"%d" % key) for key in keys]
            ring.append(records, now=0)
            ring.extend(ring.stop + 1)
            gsn = ring.stop
        for partition in range(count):
            own = [
                one.rid.gsn
                for one in ring.records[ring._first :]
                if partition_of(one, count) == partition
            ]
            for position in range(ring.start, ring.stop + 1):
                found = ring.find(position, partition, count, most)
                expected = [one for one in own if one >= position]
                gsns = [ring.gsns[number - ring.cut] for number in found.numbers]
                assert gsns == expected[:most]
                assert found.stop == (expected[most] if len(expected) > most else ring.stop)


def test_the_memory_of_small_records_counts() -> None:
    ring = Ring(10**6)
    ring.reset(1)
    tracemalloc.start()
    try:
        for first in range(1, 100_000, 1000):
            ring.append([record(gsn, 20, b"key-%d" % gsn) for gsn in range(first, first + 1000)], 0)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    dropped = _CUT_RECORDS * 100
    assert used <= ring.memory_bytes + dropped


def test_an_extension_never_goes_back() -> None:
    ring = Ring(100)
    ring.reset(5)
    ring.extend(9)
    ring.extend(6)
    assert (ring.start, ring.stop) == (5, 9)
