"""A client reads: single positions, streams, the tail (docs/protocol.md, sections 6 and 7)."""

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
    """What is at this gsn?"""

    shard: ShardId
    view: View
    request: Request
    gsn: Gsn


Answer = Literal["record", "no-op", "not-yet", "trimmed", "unknown", "wrong-shard", "wrong-view"]


class ReadReply(Message, tag=VERSION * 256 + 11, frozen=True, gc=False):
    """The closed set of answers to a read (D19). `no-op` is only ever said of a stable position."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    request: Request
    gsn: Gsn
    answer: Answer
    #: No failure changes it: one server's word suffices.
    stable: bool
    #: For `trimmed`: the first position still there.
    first: Gsn = 0
    epoch: Epoch = 0
    timestamp_us: int = 0
    key: bytes | None = None
    payload: bytes = b""


class Subscribe(Message, tag=VERSION * 256 + 12, frozen=True, gc=False):
    """Send me everything stable from `start` on, as far as `credit` reaches."""

    shard: ShardId
    view: View
    client: ClientId
    #: Chosen by the client, unique in it, never used twice.
    subscription: Request
    start: Gsn
    #: Bytes that may be sent in all (each unit counts its body and 64 more).
    credit: Unsigned


class Credit(Message, tag=VERSION * 256 + 13, frozen=True, gc=False):
    """The whole allowance so far, in bytes; also the sign of life. A `Deliver` always answers."""

    shard: ShardId
    view: View
    client: ClientId
    subscription: Request
    credit: Unsigned


class Unsubscribe(Message, tag=VERSION * 256 + 14, frozen=True, gc=False):
    """Stop sending."""

    shard: ShardId
    client: ClientId
    subscription: Request


class Deliver(Message, tag=VERSION * 256 + 15, frozen=True, gc=False):
    """The shard's stable units from `start` up to its frontier.

    All that the shard owns in [start, frontier) is in `units` or is a no-op. `start` is the
    frontier of the message before; a client that sees another one lost a message.
    """

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    subscription: Request
    start: Gsn
    frontier: Gsn
    units: list[Unit]
    #: Leases that the client needs to go past the ones it was sent before (D44).
    leases: list[LeaseRun] = []  # noqa: RUF012 - msgspec copies it
    #: What the shard could send if credit allowed: its stable frontier.
    stable: Gsn = 0


class Trimmed(Message, tag=VERSION * 256 + 16, frozen=True, gc=False):
    """The subscription stands below the trim point and ends here."""

    shard: ShardId
    view: View
    subscription: Request
    first: Gsn


class Want(Message, tag=VERSION * 256 + 17, frozen=True, gc=False):
    """Somebody waits behind this shard: decide every owned position up to `gsn` (D49).

    With a request number other than 0, a `Frontier` answers once they are all stable.
    """

    shard: ShardId
    request: Request
    gsn: Gsn


class Frontier(Message, tag=VERSION * 256 + 18, frozen=True, gc=False):
    """All that the shard owns below `frontier` is stable."""

    shard: ShardId
    view: View
    request: Request
    frontier: Gsn


class Tail(Message, tag=VERSION * 256 + 19, frozen=True, gc=False):
    """Where does the shard end? With `below`: and which is its last stable record below it?"""

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
    #: The last stable record below the asked position; 0 if there is none.
    last_below: Gsn = 0
    #: All owned positions below it are decided, stable or not, and the next one is not.
    end: Gsn = 0


class Outline(Message, tag=VERSION * 256 + 21, frozen=True, gc=False):
    """How much do you hold of [start, stop), and who serves it in bulk?"""

    shard: ShardId
    view: View
    request: Request
    start: Gsn
    stop: Gsn


class Step(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stretch of a shard's log: from where the one before ends up to `stop`."""

    stop: Gsn
    #: What is stored of it, about.
    size: Unsigned


class Outlined(Message, tag=VERSION * 256 + 22, frozen=True, gc=False):
    """The shard's stored entries of the asked range, in stretches of about equal size.

    A stretch ends where an entry ends. What lies behind the last one, no entry is about yet.
    """

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    request: Request
    #: All before it was trimmed.
    trim: Gsn
    steps: Annotated[list[Step], Meta(max_length=MAX_STEPS)]
    #: The port of this server's archive (docs/protocol.md, section 14); 0: it has none now.
    archive_port: Annotated[int, Meta(ge=0, lt=2**16)] = 0
