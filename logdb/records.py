"""The records that LogDB writes to the log, and their codec.

A payload without LogDB's name is *foreign*. One with the name that this version cannot decode is
*unreadable*: a later version may have written it. Every coordinator skips both. See docs/logdb.md,
section 3.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ziplog.types import Gsn, RecordId

#: LogDB's name, and the version of its records.
MARK: Final = b"LDB\x01"
_NAME: Final = MARK[:3]
#: Maximum bytes of a key.
MAX_KEY_BYTES: Final = 1024
#: Maximum bytes of a record without its single key and value, `Moved` included.
OVERHEAD_BYTES: Final = 64
#: Approximate bytes of a value in a `Moved` record, without the value and its key.
MOVE_BYTES: Final = 24
#: Write sets up to this size (keys and values) are stored in the commit record.
INLINE_BYTES: Final = 16 * 1024

Key = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
#: The exclusive end of a range; None: no end. It may be the first key after the longest key.
Stop = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES + 1)] | None
Session = Annotated[bytes, Meta(min_length=8, max_length=8)]
Number = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of structs inside records and messages."""


class TransactionId(Part, frozen=True, gc=False):
    """The client's session, and the transaction's number in it."""

    session: Session
    number: Number


class KeyRead(Part, frozen=True, gc=False):
    """A key that was read, and its version; 0: it was absent."""

    key: Key
    version: Gsn


class RangeRead(Part, frozen=True, gc=False):
    """The keys from `start` on, before `stop` (None: all), and the digest of their entries."""

    start: Key
    stop: Stop
    digest: Digest


class Write(Part, frozen=True, gc=False):
    """A key's new value: inline, or by reference; neither: the key is deleted."""

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
    """A value to which a commit record refers."""

    key: Key
    value: bytes


class Commit(LogRecord, tag=2, frozen=True, gc=False):
    """A transaction that requests to commit."""

    id: TransactionId
    #: A position that the client knew before it first inserted this record.
    began: Gsn
    reads: list[KeyRead]
    ranges: list[RangeRead]
    writes: list[Write]


class Move(Part, frozen=True, gc=False):
    """A value, and the place from which it was copied."""

    key: Key
    place: RecordId
    value: bytes


class Moved(LogRecord, tag=3, frozen=True, gc=False):
    """Values that are at this record from now on, if their place is still the one given."""

    moves: list[Move]


class CheckpointBegun(LogRecord, tag=4, frozen=True, gc=False):
    """A coordinator starts a checkpoint, and cleans the log before `cut`.

    From here on, no commit may refer to a value before `cut`.
    """

    coordinator: Session
    #: Effective up to this record's own gsn; 0: nothing is cleaned.
    cut: Gsn


class Decision(Part, frozen=True, gc=False):
    """The decision about a transaction, made by the record at `position`."""

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
    """A complete checkpoint: its parts hold the state after the record at `position`."""

    coordinator: Session
    position: RecordId
    #: The gsn of the last forgotten decision.
    floor: Gsn
    parts: list[RecordId]
    #: crc32c over the parts' payloads, in order.
    checksum: Annotated[int, Meta(ge=0, lt=2**32)]
    #: Number of keys.
    keys: Size
    #: The greatest `cut` announced until then.
    horizon: Gsn
    #: The first foreign record until then; 0: none.
    first_foreign: Gsn
    #: Number of records until then, without checkpoints.
    records: Gsn
    #: The log is trimmed here, because no place is before this gsn. 0: no trim.
    trim: Gsn
    #: The first unreadable record until then; 0: none, or an earlier version wrote this.
    first_unreadable: Gsn = 0


AnyRecord = Value | Commit | Moved | CheckpointBegun | CheckpointPart | CheckpointDone

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final[msgspec.msgpack.Decoder[AnyRecord]] = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: AnyRecord) -> bytes:
    """Return the payload of a record."""
    return MARK + _encode(record)


def decode(payload: bytes) -> AnyRecord | None:
    """Return the record of a payload; None if it is foreign or unreadable."""
    if payload[: len(MARK)] != MARK:
        return None
    try:
        return _decoder.decode(memoryview(payload)[len(MARK) :])
    except (msgspec.MsgspecError, RecursionError):
        return None


def is_foreign(payload: bytes) -> bool:
    """Whether a payload is without LogDB's name: another program inserted it."""
    return payload[: len(_NAME)] != _NAME


_PART: Final = encode(CheckpointPart([], [], []))[: len(MARK) + 2]
#: After the mark and the number of fields, which is one byte for up to 15 fields.
_TAG_AT: Final = len(MARK) + 1
_DONE_TAG: Final = b"\x06"


def is_part(payload: bytes) -> bool:
    """Whether a payload is a checkpoint part (which has no effect), judged by its first bytes."""
    return payload[: len(_PART)] == _PART


class _Glance(LogRecord, tag=5, frozen=True, gc=False):
    """A checkpoint part with undecoded entries."""

    entries: list[msgspec.Raw]
    decisions: msgspec.Raw
    segments: msgspec.Raw


_glance: Final = msgspec.msgpack.Decoder(_Glance)


def count_entries(payload: bytes) -> int | None:
    """Return the number of entries of a checkpoint part, undecoded; None: not a part."""
    if not is_part(payload):
        return None
    try:
        return len(_glance.decode(memoryview(payload)[len(MARK) :]).entries)
    except msgspec.MsgspecError:
        return None


def is_done(payload: bytes) -> bool:
    """Whether a payload is a `CheckpointDone`, judged by its tag; fields may be added later."""
    return payload[_TAG_AT : _TAG_AT + 1] == _DONE_TAG and payload[: len(MARK)] == MARK


def value_at(record: AnyRecord | None, key: bytes) -> bytes | None:
    """Return a key's value in a record; None if the record does not hold it."""
    if isinstance(record, Value):
        return record.value if record.key == key else None
    if isinstance(record, Commit):
        return next((write.value for write in record.writes if write.key == key), None)
    if isinstance(record, Moved):
        return next((move.value for move in record.moves if move.key == key), None)
    return None
