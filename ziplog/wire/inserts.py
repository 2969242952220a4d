"""Messages for inserts and for the outcome of inserts (docs/protocol.md, section 4)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ziplog.core.fields import MAX_UNIT_RECORDS, Count, Gsns, Unsigned
from ziplog.core.message import Message
from ziplog.types import ClientId, Gsn, Seq, ShardId, View
from ziplog.wire.base import VERSION, Request, Text


class Insert(Message, tag=VERSION * 256 + 1, frozen=True, gc=False):
    """Insert `count` records, a *unit*, at consecutive slots of the shard, all after `after`."""

    shard: ShardId
    view: View
    client: ClientId
    #: The unit's identity is (client, seq); seq counts per client and shard.
    seq: Seq
    #: Every insert of this client and shard below this seq is complete: servers may forget it.
    first_incomplete: Seq
    #: Place the unit only after the client's unit with this seq was placed; 0: no constraint.
    predecessor: Seq
    #: Every record of the unit gets a higher gsn than this one.
    after: Gsn
    count: Count
    #: An encoded `Body` with `count` payloads.
    body: bytes
    #: Number of this copy of the unit, from 1, over all views; 0: the client does not number them.
    copy: Unsigned = 0
    #: When the client created the unit, all positions of the shard below this one were decided, so
    #: no replica ever placed the unit below it; 0: not given.
    since: Unsigned = 0
    #: The client waits until the unit's last position is sealed (section 17).
    sealed: bool = False


class RelayedInsert(Message, tag=VERSION * 256 + 24, frozen=True, gc=False):
    """A backup passes a client's unit on to the primary, which the client may not reach.

    As a copy without a number, it is refused if the primary refused any copy.
    """

    insert: Insert


class InsertAck(Message, tag=VERSION * 256 + 2, frozen=True, gc=False):
    """Ack: a server holds the unit at these gsns (D8)."""

    shard: ShardId
    view: View
    #: Index of the sender among the shard's replicas; 0 is the primary.
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    seq: Seq
    #: Number of this ack among the server's acks: the highest one is the newest.
    counter: Unsigned
    #: True: decided by the primary. False: a backup's own guess.
    confirmed: bool
    gsns: Gsns
    #: A backup had the client's copy, but acked only on the primary's decision: the third message
    #: delay.
    waited: bool = False
    #: The number of the newest copy that this server received; 0: not given.
    copy: Unsigned = 0


RefusalCode = Literal[
    "wrong-cluster",
    "wrong-shard",
    "wrong-view",
    "not-ready",  # starting, in limbo, or without a lease: retry here or at another shard
    "full",  # too much is waiting: send another copy, or use another shard
    "no-space",  # the server's disk is full; as `full`, but it may last until an operator acts
    "redirect",  # the shard has no more positions: this server will never accept the unit
    "no-such-position",  # `after` is above every assigned position
    "too-large",
    "malformed",  # the body is not a Body, or does not hold `count` payloads
    "identity-reused",  # the seq is complete, or was used for other contents
    "unknown-subscription",
    "not-stable",
    # A removed session may have held the unit: this server will never accept the unit.
    "expired",
]


class Refused(Message, tag=VERSION * 256 + 3, frozen=True, gc=False):
    """A server refuses a request. `request` repeats the seq or request number.

    With `copies`, the server promises for this view that it holds none of the first `copies` copies
    of the unit and will never accept one. Without it, the server may still accept a copy.
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
    """The shard is draining: send new inserts to other shards.

    Inserts in flight are not affected (docs/protocol.md, section 13).
    """

    shard: ShardId
    view: View


class Settled(Message, tag=VERSION * 256 + 9, frozen=True, gc=False):
    """All inserts of a client and shard below `first_incomplete` are complete. No answer."""

    shard: ShardId
    view: View
    client: ClientId
    first_incomplete: Seq


class Locate(Message, tag=VERSION * 256 + 4, frozen=True, gc=False):
    """Requests the outcome of a unit that this client sent in `view` (D13)."""

    shard: ShardId
    view: View
    client: ClientId
    seq: Seq
    #: As in the unit's `Insert`.
    since: Unsigned = 0


class Located(Message, tag=VERSION * 256 + 5, frozen=True, gc=False):
    """The outcome of a unit, as a server of `view` knows it.

    `present`: the unit is at these gsns, permanently. `absent`: it is not in the log, and copies
    that were sent in the earlier view will be refused; answered in a later view only. `pending`:
    request again.
    """

    shard: ShardId
    #: The view of the answering server.
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    client: ClientId
    seq: Seq
    verdict: Literal["present", "absent", "pending"]
    #: For `present`.
    gsns: Annotated[list[Gsn], Meta(max_length=MAX_UNIT_RECORDS)]


class Sync(Message, tag=VERSION * 256 + 6, frozen=True, gc=False):
    """Requests an answer once the shard's positions up to `gsn` are durable at all replicas.

    Sent to the primary. A repeated request has the same number.
    """

    shard: ShardId
    view: View
    request: Request
    gsn: Gsn


class Synced(Message, tag=VERSION * 256 + 7, frozen=True, gc=False):
    """All positions of the shard below `durable` are on stable storage at all replicas."""

    shard: ShardId
    view: View
    request: Request
    durable: Gsn
