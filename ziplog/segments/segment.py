"""One segment file: its name, the index of its blocks, and the reads from it.

The name has the file's number, the first position and the first entry that it may hold, and a
salt. A *block* here is about 64 KiB of entries, the unit of reading; the index of a sealed segment
is in a file beside it. Entries are numbered without gaps, so that missing entries are detected.

Invariant: positions, numbers and views increase from entry to entry (docs/protocol.md, section 10).
"""

from __future__ import annotations

import errno
import os
import re
from array import array
from bisect import bisect_left, bisect_right
from itertools import repeat
from typing import TYPE_CHECKING, Final

import msgspec
from crc32c import crc32c

from ziplog.segments.entry import WatermarkRecord, unreadable
from ziplog.segments.entry_codec import (
    DAMAGED,
    EXPIRE,
    HEADER_BYTES,
    MARK,
    PLACE,
    TABLE,
    DecodedHeader,
    Facts,
    decode,
    seek,
    view_of,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

BLOCK_BYTES: Final = 64 * 1024
#: A disk that cannot read a byte loses the aligned part of this size.
SECTOR_BYTES: Final = 4096

_NAME: Final = re.compile(r"(\d{8})-(\d{19})-(?:(\d{19})-)?([0-9a-f]{8})(-first)?\.seg", re.ASCII)


class _Index(msgspec.Struct, frozen=True, array_like=True):
    """The stored index of a sealed segment, the contents of its index file."""

    number: int
    salt: int
    size: int
    ends: list[int]
    lasts: list[int]
    records: list[int]
    last: int
    last_record: int
    last_fseq: int
    mark: WatermarkRecord | None
    is_torn: bool
    fseqs: list[int]
    views: list[tuple[int, int]]
    tables: list[tuple[int, int, int]]
    holes: list[tuple[int, int]]
    #: For each table, its `part_code`; empty: all are whole.
    parts: list[int] = []
    has_lost_table: bool = False


class Segment:
    """A segment file and its block index; the newest segment is indexed before it is written."""

    def __init__(
        self, number: int, base: int, base_fseq: int, salt: int, *, is_first: bool = False
    ) -> None:
        """Create an empty segment for positions from `base` on, and entries from `base_fseq` on.

        `is_first`: the log starts here, even if there are older files.
        """
        self.number, self.base, self.base_fseq, self.salt = number, base, base_fseq, salt
        self.is_first = is_first
        #: The name and the headers have entry numbers; False for files of the first format.
        self.is_counted = True
        first = "-first" if is_first else ""
        #: The file's name.
        self.name = f"{number:08d}-{base:019d}-{base_fseq:019d}-{salt:08x}{first}.seg"
        self.clear()

    def clear(self) -> None:
        """Remove all entries from the index."""
        #: Size of all entries in bytes, written or not.
        self.size = 0
        #: Bytes on stable storage. Another thread sets it.
        self.flushed = 0
        #: For each closed block: its end; the last gsn, record (or 0) and entry number up to there.
        self.ends = array("Q")
        self.lasts = array("Q")
        self.records = array("Q")
        self.fseqs = array("Q")
        self._block_start = 0
        #: The last gsn of its entries; `base - 1` if there are none.
        self.last = self.base - 1
        #: The last record in this segment (0: none), and the last one in all segments before it.
        self.last_record = self.record_before = 0
        #: The last entry's number; `base_fseq - 1` if there are no entries.
        self.last_fseq = self.base_fseq - 1
        #: The views of its entries, each with its first entry in this segment.
        self.views: list[tuple[int, int]] = []
        self.mark: WatermarkRecord | None = None
        #: For each table: the offset of its header, its size with the header, the last entry before
        #: it, and its `part_code`.
        self.tables: list[tuple[int, int, int, int]] = []
        #: Damaged entries at the last rebuild: ranges of first and last number.
        self.holes: list[tuple[int, int]] = []
        #: Entries after the last position are missing: positions above it here are unknown.
        self.is_torn = False
        #: The segment before `is_torn`: positions before the first one here are unknown.
        self.is_torn_before = False
        #: A damaged part of the file may have been a session table.
        self.has_lost_table = False

    @property
    def index_name(self) -> str:
        """The name of the index file, which exists once the segment is sealed."""
        return self.name.removesuffix("seg") + "idx"

    @property
    def block_file_name(self) -> str:
        """The name of its block file (docs/protocol.md, section 14.1), which may not exist."""
        return self.name.removesuffix("seg") + "rows"

    @classmethod
    def named(cls, name: str) -> Segment | None:
        """Return an empty segment from a file's name; None if the name is not a segment's.

        Names of the first format have no `base_fseq`: then it is 0.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        fseq, is_first = int(found[3] or 0), bool(found[5])
        segment = cls(int(found[1]), int(found[2]), fseq, int(found[4], 16), is_first=is_first)
        segment.name, segment.is_counted = name, found[3] is not None
        return segment

    def add(self, fseq: int, entries: Iterable[Facts]) -> None:
        """Add entries to the index, the first of which has number `fseq`."""
        end, block_start, before, last_record, number = (
            self.size, self._block_start, self.last, self.last_record, self.last_fseq,
        )  # fmt: skip
        for number, (size, first, last, record) in enumerate(entries, fseq):
            end += size
            if not first:
                continue
            assert first > before, f"gsn {first} after {before}: gsns must increase"
            before = last
            if record >= self.base:  # Not of a segment before.
                last_record = record
            # A block ends after a positioned entry, so entries between belong to the next block.
            if end - block_start >= BLOCK_BYTES:
                self._close_block(end, last, last_record, number)
                block_start = end
        if before > self.last:
            # A gap is now before the first position, where reads detect it.
            self.is_torn = False
        self.size, self._block_start, self.last, self.last_record, self.last_fseq = (
            end, block_start, before, last_record, number,
        )  # fmt: skip

    def _close_block(self, end: int, last: int, record: int, fseq: int) -> None:
        self.ends.append(end)
        self.lasts.append(last)
        self.records.append(record)
        self.fseqs.append(fseq)

    def add_view(self, view: int, fseq: int) -> None:
        """Record the view of an entry."""
        if not self.views or view > self.views[-1][0]:
            self.views.append((view, fseq))

    # --- the index file ----------------------------------------------------------------------

    def index(self) -> bytes:
        """Return the contents of the index file."""
        index = _Index(
            self.number, self.salt, self.size,
            list(self.ends), list(self.lasts), list(self.records),
            self.last, self.last_record, self.last_fseq, self.mark, self.is_torn,
            list(self.fseqs), self.views, [table[:3] for table in self.tables], self.holes,
            [part for *_, part in self.tables], self.has_lost_table,
        )  # fmt: skip
        body = msgspec.msgpack.encode(index)
        return crc32c(body).to_bytes(4, "little") + body

    def load_index(self, contents: bytes, size: int) -> bool:
        """Load an index file, if it is valid and matches this segment of `size` bytes."""
        if crc32c(contents[4:]) != int.from_bytes(contents[:4], "little"):
            return False
        try:
            index = msgspec.msgpack.decode(contents[4:], type=_Index)
        except msgspec.MsgspecError:
            return False
        if (index.number, index.salt, index.size) != (self.number, self.salt, size):
            return False
        self.size = self.flushed = size
        self.ends, self.lasts = array("Q", index.ends), array("Q", index.lasts)
        self.records, self.fseqs = array("Q", index.records), array("Q", index.fseqs)
        self.last, self.last_fseq, self.mark = index.last, index.last_fseq, index.mark
        self.last_record = index.last_record
        self.views, self.holes = index.views, index.holes
        parts = index.parts or repeat(0)
        self.tables = [(*table, part) for table, part in zip(index.tables, parts, strict=False)]
        self.is_torn, self.has_lost_table = index.is_torn, index.has_lost_table
        return True

    def rebuild(self, data: bytes, flushed: int) -> None:
        """Rebuild the index from the file's bytes.

        `flushed` is the last entry that is known to have been on stable storage. The first damage
        after it is a torn write: `size` ends before it, and the rest counts as never written.
        """
        self.clear()
        if not self.is_counted:
            flushed = max(flushed, self._begin_uncounted(walk(data, self.salt)))
        good = placed = self.last_fseq
        is_all = False  # `flushed` takes all headers into account.
        # One header at a time: all of them take several times the memory of the file.
        for found in walk(data, self.salt):
            flushed = max(flushed, found.flushed)
            if not found.is_whole and good >= flushed and not is_all:
                rest = walk(data, self.salt, found.stop)
                flushed, is_all = max(flushed, max((f.flushed for f in rest), default=0)), True
            if not found.is_whole and good >= flushed:
                break
            if found.is_numbered:
                self.size = found.start - HEADER_BYTES
                self._index_entry(found)
            self.size = found.stop
            self.has_lost_table |= not found.is_whole and not found.is_numbered
            if found.kind == DAMAGED:
                continue
            if found.kind < EXPIRE:
                placed = found.fseq
            if found.is_whole:
                self._index_body(data, found, good + 1)
                good = self._note_gap(good, found.fseq) if found.is_numbered else good
        if good < flushed:
            self._note_gap(good, flushed + 1)
            self.last_fseq = max(self.last_fseq, flushed)
        self.is_torn = bool(self.holes) and self.holes[-1][1] > placed
        self.flushed = self.size

    def _begin_uncounted(self, every: Iterable[DecodedHeader]) -> int:
        """Set the start of a file of the first format; return its last entry on stable storage.

        Headers of that format do not record it: all entries before a whole one count as flushed.
        """
        first = last = 0
        for found in every:
            if found.is_numbered:
                first = first or found.fseq
                last = max(last, found.fseq) if found.is_whole else last
        if not self.base_fseq:
            self.base_fseq = first or 1
            self.last_fseq = self.base_fseq - 1
        return last

    def _index_entry(self, found: DecodedHeader) -> None:
        """Index an entry with a number, which begins at `size`."""
        record = found.last if found.kind == PLACE else 0
        size = found.stop - self.size
        self.add(found.fseq, [(size, found.first, found.last, record)])

    def _index_body(self, data: bytes, found: DecodedHeader, after_good: int) -> None:
        """Index the facts that only the body of an entry has.

        `after_good`: the number after the last good entry. The views of damaged entries in between
        are unknown: they count for the view of this one (see `views_at`).
        """
        if found.kind == MARK:
            mark = decode(data, found, self.name).decision
            self.mark = mark if isinstance(mark, WatermarkRecord) else self.mark
        elif found.kind == TABLE:
            start = found.start - HEADER_BYTES
            self.tables.append((start, found.stop - start, found.fseq, found.first))
        else:
            self.add_view(view_of(data, found), after_good)

    def _note_gap(self, good: int, fseq: int) -> int:
        """Add the gap between the last good entry and `fseq` to `holes`; return `fseq`."""
        if fseq > good + 1:
            self.holes.append((good + 1, fseq - 1))
        return fseq

    # --- reading -----------------------------------------------------------------------------

    def block_at(self, gsn: int) -> int:
        """Return the number of the block that would hold `gsn`."""
        return bisect_left(self.lasts, gsn)

    def block_start(self, fseq: int) -> int:
        """Return the offset of the block with entry `fseq`."""
        block = bisect_left(self.fseqs, fseq)
        return self.ends[block - 1] if block else 0

    def block_last(self, block: int) -> int:
        """Return the last gsn up to the end of a block."""
        return self.lasts[block] if block < len(self.lasts) else self.last

    def record_up_to(self, block: int) -> int:
        """Return the last record in the log before a block."""
        return (self.records[block - 1] if block else 0) or self.record_before

    def view_at(self, fseq: int) -> int:
        """Return the view of an entry; 0 if it is not in this segment."""
        index = bisect_right(self.views, fseq, key=lambda pair: pair[1])
        return self.views[index - 1][0] if index and fseq <= self.last_fseq else 0

    def views_at(self, fseq: int) -> tuple[int, int]:
        """Return the lowest and the highest view that an entry can have; 0: any lower one.

        They differ for damaged entries where a view begins.
        """
        view = self.view_at(fseq)
        for index, (known, start) in enumerate(self.views):
            is_unsure = any(first == start and fseq <= last for first, last in self.holes)
            if known == view and is_unsure:
                return (self.views[index - 1][0] if index else 0), view
        return view, view

    def last_of(self, view: int) -> int:
        """Return the last entry here with a view of at most `view`; 0 if there is none."""
        index = bisect_right(self.views, view, key=lambda pair: pair[0])
        if index == 0:
            return 0
        return self.views[index][1] - 1 if index < len(self.views) else self.last_fseq

    def find(self, directory: Path, gsn: int) -> tuple[bytes, DecodedHeader | None]:
        """Return the bytes of a block, and its entry that holds `gsn`, which may be damage.

        Raises:
            UnreadableError: the file cannot be read.

        """
        block = self.block_at(gsn)
        data = self._block(directory, block)
        found = seek(data, gsn, self.salt)
        if found is None:
            # Only a full scan of the block distinguishes damage from absence.
            found = next((f for f in self._listed(data, block) if f.last >= gsn), None)
        return data, found if found is not None and found.first <= gsn else None

    def read(self, directory: Path, block: int) -> tuple[bytes, list[DecodedHeader]]:
        """Return a block's bytes, and the `Place`, `Skip` and damage in them, in order.

        Raises:
            UnreadableError: the file cannot be read.

        """
        data = self._block(directory, block)
        return data, list(self._listed(data, block))

    def _listed(self, data: bytes, block: int) -> Iterator[DecodedHeader]:
        fseq = self.fseqs[block - 1] if block else self.base_fseq - 1
        before = self.block_last(block - 1) if block else self.base - 1
        is_torn = block == 0 and self.is_torn_before
        entries = walk(data, self.salt)
        # Entries after a lost end show the gap, but perhaps they are not written yet.
        lost = self.holes[-1] if self.holes else (0, 0)
        return _positions(entries, fseq, before, self.block_last(block), is_torn, lost)

    def read_from(self, directory: Path, fseq: int) -> tuple[bytes, list[DecodedHeader]]:
        """Return the bytes of the block of entry `fseq`, and its entries from there on.

        Damaged entries may be missing.

        Raises:
            UnreadableError: the file cannot be read.

        """
        data = self._block(directory, bisect_left(self.fseqs, fseq))
        return data, [f for f in walk(data, self.salt) if f.is_numbered and f.fseq >= fseq]

    def last_at(self, directory: Path, fseq: int) -> int:
        """Return the last gsn of the entries up to `fseq`, as far as they can be read.

        Raises:
            UnreadableError: the file cannot be read.

        """
        block = bisect_left(self.fseqs, fseq)
        last = self.block_last(block - 1) if block else self.base - 1
        for found in walk(self._block(directory, block), self.salt):
            if found.is_numbered and found.kind < EXPIRE and found.fseq <= fseq:
                last = found.last
        return last

    def read_table(self, directory: Path, start: int, size: int) -> tuple[bytes, DecodedHeader]:
        """Return the bytes of a table, and the header found there.

        Raises:
            UnreadableError: the file cannot be read.

        """
        data = self._pread(directory, start, start + size)
        return data, next(walk(data, self.salt))

    def _block(self, directory: Path, block: int) -> bytes:
        start = self.ends[block - 1] if block else 0
        stop = min(self.ends[block] if block < len(self.ends) else self.size, self.flushed)
        return self._pread(directory, start, stop)

    def _pread(self, directory: Path, start: int, stop: int) -> bytes:
        try:
            fd = os.open(directory / self.name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = _read_range(fd, start, stop)
            finally:
                os.close(fd)
        except OSError as error:
            raise unreadable(self.name, error) from error
        # Missing bytes of a file that is too short are read as damage.
        return data + bytes(stop - start - len(data))


def read_file(path: Path) -> bytes:
    """Return a file's contents; see `read_with_errors`."""
    return read_with_errors(path)[0]


def read_with_errors(path: Path) -> tuple[bytes, bool]:
    """Return a file's contents, with zeros for what the disk cannot read, and if there was such.

    Zeros are never decoded as an entry, so what the disk cannot read counts as damage.

    Raises:
        OSError: another failure.

    """
    try:
        return path.read_bytes(), False
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read_range(fd, 0, os.fstat(fd).st_size), True
    finally:
        os.close(fd)


def _read_range(fd: int, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop), with zeros for what the disk cannot read."""
    parts: list[bytes] = []
    while start < stop:
        try:
            part = os.pread(fd, stop - start, start)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            part = bytes(min(stop, (start // SECTOR_BYTES + 1) * SECTOR_BYTES) - start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _positions(
    entries: Iterable[DecodedHeader],
    fseq: int,
    before: int,
    last: int,
    is_torn: bool,
    lost: tuple[int, int],
) -> Iterator[DecodedHeader]:
    """Yield the entries with positions, and for each damage the positions that it may have held.

    Entries are numbered from `fseq` + 1 on. A missing entry makes a hole: the positions between its
    neighbours. `before` is the position before the first entry, `last` is the end, and `is_torn`
    means that there is a hole before the first entry. `lost` are the last entries that are known to
    be missing: there is a hole after the entries if it begins there.
    """
    is_damaged = False
    for found in entries:
        is_damaged = is_damaged or found.kind == DAMAGED
        if not found.is_numbered:
            continue
        is_torn = is_torn or found.fseq > fseq + 1
        fseq = found.fseq
        if found.kind == EXPIRE:
            continue
        if is_torn and before + 1 < found.first:
            yield _damage(before + 1, found.first - 1)
        is_torn = is_damaged = False
        before = found.last
        yield found
    is_torn = is_torn or lost[0] <= fseq + 1 <= lost[1]
    if (is_torn or is_damaged) and before < last:
        yield _damage(before + 1, last)


def _damage(first: int, last: int) -> DecodedHeader:
    return DecodedHeader(DAMAGED, first, last, 0, 0, 0, False, 0)
