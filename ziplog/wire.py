"""Every message, and the one codec. MessagePack arrays, led by a tag that carries the version.

`decode` checks types, lengths and ranges and raises `ProtocolError` on anything else; the code
behind it assumes. Every message names its cluster; those of a shard name its view, and a receiver
of another view refuses them (docs/protocol.md, "Views"). Fields are only ever added at the end.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ziplog.errors import LocalProtocolError, ProtocolError
from ziplog.types import ClientId, Epoch, Fseq, Gsn, Seq, ShardId, View
from ziplog.view import LeaseRun, NodeState, Placement

#: Stands in every frame: a tag is `VERSION * 256 + code`.
VERSION: Final = 1
#: No frame is longer, in bytes.
MAX_FRAME: Final = 16 * 1024 * 1024
#: No insert holds more records.
MAX_UNIT_RECORDS: Final = 4096

Cluster = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Request = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=1, le=MAX_UNIT_RECORDS)]
Unsigned = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Checksum = Annotated[int, Meta(ge=0, lt=2**32)]
#: Consecutive owned gsns of one insert, increasing.
Gsns = Annotated[list[Gsn], Meta(min_length=1, max_length=MAX_UNIT_RECORDS)]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""

    cluster: Cluster


class Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the records of one insert hold. Servers store and send it as it came, undecoded."""

    timestamp_us: Annotated[int, Meta(ge=-(2**62), lt=2**62)]
    key: bytes | None
    payloads: Annotated[list[bytes], Meta(min_length=1, max_length=MAX_UNIT_RECORDS)]


# --- a client inserts ------------------------------------------------------------------------


class Insert(Message, tag=VERSION * 256 + 1, frozen=True, gc=False):
    """Put `count` records, a *unit*, at consecutive slots of the shard, all after `after`."""

    shard: ShardId
    view: View
    client: ClientId
    #: The unit's identity is (client, seq); seq counts per client and shard.
    seq: Seq
    #: Every insert of this client and shard below this is settled: servers may forget it.
    done_below: Seq
    #: Place it only after the unit with this seq of the same client was placed; 0: no such wish.
    follows: Seq
    #: Every record of the unit gets a gsn above this one.
    after: Gsn
    count: Count
    #: An encoded `Body` with `count` payloads.
    body: bytes


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


RefusalCode = Literal[
    "wrong-cluster",
    "wrong-shard",
    "wrong-view",
    "not-ready",  # starting, in limbo, or without a lease: try again, or elsewhere
    "full",  # no disk space, or too much is waiting: try again, or elsewhere
    "redirect",  # the shard takes no new records: elsewhere
    "no-such-position",  # `after` was never given to anybody
    "too-large",
    "malformed",  # the body is no Body, or does not hold `count` payloads
    "identity-reused",  # the seq is settled, or was used for other contents
    "unknown-subscription",
    "not-stable",
]


class Refused(Message, tag=VERSION * 256 + 3, frozen=True, gc=False):
    """A server will not do what was asked. `request` repeats the seq or request number."""

    shard: ShardId
    #: The sender's own view.
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    request: Request
    code: RefusalCode
    detail: Text = ""


# --- a client reads --------------------------------------------------------------------------


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


class Unit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The records of one insert at their positions, for readers."""

    epoch: Epoch
    gsns: Gsns
    #: An encoded `Body` with one payload for each gsn.
    body: bytes


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
    leases: list[LeaseRun] = []
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


# --- between the replicas of a shard ---------------------------------------------------------


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """The primary put a unit at these gsns. The body travels only when a backup asked for it."""

    client: ClientId
    seq: Seq
    done_below: Seq
    epoch: Epoch
    gsns: Gsns
    checksum: Checksum
    body: bytes | None = None


class Skip(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """Every position that the shard owns in [start, stop) is a no-op."""

    start: Gsn
    stop: Gsn


class Expire(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """The client was silent for so long that its session is forgotten (D9)."""

    client: ClientId


Decision = Place | Skip | Expire


class Forward(Message, tag=VERSION * 256 + 30, frozen=True, gc=False):
    """The primary's decisions, in its order: number `first` and those after it (D7)."""

    shard: ShardId
    view: View
    incarnation: Unsigned
    first: Fseq
    decisions: list[Decision]
    #: Up to here (inclusive), every replica holds the stream; up to `durable`, on stable storage.
    stable: Fseq
    durable: Fseq


class Report(Message, tag=VERSION * 256 + 31, frozen=True, gc=False):
    """A backup holds the stream up to `held` (inclusive), and up to `durable` on stable storage."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    held: Fseq
    durable: Fseq
    #: Guesses failed lately, or readers wait here: tell me your decisions at once.
    hurry: bool = True


class Resend(Message, tag=VERSION * 256 + 32, frozen=True, gc=False):
    """A backup misses the stream from `first` on, or the bodies of some of it (D7: NACK)."""

    shard: ShardId
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    first: Fseq
    #: Send bodies along with this many decisions; the rest need none.
    bodies: Annotated[int, Meta(ge=0, le=65536)]


# --- the membership service ------------------------------------------------------------------


class Heartbeat(Message, tag=VERSION * 256 + 40, frozen=True, gc=False):
    """A storage server's state, to the membership service. Cluster 0: it does not know it yet."""

    node: Name
    endpoint: Name
    shard: ShardId
    view: View
    incarnation: Unsigned
    pid: Unsigned
    state: NodeState
    #: Inserts came lately.
    active: bool
    #: Records a second.
    rate_per_s: Unsigned
    frontier: Gsn
    #: Like `frontier`, on stable storage at all replicas.
    durable: Gsn
    #: The last lease that the server holds, and its digest (D30).
    lease: Unsigned
    digest: Annotated[bytes, Meta(min_length=8, max_length=8)]
    trim: Gsn
    #: The last stable and the last durable record, inclusive; 0: none.
    stable_gsn: Gsn = 0
    durable_gsn: Gsn = 0
    #: The identity of its data directory: a secret between the two.
    identity: Name = ""


