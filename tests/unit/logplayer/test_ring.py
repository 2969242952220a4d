"""The ring against a list of all records: what it covers, drops and keeps."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from logplayer.partitions import size_of
from logplayer.ring import Ring
from tests.properties import examples
from ziplog.types import Record, RecordId


def record(gsn: int, size: int = 10, key: bytes | None = None) -> Record:
    return Record(RecordId(gsn, 0), b"x" * size, key, 0, 0)


class Model:
    """All records that were added, and the bound."""

    def __init__(self, memory_bytes: int, start: int) -> None:
        self.memory_bytes, self.start, self.stop = memory_bytes, start, start
        self.kept: list[Record] = []

    def append(self, records: list[Record]) -> None:
        self.kept += records
        if records:
            self.stop = records[-1].rid.gsn + 1
        while len(self.kept) > 1 and sum(map(size_of, self.kept)) > self.memory_bytes:
            self.start = self.kept.pop(0).rid.gsn + 1


@examples(200)
@given(
    st.integers(1, 60),
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
        assert ring.size == sum(map(size_of, model.kept))
        gsns = [one.rid.gsn for one in model.kept]
        for position in range(ring.start, ring.stop + 1):
            assert ring.covers(position)
            index = ring.index(position)
            assert ring.records[index:] == model.kept[bisect_left(gsns, position) :]
        assert not ring.covers(ring.start - 1)
        assert not ring.covers(ring.stop + 1)


def test_a_record_above_the_bound_stays_until_the_next_one() -> None:
    ring = Ring(10)
    ring.reset(1)
    ring.append([record(1, 100)], now=0)
    assert len(ring) == 1
    ring.append([record(2, 100)], now=0)
    assert (ring.start, len(ring)) == (2, 1)


def test_a_ring_forgets_dropped_records() -> None:
    ring = Ring(100)
    ring.reset(1)
    for gsn in range(1, 30_000):
        ring.append([record(gsn)], now=gsn)
    assert len(ring) == 10
    assert len(ring.records) < 10_000
    assert ring.arrived(ring.index(29_999)) == 29_999
    ring.check()


def test_the_memory_of_a_dropped_record_is_free_at_once() -> None:
    ring = Ring(3000)
    for gsn in range(1, 100):
        ring.append([record(gsn, 1000)], now=0)
        assert sum(map(size_of, ring.records)) <= 3000


def test_an_extension_never_goes_back() -> None:
    ring = Ring(100)
    ring.reset(5)
    ring.extend(9)
    ring.extend(6)
    assert (ring.start, ring.stop) == (5, 9)
