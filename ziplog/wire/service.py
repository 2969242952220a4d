"""The membership service (docs/protocol.md, sections 3, 7 and 8)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ziplog.core.fields import MAX_FRAME, Unsigned
from ziplog.core.message import Message
from ziplog.core.view import (
    NO_DIGEST,
    LeaseRun,
    LeaseStep,
    NodeState,
    Placement,
    Replica,
    ShardState,
)
from ziplog.types import Durability, Gsn, ShardId, View
from ziplog.wire.base import VERSION, Name, Request


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
    #: How its shard was placed when the server was told last; "": it was not.
    shard_state: ShardState | Literal[""] = ""
    #: Somebody reads along: positions are decided at the end of every epoch.
    is_watched: bool = False
    #: Positions that were given up because somebody waited behind them, since the process started.
    holes: Unsigned = 0
    #: All that its shard will ever own is on stable storage here, and this server knows it.
    is_sealed: bool = False
    #: It was told what follows a lease that it does not hold.
    has_gap: bool = False
    #: All that its shard owns below is stable here: if it holds no lease, it needs those from here
    #: on, and no more than the newest `KEPT_RUNS`. 0: it takes all of them only.
    needs_from: Gsn = 0


class Rate(Message, tag=VERSION * 256 + 51, frozen=True, gc=False):
    """A primary's rate of inserts has changed. A leaving shard says 0 once nothing waits there."""

    shard: ShardId
    view: View
    #: Records a second.
    per_s: Unsigned


class LeaseAnnounced(Message, tag=VERSION * 256 + 41, frozen=True, gc=False):
    """Committed leases that follow those the server said it has, and the state around them."""

    #: In order. The last lease of the last run starts `starts_in_us` from now; what is left of
    #: any lease before it is over then.
    runs: list[LeaseRun]
    starts_in_us: Unsigned
    placements: list[Placement]
    trim: Gsn
    #: Where leases have many members, instead of `runs`: what follows lease `after`, by what
    #: changes from one to the next; and the digest of the last of them.
    after: Unsigned = 0
    steps: list[LeaseStep] = []  # noqa: RUF012 - msgspec copies it
    digest: Annotated[bytes, Meta(min_length=8, max_length=8)] = NO_DIGEST
    #: Leases before the first run are left out, because the receiver needs none of them: it goes
    #: on with that run, whatever it holds before it.
    is_cut: bool = False
    #: The receiver's shard has left, and owns nothing from here on; 0: it has not, or is not placed
    #: by this message.
    limit: Gsn = 0


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
    #: Of each placement's shard: all of its positions below are stable, as far as is known; 0:
    #: nothing is known.
    frontiers: list[Unsigned] = []  # noqa: RUF012 - msgspec copies it


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


class ChangeShard(Message, tag=VERSION * 256 + 52, frozen=True, gc=False):
    """Add a shard, take one out for good, or have one sealed; answered when that is done.

    Asked again until it is answered: twice is the same as once (docs/protocol.md, section 13).
    """

    request: Request
    shard: ShardId
    change: Literal["add", "remove", "finalize"]
    #: For `add`: where its servers listen, the primary first.
    replicas: Annotated[list[Replica], Meta(max_length=16)] = []  # noqa: RUF012 - msgspec copies it


class ShardChanged(Message, tag=VERSION * 256 + 53, frozen=True, gc=False):
    """The shard has become what was asked, or `error` says why it cannot."""

    request: Request
    shard: ShardId
    #: exists: with other servers, or one of them is of another shard, or has the name or endpoint
    #: of a service's node. last-shard: nobody would take records. wrong-size: not f+1 servers.
    #: retired: it has left, and never comes back.
    #: too-many: no message would hold where all shards are.
    error: Literal[
        "", "no-such-shard", "exists", "last-shard", "wrong-size", "retired", "too-many"
    ] = ""
