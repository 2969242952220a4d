"""Codec of an archive's requests and answers.

A request has `REQUEST_BYTES`. An answer starts with a header of `ANSWER_BYTES`, which has the size
of the rest. Rule: a header with an impossible size is rejected, so that the rest is limited before
it is read. Invariant: decoding returns what was encoded, or None
(docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from ziplog.segments.block_file import BlockIndex, Part
from ziplog.segments.blocks import MAX_BLOCK_BYTES, layout

MAGIC: Final = b"ZIPARCH3"
#: Kinds of requests: a block, a writer table, the places of blocks.
BLOCK, WRITERS, LOCATE = 1, 2, 5
#: Further kinds of answers: no block here; wrong cluster or shard; the places of blocks.
NEXT, WRONG_SHARD, LOCATED = 3, 4, 6
_REQUEST_KINDS: Final = frozenset((BLOCK, WRITERS, LOCATE))
_ANSWER_KINDS: Final = frozenset((BLOCK, WRITERS, NEXT, WRONG_SHARD, LOCATED))
#: Magic number, kind, cluster, shard, position.
_REQUEST: Final = struct.Struct("<8sBQIQ")
#: Magic number, kind; start and stop, or one position; number of records, whether they have keys;
#: sizes and CRC32Cs of columns, origins and data, or of a writer table (first); size of places.
_ANSWER: Final = struct.Struct("<8sBQQIBIIIIIIH")
REQUEST_BYTES: Final = _REQUEST.size
ANSWER_BYTES: Final = _ANSWER.size
#: Maximum size of origins and of a writer table, in bytes.
_MAX_TABLE_BYTES: Final = 64 * 1024 * 1024
#: Maximum number of places in an answer: the blocks of a segment of usual size.
MAX_PLACES: Final = 16
#: Maximum size of places, in bytes: PATH_MAX, and the size of the numbers.
_MAX_PLACES_BYTES: Final = 4096 + MAX_PLACES * 96
_NO_PART: Final = Part(0, 0, 0)


class Request(NamedTuple):
    """A request of a client."""

    kind: int
    cluster: int
    shard: int
    gsn: int


class Answer(NamedTuple):
    """The header of an answer."""

    kind: int
    start: int = 0
    stop: int = 0
    rows: int = 0
    has_keys: bool = False
    columns: Part = _NO_PART
    origins: Part = _NO_PART
    data: Part = _NO_PART
    #: Size of the encoded `Places` that follow.
    places_size: int = 0

    @property
    def size(self) -> int:
        """Number of bytes that follow the header."""
        parts = self.columns.size + self.origins.size + self.data.size
        return self.places_size if self.kind == LOCATED else parts


class Places(msgspec.Struct, frozen=True, array_like=True):
    """The places of blocks of one segment in the files of the archive's machine."""

    #: The absolute path of the segment, in the file system's encoding; the block file is beside it.
    segment: bytes
    #: Consecutive blocks, in order.
    blocks: list[BlockIndex]


_places_decoder: Final = msgspec.msgpack.Decoder(Places)


def encode_request(request: Request) -> bytes:
    """Return the encoded request."""
    return _REQUEST.pack(MAGIC, *request)


def decode_request(content: bytes) -> Request | None:
    """Decode `REQUEST_BYTES`; None if they are not a request."""
    magic, *fields = _REQUEST.unpack(content)
    request = Request(*fields)
    return request if magic == MAGIC and request.kind in _REQUEST_KINDS else None


def encode_answer(answer: Answer) -> bytes:
    """Return the encoded header of an answer."""
    parts = (answer.columns, answer.origins, answer.data)
    sizes, crcs = [part.size for part in parts], [part.crc for part in parts]
    return _ANSWER.pack(MAGIC, *answer[:5], *sizes, *crcs, answer.places_size)


def decode_answer(content: bytes) -> Answer | None:
    """Decode `ANSWER_BYTES`; None if they are not an answer, or have an impossible size."""
    magic, kind, start, stop, rows, has_keys, *numbers, places_size = _ANSWER.unpack(content)
    if magic != MAGIC or kind not in _ANSWER_KINDS or has_keys > 1:
        return None
    columns, origins, data = (Part(0, numbers[index], numbers[index + 3]) for index in range(3))
    answer = Answer(
        kind, start, stop, rows, bool(has_keys), columns, origins, data, places_size
    )  # fmt: skip
    return answer if _is_sane(answer) else None


def _is_sane(answer: Answer) -> bool:
    if answer.kind == LOCATED:
        is_all = answer == Answer(LOCATED, places_size=answer.places_size)
        return is_all and answer.places_size <= _MAX_PLACES_BYTES
    if answer.places_size:
        return False
    if answer.kind == BLOCK:
        return _is_block(answer)
    return (
        answer.columns.size <= _MAX_TABLE_BYTES and not answer.origins.size and not answer.data.size
    )


def _is_block(block: Answer | BlockIndex) -> bool:
    """Whether a block can have these sizes."""
    # An encoded payload has at least two bytes.
    is_sane = 0 < block.start < block.stop < 2**63 and block.rows >= 0
    is_sane = is_sane and 2 * block.rows <= block.data.size <= MAX_BLOCK_BYTES
    is_sane = is_sane and block.columns.size == layout(block.rows, has_keys=block.has_keys).size
    return is_sane and block.origins.size <= _MAX_TABLE_BYTES


def encode_places(places: Places) -> bytes:
    """Return the encoded places of blocks, which follow a `LOCATED` header."""
    return msgspec.msgpack.encode(places)


def decode_places(content: bytes | bytearray) -> Places | None:
    """Decode the places of blocks; None if they are malformed or impossible."""
    try:
        places = _places_decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError):
        return None
    is_path = places.segment.startswith(b"/") and b"\0" not in places.segment
    blocks = places.blocks
    is_row = all(before.stop == block.start for before, block in pairwise(blocks))
    is_row = is_row and 0 < len(blocks) <= MAX_PLACES
    return places if is_path and is_row and all(map(_is_block, blocks)) else None
