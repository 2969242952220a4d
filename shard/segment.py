"""One segment file: its name, its entries' form, how damage is passed over, and its index.

An entry is a 44-byte header and the MessagePack of an `Entry`. The header has a CRC of its own, so
that a damaged body costs that entry only; after a damaged header the next whole one is looked for.
Headers begin with the segment's salt, which stands in the file's name: no record that a client
made up can pass for an entry. A *block* is about 64 KiB of entries, the unit of reading.

Rule: what a header says of positions is believed only under its CRC, a body only under its own.
Invariant: positions increase from entry to entry (docs/protocol.md, section 10).
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from crc32c import crc32c

from shard.entry import Entry, Mark, UnreadableError
from ziplog.wire import Expire, Place, Skip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Salt and CRC32C of the rest of the header.
_GUARD: Final = struct.Struct("<II")
#: Length and CRC32C of the body, first and last gsn (0, 0: none), fseq, kind.
_FACTS: Final = struct.Struct("<IIQQQI")
HEADER_BYTES: Final = _GUARD.size + _FACTS.size
BLOCK_BYTES: Final = 64 * 1024

PLACE, SKIP, EXPIRE, MARK = 1, 2, 3, 4
#: Bytes that are no entry.
DAMAGED: Final = 0

_NAME: Final = re.compile(r"(\d{8})-(\d{19})-([0-9a-f]{8})\.seg", re.ASCII)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class Found(NamedTuple):
    """An entry of a segment, or a stretch of damage, by its place in the bytes read."""

    kind: int
    #: The positions that it is about; of damage, those that it may have been about.
    first: int
    last: int
    fseq: int
    #: The body's place; of damage, the whole place.
    start: int
    stop: int
    checksum: int


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
    mark: Mark | None
    is_torn: bool


class Segment:
    """A file of entries and the index of its blocks. The newest one grows in memory first."""

    def __init__(self, number: int, base: int, salt: int) -> None:
        """Begin an empty segment for positions from `base` on."""
        self.number, self.base, self.salt = number, base, salt
        #: Bytes of all entries, written or not.
        self.size = 0
        #: Bytes on stable storage. Another thread sets it.
        self.flushed = 0
        #: Of each closed block: where it ends, the last gsn so far, the last record so far (or 0).
        self.ends = array("Q")
        self.lasts = array("Q")
        self.records = array("Q")
        self._block_start = 0
        #: The last gsn that an entry is about; `base - 1` if there is none.
        self.last = base - 1
        #: The last record in it, 0 if there is none; and the last in all segments before it.
        self.last_record = self.record_before = 0
        self.last_fseq = 0
        self.mark: Mark | None = None
        #: Entries after the last one are missing: positions up to the next segment are unknown.
        self.is_torn = False

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.number:08d}-{self.base:019d}-{self.salt:08x}.seg"

    @property
    def index_name(self) -> str:
        """The name of the index file, which exists once the segment is sealed."""
        return self.name.removesuffix("seg") + "idx"

    @classmethod
    def named(cls, name: str) -> Segment | None:
        """Return the empty segment of a file's name, None if it is no segment's."""
        found = _NAME.fullmatch(name)
        return found and cls(int(found[1]), int(found[2]), int(found[3], 16))

    def add(self, kind: int, first: int, last: int, record: int, fseq: int, size: int) -> None:
        """Count an entry of `size` bytes in; `record` is its last record, 0 if it has none."""
        self.size += size
        if kind < EXPIRE:
            assert first > self.last, f"gsn {first} after {self.last}: entries must go upwards"
            self.last = last
            if record:
                self.last_record = record
            # Only here: what lies between two blocks' positions is then in the second one.
            if self.size - self._block_start >= BLOCK_BYTES:
                self._close_block()
        if fseq:
            self.last_fseq = fseq

    def _close_block(self) -> None:
        self._block_start = self.size
        self.ends.append(self.size)
        self.lasts.append(self.last)
        self.records.append(self.last_record)

    # --- the index file ----------------------------------------------------------------------

    def index(self) -> bytes:
        """Return the contents of the index file."""
        index = _Index(
            self.number,
            self.salt,
            self.size,
            list(self.ends),
            list(self.lasts),
            list(self.records),
            self.last,
            self.last_record,
            self.last_fseq,
            self.mark,
            self.is_torn,
        )
        body = _encoder.encode(index)
        return crc32c(body).to_bytes(4, "little") + body

    def take_index(self, contents: bytes, size: int) -> bool:
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
        self.records = array("Q", index.records)
        self.last, self.last_fseq, self.mark = index.last, index.last_fseq, index.mark
        self.last_record = index.last_record
        self.is_torn = index.is_torn
        return True

    def rebuild(self, data: bytes) -> int:
        """Take the index from the file's bytes; return how many of them end with a whole entry.

        What comes behind is torn: nothing whole follows it.
        """
        pending: list[Found] = []
        for found in walk(data, self.salt):
            self.is_torn = self.is_torn or found.kind == DAMAGED
            if found.kind != DAMAGED:
                pending.append(found)
            if found.kind == DAMAGED or not _is_whole(data, found):
                continue
            # Damage in the middle: `read` will come upon it again, and say which positions.
            for known in pending:
                self._recall(known)
            pending.clear()
            self.is_torn = self.is_torn and found.kind >= EXPIRE
            if found.kind == MARK:
                mark = decode(data, found).decision
                self.mark = mark if isinstance(mark, Mark) else self.mark
        self.is_torn = self.is_torn or self.size < len(data)
        self.flushed = self.size
        return self.size

    def _recall(self, found: Found) -> None:
        self.size = found.start - HEADER_BYTES
        record = found.last if found.kind == PLACE else 0
        size = found.stop - self.size
        self.add(found.kind, found.first, found.last, record, found.fseq, size)

    # --- reading -----------------------------------------------------------------------------

    def block_at(self, gsn: int) -> int:
        """Return the number of the block that would hold `gsn`."""
        low, high = 0, len(self.lasts)
        while low < high:
            middle = (low + high) // 2
            if self.lasts[middle] < gsn:
                low = middle + 1
            else:
                high = middle
        return low

    def block_last(self, block: int) -> int:
        """Return the last gsn up to the end of a block."""
        return self.lasts[block] if block < len(self.lasts) else self.last

    def record_up_to(self, block: int) -> int:
        """Return the last record in the log before a block."""
        return (self.records[block - 1] if block else 0) or self.record_before

    def read(self, directory: Path, block: int) -> tuple[bytes, list[Found]]:
        """Return a block's bytes and what is in them of `Place`, `Skip` and damage, in order.

        Raises:
            UnreadableError: the file cannot be read.

        """
        start = self.ends[block - 1] if block else 0
        stop = min(self.ends[block] if block < len(self.ends) else self.size, self.flushed)
        try:
            fd = os.open(directory / self.name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(fd, stop - start, start)
            finally:
                os.close(fd)
        except OSError as error:
            raise UnreadableError(f"{self.name}: {error}") from error
        before = self.block_last(block - 1) if block else self.base - 1
        # A block without its end (the file is short) is damaged up to where it should end.
        data += bytes(stop - start - len(data))
        return data, list(_positions(walk(data, self.salt), before, self.block_last(block)))


def positions(entry: Entry) -> tuple[int, int, int, int]:
    """Return the kind of an entry, its first and last gsn, and its last record (0: none)."""
    decision = entry.decision
    match decision:
        case Place():
            last = decision.gsns[-1]
            return PLACE, decision.gsns[0], last, last
        case Skip():
            return SKIP, decision.start, decision.stop - 1, 0
        case Expire():
            return EXPIRE, 0, 0, 0
        case Mark():
            return MARK, 0, 0, 0


def encode(entry: Entry, salt: int, kind: int, first: int, last: int) -> tuple[bytes, bytes]:
    """Return the header and the body of an entry."""
    body = _encoder.encode(entry)
    facts = _FACTS.pack(len(body), crc32c(body), first, last, entry.fseq, kind)
    return _GUARD.pack(salt, crc32c(facts)) + facts, body


def decode(data: bytes, found: Found) -> Entry:
    """Return an entry.

    Raises:
        UnreadableError: it is damaged.

    """
    if found.kind == DAMAGED or not _is_whole(data, found):
        raise UnreadableError(f"the entry of gsns {found.first} to {found.last} is damaged")
    return _decoder.decode(memoryview(data)[found.start : found.stop])


def walk(data: bytes, salt: int) -> Iterator[Found]:
    """Go through the entries of `data`, which begins with one; damage has positions 0, 0."""
    at = 0
    while at < len(data):
        found = _header(data, at, salt)
        if found is None:
            following = _next_header(data, at + 1, salt)
            yield Found(DAMAGED, 0, 0, 0, at, following, 0)
            at = following
        else:
            yield found
            at = found.stop


def _header(data: bytes, at: int, salt: int) -> Found | None:
    if at + HEADER_BYTES > len(data):
        return None
    read_salt, guard = _GUARD.unpack_from(data, at)
    start = at + HEADER_BYTES
    if read_salt != salt or crc32c(data[at + _GUARD.size : start]) != guard:
        return None
    length, checksum, first, last, fseq, kind = _FACTS.unpack_from(data, at + _GUARD.size)
    if start + length > len(data):
        return None
    return Found(kind, first, last, fseq, start, start + length, checksum)


def _next_header(data: bytes, at: int, salt: int) -> int:
    pattern = salt.to_bytes(4, "little")
    while (at := data.find(pattern, at)) >= 0:
        if _header(data, at, salt) is not None:
            return at
        at += 1
    return len(data)


def _is_whole(data: bytes, found: Found) -> bool:
    return crc32c(memoryview(data)[found.start : found.stop]) == found.checksum


def _positions(entries: Iterator[Found], before: int, last: int) -> Iterator[Found]:
    """Leave out what is about no position, and say of damage which ones it may have held.

    They are those between its neighbours; before the first comes `before`, and the end is `last`.
    """
    damage: Found | None = None
    for found in entries:
        if found.kind == DAMAGED:
            damage = damage or found
            continue
        if found.kind >= EXPIRE:
            continue
        if damage is not None and before + 1 < found.first:
            yield damage._replace(first=before + 1, last=found.first - 1)
        damage = None
        before = found.last
        yield found
    if damage is not None and before < last:
        yield damage._replace(first=before + 1, last=last)
