"""Messages of the failure handler with servers, membership service and supervisors (section 11)."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ziplog.core.fields import Region, Unsigned
from ziplog.core.message import Message
from ziplog.core.view import LeaseRun, ServerState
from ziplog.types import Fseq, Gsn, ShardId, View
from ziplog.wire.base import VERSION, Name, Request, Text, Wire

#: Blake2b digest of the end of a log, see `shard.recovery.participant.digest_of`.
LogDigest = Annotated[bytes, Meta(min_length=16, max_length=16)]


#: Maximum number of shards in one report of obstacles.
MAX_OBSTACLES: Final = 16


class Suspect(Message, tag=VERSION * 256 + 60, frozen=True, gc=False):
    """A server's state, sent to all failure handlers while it is not `up` or suspects a replica."""

    node: Name
    shard: ShardId
    #: The server's view; 0 if it has none.
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    state: ServerState
    #: The indexes of the replicas that it suspects.
    suspects: Annotated[list[int], Meta(max_length=16)]
    #: The last entry of its log, stored or not, and the view of that entry; 0 and 0: none. If the
    #: log is damaged: the last entry up to which it could be the survivor.
    last: Fseq
    last_view: View
    #: The highest recovery that it froze for or takes part in; 0: none.
    recovery: View
    #: The identity of its data directory: a secret of the server and the failure handler.
    identity: Name
    #: It has entries that it cannot read and no peer could send: in limbo after `last`; after it
    #: joined, entries that a joining replica may need.
    is_damaged: bool = False
    #: The region in which it runs.
    region: Region = ""


class Freeze(Message, tag=VERSION * 256 + 61, frozen=True, gc=False):
    """Asks a server to store nothing more in `view`, and to decide all positions below `limit`."""

    shard: ShardId
    view: View
    recovery: View
    limit: Gsn
    #: The last leases before `limit`, for servers that did not receive them.
    runs: list[LeaseRun]
    #: Incarnation of the intended receiver: a later process knows less. 0: any.
    incarnation: Unsigned = 0


class Frozen(Message, tag=VERSION * 256 + 62, frozen=True, gc=False):
    """Promises to store nothing more, and reports the sender's state, which is on its disk."""

    shard: ShardId
    view: View
    recovery: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    #: The last entry that it knew to be stable (inclusive).
    stable: Fseq
    #: The end of its decided entries before the roll-forward, as a gsn. Records at or after it may
    #: be lost if all servers lost some state.
    decided_end: Gsn
    #: The last entry, after the roll-forward.
    last: Fseq
    #: Number of records that it rolled forward without the primary's decision.
    rolled_forward: Unsigned
    digest: LogDigest
    #: Its disk has all that it ever acked, so nothing is lost if all servers lost their memory.
    has_all: bool = False


class ViewDecided(Message, tag=VERSION * 256 + 63, frozen=True, gc=False):
    """`view` starts with the log of `survivor`; all other replicas copy it from there."""

    shard: ShardId
    view: View
    survivor: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    last: Fseq
    digest: LogDigest
    #: Enough replicas have joined that no recovery will go back to an earlier view, so the
    #: survivor's log is stable.
    is_confirmed: bool = True


class Remove(Message, tag=VERSION * 256 + 64, frozen=True, gc=False):
    """Asks the membership service to leave the shard out of new leases during a recovery."""

    request: Request
    shard: ShardId
    #: The shard's former view, and the number of the recovery.
    view: View
    recovery: View


class Removed(Message, tag=VERSION * 256 + 65, frozen=True, gc=False):
    """The removal is committed: the shard has positions below `limit` only."""

    request: Request
    shard: ShardId
    recovery: View
    limit: Gsn
    runs: list[LeaseRun]


class Reinsert(Message, tag=VERSION * 256 + 66, frozen=True, gc=False):
    """Asks the membership service to start `view`, which all replicas of the shard hold."""

    request: Request
    shard: ShardId
    view: View
    #: The fingerprint of each replica's data directory.
    fingerprints: Annotated[list[Name], Meta(max_length=16)]
    #: Records in [lost_from, limit) may be lost; 0: none.
    lost_from: Gsn
    #: The region of each replica; empty: the handler does not know them.
    regions: Annotated[list[Region], Meta(max_length=16)] = []  # noqa: RUF012 - msgspec copies it


class Reinserted(Message, tag=VERSION * 256 + 67, frozen=True, gc=False):
    """The start of `view` is committed: the shard is live in it."""

    request: Request
    shard: ShardId
    view: View


class OrdersQuery(Message, tag=VERSION * 256 + 68, frozen=True, gc=False):
    """A host's supervisor requests the nodes that the failure handler waits for."""

    request: Request


class Order(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Start this unreachable node; if its process runs, kill it first."""

    node: Name
    #: The recovery that waits for it.
    recovery: View


class Orders(Message, tag=VERSION * 256 + 69, frozen=True, gc=False):
    """The nodes that the failure handler waits for."""

    request: Request
    orders: list[Order]


class Obstacle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the recovery of a shard waits for, and what an operator can do."""

    shard: ShardId
    text: Text


class HandlerHeartbeat(Message, tag=VERSION * 256 + 70, frozen=True, gc=False):
    """A failure handler's state, for the membership service."""

    node: Name
    pid: Unsigned
    leader: bool
    #: The version of Ziplog that it runs; "": unknown.
    version: Name = ""
    #: The first and the last wire version that it knows, and the one that it uses.
    first_wire: Wire = 1
    last_wire: Wire = 1
    wire: Wire = 1
    #: The shards that cannot be recovered now, some of them if there are many.
    obstacles: Annotated[list[Obstacle], Meta(max_length=MAX_OBSTACLES)] = []  # noqa: RUF012 - msgspec copies it
    #: Free space of its disk; None: unknown.
    free_bytes: Unsigned | None = None
