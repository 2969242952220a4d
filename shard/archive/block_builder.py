"""Builds the block files of sealed segments, one after the other, in log order.

Rule: a block file is built only of a segment that is stable to its end, without void, damaged or
missing entries. The file appears atomically. A replaced segment takes its block file along. A
damaged segment is skipped, and tried again when its file has changed. One that the disk cannot read
is tried again with the next build (docs/protocol.md, section 14.1).
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from shard.archive.throttle import Throttle
from ziplog import event_log
from ziplog.core.writer_table import WriterTable
from ziplog.errors import ProtocolError
from ziplog.segments.block_file import (
    MAGIC,
    BlockFileIndex,
    BlockIndex,
    Part,
    encode_footer,
    encode_origins,
    encode_writers,
    part_of,
)
from ziplog.segments.block_reader import BlockReader, read_table
from ziplog.segments.blocks import BLOCK_BYTES, MAX_BLOCK_BYTES, cut_block
from ziplog.segments.entry import BusyError, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

    from ziplog.segments.blocks import Block, BlockCut
    from ziplog.segments.directory import ListedSegment
    from ziplog.segments.segment import Segment

#: Bytes of the first read: a block is a little longer than its minimum length.
_WINDOW_BYTES: Final = BLOCK_BYTES + BLOCK_BYTES // 8
#: Suffix of an unfinished file.
SUFFIX: Final = ".making"


class _Task(NamedTuple):
    """A segment, with the data for its block file."""

    entry: ListedSegment
    #: The segment covers all positions of the shard from here to its end; 0: from its first entry.
    start: int
    #: The writer table before the segment; None: unknown.
    writers: WriterTable | None


class BlockBuilder:
    """Builds missing block files. One thread."""

    def __init__(self, directory: Path, *, reserve_bytes: int = 0) -> None:
        """Build block files in `directory`, if more than the reserve of space is free."""
        self._directory, self._reserve_bytes = directory, reserve_bytes
        self.throttle: Final = Throttle()
        self._blocks: Final = BlockReader(directory)
        #: Segments that cannot be read: inode and length by file name.
        self._damaged: dict[str, tuple[int, int]] = {}
        #: The first entry of the first segment that waits for its block file; 0: unknown.
        self._next_fseq = 0

    def build(
        self, stable: Callable[[], int], on_progress: Callable[[int], object] = lambda _: None
    ) -> None:
        """Build all block files that can be built now.

        Args:
            stable: returns the last entry that is known to be stable.
            on_progress: receives the first entry without a block file before each file is built,
                and at the end.

        Raises:
            OSError: a write failed; there may be no space now.

        """
        self._remove_leftovers()
        done: set[str] = set()
        while (task := self._next_task(stable(), done)) is not None:
            on_progress(self._next_fseq)
            entry = task.entry
            done.add(entry.segment.name)
            assert 0 < entry.limit <= stable() + 1, "block files are built of stable entries"
            try:
                self._build(task)
            except (UnreadableError, ProtocolError) as error:
                if not isinstance(error, BusyError):
                    self._damaged[entry.segment.name] = self._stamp(entry)
                event_log.warning(
                    "the block file of a damaged segment cannot be built", error=str(error)
                )
        on_progress(self._next_fseq)

    def _remove_leftovers(self) -> None:
        """Delete block files without a segment, and unfinished files."""
        names = {entry.segment.block_file_name for entry in self._blocks.listed()}
        for path in self._directory.iterdir():
            is_left = path.name.endswith(".rows") and path.name not in names
            if is_left or path.name.endswith(SUFFIX):
                path.unlink(missing_ok=True)

    def _next_task(self, stable: int, done: set[str]) -> _Task | None:
        """Return the first buildable segment without a block file."""
        indexes = {segment.name: index for segment, index in self._blocks.indexed()}
        before: ListedSegment | None = None
        for entry in self._blocks.listed():
            segment = entry.segment
            self._next_fseq = segment.base_fseq
            if entry.limit > stable + 1:
                return None
            # The first segment holds the beginning of the kept log.
            start = segment.base if before is None else 0
            table: Part | None = None
            if before is not None and segment.base_fseq == before.limit:
                index = indexes.get(before.segment.name)
                if index is not None:
                    # Repaired entries there may reach beyond the planned start of this one.
                    start, table = max(segment.base, index.stop), index.writers
            is_known = before is None or table is not None
            index = indexes.get(segment.name)
            has_all = index is not None and (index.writers is not None or not is_known)
            can_be = entry.limit and segment.name not in done and not self._is_damaged(entry)
            if can_be and not has_all:
                writers = self._table(before, table) if is_known else None
                return _Task(entry, start, writers)
            before = entry
            self._next_fseq = entry.limit or segment.base_fseq
        return None

    def _table(self, before: ListedSegment | None, part: Part | None) -> WriterTable | None:
        """Return the writer table at the end of the segment before."""
        if before is None or part is None:
            return WriterTable()
        return read_table(self._directory / before.segment.block_file_name, part)

    def _is_damaged(self, entry: ListedSegment) -> bool:
        stamp = self._damaged.get(entry.segment.name)
        return stamp is not None and stamp == self._stamp(entry)

    def _stamp(self, entry: ListedSegment) -> tuple[int, int]:
        with suppress(OSError):
            facts = (self._directory / entry.segment.name).stat()
            return facts.st_ino, facts.st_size
        return 0, 0

    # --- one file ----------------------------------------------------------------------------

    def _build(self, task: _Task) -> None:
        entry = task.entry
        path = self._directory / entry.segment.name
        target = self._directory / entry.segment.block_file_name
        # The name contains the pid: an older builder may be about to end.
        fresh = target.with_name(f"{target.name}.{os.getpid()}{SUFFIX}")
        try:
            with path.open("rb", buffering=0) as segment, fresh.open("wb") as file:
                facts = os.fstat(segment.fileno())
                self._check_space(facts.st_size)
                self.throttle.start()
                _write(segment.fileno(), facts.st_size, task, file, self._before_block)
                file.flush()
                os.fdatasync(file.fileno())
            fresh.replace(target)
        except FileNotFoundError:
            # The segment was trimmed just now.
            fresh.unlink(missing_ok=True)
            return
        except BaseException:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise
        if not _is_same(path, facts):
            # The change of the segment deleted its block file too early: it did not exist yet.
            target.unlink(missing_ok=True)

    def _before_block(self, columns: int) -> None:
        # With short records, a block file is several times as large as the segment.
        self._check_space(columns)
        self.throttle.throttle(self._directory / self._blocks.listed()[-1].segment.name)

    def _check_space(self, size: int) -> None:
        space = os.statvfs(self._directory)
        if space.f_bavail * space.f_frsize < 2 * self._reserve_bytes + size:
            raise OSError(errno.ENOSPC, "the remaining space is reserved for records")


def _write(
    fd: int, size: int, task: _Task, file: BinaryIO, before_block: Callable[[int], None]
) -> None:
    """Write the block file of a segment of `size` bytes."""
    entry, writers = task.entry, task.writers
    segment = entry.segment
    file.write(MAGIC)
    before = _put_table(writers, file) if writers else None
    start = task.start
    # Old files do not contain the number of their first entry.
    last_fseq = segment.base_fseq - 1
    blocks: list[BlockIndex] = []
    at = 0
    while at < size:
        cut = _cut(fd, at, size, start, last_fseq, segment)
        last_fseq = cut.last_fseq
        if cut.block is not None:
            before_block(len(cut.block.columns))
            blocks.append(_put(cut.block, at, file))
            start = cut.block.stop
            if writers is not None:
                for run in cut.block.origins:
                    writers.first_new_row(run.origin, run.count)
        at += cut.size
    if last_fseq != entry.limit - 1:
        raise UnreadableError(f"{segment.name} ends with entry {last_fseq}, not {entry.limit - 1}")
    table = _put_table(writers, file) if writers is not None else None
    begin = blocks[0].start if blocks else max(segment.base, task.start)
    stop = blocks[-1].stop if blocks else begin
    index = BlockFileIndex(
        segment.number, segment.salt, size, last_fseq, begin, stop, blocks, table, before
    )
    file.write(encode_footer(index))


def _cut(fd: int, at: int, size: int, start: int, last_fseq: int, segment: Segment) -> BlockCut:
    """Return the block that begins at an offset of the file."""
    window = _WINDOW_BYTES
    while True:
        wanted = min(window, size - at)
        try:
            data = os.pread(fd, wanted, at)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # It may pass: the next build tries again.
            raise BusyError(f"{segment.name}: {error}") from error
        if len(data) < wanted:
            raise UnreadableError(f"{segment.name} became shorter")
        is_end = wanted == size - at or wanted >= MAX_BLOCK_BYTES
        cut = cut_block(data, segment.salt, start, last_fseq, segment.name, is_end=is_end)
        if cut is not None:
            return cut
        window *= 2


def _put(block: Block, at: int, file: BinaryIO) -> BlockIndex:
    """Write the columns of the block at offset `at` of the segment."""
    origins = encode_origins(block.origins)
    columns = part_of(block.columns, file.tell())
    file.write(block.columns)
    file.write(origins)
    return BlockIndex(
        block.start, block.stop, block.rows, block.has_keys,
        part_of(block.data, at), columns, part_of(origins, columns.at + columns.size),
    )  # fmt: skip


def _put_table(writers: WriterTable, file: BinaryIO) -> Part:
    """Write a writer table."""
    content = encode_writers(writers)
    table = part_of(content, file.tell())
    file.write(content)
    return table


def _is_same(path: Path, facts: os.stat_result) -> bool:
    """Whether a file is unchanged."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return (now.st_ino, now.st_size) == (facts.st_ino, facts.st_size)
