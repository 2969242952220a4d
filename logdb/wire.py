"""The messages between clients and coordinators, and their codec.

A request has a number, which the reply repeats. Tags start at 128, because clients and coordinators
receive the log's messages on the same socket. See docs/logdb.md, section 11.
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

#: Maximum keys of a `Get`, rows of a `Scanned`, and reads of a transaction.
MAX_KEYS: Final = 10_000
#: Maximum membership nodes in an `Opened`.
MAX_ENDPOINTS: Final = 64

Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Reads = Annotated[list[KeyRead], Meta(max_length=MAX_KEYS)]
Ranges = Annotated[list[RangeRead], Meta(max_length=MAX_KEYS)]


class KeyResult(Part, frozen=True, gc=False):
    """A key's entry; `value` is present if the coordinator has it cached."""

    entry: Entry | None
    value: bytes | None = None


class Open(Message, tag=VERSION * 256 + 128, frozen=True, gc=False):
    """Register a session, so that its decisions are sent to this route. Cluster 0: any."""

    request: Request
    session: Session


class Opened(Message, tag=VERSION * 256 + 129, frozen=True, gc=False):
    """The log's endpoints, and the coordinator's position."""

    request: Request
    #: The log's membership nodes.
    endpoints: Annotated[list[Name], Meta(min_length=1, max_length=MAX_ENDPOINTS)]
    position: RecordId


class Get(Message, tag=VERSION * 256 + 130, frozen=True, gc=False):
    """Request the states of keys, if the earlier reads are unchanged."""

    request: Request
    keys: Keys
    #: The minimum position of the state.
    at_least: Gsn
    #: Whether the state must contain everything that completed before.
    fresh: bool
    reads: Reads
    ranges: Ranges
    #: The snapshot to read; 0: the present state.
    snapshot: Request = 0


class Got(Message, tag=VERSION * 256 + 131, frozen=True, gc=False):
    """The states of the keys, in order; empty if there are conflicts."""

    request: Request
    position: RecordId
    found: Annotated[list[KeyResult], Meta(max_length=MAX_KEYS)]
    conflicts: Keys
    #: No key changed after this gsn, up to the position; None: unknown.
    unchanged_since: Gsn | None = None


class Scan(Message, tag=VERSION * 256 + 132, frozen=True, gc=False):
    """Request the first `limit` keys from `start` on, before `stop`."""

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
    """All rows from the requested `start` on, before `stop`, in key order."""

    request: Request
    position: RecordId
    rows: Annotated[list[tuple[Key, KeyResult]], Meta(max_length=MAX_KEYS)]
    #: Smaller than the requested `stop` if there may be more rows.
    stop: Stop
    is_end: bool
    digest: Digest
    conflicts: Keys


class Validate(Message, tag=VERSION * 256 + 134, frozen=True, gc=False):
    """Request whether earlier reads are unchanged in the present state."""

    request: Request
    reads: Reads
    ranges: Ranges


class Validated(Message, tag=VERSION * 256 + 135, frozen=True, gc=False):
    """The conflicting keys; none: the reads are unchanged."""

    request: Request
    position: RecordId
    conflicts: Keys


class AwaitDecision(Message, tag=VERSION * 256 + 136, frozen=True, gc=False):
    """Request the decision about a transaction; answered with `Decided` once it is decided."""

    request: Request
    session: Session
    number: Number


#: "aborted" stands for "conflict" or "expired" when the reason is no longer known.
KnownOutcome = Literal["committed", "conflict", "expired", "aborted"]


class Decided(Message, tag=VERSION * 256 + 137, frozen=True, gc=False):
    """A transaction of the session was decided by the record at `position`."""

    session: Session
    number: Number
    position: RecordId
    outcome: KnownOutcome
    conflicts: Keys
    #: No key changed after this gsn and before the position; None: unknown.
    unchanged_since: Gsn | None = None


class Watch(Message, tag=VERSION * 256 + 138, frozen=True, gc=False):
    """Request a `Got` when the key's version differs from `version`, or after a timeout."""

    request: Request
    key: Key
    version: Gsn
    at_least: Gsn


class TakeSnapshot(Message, tag=VERSION * 256 + 139, frozen=True, gc=False):
    """Request a snapshot of the present state; always fresh."""

    request: Request
    session: Session


class SnapshotTaken(Message, tag=VERSION * 256 + 140, frozen=True, gc=False):
    """The number of a new snapshot."""

    request: Request
    snapshot: Number
    position: RecordId


class DropSnapshot(Message, tag=VERSION * 256 + 141, frozen=True, gc=False):
    """End a snapshot. No reply."""

    snapshot: Number


class Status(Message, tag=VERSION * 256 + 142, frozen=True, gc=False):
    """Request the coordinator's status."""

    request: Request


class StatusReply(Message, tag=VERSION * 256 + 143, frozen=True, gc=False):
    """The status, a JSON object."""

    request: Request
    document: Annotated[bytes, Meta(max_length=65_536)]


class NotReady(Message, tag=VERSION * 256 + 144, frozen=True, gc=False):
    """The coordinator is replaying the log, or is overloaded: retry, or use another coordinator."""

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
#: Returns the message of a frame, of LogDB or of the log; see `decoder_of`.
decode: Final = decoder_of(_decoder)
