"""Deduplication does not depend on the start of a read or on block boundaries."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_reader.deduplication import Deduplicator, gsns_of
from tests.unit.spark_reader.blocks import Draft, cut, drafts, once, placed
from tests.unit.ziplog.segments.blocks import rows_of_units
from ziplog.core.entries import Origin
from ziplog.core.writer_table import WriterTable
from ziplog.errors import TrimmedError, UnavailableError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.core.entries import Unit
    from ziplog.segments.blocks import Block


def table_before(units: list[Unit], gsn: int) -> WriterTable:
    """The writers' table at a position, record by record."""
    writers = WriterTable()
    for row in rows_of_units(units):
        if row.origin is not None and row.gsn < gsn:
            writers.first_new_row(Origin(*row.origin), 1)
    return writers


class Shard:
    """A shard's log: its blocks as one server has them, and tables at some positions."""

    def __init__(self, units: list[Unit], sizes: list[int], tables: list[int]) -> None:
        self.units = units
        self.kept = cut(units, sizes)
        #: Units end there.
        ends = [unit.gsns[-1] + 1 for unit in units]
        self.tables = sorted({1, *(ends[at % len(ends)] for at in tables if ends)})
        self.asked: list[int] = []

    def table(self, gsn: int) -> tuple[int, WriterTable]:
        self.asked.append(gsn)
        at = self.tables[bisect_right(self.tables, gsn) - 1]
        return at, table_before(self.units, at)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        for block in self.kept:
            if block.stop > start and block.start < stop:
                yield block


def read(shard: Shard, blocks: list[Block], start: int, stop: int) -> list[int]:
    """The positions in [start, stop) that count."""
    repeats = Deduplicator(shard.table, shard.blocks)
    found: list[int] = []
    at = start
    for block in blocks:
        old = repeats.repeated_rows(block)
        gsns = gsns_of(block)
        found += [
            gsns[index]
            for index in range(bisect_left(gsns, at), bisect_left(gsns, stop))
            if not any(low <= index < high for low, high in old)
        ]
        at = max(at, block.stop)
    return found


sizes = st.lists(st.integers(1, 4), max_size=10)


@given(
    st.lists(drafts, min_size=1, max_size=15), sizes, sizes,
    st.lists(st.integers(0, 50), max_size=3), st.integers(1, 90), st.integers(1, 90),
)  # fmt: skip
def test_the_verdict_depends_neither_on_the_start_nor_on_block_boundaries(
    found: list[Draft], kept: list[int], mine: list[int], tables: list[int], start: int, stop: int
) -> None:
    units = placed(found)
    shard = Shard(units, kept, tables)
    # Another server's blocks, or those of a stream: cut elsewhere, and from the first unit on that
    # reaches into the range.
    inside = [unit for unit in units if unit.gsns[-1] >= start and unit.gsns[0] < stop]
    expected = [row.gsn for row in once(rows_of_units(units)) if start <= row.gsn < stop]
    assert read(shard, cut(inside, mine, start), start, stop) == expected
    whole = [block for block in cut(units, mine) if block.stop > start and block.start < stop]
    assert read(shard, whole, start, stop) == expected


@given(st.lists(drafts, min_size=2, max_size=15), sizes, sizes, st.integers(0, 14))
def test_blocks_of_two_servers_may_overlap(
    found: list[Draft], kept: list[int], mine: list[int], turns: int
) -> None:
    units = placed(found)
    shard = Shard(units, kept, [])
    one, other = cut(units, kept), cut(units, mine)
    switched = one[: turns % len(one) + 1]
    switched += [block for block in other if block.stop > switched[-1].stop]
    expected = [row.gsn for row in once(rows_of_units(units))]
    assert read(shard, switched, 1, 10_000) == expected


def test_without_origins_no_writer_table_is_requested() -> None:
    units = placed([Draft(1, [b"x"], None, 0, None)] * 5)
    shard = Shard(units, [2], [])
    assert read(shard, cut(units, [1, 2]), 1, 100) == [1, 2, 3, 4, 5]
    assert shard.asked == []


def test_a_row_before_the_range_makes_one_in_it_a_duplicate() -> None:
    units = placed([Draft(1, [b"x", b"y"], None, 0, (0, 0, 0))] * 2)
    shard = Shard(units, [1], [])
    assert read(shard, cut(units[1:], [], 3), 3, 100) == []
    assert shard.asked == [3]
    assert Origin(b"a" * 16, 0, 0) == shard.kept[0].origins[0].origin


class Trimmed(Shard):
    """A shard that trims its start at the first request for a table."""

    def __init__(self, units: list[Unit], trim: int, *, fails: bool, tells: bool = True) -> None:
        super().__init__(units, [1], [])
        self._trim, self._fails, self._tells = trim, fails, tells

    def table(self, gsn: int) -> tuple[int, WriterTable]:
        self.asked.append(gsn)
        at = min(self._trim, gsn) if self._tells and len(self.asked) > 1 else 1
        return at, table_before(self.units, at)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        if self._fails and start < self._trim:
            raise TrimmedError(RecordId(self._trim, 0))
        yield from super().blocks(max(start, self._trim), stop)


#: Each of two rows; the third are the second again.
AGAIN = [Draft(1, [b"x", b"y"], None, 0, (0, 0, row)) for row in (0, 2, 2, 4)]


@pytest.mark.parametrize("fails", [True, False])
def test_a_trim_during_the_table_request_leads_to_a_later_table(
    fails: bool,
) -> None:
    units = placed(AGAIN)
    trim, start = units[1].gsns[-1] + 1, units[2].gsns[0]
    shard = Trimmed(units, trim, fails=fails)
    assert read(shard, cut(units[2:], [], start), start, 100) == list(units[3].gsns)
    assert shard.asked == [start, start]


@pytest.mark.parametrize("fails", [True, False])
def test_a_missing_writer_table_is_an_error(fails: bool) -> None:
    units = placed(AGAIN)
    start = units[2].gsns[0]
    shard = Trimmed(units, start, fails=fails, tells=False)
    with pytest.raises(UnavailableError, match="is being trimmed"):
        read(shard, cut(units[2:], [], start), start, 100)


def test_after_a_gap_the_writer_table_is_requested_again() -> None:
    units = placed(AGAIN)
    shard = Shard(units, [1, 1, 1, 1], [1])
    first, _, again, last = shard.kept
    assert read(shard, [first, again, last], 1, 100) == [*units[0].gsns, *units[3].gsns]
    assert shard.asked == [first.start, again.start]
