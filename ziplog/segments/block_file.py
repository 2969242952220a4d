"""Codec of a segment's block file, `N.rows` beside `N.seg`: columns, origins, writer tables.

The file has a magic number, then for each block its columns and origins (MessagePack), the writer
tables at the segment's start and end, and a footer with the place of each part. It ends with the
footer's length and CRC32C, and the magic number again.

Rule: each part is used only if its CRC is right, and the file only if it belongs to this segment at
its present size (docs/protocol.md, section 14.1).
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

import msgspec
from crc32c import crc32c

from ziplog.core.writer_table import MAX_WRITERS, WriterTable
from ziplog.segments.blocks import OriginRun

_T = TypeVar("_T")
#: First and last bytes of the file; another format has another magic number.
MAGIC: Final = b"ZIPROWS1"
_TRAILER: Final = struct.Struct("<II8s")
TRAILER_BYTES: Final = _TRAILER.size

_origins_decoder = msgspec.msgpack.Decoder(list[OriginRun])
_writers_decoder = msgspec.msgpack.Decoder(list[tuple[bytes, int, int]])


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A range of bytes in a file, with its CRC32C."""

    at: int
    size: int
    crc: int


class BlockIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A block in the footer: its positions, its number of records, and its parts."""

    start: int
    stop: int
    rows: int
    has_keys: bool
    #: In the segment file.
    data: Part
    #: In the block file, one after the other.
    columns: Part
    origins: Part


class BlockFileIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The footer of a block file."""

    #: Number, salt, size and last entry of the segment.
    number: int
    salt: int
    size: int
    last_fseq: int
    #: The positions of the file; its blocks cover them without a gap.
    start: int
    stop: int
    blocks: list[BlockIndex]
    #: The writer table at `stop`; None: the log before the segment is not known.
    writers: Part | None
    #: The writer table at `start`, for use once the log before is trimmed; None: empty or unknown.
    before: Part | None = None


def part_of(content: bytes | bytearray | memoryview, at: int) -> Part:
    """Return the `Part` for `content` at offset `at`."""
    return Part(at, len(content), crc32c(content))


def is_sound(part: Part, content: bytes | bytearray | memoryview) -> bool:
    """Whether `content` has the size and the CRC of `part`."""
    return len(content) == part.size and crc32c(content) == part.crc


def encode_footer(index: BlockFileIndex) -> bytes:
    """Return the encoded footer and trailer."""
    footer = msgspec.msgpack.encode(index)
    return footer + _TRAILER.pack(len(footer), crc32c(footer), MAGIC)


def footer_size(trailer: bytes) -> int:
    """Return the size of footer and trailer, given a file's last bytes; 0: invalid."""
    if len(trailer) != TRAILER_BYTES:
        return 0
    size, _, magic = _TRAILER.unpack(trailer)
    return size + TRAILER_BYTES if magic == MAGIC else 0


def decode_footer(content: bytes) -> BlockFileIndex | None:
    """Decode footer and trailer; None if they are damaged."""
    footer, trailer = content[:-TRAILER_BYTES], content[-TRAILER_BYTES:]
    if len(trailer) != TRAILER_BYTES or _TRAILER.unpack(trailer)[1] != crc32c(footer):
        return None
    try:
        return msgspec.msgpack.decode(footer, type=BlockFileIndex)
    except msgspec.MsgspecError:
        return None


def encode_origins(origins: list[OriginRun]) -> bytes:
    """Return the encoded origins of a block; empty if it has none."""
    return msgspec.msgpack.encode(origins) if origins else b""


def decode_origins(content: bytes | bytearray | memoryview) -> list[OriginRun]:
    """Decode the origins of a block.

    Raises:
        msgspec.MsgspecError: the content is invalid.

    """
    return _decode(_origins_decoder, content) if len(content) else []


def encode_writers(writers: WriterTable) -> bytes:
    """Return an encoded writer table."""
    return msgspec.msgpack.encode(writers.export())


def decode_writers(content: bytes | bytearray | memoryview) -> WriterTable:
    """Decode a writer table.

    Raises:
        msgspec.MsgspecError: the content is invalid.

    """
    rows = _decode(_writers_decoder, content)
    if len(rows) > MAX_WRITERS:
        raise msgspec.ValidationError(f"a table of {len(rows)} writers")
    return WriterTable(rows)


def _decode(decoder: msgspec.msgpack.Decoder[_T], content: bytes | bytearray | memoryview) -> _T:
    try:
        return decoder.decode(content)
    except RecursionError as error:
        raise msgspec.DecodeError("the value is nested too deep") from error
