"""What LogDB writes into the log, and the one codec for it.

Rule: a payload that does not begin with our mark, or is malformed behind it, is *foreign*:
everybody who follows the log passes over it alike. See docs/logdb.md, section 3.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ziplog.types import Gsn, RecordId

MARK: Final = b"LDB\x01"
#: No key is longer, in bytes.
MAX_KEY_BYTES: Final = 1024
#: What a record needs at most beside one key and its value, moved ones too.
OVERHEAD_BYTES: Final = 64
#: What a value takes in a `Moved` record beside it and its key, about.
MOVE_BYTES: Final = 24
#: Write sets up to this size (keys and values) stand in the commit record.
INLINE_BYTES: Final = 16 * 1024

Key = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
#: Where a range ends: before it; None: nowhere. Perhaps the one just behind the longest key.
Stop = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES + 1)] | None
Session = Annotated[bytes, Meta(min_length=8, max_length=8)]
Number = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what stands inside records and messages."""


class TransactionId(Part, frozen=True, gc=False):
    """Which client's session, and the how-manieth transaction of it."""

    session: Session
    number: Number


class KeyRead(Part, frozen=True, gc=False):
    """A key that was read, and the version that it had; 0: it was absent."""

    key: Key
    version: Gsn


class RangeRead(Part, frozen=True, gc=False):
    """The keys from `start` on, before `stop` (None: all), and the digest of what they were."""

    start: Key
    stop: Stop
    digest: Digest


class Write(Part, frozen=True, gc=False):
    """A key's new value: as it is, or where it stands; neither: the key is deleted."""

    key: Key
    value: bytes | None = None
    rid: RecordId | None = None
    #: Bytes of the value.
    size: Size = 0


class Entry(Part, frozen=True, gc=False):
    """A key's present state: the version, the value's place, and its size in bytes."""

    version: Gsn
    place: RecordId
    size: Size


class LogRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of our records."""


class Value(LogRecord, tag=1, frozen=True, gc=False):
    """A value that a commit record will refer to."""

    key: Key
    value: bytes


class Commit(LogRecord, tag=2, frozen=True, gc=False):
    """A transaction that wants to commit."""

    id: TransactionId
    #: A position that the client knew before it first inserted this record.
    began: Gsn
    reads: list[KeyRead]
    ranges: list[RangeRead]
    writes: list[Write]


class Move(Part, frozen=True, gc=False):
    """A value, and the place that it was copied from."""

    key: Key
    place: RecordId
    value: bytes


class Moved(LogRecord, tag=3, frozen=True, gc=False):
    """Values that stand here from now on, if they are still at the place given."""

    moves: list[Move]


class CheckpointBegun(LogRecord, tag=4, frozen=True, gc=False):
    """A coordinator makes a checkpoint, and clears the log before `cut`.

    From here on, no commit may refer to a value before `cut` that it does not find in place.
    """

    coordinator: Session
    #: At most this record's own gsn counts; 0: nothing is cleared.
    cut: Gsn


class Decision(Part, frozen=True, gc=False):
    """What became of a transaction, by the record at `position`."""

    session: Session
    number: Number
    position: RecordId
    committed: bool


#: A segment of the log: first gsn, bytes of records, bytes of live values.
Segment = tuple[Gsn, Annotated[int, Meta(ge=0)], int]


class CheckpointPart(LogRecord, tag=5, frozen=True, gc=False):
    """A part of a checkpoint: entries in key order, decisions in log order, segments."""

    entries: list[tuple[Key, Entry]]
    decisions: list[Decision]
    segments: list[Segment]


class CheckpointDone(LogRecord, tag=6, frozen=True, gc=False):
    """The state after the record at `position` is what these parts hold."""

    coordinator: Session
    position: RecordId
    #: The gsn of the last decision that was forgotten.
    floor: Gsn
    parts: list[RecordId]
    #: crc32c over the parts' payloads, in order.
    checksum: Annotated[int, Meta(ge=0, lt=2**32)]
    #: Keys in it.
    keys: Size
    #: The greatest `cut` of the checkpoints begun until then.
    horizon: Gsn
    #: The first foreign record until then; 0: there is none.
    first_foreign: Gsn
    #: Records until then, without those of checkpoints.
    records: Gsn
    #: No place in it is before this gsn: the log is trimmed here. 0: nothing is trimmed.
    trim: Gsn


AnyRecord = Value | Commit | Moved | CheckpointBegun | CheckpointPart | CheckpointDone

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final[msgspec.msgpack.Decoder[AnyRecord]] = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    """Return the payload of a record."""
    return MARK + _encode(record)


def decode(payload: bytes) -> AnyRecord | None:
    """Return the record of a payload; None if it is foreign."""
    if payload[:4] != MARK:
        return None
    try:
        return _decoder.decode(memoryview(payload)[4:])
    except (msgspec.MsgspecError, RecursionError):
        return None


_PART: Final = encode(CheckpointPart([], [], []))[: len(MARK) + 2]
#: Behind the mark and the number of fields, which is one byte up to 15 of them.
_TAG_AT: Final = len(MARK) + 1
_DONE_TAG: Final = b"\x06"


def is_part(payload: bytes) -> bool:
    """Whether a payload is a checkpoint's part, whatever is in it: it has no effect."""
    return payload[: len(_PART)] == _PART


class _Glance(LogRecord, tag=5, frozen=True, gc=False):
    """A part whose entries are not looked at."""

    entries: list[msgspec.Raw]
    decisions: msgspec.Raw
    segments: msgspec.Raw


_glance: Final = msgspec.msgpack.Decoder(_Glance)


def count_entries(payload: bytes) -> int | None:
    """Return how many entries a checkpoint's part has, at a glance; None if it is no part."""
    if not is_part(payload):
        return None
    try:
        return len(_glance.decode(memoryview(payload)[len(MARK) :]).entries)
    except msgspec.MsgspecError:
        return None


def is_done(payload: bytes) -> bool:
    """Whether a payload is a `CheckpointDone`, if it is sound; fields may have been added to it."""
    return payload[_TAG_AT : _TAG_AT + 1] == _DONE_TAG and payload[: len(MARK)] == MARK


def value_at(record: AnyRecord | None, key: bytes) -> bytes | None:
    """Return the value of a key that stands in a record; None if none does."""
    if isinstance(record, Value):
        return record.value if record.key == key else None
    if isinstance(record, Commit):
        return next((write.value for write in record.writes if write.key == key), None)
    if isinstance(record, Moved):
        return next((move.value for move in record.moves if move.key == key), None)
    return None
