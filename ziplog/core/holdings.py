"""Holdings: what the directory of a stopped node holds, for a rebuild of the membership service.

A storage server's process and a failure handler's process read their own directories
(`--holdings`), and write one of these structures to stdout. `mms/rebuild.py` makes the membership
service's state from them (docs/protocol.md, section 16).
"""

from __future__ import annotations

import msgspec

from ziplog.core.view import LeaseRun, Placement
from ziplog.types import Durability, Gsn, ShardId, View


class ServerHoldings(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a storage server's directory."""

    node: str
    #: The fingerprint of its identity.
    fingerprint: str
    #: The cluster's number; 0: unknown, because the server never had a lease.
    cluster: int
    #: The view that the server resumes in service after a clean stop; 0: it starts in limbo.
    view: View
    #: The highest view in its log or in its checkpoint, decided or not.
    last_view: View
    #: The position after the last decided one in its log.
    end: Gsn
    #: The position after the last record in its log; 0: it has no record.
    records_end: Gsn
    trim: Gsn
    #: The number of its last lease; 0: none.
    lease: int
    #: All leases that it recorded, in the order of their records.
    runs: list[LeaseRun]
    #: The last announced placement of its shard; None: none was recorded.
    placement: Placement | None
    #: The end of the shard's positions, if it has left; 0: not known to have left.
    limit: Gsn
    #: The wire version in use.
    wire: int = 1
    #: The durability level that the server keeps to.
    level: Durability = "memory"


class ShardRecovery(msgspec.Struct, frozen=True, array_like=True):
    """The last recovery of a shard, by the failure handler's log."""

    shard: ShardId
    #: The current view: the decided one.
    view: View
    #: A view before `view` to which the shard belonged.
    base: View
    #: An attempt to reach a later view is under way.
    is_under_way: bool
    #: The shard returned to the leases in `view`, and the failure handler knows it.
    is_finished: bool


class HandlerHoldings(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a failure handler's directory: all entries of its log, committed or not."""

    node: str
    #: Term and index of the last entry.
    term: int
    index: int
    recoveries: list[ShardRecovery]


class Holdings(msgspec.Struct, frozen=True, array_like=True):
    """What the directories hold from which a membership service is rebuilt."""

    servers: list[ServerHoldings]
    handlers: list[HandlerHoldings]
    #: The storage servers whose directories are lost for good.
    lost: list[str] = []


class RebuiltShard(msgspec.Struct, frozen=True, array_like=True):
    """A shard of a rebuilt state, in words."""

    shard: ShardId
    state: str
    view: View
    #: Its servers, each with the state of its directory.
    servers: list[str]


class RebuildPlan(msgspec.Struct, frozen=True, array_like=True):
    """A rebuilt state, and its summary."""

    #: The snapshot of the membership service's state.
    state: bytes
    cluster: str
    trim: Gsn
    #: The end of all known leases and entries, and the first position that a shard gets next.
    known_end: Gsn
    first_free: Gsn
    shards: list[RebuiltShard]
    #: What the operator has to do.
    notes: list[str]
