"""Every message, and the one codec. MessagePack arrays, led by a tag that carries the version.

`decode` checks types, lengths and ranges and raises `ProtocolError` on anything else; the code
behind it assumes. Every message names its cluster; those of a shard name its view, and a receiver
of another view refuses them (docs/protocol.md, "Views"). Fields are only ever added at the end.
"""

from __future__ import annotations

import msgspec

from ziplog.errors import LocalProtocolError, ProtocolError
from ziplog.wire.base import (
    MAX_FRAME,
    MAX_UNIT_RECORDS,
    VERSION,
    Body,
    Checksum,
    Cluster,
    Count,
    Gsns,
    Message,
    Name,
    Request,
    Text,
    Unsigned,
)
from ziplog.wire.handler import (
    Freeze,
    Frozen,
    HandlerHeartbeat,
    LogDigest,
    Order,
    Orders,
    OrdersQuery,
    Reinsert,
    Reinserted,
    Remove,
    Removed,
    Suspect,
    ViewDecided,
)
from ziplog.wire.inserts import (
    Insert,
    InsertAck,
    Locate,
    Located,
    RefusalCode,
    Refused,
    Sync,
    Synced,
)
from ziplog.wire.reads import (
    Answer,
    Credit,
    Deliver,
    Frontier,
    Read,
    ReadReply,
    Subscribe,
    Tail,
    TailReply,
    Trimmed,
    Unit,
    Unsubscribe,
    Want,
)
from ziplog.wire.replicas import (
    Beat,
    Decision,
    Expire,
    Fetch,
    Fetched,
    Forward,
    Logged,
    Place,
    Report,
    Resend,
    SessionTable,
    SettledUnit,
    Skip,
)
from ziplog.wire.service import (
    ClusterInfo,
    Heartbeat,
    Hello,
    LeaseAnnounced,
    LeaseHistory,
    LeaseQuery,
    Limits,
    NotLeader,
    StatusQuery,
    StatusReply,
    Trim,
    TrimReply,
)

__all__ = [
    "MAX_FRAME",
    "MAX_UNIT_RECORDS",
    "VERSION",
    "Answer",
    "AnyMessage",
    "Beat",
    "Body",
    "Checksum",
    "Cluster",
    "ClusterInfo",
    "Count",
    "Credit",
    "Decision",
    "Deliver",
    "Expire",
    "Fetch",
    "Fetched",
    "Forward",
    "Freeze",
    "Frontier",
    "Frozen",
    "Gsns",
    "HandlerHeartbeat",
    "Heartbeat",
    "Hello",
    "Insert",
    "InsertAck",
    "LeaseAnnounced",
    "LeaseHistory",
    "LeaseQuery",
    "Limits",
    "Locate",
    "Located",
    "LogDigest",
    "Logged",
    "Message",
    "Name",
    "NotLeader",
    "Order",
    "Orders",
    "OrdersQuery",
    "Place",
    "Read",
    "ReadReply",
    "RefusalCode",
    "Refused",
    "Reinsert",
    "Reinserted",
    "Remove",
    "Removed",
    "Report",
    "Request",
    "Resend",
    "SessionTable",
    "SettledUnit",
    "Skip",
    "StatusQuery",
    "StatusReply",
    "Subscribe",
    "Suspect",
    "Sync",
    "Synced",
    "Tail",
    "TailReply",
    "Text",
    "Trim",
    "TrimReply",
    "Trimmed",
    "Unit",
    "Unsigned",
    "Unsubscribe",
    "ViewDecided",
    "Want",
    "decode",
    "decode_body",
    "encode",
    "encode_body",
]

AnyMessage = (
    Insert | InsertAck | Refused | Locate | Located | Sync | Synced
    | Read | ReadReply | Subscribe | Credit | Unsubscribe | Deliver | Trimmed
    | Want | Frontier | Tail | TailReply
    | Forward | Report | Resend | Beat | Fetch | Fetched
    | Suspect | Freeze | Frozen | ViewDecided | Remove | Removed | Reinsert | Reinserted
    | OrdersQuery | Orders | HandlerHeartbeat
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
