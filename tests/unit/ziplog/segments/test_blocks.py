"""Columns of blocks, compared with decoding record by record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.ziplog.segments.blocks import (
    SALT,
    body_of,
    entries_of,
    rows_in,
    rows_of,
    stored,
    units,
)
from ziplog.core.entries import Body, Origin, Place, Skip, Unit
from ziplog.core.view import NO_DIGEST
from ziplog.errors import ProtocolError
from ziplog.segments import blocks as rows
from ziplog.segments.blocks import OriginRun, block_of_units, cut_block
from ziplog.segments.entry import Entry, UnreadableError, WatermarkRecord
from ziplog.segments.entry_codec import walk

if TYPE_CHECKING:
    from ziplog.segments.blocks import Block

WRITER = b"w" * 16


def all_blocks(data: bytes, start: int = 1, last_fseq: int = 0) -> tuple[list[Block], int]:
    """Cut a segment into blocks, and check that they follow each other."""
    blocks: list[Block] = []
    at = 0
    while at < len(data):
        cut = cut_block(data[at:], SALT, start, last_fseq, "a segment", is_end=True)
        assert cut is not None
        assert cut.size > 0
        if cut.block is not None:
            assert cut.block.start == start
            assert bytes(cut.block.data) == data[at : at + cut.size]
            blocks.append(cut.block)
            start = cut.block.stop
        at, last_fseq = at + cut.size, cut.last_fseq
    return blocks, last_fseq


def mark(stable: int) -> Entry:
    return Entry(0, 1, WatermarkRecord(1, stable, 1, 0, 0, NO_DIGEST))


@examples(150)
@given(units, st.sampled_from([1, 700, 100_000, 1 << 22]))
@example([(0, Body(1, None, [b""] * 20), "ours", "")], 1)
@example([(0, Body(1, b"", [b"", b"x"]), "foreign", "skip")], 1)
@example([(0, Body(1, None, [b"x"] * 20, None, [b"k", None, b"", bytes(300)] * 5), "ours", "")], 1)
@example([(0, Body(1, None, [b"x"] * 2, None, [bytes(70_000), b"k"]), "ours", "")], 1)
@example([(0, Body(1, None, [b"x"] * 2, None, [None, None]), "ours", "")], 1)
def test_columns_equal_decoding_record_by_record(parts: list[Any], block_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_BYTES", block_bytes)
        entries = entries_of(parts)
        blocks, last_fseq = all_blocks(stored([mark(0), *entries, mark(1)]))
    assert [row for block in blocks for row in rows_in(block)] == rows_of(entries)
    assert last_fseq == len(entries)
    for block in blocks:
        assert all(block.start <= row.gsn < block.stop for row in rows_in(block))
        assert block.has_keys == any(row.key is not None for row in rows_in(block))
    if blocks:
        last = (
            entries[-1]
            if not entries[-1].fseq
            else next(e for e in reversed(entries) if isinstance(e.decision, Place | Skip))
        )
        decision = last.decision
        end = decision.stop if isinstance(decision, Skip) else decision.gsns[-1] + 1  # type: ignore[union-attr]
        assert blocks[-1].stop == end
    if block_bytes == 1:
        places = [e for e in entries if isinstance(e.decision, Place | Skip)]
        assert len(blocks) == len(places)


@examples(60)
@given(units)
def test_units_of_a_stream_give_the_same_block(parts: list[Any]) -> None:
    entries = entries_of(parts)
    places = [e.decision for e in entries if isinstance(e.decision, Place)]
    block = block_of_units([Unit(p.epoch, p.gsns, p.body or b"") for p in places], 1, 10_000)
    assert (block.start, block.stop) == (1, 10_000)
    assert rows_in(block) == rows_of(entries)
    assert bytes(block.data) == b"".join(p.body or b"" for p in places)


def test_malformed_body_is_refused() -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        block_of_units([Unit(0, [1], b"\x91")], 1, 2)
    with pytest.raises(ProtocolError, match="2 records instead of 1"):
        block_of_units([Unit(0, [1], body_of(Body(1, None, [b"", b""]), "ours"))], 1, 2)


def test_consecutive_rows_are_one_origin_run() -> None:
    def unit(gsn: int, batch: int, row: int, writer: bytes = WRITER) -> tuple[Any, ...]:
        return (0, Body(1, None, [b"p"] * 2, Origin(writer, batch, row)), "ours", "")

    parts = [
        unit(1, 1, 0), unit(2, 1, 2), unit(3, 1, 5), unit(4, 2, 7), unit(5, 2, 9),
        unit(6, 2, 11, b"v" * 16), (0, Body(1, None, [b"p"]), "ours", ""),
        unit(8, 2, 13, b"v" * 16),
    ]  # fmt: skip
    ((block,), _) = all_blocks(stored(entries_of(parts)))
    assert block.origins == [
        OriginRun(0, 4, Origin(WRITER, 1, 0)),
        OriginRun(4, 2, Origin(WRITER, 1, 5)),
        OriginRun(6, 4, Origin(WRITER, 2, 7)),
        OriginRun(10, 2, Origin(b"v" * 16, 2, 11)),
        OriginRun(13, 2, Origin(b"v" * 16, 2, 13)),
    ]


def test_incomplete_block_of_a_partial_segment_is_not_returned() -> None:
    parts: list[Any] = [(0, Body(1, None, [b"x" * 900]), "ours", "") for _ in range(5)]
    data = stored(entries_of(parts))
    ends = [found.stop for found in walk(data, SALT)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_BYTES", 1500)
        for size in range(0, ends[1], 7):
            assert cut_block(data[:size], SALT, 1, 0, "s", is_end=False) is None
        for size in range(ends[1], len(data), 7):
            cut = cut_block(data[:size], SALT, 1, 0, "s", is_end=False)
            assert cut is not None
            assert (cut.size, cut.last_fseq) == (ends[1], 2)


@pytest.mark.parametrize("part", ["header", "body"])
@pytest.mark.parametrize("index", [0, 2, 4])
def test_damage_is_never_skipped(part: str, index: int) -> None:
    parts: list[Any] = [(0, Body(1, None, [b"x" * 90]), "ours", "") for _ in range(5)]
    data = bytearray(stored(entries_of(parts)))
    found = list(walk(bytes(data), SALT))[index]
    data[found.start + (-20 if part == "header" else 30)] ^= 1
    with pytest.raises(UnreadableError):
        cut_block(bytes(data), SALT, 1, 0, "s", is_end=True)


def test_missing_entry_is_never_skipped() -> None:
    parts: list[Any] = [(0, Body(1, None, [b"x" * 90]), "ours", "") for _ in range(5)]
    entries = entries_of(parts)
    with pytest.raises(UnreadableError, match="lacks the entry after 2"):
        cut_block(stored(entries[:2] + entries[3:]), SALT, 1, 0, "s", is_end=True)
    with pytest.raises(UnreadableError, match="lacks the entry after 0"):
        cut_block(stored(entries[1:]), SALT, 1, 0, "s", is_end=True)
    # In old files, the first number is unknown.
    cut = cut_block(stored(entries[1:]), SALT, 0, -1, "s", is_end=True)
    assert cut is not None
    assert cut.block is not None
    assert (cut.block.start, cut.last_fseq) == (2, 5)


def test_entries_without_positions_give_no_block() -> None:
    cut = cut_block(stored([mark(1), mark(2)]), SALT, 1, 0, "s", is_end=True)
    assert cut is not None
    assert cut.block is None
