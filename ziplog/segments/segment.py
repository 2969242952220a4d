"""One segment file: its name, the index of its blocks, and how it is read.

The name tells the file's number, the first position and the first entry that it may hold, and a
salt. A *block* is about 64 KiB of entries, the unit of reading; a sealed segment has its index in
a file beside it. Entries are numbered without gaps, so what is missing shows.

Invariant: positions, numbers and views increase from entry to entry (docs/protocol.md, section 10).
"""

from __future__ import annotations

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
    decode,
    seek,
    view_of,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

BLOCK_BYTES: Final = 64 * 1024

_NAME: Final = re.compile(r"(\d{8})-(\d{19})-(?:(\d{19})-)?([0-9a-f]{8})(-first)?\.seg", re.ASCII)


class _Index(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a sealed segment without reading it."""

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
    #: Of each table, which part it is; none: all are whole.
    parts: list[int] = []


class Segment:
    """A file of entries and the index of its blocks. The newest one grows in memory first."""

    def __init__(
        self, number: int, base: int, base_fseq: int, salt: int, *, is_first: bool = False
    ) -> None:
        """Begin an empty segment for positions from `base` on, and entries from `base_fseq` on.

        `is_first`: the log begins here, whatever other files there are.
        """
        self.number, self.base, self.base_fseq, self.salt = number, base, base_fseq, salt
        self.is_first = is_first
        #: Entries were counted when it was made: its name and its headers tell their numbers.
        self.is_counted = True
        first = "-first" if is_first else ""
        #: The file's name.
        self.name = f"{number:08d}-{base:019d}-{base_fseq:019d}-{salt:08x}{first}.seg"
        self.clear()

    def clear(self) -> None:
        """Forget all that was added."""
        #: Bytes of all entries, written or not.
        self.size = 0
        #: Bytes on stable storage. Another thread sets it.
        self.flushed = 0
        #: Of each closed block: where it ends; the last gsn, record (or 0) and number so far.
        self.ends = array("Q")
        self.lasts = array("Q")
        self.records = array("Q")
        self.fseqs = array("Q")
        self._block_start = 0
        #: The last gsn that an entry is about; `base - 1` if there is none.
        self.last = self.base - 1
        #: The last record in it, 0 if there is none; and the last in all segments before it.
        self.last_record = self.record_before = 0
        #: The last entry's number; `base_fseq - 1` if there is none.
        self.last_fseq = self.base_fseq - 1
        #: The views of its entries, each with the first entry of it here.
        self.views: list[tuple[int, int]] = []
        self.mark: WatermarkRecord | None = None
        #: Of each table: where its header is, its size with it, the last entry before it, and which
        #: part it is (`part_code`).
        self.tables: list[tuple[int, int, int, int]] = []
        #: Entries that were damaged when the file was last read as a whole: first and last number.
        self.holes: list[tuple[int, int]] = []
        #: Entries after the last position are missing: what lies above it here is unknown.
        self.is_torn = False
        #: So it was in the segment before: what lies before the first position here is unknown.
        self.is_torn_before = False

    @property
    def index_name(self) -> str:
        """The name of the index file, which exists once the segment is sealed."""
        return self.name.removesuffix("seg") + "idx"

    @property
    def block_file_name(self) -> str:
        """The name of the file of its rows (docs/protocol.md, section 14.1), if there is one."""
        return self.name.removesuffix("seg") + "rows"

    @classmethod
    def named(cls, name: str) -> Segment | None:
        """Return the empty segment of a file's name, None if it is no segment's.

        Names that were given before entries were counted tell no `base_fseq`: then it is 0.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        fseq, is_first = int(found[3] or 0), bool(found[5])
        segment = cls(int(found[1]), int(found[2]), fseq, int(found[4], 16), is_first=is_first)
        segment.name, segment.is_counted = name, found[3] is not None
        return segment

    def add(self, kind: int, first: int, last: int, record: int, fseq: int, size: int) -> None:
        """Count an entry of `size` bytes in; `record` is its last record, 0 if it has none."""
        self.size += size
        if kind < MARK:
            self.last_fseq = fseq
        if kind < EXPIRE:
            assert first > self.last, f"gsn {first} after {self.last}: entries must go upwards"
            self.last = last
            # What was damaged lies before it now, and reading comes upon it.
            self.is_torn = False
            if record:
                self.last_record = record
            # Only here: what lies between two blocks' positions is then in the second one.
            if self.size - self._block_start >= BLOCK_BYTES:
                self._close_block()

    def _close_block(self) -> None:
        self._block_start = self.size
        self.ends.append(self.size)
        self.lasts.append(self.last)
        self.records.append(self.last_record)
        self.fseqs.append(self.last_fseq)

    def add_view(self, view: int, fseq: int) -> None:
        """Take note of the view of an entry."""
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
            [part for *_, part in self.tables],
        )  # fmt: skip
        body = msgspec.msgpack.encode(index)
        return crc32c(body).to_bytes(4, "little") + body

    def load_index(self, contents: bytes, size: int) -> bool:
        """Take an index over, if it is whole and about this segment, of `size` bytes."""
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
        self.is_torn = index.is_torn
        return True

    def rebuild(self, data: bytes, flushed: int) -> None:
        """Take the index from the file's bytes.

        `flushed`: the last entry that is known to have been on stable storage. The first damage
        after it is a torn write, and all from there on counts as never written: `size` ends before.
        """
        self.clear()
        every = list(walk(data, self.salt))
        flushed = max(flushed, self._flushed_entry(every))
        good = placed = self.last_fseq
        for found in every:
            if not found.is_whole and good >= flushed:
                break
            self.size = found.stop
            if found.kind == DAMAGED:
                continue
            self._index_entry(found)
            if found.kind < EXPIRE:
                placed = found.fseq
            if found.is_whole:
                self._index_body(data, found)
                good = self._note_gap(good, found.fseq) if found.is_numbered else good
        if good < flushed:
            self._note_gap(good, flushed + 1)
            self.last_fseq = max(self.last_fseq, flushed)
        self.is_torn = bool(self.holes) and self.holes[-1][1] > placed
        self.flushed = self.size

    def _flushed_entry(self, every: list[DecodedHeader]) -> int:
        """Return the last entry that was on stable storage, as the entries tell."""
        if self.is_counted:
            return max((found.flushed for found in every), default=0)
        # They do not. What stands before a good one is taken for it.
        numbered = [found for found in every if found.is_numbered]
        if not self.base_fseq:
            self.base_fseq = numbered[0].fseq if numbered else 1
            self.last_fseq = self.base_fseq - 1
        return max((found.fseq for found in numbered if found.is_whole), default=0)

    def _index_entry(self, found: DecodedHeader) -> None:
        self.size = found.start - HEADER_BYTES
        record = found.last if found.kind == PLACE else 0
        size = found.stop - self.size
        self.add(found.kind, found.first, found.last, record, found.fseq, size)

    def _index_body(self, data: bytes, found: DecodedHeader) -> None:
        """Take what only the body tells."""
        if found.kind == MARK:
            mark = decode(data, found, self.name).decision
            self.mark = mark if isinstance(mark, WatermarkRecord) else self.mark
        elif found.kind == TABLE:
            start = found.start - HEADER_BYTES
            self.tables.append((start, found.stop - start, found.fseq, found.first))
        else:
            self.add_view(view_of(data, found), found.fseq)

    def _note_gap(self, good: int, fseq: int) -> int:
        """Note what is missing between the last good entry and this one, which is returned."""
        if fseq > good + 1:
            self.holes.append((good + 1, fseq - 1))
        return fseq

    # --- reading -----------------------------------------------------------------------------

    def block_at(self, gsn: int) -> int:
        """Return the number of the block that would hold `gsn`."""
        return bisect_left(self.lasts, gsn)

    def block_last(self, block: int) -> int:
        """Return the last gsn up to the end of a block."""
        return self.lasts[block] if block < len(self.lasts) else self.last

    def record_up_to(self, block: int) -> int:
        """Return the last record in the log before a block."""
        return (self.records[block - 1] if block else 0) or self.record_before

    def view_at(self, fseq: int) -> int:
        """Return the view of an entry; 0 if it is not here."""
        index = bisect_right(self.views, fseq, key=lambda pair: pair[1])
        return self.views[index - 1][0] if index and fseq <= self.last_fseq else 0

    def last_of(self, view: int) -> int:
        """Return the last entry here whose view is `view` or less; 0 if there is none."""
        index = bisect_right(self.views, view, key=lambda pair: pair[0])
        if index == 0:
            return 0
        return self.views[index][1] - 1 if index < len(self.views) else self.last_fseq

    def find(self, directory: Path, gsn: int) -> tuple[bytes, DecodedHeader | None]:
        """Return the bytes of a block, and what in it is about `gsn`, which may be damage.

        Raises:
            UnreadableError: the file cannot be read.

        """
        block = self.block_at(gsn)
        data = self._block(directory, block)
        found = seek(data, gsn, self.salt)
        if found is None:
            # Only all that is in the block tells damage and absence apart.
            found = next((f for f in self._listed(data, block) if f.last >= gsn), None)
        return data, found if found is not None and found.first <= gsn else None

    def read(self, directory: Path, block: int) -> tuple[bytes, list[DecodedHeader]]:
        """Return a block's bytes and what is in them of `Place`, `Skip` and damage, in order.

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
        return _positions(entries, fseq, before, self.block_last(block), is_torn)

    def read_from(self, directory: Path, fseq: int) -> tuple[bytes, list[DecodedHeader]]:
        """Return the bytes of the block of entry `fseq`, and the entries in it from there on.

        Those that are damaged may be missing.

        Raises:
            UnreadableError: the file cannot be read.

        """
        data = self._block(directory, bisect_left(self.fseqs, fseq))
        return data, [f for f in walk(data, self.salt) if f.is_numbered and f.fseq >= fseq]

    def last_at(self, directory: Path, fseq: int) -> int:
        """Return the last gsn that the entries up to `fseq` are about, as far as can be read.

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
        """Return the bytes of a table, and what is there.

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
                data = os.pread(fd, max(stop - start, 0), start)
            finally:
                os.close(fd)
        except OSError as error:
            raise unreadable(self.name, error) from error
        # What is missing of a file that is too short is damaged.
        return data + bytes(stop - start - len(data))


def _positions(
    entries: Iterable[DecodedHeader], fseq: int, before: int, last: int, is_torn: bool
) -> Iterator[DecodedHeader]:
    """Leave out what is about no position, and say of damage which ones it may have held.

    Entries are numbered from `fseq` + 1 on: where one is missing there is a hole, of the positions
    between its neighbours; `before` comes before the first, and the end is `last`. `is_torn`: there
    is a hole before the first.
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
    if (is_torn or is_damaged) and before < last:
        yield _damage(before + 1, last)


def _damage(first: int, last: int) -> DecodedHeader:
    return DecodedHeader(DAMAGED, first, last, 0, 0, 0, False, 0)
