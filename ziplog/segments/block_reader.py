"""Reads the blocks of a server's sealed segments from its files, while the server may run.

It changes no file. A segment without a valid block file counts as absent; its records must be read
by another path. Invariant: every returned block was stable when its block file was written, and no
newer segment has replaced it (docs/protocol.md, section 14).
"""

from __future__ import annotations

import errno
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
from ziplog.segments.entry import SCARCE

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.segments.block_file import BlockIndex, Part
    from ziplog.segments.blocks import OriginRun
    from ziplog.segments.directory import ListedSegment
    from ziplog.segments.segment import Segment


#: Flags that open regular files only: no symbolic links, and no waiting for pipes or devices.
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
#: Errors of reads that may succeed later, without a change in the directory.
_PASSING: Final = SCARCE | {errno.EIO}


class BlockPlace(NamedTuple):
    """The files of a block, and its place in them."""

    segment: Path
    rows: Path
    block: BlockIndex


class BlockReader(SegmentDirectory):
    """The sealed segments of a directory that have block files. Detects changes. One thread."""

    def __init__(self, directory: Path, pool: BufferPool | None = None) -> None:
        """Open a storage server's `segments` directory.

        Args:
            directory: the directory of the segments.
            pool: buffers for the blocks; None: a pool of its own.

        """
        super().__init__(directory)
        self._entries: list[ListedSegment] = []
        self._is_refused = False
        #: Segments with block files, and the start of each; by name, the footer and its file stamp.
        self._rows: list[tuple[Segment, BlockFileIndex]] = []
        self._starts: list[int] = []
        self._known: dict[str, tuple[tuple[int, int], BlockFileIndex | None]] = {}
        self._pool: Final = pool or BufferPool()

    # --- the block files ---------------------------------------------------------------------

    def indexed(self) -> list[tuple[Segment, BlockFileIndex]]:
        """Return the segments with block files and their footers, in order of position.

        Files that the system refuses to read count as absent; the next call tries them again.
        """
        try:
            listed = self.listed()
        except OSError:
            listed = []
        if listed is not self._entries:
            self._is_refused = False
            found = [(e.segment, index) for e in listed if (index := self._index(e)) is not None]
            self._rows = found
            self._starts = [index.start for _, index in found]
            present = {segment.name for segment, _ in found}
            self._known = {name: kept for name, kept in self._known.items() if name in present}
            self._entries = [] if self._is_refused else listed
        return self._rows

    def _index(self, entry: ListedSegment) -> BlockFileIndex | None:
        """Return the footer of a segment's block file; None if it has no up-to-date one."""
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
        except OSError as error:
            self._is_refused |= error.errno in _PASSING
            return None
        index = kept[1]
        if index is None or (index.number, index.salt) != (segment.number, segment.salt):
            return None
        is_whole = index.size == size and 0 <= index.last_fseq < (entry.limit or 2**63)
        return index if is_whole else None

    # --- blocks ------------------------------------------------------------------------------

    def block(self, gsn: int) -> Block | int:
        """Return the block that holds a position, or the start of the next block; 0: none."""
        found = self.find(gsn)
        if isinstance(found, int):
            return found
        block = read_block(found[0], self._pool)
        # A block that cannot be read here must be read by another path.
        return block if block is not None else self.next_start(found[0].block.stop)

    def find(self, gsn: int, most: int = 1) -> list[BlockPlace] | int:
        """Return the place of the block that holds a position, or the next block's start; 0: none.

        The blocks after it in its segment follow in order, up to `most` places in all.
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
        """Return the start of the first block that starts at or after a position; 0: none."""
        return self._next_start(self.indexed(), gsn)

    def _next_start(self, rows: list[tuple[Segment, BlockFileIndex]], gsn: int) -> int:
        """Return the same for a list of segments; `indexed` may have found more since."""
        for _, index in rows[max(bisect_right(self._starts, gsn) - 1, 0) :]:
            if index.blocks and index.blocks[-1].start >= gsn:
                return index.blocks[bisect_left(index.blocks, gsn, key=lambda b: b.start)].start
        return 0

    # --- writers -----------------------------------------------------------------------------

    def writers(self, gsn: int) -> tuple[int, WriterTable]:
        """Return the writer table at a position, or at the last position known before it.

        Returns:
            A position, and the table there: `gsn`, or less if blocks do not cover all before it.
            If no table is known: the first position in the files, and an empty table.

        """
        position, writers = self._table(gsn)
        # Columns may be large, and calls are rare: the shared pool is not used.
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
        """Return the last table stored in a block file at or before a position."""
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
    """Return the footer of a block file; None if it has no valid one.

    Raises:
        OSError: the file cannot be read.

    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        trailer = os.pread(file.fileno(), TRAILER_BYTES, max(size - TRAILER_BYTES, 0))
        footer = footer_size(trailer)
        if not 0 < footer <= size:
            return None
        return decode_footer(os.pread(file.fileno(), footer, size - footer))


def read_table(path: Path, part: Part) -> WriterTable | None:
    """Return a writer table of a block file; None if the file is missing or damaged."""
    found = _parts(path, BufferPool(), part)
    with suppress(msgspec.MsgspecError):
        return decode_writers(found[0]) if found is not None else None
    return None


def read_block(place: BlockPlace, pool: BufferPool) -> Block | None:
    """Return a block; None if its files are missing, or hold other bytes at that place.

    The place may come from an untrusted peer: only a segment's files are read, within their sizes.

    Args:
        place: the files and the parts to read.
        pool: supplies the buffers.

    """
    index = place.block
    parts = _parts(place.rows, pool, index.columns, index.origins)
    data = _parts(place.segment, pool, index.data) if parts is not None else None
    if parts is None or data is None:
        return None
    columns, origins = parts
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
    """Return parts of a file; None if the file is missing, or a part is damaged."""
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
            # After a short read, the rest of the buffer does not match the CRC.
            os.preadv(fd, [content], part.at)
            if not is_sound(part, content):
                return None
            contents.append(content)
    except OSError:
        return None
    finally:
        os.close(fd)
    return contents
