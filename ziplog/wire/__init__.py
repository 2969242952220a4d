"""The wire format: all messages, and their codec. A message is a MessagePack array with a tag.

The tag carries the version that introduced the message. `decode` checks types, lengths and ranges,
and raises `ProtocolError` if one is wrong; later code relies on these checks. Every message carries
its cluster. Messages of a shard carry its view; a receiver in another view refuses them
(docs/protocol.md, "Views"). New fields are only added at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from ziplog.core.fields import MAX_FRAME
from ziplog.errors import LocalProtocolError, ProtocolError
from ziplog.wire.base import MAX_STEPS, VERSION, Name, Request, Text
from ziplog.wire.cursors import (
    CursorClaim,
    CursorEdit,
    CursorList,
    CursorMoves,
    CursorQuery,
    CursorRelease,
    CursorRenewal,
    CursorReply,
    CursorsMoved,
    CursorsRenewed,
)
from ziplog.wire.handler import (
    Freeze,
    Frozen,
    HandlerHeartbeat,
    LogDigest,
    Obstacle,
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
    Leaving,
    Locate,
    Located,
    RefusalCode,
    Refused,
    RelayedInsert,
    Settled,
    Sync,
    Synced,
)
from ziplog.wire.metrics import Durations, Metrics, MetricsQuery, Value
from ziplog.wire.node_info import NodeInfo, NodeInfoQuery
from ziplog.wire.reads import (
    Answer,
    Credit,
    Deliver,
    Early,
    Frontier,
    Outline,
    Outlined,
    Read,
    ReadReply,
    Step,
    StreamKind,
    Subscribe,
    Tail,
    TailReply,
    Trimmed,
    Unsubscribe,
    Want,
)
from ziplog.wire.replicas import Ahead, Beat, Fetch, Fetched, Forward, Logged, Report, Resend
from ziplog.wire.service import (
    ChangeRegion,
    ChangeShard,
    ClusterInfo,
    Echo,
    FinishUpgrade,
    Heartbeat,
    Hello,
    LeaseAnnounced,
    LeaseHistory,
    LeaseQuery,
    Limits,
    NotLeader,
    Rate,
    RegionChanged,
    ShardChanged,
    StatusQuery,
    StatusReply,
    Trim,
    TrimReply,
    UpgradeFinished,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.message import Message

__all__ = [
    "MAX_STEPS",
    "VERSION",
    "Ahead",
    "Answer",
    "AnyMessage",
    "Beat",
    "ChangeRegion",
    "ChangeShard",
    "ClusterInfo",
    "Credit",
    "CursorClaim",
    "CursorEdit",
    "CursorList",
    "CursorMoves",
    "CursorQuery",
    "CursorRelease",
    "CursorRenewal",
    "CursorReply",
    "CursorsMoved",
    "CursorsRenewed",
    "Deliver",
    "Durations",
    "Early",
    "Echo",
    "Fetch",
    "Fetched",
    "FinishUpgrade",
    "Forward",
    "Freeze",
    "Frontier",
    "Frozen",
    "HandlerHeartbeat",
    "Heartbeat",
    "Hello",
    "Insert",
    "InsertAck",
    "LeaseAnnounced",
    "LeaseHistory",
    "LeaseQuery",
    "Leaving",
    "Limits",
    "Locate",
    "Located",
    "LogDigest",
    "Logged",
    "Metrics",
    "MetricsQuery",
    "Name",
    "NodeInfo",
    "NodeInfoQuery",
    "NotLeader",
    "Obstacle",
    "Order",
    "Orders",
    "OrdersQuery",
    "Outline",
    "Outlined",
    "Rate",
    "Read",
    "ReadReply",
    "RefusalCode",
    "Refused",
    "RegionChanged",
    "Reinsert",
    "Reinserted",
    "RelayedInsert",
    "Remove",
    "Removed",
    "Report",
    "Request",
    "Resend",
    "Settled",
    "ShardChanged",
    "StatusQuery",
    "StatusReply",
    "Step",
    "StreamKind",
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
    "Unsubscribe",
    "UpgradeFinished",
    "Value",
    "ViewDecided",
    "Want",
    "decode",
    "encode",
]

AnyMessage = (
    Insert | InsertAck | RelayedInsert | Refused | Leaving | Settled
    | Locate | Located | Sync | Synced
    | Read | ReadReply | Subscribe | Credit | Unsubscribe | Deliver | Early | Trimmed
    | Want | Frontier | Tail | TailReply | Outline | Outlined
    | Forward | Report | Resend | Ahead | Beat | Fetch | Fetched
    | Suspect | Freeze | Frozen | ViewDecided | Remove | Removed | Reinsert | Reinserted
    | OrdersQuery | Orders | HandlerHeartbeat
    | Heartbeat | Echo | Rate | LeaseAnnounced | Hello | ClusterInfo | NotLeader
    | LeaseQuery | LeaseHistory | Trim | TrimReply | ChangeShard | ShardChanged
    | ChangeRegion | RegionChanged | StatusQuery | StatusReply | FinishUpgrade | UpgradeFinished
    | CursorClaim | CursorRelease | CursorEdit | CursorReply | CursorMoves | CursorsMoved
    | CursorRenewal | CursorsRenewed | CursorQuery | CursorList
    | NodeInfoQuery | NodeInfo | MetricsQuery | Metrics
)  # fmt: skip

_M = TypeVar("_M")

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Return the frame of a message.

    Raises:
        LocalProtocolError: a field has a value that no frame can carry, or the frame would be
            longer than `MAX_FRAME`.

    """
    try:
        frame = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        name = type(message).__name__
        raise LocalProtocolError(f"{name} cannot be encoded: {error}") from error
    if len(frame) > MAX_FRAME:
        name = type(message).__name__
        raise LocalProtocolError(
            f"{name} has {len(frame)} bytes; a frame has at most {MAX_FRAME} bytes"
        )
    return frame


def decoder_of(decoder: msgspec.msgpack.Decoder[_M]) -> Callable[[bytes], _M]:
    """Return a function that decodes a frame into one of the decoder's messages.

    The function raises `ProtocolError` if the frame is not one of these messages in this version,
    or if a field is out of range.
    """
    decode_sound = decoder.decode

    def decode_any(frame: bytes) -> _M:
        if len(frame) > MAX_FRAME:
            raise ProtocolError(f"frame of {len(frame)} bytes; at most {MAX_FRAME} are allowed")
        try:
            return decode_sound(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"frame of {len(frame)} bytes is not a valid message: {error}"
            ) from error

    return decode_any


#: Decodes a frame into any message of the log; see `decoder_of`.
decode: Final = decoder_of(_decoder)
