"""A client inserts, and asks what became of it (docs/protocol.md, section 4)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ziplog.core.fields import MAX_UNIT_RECORDS, Count, Gsns, Unsigned
from ziplog.core.message import Message
from ziplog.types import ClientId, Gsn, Seq, ShardId, View
from ziplog.wire.base import VERSION, Request, Text


class Insert(Message, tag=VERSION * 256 + 1, frozen=True, gc=False):
    """Put `count` records, a *unit*, at consecutive slots of the shard, all after `after`."""

    shard: ShardId
    view: View
    client: ClientId
    #: The unit's identity is (client, seq); seq counts per client and shard.
    seq: Seq
    #: Every insert of this client and shard below this is settled: servers may forget it.
    first_incomplete: Seq
    #: Place it only after the unit with this seq of the same client was placed; 0: no such wish.
    predecessor: Seq
    #: Every record of the unit gets a gsn above this one.
    after: Gsn
    count: Count
    #: An encoded `Body` with `count` payloads.
    body: bytes
    #: Which copy of the unit this is, from 1, in all views; 0: the client does not number them.
    copy: Unsigned = 0
    #: When the client made the unit, all positions of the shard below this one were decided, so no
    #: replica ever placed it below; 0: the client does not say.
    since: Unsigned = 0


class InsertAck(Message, tag=VERSION * 256 + 2, frozen=True, gc=False):
    """A server holds the unit at these gsns (D8)."""

    shard: ShardId
    view: View
    #: Index of the sender among the shard's replicas; 0 is the primary.
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    seq: Seq
    #: Counts this server's acks: of two, the greater is the newer.
    counter: Unsigned
    #: Decided by the primary, or still a backup's own guess.
    confirmed: bool
    gsns: Gsns
    #: A backup had the client's copy, and said this only when the primary's word came: the third
    #: message delay.
    waited: bool = False
    #: The number of the newest copy that has come to this server; 0: it does not say.
    copy: Unsigned = 0


RefusalCode = Literal[
    "wrong-cluster",
    "wrong-shard",
    "wrong-view",
    "not-ready",  # starting, in limbo, or without a lease: try again, or elsewhere
    "full",  # no disk space, or too much is waiting: send another copy, or elsewhere
    "redirect",  # the shard has no more positions: this server will never take the unit
    "no-such-position",  # `after` was never given to anybody
    "too-large",
    "malformed",  # the body is no Body, or does not hold `count` payloads
    "identity-reused",  # the seq is settled, or was used for other contents
    "unknown-subscription",
    "not-stable",
    # A session was forgotten that may have held the unit: this server will never take the unit.
    "expired",
]


class Refused(Message, tag=VERSION * 256 + 3, frozen=True, gc=False):
    """A server will not do what was asked. `request` repeats the seq or request number.

    With `copies` it is a promise, in this view: it holds none of the first `copies` copies of the
    unit, and never takes one. Without, it says nothing about other copies, or the same one again.
    """

    shard: ShardId
    #: The sender's own view.
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    request: Request
    code: RefusalCode
    detail: Text = ""
    copies: Unsigned = 0
    #: With `expired`: all positions of the shard below this one are decided.
    since: Unsigned = 0


class Leaving(Message, tag=VERSION * 256 + 8, frozen=True, gc=False):
    """The shard takes records for a little while only: send what is new elsewhere.

    Nothing that is under way is touched (docs/protocol.md, section 13).
    """

    shard: ShardId
    view: View


class Settled(Message, tag=VERSION * 256 + 9, frozen=True, gc=False):
    """All inserts of a client and shard below `first_incomplete` are settled. No answer."""

    shard: ShardId
    view: View
    client: ClientId
    first_incomplete: Seq


class Locate(Message, tag=VERSION * 256 + 4, frozen=True, gc=False):
    """What became of this client's unit, which it sent in `view`? (D13)."""

    shard: ShardId
    view: View
    client: ClientId
    seq: Seq
    #: As in the unit's `Insert`.
    since: Unsigned = 0


class Located(Message, tag=VERSION * 256 + 5, frozen=True, gc=False):
    """Where a unit is, as a server of `view` knows it.

    `present`: at these gsns, for good. `absent`: it is nowhere, and copies of the view in which it
    was sent will be refused; only said in a later view. `pending`: ask again.
    """

    shard: ShardId
    #: The view of the server that answers.
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    client: ClientId
    seq: Seq
    verdict: Literal["present", "absent", "pending"]
    #: For `present`.
    gsns: Annotated[list[Gsn], Meta(max_length=MAX_UNIT_RECORDS)]


class Sync(Message, tag=VERSION * 256 + 6, frozen=True, gc=False):
    """Tell me when all that the shard owns up to `gsn` is on stable storage at all replicas.

    Asked of the primary. Again with the same request: a repetition.
    """

    shard: ShardId
    view: View
    request: Request
    gsn: Gsn


class Synced(Message, tag=VERSION * 256 + 7, frozen=True, gc=False):
    """All that the shard owns below `durable` is on stable storage at all replicas."""

    shard: ShardId
    view: View
    request: Request
    durable: Gsn
