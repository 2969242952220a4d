"""The blocks of a server's sealed segments, straight from its files.

Nothing is changed, and a server may run there. Rule: what has no rows, or rows that are not sound,
is not there: who asks for it reads the log in another way. Invariant: what is given out was stable
when its rows were made, and nothing newer made it void (docs/protocol.md, section 14).
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ziplog.core.writer_table import WriterTable
from ziplog.segments.block_file import (
    TRAILER_BYTES,
    BlockFileIndex,
    decode_footer,
    decode_origins,
    decode_writers,
    footer_size,
    is_sound,
)
from ziplog.segments.blocks import Block, layout
from ziplog.segments.buffer_pool import BufferPool
from ziplog.segments.directory import SegmentDirectory

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.segments.block_file import BlockIndex, Part
    from ziplog.segments.blocks import OriginRun
    from ziplog.segments.directory import ListedSegment
    from ziplog.segments.segment import Segment


#: What is no file at all, or leads to one elsewhere, is not opened, nor waited for.
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class BlockPlace(NamedTuple):
    """Where a block is."""

    segment: Path
    rows: Path
    block: BlockIndex


class BlockReader(SegmentDirectory):
    """The sealed segments in a directory, and their rows. Notices what changes. One thread."""

    def __init__(self, directory: Path, pool: BufferPool | None = None) -> None:
        """Read what is in `directory`, which a storage server calls its `segments`.

        Args:
            directory: where the segments are.
            pool: where blocks are read to; None: some of its own.

        """
        super().__init__(directory)
        self._entries: list[ListedSegment] = []
        #: Segments with rows, and where each begins; by segment, which file its rows were read of.
        self._rows: list[tuple[Segment, BlockFileIndex]] = []
        self._starts: list[int] = []
        self._known: dict[str, tuple[tuple[int, int], BlockFileIndex | None]] = {}
        self._pool: Final = pool or BufferPool()

    # --- what there is -----------------------------------------------------------------------

    def indexed(self) -> list[tuple[Segment, BlockFileIndex]]:
        """Return the segments that have rows, in order of their positions."""
        listed = self.listed()
        if listed is not self._entries:
            found = [(e.segment, index) for e in listed if (index := self._index(e)) is not None]
            self._rows = found
            self._starts = [index.start for _, index in found]
            there = {segment.name for segment, _ in found}
            self._known = {name: kept for name, kept in self._known.items() if name in there}
            self._entries = listed
        return self._rows

    def _index(self, entry: ListedSegment) -> BlockFileIndex | None:
        """Return what the rows of a segment say, None if it has none that are about it now."""
        segment = entry.segment
        if not entry.has_block_file:
            return None
        path = self._directory / segment.block_file_name
        try:
            facts = path.stat()
            size = (self._directory / segment.name).stat().st_size
            stamp = (facts.st_ino, facts.st_mtime_ns)
            kept = self._known.get(segment.name)
            if kept is None or kept[0] != stamp:
                kept = self._known[segment.name] = (stamp, read_index(path))
        except OSError:
            return None
        index = kept[1]
        if index is None or (index.number, index.salt) != (segment.number, segment.salt):
            return None
        is_whole = index.size == size and 0 <= index.last_fseq < (entry.limit or 2**63)
        return index if is_whole else None

    # --- blocks ------------------------------------------------------------------------------

    def block(self, gsn: int) -> Block | int:
        """Return the block over a position, or where the next one begins; 0: there is none."""
        found = self.find(gsn)
        if isinstance(found, int):
            return found
        block = read_block(found[0], self._pool)
        # What cannot be read here is read in another way.
        return block if block is not None else self.next_start(found[0].block.stop)

    def find(self, gsn: int, most: int = 1) -> list[BlockPlace] | int:
        """Return where the block over a position is, or where the next one begins; 0: none.

        Behind it, in order, are those that follow it in its segment, up to `most` in all.
        """
        rows = self.indexed()
        at = bisect_right(self._starts, gsn) - 1
        if at < 0 or gsn >= rows[at][1].stop:
            return self._next_start(rows, gsn)
        segment, index = rows[at]
        first = bisect_right(index.blocks, gsn, key=lambda block: block.stop)
        path, rows_path = self._directory / segment.name, self._directory / segment.block_file_name
        return [BlockPlace(path, rows_path, block) for block in index.blocks[first : first + most]]

    def next_start(self, gsn: int) -> int:
        """Return where the first block begins that does not begin before a position; 0: none."""
        return self._next_start(self.indexed(), gsn)

    def _next_start(self, rows: list[tuple[Segment, BlockFileIndex]], gsn: int) -> int:
        """Return the same of rows as they were seen just now: there may be more already."""
        for _, index in rows[max(bisect_right(self._starts, gsn) - 1, 0) :]:
            if index.blocks and index.blocks[-1].start >= gsn:
                return index.blocks[bisect_left(index.blocks, gsn, key=lambda b: b.start)].start
        return 0

    # --- writers -----------------------------------------------------------------------------

    def writers(self, gsn: int) -> tuple[int, WriterTable]:
        """Return the writers' table at a position, as far as blocks tell.

        Returns:
            A position, and the table there: `gsn`, or less if blocks do not cover all before it.
            Where nothing is known: the first position that is kept, and an empty table.

        """
        position, writers = self._table(gsn)
        # Columns may be large, and this is asked for rarely.
        pool = BufferPool()
        while position < gsn:
            found = self.find(position)
            if isinstance(found, int):
                break
            place = found[0]
            runs = _origins(place, pool)
            if runs is None:
                break
            end = place.block.rows
            if place.block.stop > gsn:
                gsns = _gsns(place, pool)
                if gsns is None:
                    break
                end = bisect_left(gsns, gsn)
            for run in runs:
                if run.at < end:
                    writers.first_new_row(run.origin, min(run.count, end - run.at))
            position = min(place.block.stop, gsn)
        return position, writers

    def _table(self, gsn: int) -> tuple[int, WriterTable]:
        """Return the last table that was written down at or before a position."""
        rows = self.indexed()
        for segment, index in reversed(rows[: bisect_right(self._starts, gsn)]):
            for position, part in ((index.stop, index.writers), (index.start, index.before)):
                if part is None or position > gsn:
                    continue
                table = read_table(self._directory / segment.block_file_name, part)
                if table is not None:
                    return position, table
        return min(self.start, gsn), WriterTable()


def read_index(path: Path) -> BlockFileIndex | None:
    """Return the footer of a file of rows, None if there is none that is sound.

    Raises:
        OSError: it cannot be read.

    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        trailer = os.pread(file.fileno(), TRAILER_BYTES, max(size - TRAILER_BYTES, 0))
        footer = footer_size(trailer)
        if not 0 < footer <= size:
            return None
        return decode_footer(os.pread(file.fileno(), footer, size - footer))


