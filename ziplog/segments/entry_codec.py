"""Codec of stored entries: header and body, and the scan that skips damaged bytes.

An entry is a 44-byte header and the MessagePack of an `Entry`. The header has a CRC of its own, so
damage in a body affects that entry only; after a damaged header, the scan searches the next whole
one. A header starts with the segment's salt, which is in the file's name, so that a record's
payload cannot look like an entry. The header also records the last entry that was on stable storage
when it was written.

Rule: a header is used only if its CRC is right, and a body only if its own CRC is right
(docs/protocol.md, section 10).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from crc32c import crc32c

from ziplog.core.entries import Expire, Place, Skip
from ziplog.segments.entry import (
    Entry,
    SessionTablePartRecord,
    SessionTableRecord,
    UnreadableError,
    WatermarkRecord,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Salt and CRC32C of the rest of the header.
_GUARD: Final = struct.Struct("<II")
#: Length and CRC32C of the body, first and last gsn (0, 0: none), entry number, kind and lag.
_FACTS: Final = struct.Struct("<IIQQQI")
HEADER_BYTES: Final = _GUARD.size + _FACTS.size
#: The header fields that are needed to skip an entry: length of the body, last gsn.
_STEP: Final = struct.Struct("<8xI12xQ12x")
#: The kind has one byte, the lag three; a lag of 0 means unknown.
_KIND_BITS: Final = 8
_MAX_LAG: Final = (1 << 24) - 1

#: MessagePack's nil, and the type and length of a byte string of 64 KiB or more.
_NIL: Final = b"\xc0"
_LONG_BYTES: Final = struct.Struct(">BI")
_BIN_32: Final = 0xC6
#: Units with a body of this size are stored without a copy of it.
_UNCOPIED_BYTES: Final = 1 << 16

PLACE, SKIP, EXPIRE, MARK, TABLE = 1, 2, 3, 4, 5
#: The kind of bytes that are not an entry.
DAMAGED: Final = 0

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class _EntryPrefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first fields of an `Entry`."""

    fseq: int
    view: int


_prefix_decoder: msgspec.msgpack.Decoder[_EntryPrefix] = msgspec.msgpack.Decoder(_EntryPrefix)


class DecodedHeader(NamedTuple):
    """The header of an entry, or a stretch of damage, with its place in the bytes read."""

    kind: int
    #: Its positions; for damage, those that it may have held; for a table, `first` is the
    #: `part_code`.
    first: int
    last: int
    #: Its number; for a watermark record or table, the number of the last entry before it.
    fseq: int
    #: The place of the body; for damage, of all its bytes.
    start: int
    stop: int
    #: The body's CRC is right.
    is_whole: bool
    #: The last entry that was on stable storage before this one was written.
    flushed: int

    @property
    def is_numbered(self) -> bool:
        """Whether it is an entry with a stream position, whole or not."""
        return DAMAGED < self.kind < MARK


def part_code(number: int, *, is_last: bool) -> int:
    """Return the first-gsn field in the header of a table's part; 0: it is a whole table."""
    return 2 * number + (not is_last)


def positions(entry: Entry) -> tuple[int, int, int, int]:
    """Return the kind of an entry, its first and last gsn, and its last record (0: none).

    For a part of a table, the first gsn is its `part_code`.
    """
    decision = entry.decision
    match decision:
        case Place():
            last = decision.gsns[-1]
            return PLACE, decision.gsns[0], last, last
        case Skip():
            return SKIP, decision.start, decision.stop - 1, 0
        case Expire():
            return EXPIRE, 0, 0, 0
        case WatermarkRecord():
            return MARK, 0, 0, 0
        case SessionTableRecord():
            return TABLE, 0, 0, 0
        case SessionTablePartRecord(_, _, number, is_last):
            return TABLE, part_code(number, is_last=is_last), 0, 0


#: The size of an entry, its first gsn (0: none), and the last gsn and record up to it.
Facts = tuple[int, int, int, int]


