"""The file of a segment's rows: `N.rows` beside `N.seg`.

It has a magic number, of each block the columns and then the origins (MessagePack), the writers'
tables at the segment's start and end, and a footer that says where all of this is; the file ends
with the footer's length and CRC32C and the magic number again.

Rule: nothing in it is believed but under its CRC, and none of it about another segment, or one of
another size (docs/protocol.md, section 14.1).
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

import msgspec
from crc32c import crc32c

from ziplog.core.writer_table import MAX_WRITERS, WriterTable
from ziplog.segments.blocks import OriginRun

_T = TypeVar("_T")
#: Begins and ends the file; another format has another one.
MAGIC: Final = b"ZIPROWS1"
_TRAILER: Final = struct.Struct("<II8s")
TRAILER_BYTES: Final = _TRAILER.size

_origins_decoder = msgspec.msgpack.Decoder(list[OriginRun])
_writers_decoder = msgspec.msgpack.Decoder(list[tuple[bytes, int, int]])


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes of a file."""

    at: int
    size: int
    crc: int


class BlockIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block: its positions and records, and where it is."""

    start: int
    stop: int
    rows: int
    has_keys: bool
    #: In the segment.
    data: Part
    #: In the file of rows, right behind each other.
    columns: Part
    origins: Part


class BlockFileIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The footer."""

    #: Of the segment.
    number: int
    salt: int
    size: int
    last_fseq: int
    #: The positions that it covers, and the blocks cover them without a gap.
    start: int
    stop: int
    blocks: list[BlockIndex]
    #: The writers' table at `stop`; None: what was before the segment is not known.
    writers: Part | None
    #: The table at `start`, for when what is before was trimmed; None: empty, or not known.
    before: Part | None = None


def part_of(content: bytes | bytearray | memoryview, at: int) -> Part:
    """Return the part that holds `content` at `at`."""
    return Part(at, len(content), crc32c(content))


def is_sound(part: Part, content: bytes | bytearray | memoryview) -> bool:
    """Whether this is what was put there."""
    return len(content) == part.size and crc32c(content) == part.crc


def encode_footer(index: BlockFileIndex) -> bytes:
    """Return the footer, and what the file ends with."""
    footer = msgspec.msgpack.encode(index)
    return footer + _TRAILER.pack(len(footer), crc32c(footer), MAGIC)


def footer_size(trailer: bytes) -> int:
    """Return the size of the footer with the trailer, given a file's last bytes; 0: none."""
    if len(trailer) != TRAILER_BYTES:
        return 0
    size, _, magic = _TRAILER.unpack(trailer)
    return size + TRAILER_BYTES if magic == MAGIC else 0


def decode_footer(content: bytes) -> BlockFileIndex | None:
    """Return what `encode_footer` was given; None if it is damaged."""
    footer, trailer = content[:-TRAILER_BYTES], content[-TRAILER_BYTES:]
    if len(trailer) != TRAILER_BYTES or _TRAILER.unpack(trailer)[1] != crc32c(footer):
        return None
    try:
        return msgspec.msgpack.decode(footer, type=BlockFileIndex)
    except msgspec.MsgspecError:
        return None


def encode_origins(origins: list[OriginRun]) -> bytes:
    """Return the origins of a block; nothing if it has none."""
    return msgspec.msgpack.encode(origins) if origins else b""


def decode_origins(content: bytes | bytearray | memoryview) -> list[OriginRun]:
    """Return what `encode_origins` was given.

    Raises:
        msgspec.MsgspecError: it is something else.

    """
    return _decode(_origins_decoder, content) if len(content) else []


def encode_writers(writers: WriterTable) -> bytes:
    """Return a writers' table."""
    return msgspec.msgpack.encode(writers.export())


def decode_writers(content: bytes | bytearray | memoryview) -> WriterTable:
    """Return what `encode_writers` was given.

    Raises:
        msgspec.MsgspecError: it is something else.

    """
    rows = _decode(_writers_decoder, content)
    if len(rows) > MAX_WRITERS:
        raise msgspec.ValidationError(f"a table of {len(rows)} writers")
    return WriterTable(rows)


def _decode(decoder: msgspec.msgpack.Decoder[_T], content: bytes | bytearray | memoryview) -> _T:
    try:
        return decoder.decode(content)
    except RecursionError as error:
        raise msgspec.DecodeError("it is too deep") from error
