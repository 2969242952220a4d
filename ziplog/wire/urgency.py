"""Priority of frames: a process with a queue handles urgent messages first.

Urgent messages are those that keep shards running, between servers and services, and the answers
to a process's own requests: their number does not depend on the number of clients. Client requests
are not urgent. Neither is `Forward`: if it overtook the inserts that it names, the backup would
request bodies that are in its queue. The protocols do not rely on the order of messages, so the
priority affects latency only.
"""

from __future__ import annotations

from typing import Final

from ziplog.wire.cursors import CursorList, CursorReply, CursorsMoved, CursorsRenewed
from ziplog.wire.handler import (
    Freeze,
    Frozen,
    HandlerHeartbeat,
    Orders,
    OrdersQuery,
    Reinsert,
    Reinserted,
    Remove,
    Removed,
    Suspect,
    ViewDecided,
)
from ziplog.wire.inserts import InsertAck, Leaving, Located, Refused, Synced
from ziplog.wire.reads import Deliver, Early, Frontier, Outlined, ReadReply, TailReply, Trimmed
from ziplog.wire.replicas import Ahead, Beat, Fetch, Fetched, Report, Resend
from ziplog.wire.service import (
    ClusterInfo,
    Echo,
    Heartbeat,
    LeaseAnnounced,
    LeaseHistory,
    NotLeader,
    Rate,
    RegionChanged,
    ShardChanged,
    StatusReply,
    TrimReply,
    UpgradeFinished,
)

URGENT: Final = (
    Beat, Report, Resend, Ahead, Fetch, Fetched,
    Suspect, Freeze, Frozen, ViewDecided, Remove, Removed, Reinsert, Reinserted,
    OrdersQuery, Orders, HandlerHeartbeat,
    Heartbeat, Echo, Rate, LeaseAnnounced, LeaseHistory,
    InsertAck, Refused, Leaving, Located, Synced, ReadReply, Deliver, Early, Trimmed,
    Frontier, TailReply, Outlined, ClusterInfo, NotLeader, TrimReply, ShardChanged, StatusReply,
    RegionChanged, UpgradeFinished, CursorReply, CursorsMoved, CursorsRenewed, CursorList,
)  # fmt: skip
#: First byte of a MessagePack array of more than 15 items; two bytes of length follow.
_LONG_ARRAY: Final = b"\xdc"


def _tag(kind: type) -> bytes:
    """Return the encoded tag of a message class: a MessagePack 16-bit integer."""
    tag = kind.__struct_config__.tag  # type: ignore[attr-defined]
    assert isinstance(tag, int)
    return b"\xcd" + tag.to_bytes(2, "big")


_TAGS: Final = frozenset(map(_tag, URGENT))


def is_urgent(frame: bytes) -> bool:
    """Whether a frame is handled first. An invalid frame may pass; `decode` rejects it later."""
    start = 3 if frame[:1] == _LONG_ARRAY else 1
    return frame[start : start + 3] in _TAGS
