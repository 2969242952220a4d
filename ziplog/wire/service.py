"""Messages of the membership service (docs/protocol.md, sections 3, 7 and 8)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ziplog.core.fields import MAX_FRAME, Region, Unsigned
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
from ziplog.wire.base import VERSION, Name, Request, Text, Wire


class Heartbeat(Message, tag=VERSION * 256 + 40, frozen=True, gc=False):
    """A storage server's state, for the membership service. Cluster 0: it has no cluster id yet."""

    node: Name
    endpoint: Name
    shard: ShardId
    view: View
    incarnation: Unsigned
    pid: Unsigned
    state: NodeState
    #: Inserts arrived recently.
    active: bool
    #: Inserted records per second.
    rate_per_s: Unsigned
    frontier: Gsn
    #: Like `frontier`, for what is on stable storage at all replicas.
    durable: Gsn
    #: The last lease that the server holds, and its digest (D30).
    lease: Unsigned
    digest: Annotated[bytes, Meta(min_length=8, max_length=8)]
    trim: Gsn
    #: The last stable and the last durable record, inclusive; 0: none.
    stable_gsn: Gsn = 0
    durable_gsn: Gsn = 0
    #: The identity of its data directory: a secret of the server and the service.
    identity: Name = ""
    #: Its shard's state in the last placement that it received; "": it received none.
    shard_state: ShardState | Literal[""] = ""
    #: It has readers, so positions are decided at the end of every epoch.
    has_readers: bool = False
    #: Number of positions given up since the process started because readers waited for them.
    holes: Unsigned = 0
    #: All positions that its shard will ever own are durable here, and this server knows it.
    is_sealed: bool = False
    #: It received leases that do not follow the ones it holds.
    has_gap: bool = False
    #: All positions of its shard below this are stable here. A server without a lease needs the
    #: leases from here on, at most the newest `KEPT_RUNS`. 0: it needs all leases.
    needs_from: Gsn = 0
    #: The last lease came as a publication from this endpoint; "": it came by another way.
    publisher: Name = ""
    #: Why its disk is full, so that it refuses new records; "": there is room.
    full: Text = ""
    #: The version of Ziplog that it runs; "": unknown.
    version: Name = ""
    #: The free space of its disk, and the space below which it is full; 0: unknown.
    free_bytes: Unsigned = 0
    reserve_bytes: Unsigned = 0
    #: The first and the last wire version that it knows, and the one that it uses.
    first_wire: Wire = 1
    last_wire: Wire = 1
    wire: Wire = 1
    #: The durability level that it keeps to; "": it changes to another one, or does not report it.
    level: Durability | Literal[""] = ""
    #: The region in which it runs.
    region: Region = ""
    #: When it was sent, by the server's own clock, in µs; 0: it requests no `Echo`.
    sent_us: Unsigned = 0
    #: It stops as soon as its shard is left out of the leases.
    is_stopping: bool = False


class Echo(Message, tag=VERSION * 256 + 80, frozen=True, gc=False):
    """Answers a heartbeat at once, so that its server can measure the round trip."""

    #: That of the heartbeat.
    sent_us: Unsigned


class Rate(Message, tag=VERSION * 256 + 51, frozen=True, gc=False):
    """A primary's insert rate changed. A leaving shard reports 0 once no unit waits there."""

    shard: ShardId
    view: View
    #: Inserted records per second.
    per_s: Unsigned


class LeaseAnnounced(Message, tag=VERSION * 256 + 41, frozen=True, gc=False):
    """Committed leases that follow those of a server, with placements and the trim point."""

    #: In order. The last lease of the last run starts in `starts_in_us`; all leases before it have
    #: ended by then.
    runs: list[LeaseRun]
    starts_in_us: Unsigned
    placements: list[Placement]
    trim: Gsn
    #: Instead of `runs`, if leases have many members: the leases after lease `after`, each as the
    #: difference from the one before; and the digest of the last one.
    after: Unsigned = 0
    steps: list[LeaseStep] = []  # noqa: RUF012 - msgspec copies it
    digest: Annotated[bytes, Meta(min_length=8, max_length=8)] = NO_DIGEST
    #: Leases before the first run are omitted, because the receiver needs none of them: it
    #: continues with that run, whichever leases it holds.
    is_cut: bool = False
    #: The receiver's shard has left, and owns no position from here on; 0: it has not left, or
    #: this message does not contain its placement.
    limit: Gsn = 0
    #: The endpoint at which the sender publishes further leases; "": it does not publish them.
    publisher: Name = ""
    #: This message was published there.
    is_publication: bool = False


class Hello(Message, tag=VERSION * 256 + 42, frozen=True, gc=False):
    """A client requests the cluster's current state. Cluster 0: it has no cluster id yet."""

    request: Request


class Limits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The cluster's limits."""

    max_payload_bytes: Unsigned = 1024 * 1024
    max_key_bytes: Unsigned = 4096
    #: Maximum number of in-flight units of a client at a shard.
    max_unsettled_units: Unsigned = 1024
    #: Session timeout: servers remove the session of a client after this time of silence.
    session_timeout_s: Unsigned = 900
    #: Longest round trip between two machines of the cluster and its clients.
    rtt_ms: Unsigned = 0
    #: Least number of regions of an insert that requests no number.
    min_regions: Unsigned = 1


