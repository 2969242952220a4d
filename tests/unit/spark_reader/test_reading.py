"""Common part of all sources: the choice among replicas, and blocks made from units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spark_reader import reading
from spark_reader.reading import blocks_from_units, first_block
from ziplog.core.entries import Body, Unit, encode_body
from ziplog.core.writer_table import MAX_WRITERS, WriterTable, merged_tables
from ziplog.segments.blocks import Block, block_of_units

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTHING = block_of_units([], 1, 2)


def unit(gsn: int) -> Unit:
    return Unit(0, [gsn], encode_body(Body(0, None, [b"." * 100])))


@pytest.mark.parametrize(
    ("starts", "first"), [([], 0), ([0, 0], 0), ([0, 7, 0], 7), ([9, 7, 8], 7)]
)
def test_without_a_block_the_least_start_of_all_replicas_counts(
    starts: list[Block | int], first: int
) -> None:
    assert first_block(starts) == first


def test_no_replica_is_asked_after_the_first_block() -> None:
    asked = []

    def answers() -> Iterator[Block | int]:
        for found in (0, 7, NOTHING, 3):
            asked.append(found)
            yield found

    assert first_block(answers()) is NOTHING
    assert asked == [0, 7, NOTHING]


def test_blocks_of_units_follow_each_other_and_have_the_least_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 250)
    # The first positions, some in between and the last ones are no-ops.
    steps = [([], 3), *(([unit(gsn)], gsn + 2) for gsn in range(3, 13, 2)), ([], 20)]
    blocks = list(blocks_from_units(steps, 1))
    assert [(block.start, block.stop, block.rows) for block in blocks] == [
        (1, 9, 3), (9, 20, 2),
    ]  # fmt: skip
    assert [len(block.data) >= 250 for block in blocks] == [True, False]


def test_no_units_make_no_block() -> None:
    assert list(blocks_from_units([], 5)) == []


def test_tables_of_replicas_are_merged() -> None:
    """A replica that made its files after a trim lacks the rows from before."""
    one, two = b"1" * 16, b"2" * 16
    complete, later = WriterTable([(one, 0, 99), (two, 3, 7)]), WriterTable([(two, 3, 2)])
    for position in (6, 7):
        for pair in (((7, later), (position, complete)), ((position, complete), (7, later))):
            at, table = merged_tables(*pair)
            assert (at, sorted(table.export())) == (7, [(one, 0, 99), (two, 3, 7)])
    assert merged_tables((7, WriterTable()), (6, complete))[1].export() == complete.export()
    assert later.export() == [(two, 3, 2)]


def test_the_writers_of_the_higher_position_stay_in_a_full_table() -> None:
    rows = [(number.to_bytes(16), 0, 0) for number in range(MAX_WRITERS)]
    older = WriterTable([(b"o" * 16, 0, 1), (b"p" * 16, 0, 2)])
    full = merged_tables((6, older), (7, WriterTable(rows)))[1]
    assert full.export() == rows
    some = merged_tables((6, older), (7, WriterTable(rows[1:])))[1]
    assert some.export() == [(b"p" * 16, 0, 2), *rows[1:]]
