"""Messages between clients and coordinators, and the codec of everything that either receives.

A client's requests carry a number, and a coordinator's answers repeat it. Codes are 128 and up:
both sides hear the log's messages over the same socket. See docs/logdb.md, section 11.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from logdb.records import (
    Digest,
    Entry,
    Key,
    KeyRead,
    Number,
    Part,
    RangeRead,
    Session,
    Stop,
)
from ziplog.core.message import Message
from ziplog.types import Gsn, RecordId
from ziplog.wire import AnyMessage, Name, Request, Text, decoder_of
from ziplog.wire.base import VERSION

#: Keys of one `Get`, entries of one `Scanned`, reads of one transaction.
MAX_KEYS: Final = 10_000
#: Membership nodes that an `Opened` tells.
MAX_ENDPOINTS: Final = 64

Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Reads = Annotated[list[KeyRead], Meta(max_length=MAX_KEYS)]
Ranges = Annotated[list[RangeRead], Meta(max_length=MAX_KEYS)]


class KeyResult(Part, frozen=True, gc=False):
    """A key's state. `value` is there if the coordinator has it at hand."""

    entry: Entry | None
    value: bytes | None = None


class Open(Message, tag=VERSION * 256 + 128, frozen=True, gc=False):
    """Here is a session: tell it its decisions. Cluster 0: any."""

    request: Request
    session: Session


class Opened(Message, tag=VERSION * 256 + 129, frozen=True, gc=False):
    """Where the log is, and how far this coordinator is."""

    request: Request
    #: Of the log's membership service.
    endpoints: Annotated[list[Name], Meta(min_length=1, max_length=MAX_ENDPOINTS)]
    position: RecordId


class Get(Message, tag=VERSION * 256 + 130, frozen=True, gc=False):
    """What are these keys, if all of that is still so?"""

    request: Request
    keys: Keys
    #: Answer from this position on.
    at_least: Gsn
    #: Answer when everything was passed that had completed before.
    fresh: bool
    reads: Reads
    ranges: Ranges
    #: Answer from this snapshot; 0: from the present state.
    snapshot: Request = 0


class Got(Message, tag=VERSION * 256 + 131, frozen=True, gc=False):
    """The state of the keys, in their order; empty if there are conflicts."""

    request: Request
    position: RecordId
    found: Annotated[list[KeyResult], Meta(max_length=MAX_KEYS)]
    conflicts: Keys


class Scan(Message, tag=VERSION * 256 + 132, frozen=True, gc=False):
    """Which keys are there from `start` on, before `stop`? At most `limit` of them are told."""

    request: Request
    start: Key
    stop: Stop
    limit: Annotated[int, Meta(ge=1, le=MAX_KEYS)]
    at_least: Gsn
    fresh: bool
    reads: Reads
    ranges: Ranges
    snapshot: Request = 0


class Scanned(Message, tag=VERSION * 256 + 133, frozen=True, gc=False):
    """Keys in order, all that there are from the `start` asked for on, before `stop`."""

    request: Request
    position: RecordId
    rows: Annotated[list[tuple[Key, KeyResult]], Meta(max_length=MAX_KEYS)]
    #: Before the `stop` asked for if there may be more.
    stop: Stop
    is_end: bool
    digest: Digest
    conflicts: Keys


class Validate(Message, tag=VERSION * 256 + 134, frozen=True, gc=False):
    """Is all of this still so, now?"""

    request: Request
    reads: Reads
    ranges: Ranges


class Validated(Message, tag=VERSION * 256 + 135, frozen=True, gc=False):
    """These are not; none: it is."""

    request: Request
    position: RecordId
    conflicts: Keys


class AwaitDecision(Message, tag=VERSION * 256 + 136, frozen=True, gc=False):
    """What became of this transaction? Answered with `Decided`, as soon as it is decided."""

    request: Request
    session: Session
    number: Number


#: "aborted": for one of the other two reasons, which nobody remembers.
KnownOutcome = Literal["committed", "conflict", "expired", "aborted"]


class Decided(Message, tag=VERSION * 256 + 137, frozen=True, gc=False):
    """A transaction of the session was decided by the record at `position`."""

    session: Session
    number: Number
    position: RecordId
    outcome: KnownOutcome
    conflicts: Keys


class Watch(Message, tag=VERSION * 256 + 138, frozen=True, gc=False):
    """Answer with `Got` when this key has another version, or after a while; at once if it has."""

    request: Request
    key: Key
    version: Gsn
    at_least: Gsn


class TakeSnapshot(Message, tag=VERSION * 256 + 139, frozen=True, gc=False):
    """Keep the state of a moment from now on. Always fresh."""

    request: Request
    session: Session


class SnapshotTaken(Message, tag=VERSION * 256 + 140, frozen=True, gc=False):
    """It is kept under this number."""

    request: Request
    snapshot: Number
    position: RecordId


class DropSnapshot(Message, tag=VERSION * 256 + 141, frozen=True, gc=False):
    """The snapshot is no longer needed. No answer."""

    snapshot: Number


class Status(Message, tag=VERSION * 256 + 142, frozen=True, gc=False):
    """How is the coordinator?"""

    request: Request


class StatusReply(Message, tag=VERSION * 256 + 143, frozen=True, gc=False):
    """A JSON object."""

    request: Request
    document: Annotated[bytes, Meta(max_length=65_536)]


class NotReady(Message, tag=VERSION * 256 + 144, frozen=True, gc=False):
    """The coordinator replays the log, or has too much to do: ask again, or another one."""

    request: Request
    reason: Text


class Invalid(Message, tag=VERSION * 256 + 145, frozen=True, gc=False):
    """The request can never be answered."""

    request: Request
    code: Literal["snapshot-expired", "wrong-cluster"]
    detail: Text


ClientRequest = (
    Open | Get | Scan | Validate | AwaitDecision | Watch | TakeSnapshot | DropSnapshot | Status
)
Reply = (
    Opened | Got | Scanned | Validated | Decided | SnapshotTaken | StatusReply | NotReady | Invalid
)

_decoder: Final[msgspec.msgpack.Decoder[AnyMessage | ClientRequest | Reply]] = (
    msgspec.msgpack.Decoder(AnyMessage | ClientRequest | Reply)
)
#: Returns the message of a frame: one of ours, or one of the log's; see `decoder_of`.
decode: Final = decoder_of(_decoder)
