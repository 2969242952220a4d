"""The messages between players and receivers, and their codec: the contract of a target.

Every message names a task, its term and a number, which grows with each request of the term. A
reply repeats the number. The family has a version of its own, which its tags carry. Codes start at
160, because a player receives the log's messages on the same transport (docs/player.md, section
10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta

from logplayer.contract import RejectedRecord, cursor_name
from logplayer.partitions import size_of
from logplayer.retries import MAX_AFTER_S
from ziplog.core.cursors import Mark
from ziplog.core.fields import MAX_FRAME, Unsigned
from ziplog.core.message import Message
from ziplog.core.wire_use import WireRange
from ziplog.types import Epoch, Gsn, Record, RecordId, ShardId
from ziplog.wire import AnyMessage, Hello, Name, NodeInfoQuery, Text, decoder_of

if TYPE_CHECKING:
    from logplayer.contract import Batch

#: The version of these messages, which receivers state in their `NodeInfo`.
VERSION: Final = 1
VERSIONS: Final = WireRange(VERSION, VERSION)
#: The role of a receiver in its `NodeInfo`.
ROLE: Final = "receiver"
#: Maximum of `batch_records` of all targets, and the records that `map` makes of the last one.
_MAX_RECORDS: Final = 1_000_000
#: Space in a frame that each record and each message needs besides payloads, keys and reasons.
_RECORD_BYTES: Final = 48
_MESSAGE_BYTES: Final = 4096
#: A reason is UTF-8 text of up to 4 bytes a character.
_CHARACTER_BYTES: Final = 4

Key = Annotated[bytes, Meta(max_length=MAX_FRAME)]


class PushMessage(Message, frozen=True, gc=False):
    """Base of all messages between players and receivers."""

    player: Name
    target: Name
    partition: Unsigned
    term: Unsigned
    number: Unsigned

    @property
    def cursor(self) -> str:
        """The name of the task's cursor."""
        return cursor_name(self.player, self.target, self.partition)


class PushOpen(PushMessage, tag=VERSION * 256 + 160, frozen=True, gc=False):
    """Requests `Target.open`. Repeated with the same number until the reply comes."""

    partitions: Unsigned
    birth: Unsigned
    seek: Unsigned
    position: Gsn
    mark: Mark
    has_moved: bool
    #: What the player knows of the target: the receiver's must be the same.
    stores_position: bool
    #: Batches may have rejected records, which the receiver has to keep.
    keeps_rejected: bool


class PushOpened(PushMessage, tag=VERSION * 256 + 161, frozen=True, gc=False):
    """Where the target stands; None: it stores no position."""

    position: Gsn | None
    mark: Mark


class PushedRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record of a batch."""

    gsn: Gsn
    shard: ShardId
    payload: Key
    key: Key | None
    timestamp_us: int
    epoch: Epoch


class PushedRejection(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record that the target refused before, to keep with the reason."""

    record: PushedRecord
    why: Text


class PushBatch(PushMessage, tag=VERSION * 256 + 162, frozen=True):
    """Requests `Target.deliver`. It is sent once; `PushQuery` asks for its result."""

    start: Gsn
    stop: Gsn
    size: Unsigned
    records: Annotated[list[PushedRecord], Meta(max_length=_MAX_RECORDS)]
    rejected: Annotated[list[PushedRejection], Meta(max_length=_MAX_RECORDS)]


class PushQuery(PushMessage, tag=VERSION * 256 + 163, frozen=True, gc=False):
    """Requests the result of a batch that was sent."""


class PushWorking(PushMessage, tag=VERSION * 256 + 164, frozen=True, gc=False):
    """The request is being carried out; its result follows."""


class PushDone(PushMessage, tag=VERSION * 256 + 165, frozen=True, gc=False):
    """The target has the batch durably; the mark that it returned, if any."""

    mark: Mark | None


#: Why a request failed. retry, rejected, fenced: as the exception of this name. bug: an error of a
#: program or its settings. lost: the receiver does not know the batch or its task.
Failure = Literal["retry", "rejected", "fenced", "bug", "lost"]


class PushFailed(PushMessage, tag=VERSION * 256 + 166, frozen=True, gc=False):
    """The request failed."""

    kind: Failure
    text: Text
    #: Of retry: the pause that the target asked for, in seconds.
    after_s: Annotated[float, Meta(ge=0.0, le=MAX_AFTER_S)] | None = None
    #: Of rejected: the record's index in the batch.
    index: Unsigned | None = None
    #: Of bug: the class of the error.
    error: Name = ""


class PushClose(PushMessage, tag=VERSION * 256 + 167, frozen=True, gc=False):
    """Requests `Target.close`; there is no reply."""


AnyPush = (
    PushOpen | PushOpened | PushBatch | PushQuery | PushWorking | PushDone | PushFailed | PushClose
)

#: What a receiver understands: `Hello` and `NodeInfoQuery` are answered with its `NodeInfo`.
decode: Final = decoder_of(msgspec.msgpack.Decoder(AnyPush | Hello | NodeInfoQuery))
#: What a player understands: also every message of the log.
decode_any: Final = decoder_of(msgspec.msgpack.Decoder(AnyPush | AnyMessage))

_record_decoder: Final = msgspec.msgpack.Decoder(list[PushedRecord])


def frame_size(batch: Batch) -> int:
    """Return a size that the frame of a batch does not exceed, in bytes."""
    kept = sum(size_of(one.record) + _CHARACTER_BYTES * len(one.why) for one in batch.rejected)
    count = len(batch.records) + len(batch.rejected)
    return _MESSAGE_BYTES + batch.size + kept + _RECORD_BYTES * count


def pushed(record: Record) -> PushedRecord:
    """Return a record as a message has it."""
    rid = record.rid
    return PushedRecord(
        rid.gsn, rid.shard, record.payload, record.key, record.timestamp_us, record.epoch
    )


def check_records(records: list[PushedRecord]) -> None:
    """Raise TypeError, ValueError or OverflowError if a record has a value that it cannot have."""
    _record_decoder.decode(msgspec.msgpack.encode(records))


def received(one: PushedRecord) -> Record:
    """Return the record of a message."""
    return Record(RecordId(one.gsn, one.shard), one.payload, one.key, one.timestamp_us, one.epoch)


def received_rejection(one: PushedRejection) -> RejectedRecord:
    """Return the rejected record of a message."""
    return RejectedRecord(received(one.record), one.why)
