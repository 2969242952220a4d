"""What an archive is asked and what it answers, in bytes.

A request is `REQUEST_BYTES` long, and an answer begins with `ANSWER_BYTES`, which tell how much
follows. Rule: nothing is believed that tells of more than there can be, so that what comes is
bounded before it is read. Invariant: what is decoded is what was encoded, or None
(docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from ziplog.segments.rowfile import Part
from ziplog.segments.rows import MOST_BYTES, layout

MAGIC: Final = b"ZIPARCH2"
#: What is asked for.
BLOCK, WRITERS, LOCATE = 1, 2, 5
#: What else may be answered: there is no block; another cluster or shard; where the block is.
NEXT, STRANGER, LOCATED = 3, 4, 6
_QUESTIONS: Final = frozenset((BLOCK, WRITERS, LOCATE))
_ANSWERS: Final = frozenset((BLOCK, WRITERS, NEXT, STRANGER, LOCATED))
#: Magic number, what is asked for, cluster, shard, position.
_REQUEST: Final = struct.Struct("<8sBQIQ")
#: Magic number, what it is; start and stop, or one position; records, whether there are keys; sizes
#: and CRC32Cs of columns, origins and bytes, or of a writers' table (the first); a place's size.
_ANSWER: Final = struct.Struct("<8sBQQIBIIIIIIH")
#: Where the columns begin in the file of rows, and the bytes in the segment.
_PLACE: Final = struct.Struct("<QQ")
REQUEST_BYTES: Final = _REQUEST.size
ANSWER_BYTES: Final = _ANSWER.size
#: Origins and writers' tables are no longer.
_MOST_TOLD: Final = 64 * 1024 * 1024
#: Paths are no longer (PATH_MAX).
_MOST_PATH: Final = 4095
_NOTHING: Final = Part(0, 0, 0)


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
    columns: Part = _NOTHING
    origins: Part = _NOTHING
    data: Part = _NOTHING
    #: How many bytes its `Place` takes.
    place_size: int = 0

    @property
    def size(self) -> int:
        """How many bytes follow."""
        parts = self.columns.size + self.origins.size + self.data.size
        return self.place_size if self.kind == LOCATED else parts


class Place(NamedTuple):
    """Where a block is in the files of the archive's machine."""

    #: In the file of rows, which is beside the segment; the origins are right behind them.
    columns_at: int
    data_at: int
    #: The absolute path.
    segment: str


def encode_request(request: Request) -> bytes:
    """Return what `decode_request` takes."""
    return _REQUEST.pack(MAGIC, *request)


def decode_request(content: bytes) -> Request | None:
    """Return what `REQUEST_BYTES` say, None if it is no request."""
    magic, *fields = _REQUEST.unpack(content)
    request = Request(*fields)
    return request if magic == MAGIC and request.kind in _QUESTIONS else None


def encode_answer(answer: Answer) -> bytes:
    """Return how an answer begins."""
    parts = (answer.columns, answer.origins, answer.data)
    sizes, crcs = [part.size for part in parts], [part.crc for part in parts]
    return _ANSWER.pack(MAGIC, *answer[:5], *sizes, *crcs, answer.place_size)


def decode_answer(content: bytes) -> Answer | None:
    """Return what `ANSWER_BYTES` say, None if it is no answer, or tells of more than can be."""
    magic, kind, start, stop, rows, has_keys, *told, place_size = _ANSWER.unpack(content)
    if magic != MAGIC or kind not in _ANSWERS or has_keys > 1:
        return None
    columns, origins, data = (Part(0, told[index], told[index + 3]) for index in range(3))
    answer = Answer(
        kind, start, stop, rows, bool(has_keys), columns, origins, data, place_size
    )  # fmt: skip
    return answer if _is_sane(answer) else None


def _is_sane(answer: Answer) -> bool:
    columns, origins, data = answer.columns.size, answer.origins.size, answer.data.size
    longest = _PLACE.size + _MOST_PATH if answer.kind == LOCATED else 0
    if answer.place_size > longest:
        return False
    if answer.kind not in {BLOCK, LOCATED}:
        return columns <= _MOST_TOLD and not origins and not data
    # A payload takes two bytes at least.
    is_sane = answer.start < answer.stop < 2**63 and 2 * answer.rows <= data <= MOST_BYTES
    is_sane = is_sane and columns == layout(answer.rows, has_keys=answer.has_keys).size
    return is_sane and origins <= _MOST_TOLD


def encode_place(place: Place) -> bytes:
    """Return what follows an answer that tells where a block is."""
    return _PLACE.pack(*place[:2]) + place.segment.encode(errors="surrogateescape")


def decode_place(content: bytes | bytearray) -> Place | None:
    """Return what `encode_place` was given, None if it is something else."""
    if len(content) < _PLACE.size:
        return None
    path = content[_PLACE.size :].decode(errors="surrogateescape")
    is_path = path.startswith("/") and "\0" not in path
    columns_at, data_at = _PLACE.unpack_from(content)
    return Place(columns_at, data_at, path) if is_path else None
