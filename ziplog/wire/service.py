"""The membership service (docs/protocol.md, sections 3, 7 and 8)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ziplog.types import Durability, Gsn, ShardId, View
from ziplog.view import LeaseRun, NodeState, Placement
from ziplog.wire.base import MAX_FRAME, VERSION, Message, Name, Request, Unsigned


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
    #: Servers forget a client that is silent for so long.
    session_timeout_s: Unsigned = 900


class ClusterInfo(Message, tag=VERSION * 256 + 43, frozen=True, gc=False):
    """The cluster as the membership service has it. Placements are those of every shard ever."""

    request: Request
    name: Name
    durability: Durability
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