def encode_run(
    entries: Sequence[Entry],
    salt: int,
    place: int,
    flushed: int,
    limit: int,
    last: int = 0,
    record: int = 0,
) -> tuple[list[bytes], list[Facts]]:
    """Encode the first entry, and all that follow it without a gap, in its view, below a limit.

    Args:
        entries: at least one.
        salt: of the segment.
        place: the number of the first one; for a record without one, that of the entry before.
        flushed: the last entry on stable storage.
        limit: no entry follows so many bytes.
        last: the last gsn before these entries.
        record: the last record before these entries.

    Returns:
        The header and the body of each entry, the body in one piece or two, and the facts about
        each entry.

    """
    buffers: list[bytes] = []
    found: list[Facts] = []
    pieces: tuple[bytes, ...]
    # A server does this for each insert: the loop looks up little, and calls only what it must.
    to_bytes, pack_facts, pack_guard, checksum = _encoder.encode, _FACTS.pack, _GUARD.pack, crc32c
    view, flushed_before = entries[0].view, flushed - 1
    for number, entry in enumerate(entries, place):
        if (limit <= 0 or entry.fseq != number or entry.view != view) and found:
            break
        decision, unit = entry.decision, None
        if type(decision) is Place:
            gsns = decision.gsns
            kind, first, last = PLACE, gsns[0], gsns[-1]
            record, unit = last, decision.body
        else:
            kind, first, own_last, _ = positions(entry)
            last = own_last or last
        if unit is None or len(unit) < _UNCOPIED_BYTES:
            body = to_bytes(entry)
            length, crc, pieces = len(body), checksum(body), (body,)
        else:
            start = _before_unit(entry, len(unit))
            length, crc = len(start) + len(unit), checksum(unit, checksum(start))
            pieces = (start, unit)
        lag = number - flushed_before
        kind_and_lag = kind | lag << _KIND_BITS if lag <= _MAX_LAG else kind
        facts = pack_facts(length, crc, first, first and last, number, kind_and_lag)
        buffers += (pack_guard(salt, checksum(facts)) + facts, *pieces)
        size = HEADER_BYTES + length
        found.append((size, first, last, record))
        limit -= size
    return buffers, found


def _before_unit(entry: Entry, size: int) -> bytes:
    """Return the start of a body, up to the unit's body, its last field, of this size."""
    assert isinstance(entry.decision, Place), "no other entry has a unit"
    start = _encoder.encode(Entry(entry.fseq, entry.view, entry.decision.without_body()))
    return start[: -len(_NIL)] + _LONG_BYTES.pack(_BIN_32, size)


def encode(entry: Entry, salt: int, place: int, flushed: int) -> bytes:
    """Return the header and the body of an entry; for `place` and `flushed` see `encode_run`."""
    return b"".join(encode_run([entry], salt, place, flushed, 0)[0])


def decode(data: bytes, found: DecodedHeader, file: str) -> Entry:
    """Decode an entry; `file` is the file's name for the error.

    Raises:
        UnreadableError: the entry is damaged.

    """
    if not found.is_whole:
        raise UnreadableError(f"{file} is damaged at gsns {found.first} to {found.last}")
    return _decoder.decode(memoryview(data)[found.start : found.stop])


def view_of(data: bytes, found: DecodedHeader) -> int:
    """Return the view of a whole entry."""
    return _prefix_decoder.decode(memoryview(data)[found.start : found.stop]).view


def seek(data: bytes, gsn: int, salt: int) -> DecodedHeader | None:
    """Return the whole entry that holds `gsn`, without checking the entries before it.

    `data` starts with an entry. None proves nothing, because skipped entries are not checked: only
    `walk` can distinguish damage from absence.
    """
    at, end, unpack = 0, len(data) - HEADER_BYTES, _STEP.unpack_from
    while at <= end:
        length, last = unpack(data, at)
        if last >= gsn:
            break
        at += HEADER_BYTES + length
    found = next(walk(data, salt, at), None)
    is_it = found is not None and found.is_whole and found.first <= gsn <= found.last
    return found if is_it else None


def walk(data: bytes, salt: int, at: int = 0) -> Iterator[DecodedHeader]:
    """Scan the entries of `data` from `at` on, which is the start of an entry.

    Damage has positions 0, 0.
    """
    while at < len(data):
        facts = _facts(data, at, salt)
        if facts is None:
            following = _next_header(data, at + 1, salt)
            yield DecodedHeader(DAMAGED, 0, 0, 0, at, following, False, 0)
            at = following
            continue
        length, checksum, first, last, place, kind_and_lag = facts
        start = at + HEADER_BYTES
        at = start + length
        is_whole = at <= len(data) and crc32c(memoryview(data)[start:at]) == checksum
        if not is_whole:
            # A part of the entry may be missing: then other entries start before its end.
            at = min(at, _next_header(data, start, salt))
        kind, lag = kind_and_lag & (1 << _KIND_BITS) - 1, kind_and_lag >> _KIND_BITS
        flushed = place + 1 - lag if lag else 0
        yield DecodedHeader(kind, first, last, place, start, at, is_whole, flushed)


def _facts(data: bytes, at: int, salt: int) -> tuple[int, ...] | None:
    """Return the fields of the header at `at`; None if there is no valid header."""
    if at + HEADER_BYTES > len(data):
        return None
    read_salt, guard = _GUARD.unpack_from(data, at)
    if read_salt != salt or crc32c(data[at + _GUARD.size : at + HEADER_BYTES]) != guard:
        return None
    return _FACTS.unpack_from(data, at + _GUARD.size)


def _next_header(data: bytes, at: int, salt: int) -> int:
    pattern = salt.to_bytes(4, "little")
    while (at := data.find(pattern, at)) >= 0:
        if _facts(data, at, salt) is not None:
            return at
        at += 1
    return len(data)
