"""What an archive is asked and what it answers, in bytes.

A request is `REQUEST_BYTES` long, and an answer begins with `ANSWER_BYTES`, which tell how much
follows. Rule: nothing is believed that tells of more than there can be, so that what comes is
bounded before it is read. Invariant: what is decoded is what was encoded, or None
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
#: What is asked for.
BLOCK, WRITERS, LOCATE = 1, 2, 5
#: What else may be answered: there is no block; another cluster or shard; where blocks are.
NEXT, WRONG_SHARD, LOCATED = 3, 4, 6
_REQUEST_KINDS: Final = frozenset((BLOCK, WRITERS, LOCATE))
_ANSWER_KINDS: Final = frozenset((BLOCK, WRITERS, NEXT, WRONG_SHARD, LOCATED))
#: Magic number, what is asked for, cluster, shard, position.
_REQUEST: Final = struct.Struct("<8sBQIQ")
#: Magic number, what it is; start and stop, or one position; records, whether there are keys; sizes
#: and CRC32Cs of columns, origins and bytes, or of a writers' table (the first); size of places.
_ANSWER: Final = struct.Struct("<8sBQQIBIIIIIIH")
REQUEST_BYTES: Final = _REQUEST.size
ANSWER_BYTES: Final = _ANSWER.size
#: Origins and writers' tables are no longer.
_MAX_TABLE_BYTES: Final = 64 * 1024 * 1024
#: Of so many blocks it is told at a time where they are: those of a segment of usual size.
MAX_PLACES: Final = 16
#: Where they are takes no more bytes: PATH_MAX, and what numbers take.
_MAX_PLACES_BYTES: Final = 4096 + MAX_PLACES * 96
_NO_PART: Final = Part(0, 0, 0)


class Request(NamedTuple):
    """What a client asks for."""

    kind: int
    cluster: int
    shard: int
    gsn: int


class Answer(NamedTuple):
    """How an answer begins."""

    kind: int
    start: int = 0
    stop: int = 0
    rows: int = 0
    has_keys: bool = False
    columns: Part = _NO_PART
    origins: Part = _NO_PART
    data: Part = _NO_PART
    #: How many bytes follow that tell where blocks are.
    places_size: int = 0

    @property
    def size(self) -> int:
        """How many bytes follow."""
        parts = self.columns.size + self.origins.size + self.data.size
        return self.places_size if self.kind == LOCATED else parts


class Places(msgspec.Struct, frozen=True, array_like=True):
    """Where blocks of one segment are in the files of the archive's machine."""

    #: The absolute path of the segment, as the system has it; the file of rows is beside it.
    segment: bytes
    #: In order, and none is left out.
    blocks: list[BlockIndex]


_places_decoder: Final = msgspec.msgpack.Decoder(Places)


def encode_request(request: Request) -> bytes:
    """Return what `decode_request` takes."""
    return _REQUEST.pack(MAGIC, *request)


def decode_request(content: bytes) -> Request | None:
    """Return what `REQUEST_BYTES` say, None if it is no request."""
    magic, *fields = _REQUEST.unpack(content)
    request = Request(*fields)
    return request if magic == MAGIC and request.kind in _REQUEST_KINDS else None


def encode_answer(answer: Answer) -> bytes:
    """Return how an answer begins."""
    parts = (answer.columns, answer.origins, answer.data)
    sizes, crcs = [part.size for part in parts], [part.crc for part in parts]
    return _ANSWER.pack(MAGIC, *answer[:5], *sizes, *crcs, answer.places_size)


def decode_answer(content: bytes) -> Answer | None:
    """Return what `ANSWER_BYTES` say, None if it is no answer, or tells of more than can be."""
    magic, kind, start, stop, rows, has_keys, *told, places_size = _ANSWER.unpack(content)
    if magic != MAGIC or kind not in _ANSWER_KINDS or has_keys > 1:
        return None
    columns, origins, data = (Part(0, told[index], told[index + 3]) for index in range(3))
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


def _is_block(told: Answer | BlockIndex) -> bool:
    """Whether there can be such a block."""
    # A payload takes two bytes at least.
    is_sane = 0 < told.start < told.stop < 2**63 and told.rows >= 0
    is_sane = is_sane and 2 * told.rows <= told.data.size <= MAX_BLOCK_BYTES
    is_sane = is_sane and told.columns.size == layout(told.rows, has_keys=told.has_keys).size
    return is_sane and told.origins.size <= _MAX_TABLE_BYTES


def encode_places(places: Places) -> bytes:
    """Return what follows an answer that tells where blocks are."""
    return msgspec.msgpack.encode(places)


def decode_places(content: bytes | bytearray) -> Places | None:
    """Return what `encode_places` was given, None if it is something else, or cannot be."""
    try:
        places = _places_decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError):
        return None
    is_path = places.segment.startswith(b"/") and b"\0" not in places.segment
    blocks = places.blocks
    is_row = all(before.stop == block.start for before, block in pairwise(blocks))
    is_row = is_row and 0 < len(blocks) <= MAX_PLACES
    return places if is_path and is_row and all(map(_is_block, blocks)) else None
