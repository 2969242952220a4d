"""Messages for reads, subscriptions and the tail (docs/protocol.md, sections 6 and 7)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ziplog.core.entries import Unit
from ziplog.core.fields import Unsigned
from ziplog.core.message import Message
from ziplog.core.view import LeaseRun
from ziplog.types import ClientId, Epoch, Gsn, ShardId, View
from ziplog.wire.base import MAX_STEPS, VERSION, Request


class Read(Message, tag=VERSION * 256 + 10, frozen=True, gc=False):
    """Requests the record at a gsn."""

    shard: ShardId
    view: View
    request: Request
    gsn: Gsn


Answer = Literal["record", "no-op", "not-yet", "trimmed", "unknown", "wrong-shard"]


class ReadReply(Message, tag=VERSION * 256 + 11, frozen=True, gc=False):
    """A replica's answer to `Read` (D19). `no-op` is answered for a stable position only."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    request: Request
    gsn: Gsn
    answer: Answer
    #: No failure changes the answer, so the answer of one server suffices.
    stable: bool
    #: For `trimmed`: the first position that is not trimmed.
    first: Gsn = 0
    epoch: Epoch = 0
    timestamp_us: int = 0
    key: bytes | None = None
    payload: bytes = b""


StreamKind = Literal["units", "frontier", "early"]


class Subscribe(Message, tag=VERSION * 256 + 12, frozen=True, gc=False):
    """Subscribes to all stable units from `start` on, within the limit of `credit`.

    With `kind` "frontier", it subscribes to the frontier only: a bare stream (section 17). With
    "early", it subscribes to all units that the primary has decided: an early stream (section 18).
    """

    shard: ShardId
    view: View
    client: ClientId
    #: Chosen by the client, which never uses a number twice.
    subscription: Request
    start: Gsn
    #: Total number of bytes that may be sent (each unit counts its body and 64 bytes more). Of a
    #: bare stream, a position: frontiers may be sent until one above it was.
    credit: Unsigned
    kind: StreamKind = "units"


class Credit(Message, tag=VERSION * 256 + 13, frozen=True, gc=False):
    """The subscription's credit, as in `Subscribe`; also a keep-alive. `Deliver` answers it.

    A `Deliver` answers one that raises the credit of a bare stream once the frontier moved.
    """

    shard: ShardId
    view: View
    client: ClientId
    subscription: Request
    credit: Unsigned


class Unsubscribe(Message, tag=VERSION * 256 + 14, frozen=True, gc=False):
    """Ends a subscription."""

    shard: ShardId
    client: ClientId
    subscription: Request


class _Part(Message, frozen=True, gc=False):
    """A part of a shard's units, from `start` up to `frontier`, for a subscriber.

    Every position of the shard in [start, frontier) is in `units` or is a no-op. `start` is the
    `frontier` of the message before; if it differs, the client has lost a message.
    """

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    subscription: Request
    start: Gsn
    frontier: Gsn
    units: list[Unit]
    #: Leases after those that the client was sent before (D44).
    leases: list[LeaseRun] = []  # noqa: RUF012 - msgspec copies it
    #: The shard's frontier for this kind of stream: up to here it could send, given enough credit.
    stable: Gsn = 0


class Deliver(_Part, tag=VERSION * 256 + 15, frozen=True, gc=False):
    """The shard's stable units from `start` up to `frontier`, for a subscriber."""


class Early(_Part, tag=VERSION * 256 + 23, frozen=True, gc=False):
    """Units that the primary has decided, from `start` up to `frontier`; they may not be stable.

    A recovery may decide these positions otherwise. The last field is the *decided* frontier.
    """


class Trimmed(Message, tag=VERSION * 256 + 16, frozen=True, gc=False):
    """The subscription's position was trimmed; the subscription ends."""

    shard: ShardId
    view: View
    subscription: Request
    first: Gsn


class Want(Message, tag=VERSION * 256 + 17, frozen=True, gc=False):
    """A reader waits for this shard: decide every owned position up to `gsn` (D49).

    If the request number is not 0, `Frontier` answers once all of them are stable.
    """

    shard: ShardId
    request: Request
    gsn: Gsn


class Frontier(Message, tag=VERSION * 256 + 18, frozen=True, gc=False):
    """All positions of the shard below `frontier` are stable."""

    shard: ShardId
    view: View
    request: Request
    frontier: Gsn


class Tail(Message, tag=VERSION * 256 + 19, frozen=True, gc=False):
    """Requests the end of the shard, and with `below` also its last stable record below that."""

    shard: ShardId
    view: View
    request: Request
    below: Gsn = 0


class TailReply(Message, tag=VERSION * 256 + 20, frozen=True, gc=False):
    """A replica's answer to `Tail`."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    request: Request
    #: The highest gsn at which this replica holds a record; 0 if it holds none.
    filled: Gsn
    frontier: Gsn
    #: The last stable record below the requested position; 0 if there is none.
    last_below: Gsn = 0
    #: All owned positions below this are decided, stable or not, and the next one is not.
    end: Gsn = 0


class Outline(Message, tag=VERSION * 256 + 21, frozen=True, gc=False):
    """Requests the amount of data in [start, stop), and the port of the server's archive."""

    shard: ShardId
    view: View
    request: Request
    start: Gsn
    stop: Gsn


class Step(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stretch of a shard's log, from the end of the stretch before it up to `stop`."""

    stop: Gsn
    #: Approximate stored size, in bytes.
    size: Unsigned


class Outlined(Message, tag=VERSION * 256 + 22, frozen=True, gc=False):
    """The shard's stored entries in the requested range, in stretches of about equal size.

    A stretch ends at the end of an entry. After the last stretch there are no entries yet.
    """

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    request: Request
    #: All positions before this are trimmed.
    trim: Gsn
    steps: Annotated[list[Step], Meta(max_length=MAX_STEPS)]
    #: The port of this server's archive (docs/protocol.md, section 14); 0: it does not run now.
    archive_port: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    #: The number of segment files that a trim to the end of the requested range deletes.
    segments: Unsigned = 0
