"""The snapshot of the replicated state, and what it says of shards that recover or have left."""

from __future__ import annotations

import msgspec

from mms.commands import ClusterEvent, RecordLoss, Refusal
from ziplog.core.cursors import Cursor
from ziplog.core.view import LeaseRun, Placement
from ziplog.types import Durability, Gsn, ShardId, View


class Recovering(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shard that was removed from the leases: its newest recovery, and its limit.

    The limit stays the same over all attempts, until the shard is live again.
    """

    shard: ShardId
    recovery: View
    limit: Gsn
    #: The shard was never a member: one of its servers crashed before.
    is_new: bool = False


class Retired(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shard that has left, or is leaving; it never returns."""

    shard: ShardId
    #: The end of its positions; 0 while the last lease still has it.
    limit: Gsn
    is_finalized: bool = False


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The whole state; new fields are added at the end."""

    cluster: int
    name: str
    placements: list[Placement]
    runs: list[LeaseRun]
    trim: int
    finalized: int
    recovering: list[Recovering] = []
    losses: list[RecordLoss] = []
    durability: Durability = "memory"
    retired: list[Retired] = []
    retirements: int = 0
    wire: int = 1
    events: list[ClusterEvent] = []
    last_event: int = 0
    durability_epoch: int = 0
    cursors: list[Cursor] = []
    terms: int = 0
    lost_regions: list[str] = []
    region_changes: int = 0
    #: The latest edits of cursors, and their outcomes.
    cursor_edits: list[tuple[tuple[str, str, bytes], Refusal]] = []