class LeaseAnnounced(Message, tag=VERSION * 256 + 41, frozen=True, gc=False):
    """Committed leases that follow those the server said it has, and the state around them."""

    #: In order. The last lease of the last run starts `starts_in_us` from now; what is left of
    #: any lease before it is over then.
    runs: list[LeaseRun]
    starts_in_us: Unsigned
    placements: list[Placement]
    trim: Gsn


class Hello(Message, tag=VERSION * 256 + 42, frozen=True, gc=False):
    """A client asks for the cluster as it is. Cluster 0: it does not know it yet."""

    request: Request


class Limits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the cluster allows."""

    max_payload_bytes: Unsigned = 1024 * 1024
    max_key_bytes: Unsigned = 4096
    #: Units that a client may have unsettled at a shard.
    max_unsettled_units: Unsigned = 1024


class ClusterInfo(Message, tag=VERSION * 256 + 43, frozen=True, gc=False):
    """The cluster as the membership service has it. Placements are those of every shard ever."""

    request: Request
    name: Name
    durability: Literal["memory", "disk"]
    #: Endpoints of the service's nodes, the leader's first.
    mms: list[Name]
    placements: list[Placement]
    #: The current lease; empty before there is one.
    leases: list[LeaseRun]
    trim: Gsn
    limits: Limits


class NotLeader(Message, tag=VERSION * 256 + 44, frozen=True, gc=False):
    """Ask the leader: its endpoint, or "" while there is none."""

    request: Request
    leader: Name


class LeaseQuery(Message, tag=VERSION * 256 + 45, frozen=True, gc=False):
    """Which leases hold `gsn` and what comes after it? Answered with a read barrier."""

    request: Request
    gsn: Gsn


class LeaseHistory(Message, tag=VERSION * 256 + 46, frozen=True, gc=False):
    """The runs from the one that holds the asked gsn on; none if nobody was ever given it.

    For a trimmed gsn the history starts at the first lease still kept. If there is more than fits,
    ask again from the last run's stop.
    """

    request: Request
    runs: list[LeaseRun]
    placements: list[Placement]
    trim: Gsn


class Trim(Message, tag=VERSION * 256 + 47, frozen=True, gc=False):
    """Delete everything before `gsn`, once it is stable (D45)."""

    request: Request
    gsn: Gsn


class TrimReply(Message, tag=VERSION * 256 + 48, frozen=True, gc=False):
    """The committed trim point: every reachable replica refuses what is before it.

    `error` says why nothing was trimmed; then `trim` is the old point.
    """

    request: Request
    trim: Gsn
    error: Literal["", "no-such-position", "not-stable"] = ""


class StatusQuery(Message, tag=VERSION * 256 + 49, frozen=True, gc=False):
    """How is the cluster?"""

    request: Request


class StatusReply(Message, tag=VERSION * 256 + 50, frozen=True, gc=False):
    """The status document, as JSON."""

    request: Request
    document: Annotated[bytes, Meta(max_length=MAX_FRAME)]


AnyMessage = (
    Insert | InsertAck | Refused
    | Read | ReadReply | Subscribe | Credit | Unsubscribe | Deliver | Trimmed
    | Want | Frontier | Tail | TailReply
    | Forward | Report | Resend
    | Heartbeat | LeaseAnnounced | Hello | ClusterInfo | NotLeader | LeaseQuery | LeaseHistory
    | Trim | TrimReply | StatusQuery | StatusReply
)  # fmt: skip

encode_body = msgspec.msgpack.Encoder().encode
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_body_decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)


def encode(message: Message) -> bytes:
    """Return the frame of a message.

    Raises:
        LocalProtocolError: it is longer than `MAX_FRAME`.

    """
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME:
        name = type(message).__name__
        raise LocalProtocolError(f"{name} has {len(frame)} bytes; a frame holds {MAX_FRAME}")
    return frame


def decode(frame: bytes) -> AnyMessage:
    """Return the message of a frame.

    Raises:
        ProtocolError: it is no message of this version, or one of its fields is out of range.

    """
    if len(frame) > MAX_FRAME:
        raise ProtocolError(f"frame of {len(frame)} bytes; at most {MAX_FRAME} are allowed")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"frame of {len(frame)} bytes is no message: {error}") from error


def decode_body(body: bytes, count: int) -> Body:
    """Return the contents of a unit of `count` records.

    Raises:
        ProtocolError: it is no body, or holds another number of payloads.

    """
    try:
        decoded = _body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"body of {len(body)} bytes is malformed: {error}") from error
    if len(decoded.payloads) != count:
        raise ProtocolError(f"body holds {len(decoded.payloads)} records instead of {count}")
    return decoded
