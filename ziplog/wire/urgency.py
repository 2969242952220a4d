"""Which frames a process handles first when many wait.

Urgent is what servers and services send each other to keep shards together, and what answers a
process's own questions: how much of it there is does not depend on the number of clients. Not
urgent is what a client asks for, and `Forward`: at a backup it may not overtake the inserts that it
names, or the backup would ask for bodies that are in its queue. The protocols rely on no order
between messages, so this is a matter of time only.
"""

from __future__ import annotations

from typing import Final

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
from ziplog.wire.reads import Deliver, Frontier, Outlined, ReadReply, TailReply, Trimmed
from ziplog.wire.replicas import Ahead, Beat, Fetch, Fetched, Report, Resend
from ziplog.wire.service import (
    ClusterInfo,
    Heartbeat,
    LeaseAnnounced,
    LeaseHistory,
    NotLeader,
    Rate,
    ShardChanged,
    StatusReply,
    TrimReply,
)

URGENT: Final = (
    Beat, Report, Resend, Ahead, Fetch, Fetched,
    Suspect, Freeze, Frozen, ViewDecided, Remove, Removed, Reinsert, Reinserted,
    OrdersQuery, Orders, HandlerHeartbeat,
    Heartbeat, Rate, LeaseAnnounced, LeaseHistory,
    InsertAck, Refused, Leaving, Located, Synced, ReadReply, Deliver, Trimmed, Frontier,
    TailReply, Outlined, ClusterInfo, NotLeader, TrimReply, ShardChanged, StatusReply,
)  # fmt: skip
#: How MessagePack's array of more than 15 items begins; its length takes two bytes more.
_LONG_ARRAY: Final = b"\xdc"


def _tag(kind: type) -> bytes:
    """Return a kind's tag as it stands in a frame: MessagePack's integer of 16 bits."""
    tag = kind.__struct_config__.tag  # type: ignore[attr-defined]
    assert isinstance(tag, int)
    return b"\xcd" + tag.to_bytes(2, "big")


_TAGS: Final = frozenset(map(_tag, URGENT))


def is_urgent(frame: bytes) -> bool:
    """Whether a frame goes before others. It may be garbage: `decode` finds that out."""
    start = 3 if frame[:1] == _LONG_ARRAY else 1
    return frame[start : start + 3] in _TAGS