def read_table(path: Path, part: Part) -> WriterTable | None:
    """Return a writers' table of a file of rows, None if it is gone or damaged."""
    found = _parts(path, BufferPool(), part)
    with suppress(msgspec.MsgspecError):
        return decode_writers(found[0]) if found is not None else None
    return None


def read_block(place: BlockPlace, pool: BufferPool) -> Block | None:
    """Return a block, None if its files are gone, or hold something else there.

    Whoever named the place need not be trusted: nothing but a segment's files is read, and no more
    of them than there is.

    Args:
        place: where it is.
        pool: where it is read to.

    """
    index = place.block
    told = _parts(place.rows, pool, index.columns, index.origins)
    data = _parts(place.segment, pool, index.data) if told is not None else None
    if told is None or data is None:
        return None
    columns, origins = told
    if len(columns) != layout(index.rows, has_keys=index.has_keys).size:
        return None
    with suppress(msgspec.MsgspecError):
        return Block(
            index.start, index.stop, index.rows, index.has_keys, columns, data[0],
            decode_origins(origins),
        )  # fmt: skip
    return None


def _origins(place: BlockPlace, pool: BufferPool) -> list[OriginRun] | None:
    found = _parts(place.rows, pool, place.block.origins)
    with suppress(msgspec.MsgspecError):
        return decode_origins(found[0]) if found is not None else None
    return None


def _gsns(place: BlockPlace, pool: BufferPool) -> memoryview | None:
    found = _parts(place.rows, pool, place.block.columns)
    if found is None:
        return None
    return found[0][: 8 * place.block.rows].cast("q")


def _parts(path: Path, pool: BufferPool, *parts: Part) -> list[memoryview] | None:
    """Return parts of a file, None if it is gone, or one of them is damaged."""
    try:
        fd = os.open(path, _READ)
    except OSError:
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            return None
        contents: list[memoryview] = []
        for part in parts:
            if min(part.at, part.size) < 0 or part.at + part.size > facts.st_size:
                return None
            content = pool.view(part.size)
            # If less is read, what is there instead does not match the CRC.
            os.preadv(fd, [content], part.at)
            if not is_sound(part, content):
                return None
            contents.append(content)
    except OSError:
        return None
    finally:
        os.close(fd)
    return contents
