"""A server's segment files, and the expected contents of its archive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shard.archive.block_builder import BlockBuilder
from shard.storage.segment_store import SegmentStore
from tests.unit.ziplog.segments.blocks import Row, rows_in, rows_of
from ziplog.core.entries import Body, Origin, Place, Skip, encode_body
from ziplog.core.view import NO_DIGEST
from ziplog.segments.blocks import Block
from ziplog.segments.entry import Entry, WatermarkRecord

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ziplog.segments.block_reader import BlockReader

CLIENT = b"c" * 16
WRITER = b"w" * 16


def unit(
    fseq: int, gsn: int, count: int = 3, size: int = 100, origin: Origin | None = None
) -> Entry:
    """Return an entry of `count` records at every second position from `gsn` on."""
    gsns = list(range(gsn, gsn + 2 * count, 2))
    key = b"key-%d" % fseq if fseq % 3 == 0 else None
    payloads = [b"%d:" % gsn + b"x" * size for gsn in gsns]
    body = encode_body(Body(gsn * 1000, key, payloads, origin))
    return Entry(fseq, 1, Place(CLIENT, fseq, 1, gsn // 100, gsns, 7, body))


def mark(stable: int, frontier: int, trim: int = 0) -> Entry:
    return Entry(0, 1, WatermarkRecord(1, stable, frontier, trim, 0, NO_DIGEST))


def log(count: int, *, origins: bool = False, first: int = 1, gsn: int = 1) -> list[Entry]:
    """Return the entries of a log: units, with a range of no-ops after every fifth."""
    entries: list[Entry] = []
    for fseq in range(first, first + count):
        if fseq % 5 == 0:
            entries.append(Entry(fseq, 1, Skip(gsn, gsn + 10)))
            gsn += 10
            continue
        origin = Origin(WRITER, fseq // 10, 3 * (fseq % 10)) if origins else None
        entries.append(unit(fseq, gsn, origin=origin))
        gsn += 7
    return entries


def end_of(entries: Iterable[Entry]) -> int:
    """Return the position after the last one."""
    *_, last = entries
    decision = last.decision
    if isinstance(decision, Skip):
        return decision.stop
    assert isinstance(decision, Place)
    return decision.gsns[-1] + 1


def open_store(directory: Path, segment_bytes: int = 2_000) -> SegmentStore:
    return SegmentStore.open(
        directory, flush_interval_ms=0, segment_bytes=segment_bytes, reserve_bytes=0
    )


def fill(store: SegmentStore, entries: list[Entry]) -> None:
    """Append entries and a watermark record that covers all of them, and flush."""
    for entry in entries:
        store.append(entry)
    store.append(mark(entries[-1].fseq, end_of(entries)))
    assert store.flush()


def make(directory: Path, stable: int = 2**60) -> None:
    """Build all rows files that can be built."""
    BlockBuilder(directory).build(lambda: stable)


def walk(archive: BlockReader, gsn: int, stop: int) -> tuple[list[Row], list[Block], int]:
    """Read contiguous blocks from a position on; return their end."""
    rows: list[Row] = []
    blocks: list[Block] = []
    while gsn < stop:
        block = archive.block(gsn)
        if not isinstance(block, Block):
            break
        assert block.start <= gsn < block.stop
        rows += [row for row in rows_in(block) if gsn <= row.gsn < stop]
        blocks.append(block)
        gsn = block.stop
    return rows, blocks, gsn


def records(entries: Iterable[Entry], start: int = 0, stop: int = 2**62) -> list[Row]:
    return [row for row in rows_of(entries) if start <= row.gsn < stop]


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's directory of segments; blocks are small."""
    monkeypatch.setattr("ziplog.segments.blocks.BLOCK_BYTES", 700)
    directory = tmp_path / "shard-0-0" / "segments"
    directory.mkdir(parents=True)
    return directory
