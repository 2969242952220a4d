"""The failure handler, with servers, the membership service and supervisors (section 11)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ziplog.core.fields import Unsigned
from ziplog.core.message import Message
from ziplog.core.view import LeaseRun, ServerState
from ziplog.types import Fseq, Gsn, ShardId, View
from ziplog.wire.base import VERSION, Name, Request

#: Blake2b over the end of a log, see `shard.recovery.participant.digest_of`.
LogDigest = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Suspect(Message, tag=VERSION * 256 + 60, frozen=True, gc=False):
    """What a server is, while it suspects somebody or is not up; to all nodes of the handler."""

    node: Name
    shard: ShardId
    #: The view that it is in; 0 if it knows none.
    view: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    state: ServerState
    #: The replicas that it suspects, by index.
    suspects: Annotated[list[int], Meta(max_length=16)]
    #: The last entry of its log, stored or not, and the view of that entry; 0 and 0: none. If it is
    #: damaged: the last entry that it could lead with.
    last: Fseq
    last_view: View
    #: The highest recovery that it froze for or follows; 0: none.
    recovery: View
    #: The identity of its data directory: a secret between the two.
    identity: Name
    #: It is in limbo, and behind `last` there is more, which it cannot read and nobody could give.
    is_damaged: bool = False


class Freeze(Message, tag=VERSION * 256 + 61, frozen=True, gc=False):
    """Promise `recovery` to store nothing more in `view`, and settle all below `limit`."""

    shard: ShardId
    view: View
    recovery: View
    limit: Gsn
    #: The last leases before `limit`, for servers that were not told of them.
    runs: list[LeaseRun]
    #: Of the process that is asked: another one knows less. 0: any.
    incarnation: Unsigned = 0


class Frozen(Message, tag=VERSION * 256 + 62, frozen=True, gc=False):
    """The promise, and the state behind it, which is on the sender's disk."""

    shard: ShardId
    view: View
    recovery: View
    server: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    #: It knew the log to be stable up to here (inclusive).
    stable: Fseq
    #: The end of its decided entries before the roll-forward, in gsns: what lies behind may be lost
    #: if all servers forgot something.
    decided_end: Gsn
    #: The last entry, after the roll-forward.
    last: Fseq
    #: Records that it rolled forward without the primary's word.
    rolled_forward: Unsigned
    digest: LogDigest


class ViewDecided(Message, tag=VERSION * 256 + 63, frozen=True, gc=False):
    """`view` begins with what `survivor` holds; everybody else takes it from there."""

    shard: ShardId
    view: View
    survivor: Annotated[int, Meta(ge=0, lt=16)]
    incarnation: Unsigned
    last: Fseq
    digest: LogDigest
    #: So many replicas have joined that nobody will go back behind this view: what the survivor
    #: holds is stable.
    is_confirmed: bool = True


class Remove(Message, tag=VERSION * 256 + 64, frozen=True, gc=False):
    """To the membership service: give the shard no more leases, it is being recovered."""

    request: Request
    shard: ShardId
    #: The view that it was in, and the number of the recovery.
    view: View
    recovery: View


class Removed(Message, tag=VERSION * 256 + 65, frozen=True, gc=False):
    """The shard has positions below `limit` only; committed."""

    request: Request
    shard: ShardId
    recovery: View
    limit: Gsn
    runs: list[LeaseRun]


class Reinsert(Message, tag=VERSION * 256 + 66, frozen=True, gc=False):
    """To the membership service: all replicas of the shard hold `view`; let it begin."""

    request: Request
    shard: ShardId
    view: View
    #: Of each replica's data directory.
    fingerprints: Annotated[list[Name], Meta(max_length=16)]
    #: Records in [lost_from, limit) may be lost; 0: none.
    lost_from: Gsn


class Reinserted(Message, tag=VERSION * 256 + 67, frozen=True, gc=False):
    """The shard is live in `view`; committed."""

    request: Request
    shard: ShardId
    view: View


class OrdersQuery(Message, tag=VERSION * 256 + 68, frozen=True, gc=False):
    """A host's supervisor asks which nodes the handler waits for."""

    request: Request


class Order(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Start this node, or if it runs, kill it and start it again: it cannot be reached."""

    node: Name
    #: The recovery that waits for it.
    recovery: View


class Orders(Message, tag=VERSION * 256 + 69, frozen=True, gc=False):
    """The nodes that the handler waits for."""

    request: Request
    orders: list[Order]


class HandlerHeartbeat(Message, tag=VERSION * 256 + 70, frozen=True, gc=False):
    """A failure handler's state, to the membership service."""

    node: Name
    pid: Unsigned
    leader: bool