class ClusterInfo(Message, tag=VERSION * 256 + 43, frozen=True, gc=False):
    """The cluster's committed state. Placements include every shard that ever existed."""

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
    #: For each placement's shard: the known frontier, below which its positions are stable; 0:
    #: unknown.
    frontiers: list[Unsigned] = []  # noqa: RUF012 - msgspec copies it
    #: The wire version that the cluster uses.
    wire: Wire = 1
    #: The region of each endpoint of `mms`; empty from earlier releases.
    regions: list[Name] = []  # noqa: RUF012 - msgspec copies it
    #: The regions that an operator gave up, sorted.
    lost_regions: list[Region] = []  # noqa: RUF012 - msgspec copies it


class NotLeader(Message, tag=VERSION * 256 + 44, frozen=True, gc=False):
    """Redirects a request to the leader's endpoint; "" while there is no leader."""

    request: Request
    leader: Name


class LeaseQuery(Message, tag=VERSION * 256 + 45, frozen=True, gc=False):
    """Requests the lease that holds `gsn` and those after it. Answered after a read barrier."""

    request: Request
    gsn: Gsn


class Finalized(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finalized shard that is not over, and the end of its positions."""

    shard: ShardId
    limit: Gsn


class LeaseHistory(Message, tag=VERSION * 256 + 46, frozen=True, gc=False):
    """The lease runs from the one that holds the requested gsn on; none if no lease holds it.

    For a trimmed gsn, the history starts at the first lease that is kept. If it does not fit one
    message, the client requests the rest from the last run's stop.
    """

    request: Request
    runs: list[LeaseRun]
    placements: list[Placement]
    trim: Gsn
    #: The shards that are over: finalized, and all their positions are trimmed. Their servers
    #: may be gone.
    over: list[ShardId] = []  # noqa: RUF012 - msgspec copies it
    #: The finalized shards that are not over.
    finalized: list[Finalized] = []  # noqa: RUF012 - msgspec copies it


class Trim(Message, tag=VERSION * 256 + 47, frozen=True, gc=False):
    """Requests the deletion of everything before `gsn`, once it is stable (D45)."""

    request: Request
    gsn: Gsn
    #: Also of what cursors hold.
    force: bool = False


class TrimReply(Message, tag=VERSION * 256 + 48, frozen=True, gc=False):
    """How far a trim is.

    No error: it is done, and every reachable replica refuses reads before it. `not-stable`: it is
    not done yet, and the client repeats the request, unless a cursor holds records.
    `no-such-position`: it is refused.
    """

    request: Request
    #: The committed trim point. If it is at or above the requested position, the trim happens.
    trim: Gsn
    error: Literal["", "no-such-position", "not-stable"] = ""
    #: What a trim that is not done waits for.
    obstacle: Text = ""
    #: The cursor that holds records before the position, its position, and its owner; "": none
    #: does. The trim is refused then.
    held_by: Name = ""
    held_at: Gsn = 0
    held_owner: Name = ""


class StatusQuery(Message, tag=VERSION * 256 + 49, frozen=True, gc=False):
    """Requests the status document, or a part of the cluster's history instead."""

    request: Request
    #: events: those recorded after number `start`. epochs: `start` to `stop`, exclusive.
    part: Literal["", "events", "epochs"] = ""
    start: Unsigned = 0
    stop: Unsigned = 0


class StatusReply(Message, tag=VERSION * 256 + 50, frozen=True, gc=False):
    """The status document, or the requested part of the history, as JSON."""

    request: Request
    document: Annotated[bytes, Meta(max_length=MAX_FRAME)]


class ChangeShard(Message, tag=VERSION * 256 + 52, frozen=True, gc=False):
    """Requests to add, remove or finalize a shard; answered when that is done.

    The client repeats it until it is answered; it is idempotent (docs/protocol.md, section 13).
    """

    request: Request
    shard: ShardId
    change: Literal["add", "remove", "finalize"]
    #: For `add`: its servers, the primary first.
    replicas: Annotated[list[Replica], Meta(max_length=16)] = []  # noqa: RUF012 - msgspec copies it


class ShardChanged(Message, tag=VERSION * 256 + 53, frozen=True, gc=False):
    """The change is done, or `error` gives the reason why it is not possible."""

    request: Request
    shard: ShardId
    #: exists: the shard exists with other servers, or a server belongs to another shard, or has the
    #: name or endpoint of a service's node. last-shard: no shard would accept records.
    #: wrong-size: not f+1 servers, or too few regions. retired: the shard has left, which is final.
    #: too-many: the placements of all shards would not fit one message.
    error: Literal[
        "", "no-such-shard", "exists", "last-shard", "wrong-size", "retired", "too-many"
    ] = ""
    #: More about the error; "": nothing.
    detail: Text = ""


class FinishUpgrade(Message, tag=VERSION * 256 + 54, frozen=True, gc=False):
    """Requests that the cluster use wire version `wire`; answered when it does."""

    request: Request
    wire: Wire


class UpgradeFinished(Message, tag=VERSION * 256 + 55, frozen=True, gc=False):
    """The cluster uses the requested wire version, or a later one; or it cannot yet."""

    request: Request
    #: The version that the cluster uses.
    wire: Wire
    #: The nodes that do not know the requested version, or are down; "": all know it.
    obstacle: Text = ""


class ChangeRegion(Message, tag=VERSION * 256 + 82, frozen=True, gc=False):
    """Requests to give up a region, or to end that; answered when it is done or refused.

    The client repeats it until it is answered; it is idempotent (docs/protocol.md, section 20).
    """

    request: Request
    region: Region
    #: The region is given up; else it counts again.
    is_lost: bool


class RegionChanged(Message, tag=VERSION * 256 + 83, frozen=True, gc=False):
    """The change of a region is committed, or `obstacle` gives the reason why it is refused."""

    request: Request
    region: Region
    #: Why the region cannot be given up, and what to do; "": the change is done.
    obstacle: Text = ""
