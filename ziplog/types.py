"""Identifiers and records: the types that every other module uses.

A position of the log is a *gsn* (global sequence number, 1, 2, 3, ... below 2**63). A record
has one gsn and one shard; the pair is its record identifier, `RecordId`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from ziplog.errors import RID_GENESIS, RID_RECENT, RecordId

__all__ = [
    "RID_GENESIS", "RID_RECENT", "ClientId", "Confirmed", "CursorInfo", "Delivery", "Durability",
    "Epoch", "Event", "Failed", "Fseq", "Gsn", "Record", "RecordId", "RegionInfo", "Seq", "ShardId",
    "View", "cluster_id",
]  # fmt: skip

#: A position of the log. 0 is before every record; records start at 1.
Gsn = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: An epoch's number, from 0.
Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: A shard's number, from 0. The number of a removed shard is never reused.
ShardId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
#: A shard's view: 1 at first; each recovery raises it.
View = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
#: Sequence number of an insert, counted per client and shard, from 1.
Seq = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: Number of an entry in the stream of a primary's decisions, from 1.
Fseq = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: When an insert is complete: all f+1 replicas hold it in memory, or on stable storage.
Durability = Literal["memory", "disk"]
#: 128 random bits, new for each client object.
ClientId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

#: Number of hexadecimal digits of a cluster's id.
CLUSTER_ID_DIGITS: Final = 32

_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def cluster_id(cluster: int) -> str:
    """Return the id of a cluster, 32 hexadecimal digits, for its number in messages; "" for 0."""
    return f"{cluster:0{CLUSTER_ID_DIGITS}x}" if cluster else ""


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record of the log, as readers receive it."""

    #: Its position.
    rid: RecordId
    #: What the client inserted; may be empty.
    payload: bytes
    #: The key that the client gave, if any.
    key: bytes | None
    #: Creation time by the client's clock, in microseconds since 1970-01-01 UTC.
    timestamp_us: int
    #: The epoch of its gsn.
    epoch: int

    @property
    def timestamp(self) -> datetime:
        """Creation time by the client's clock, as an aware datetime in UTC."""
        return _UNIX_EPOCH + timedelta(microseconds=self.timestamp_us)


class Delivery(NamedTuple):
    """A speculation delivers a record."""

    record: Record
    #: The record may still be withdrawn; False: it is final.
    speculative: bool


class Confirmed(NamedTuple):
    """Every delivery of a speculation at or before a position is final."""

    #: The last final record.
    upto: RecordId


class Failed(NamedTuple):
    """Every delivery of a speculation behind a position is void; what counts comes again."""

    #: The last position that is not affected. Its shard is 0 if its owner is unknown.
    after: RecordId


class RegionInfo(NamedTuple):
    """What a client knows of a region."""

    #: up: all of its nodes are; degraded: some are; away: none is; lost: an operator gave it up.
    state: Literal["up", "degraded", "away", "lost"]
    #: The shards whose primary is in it, and those with any server in it.
    shards: tuple[int, ...]
    replicas: tuple[int, ...]
    #: The least measured latency of this client's inserts at `shards`; None: there is none.
    insert_ms: float | None


class CursorInfo(NamedTuple):
    """A cursor as the membership service knows it."""

    name: str
    #: Everything below it was processed.
    position: RecordId
    #: Rises with each claim, seek and release.
    term: int
    #: owned, free or paused; a paused cursor may have an owner.
    state: Literal["owned", "free", "paused"]
    #: The owner, "host:process"; "": none.
    owner: str
    #: When it was last moved or changed, by the service's clock; None: never.
    moved_at: datetime | None
    #: Time without use after which it stops holding trims, in seconds; 0: it never holds any.
    hold_s: int
    #: Records from its position on are not trimmed, except by force.
    is_holding: bool
    #: Number of seeks so far.
    seek: int
    #: What its owner stored with the position.
    mark: bytes
    #: The owner was silent for its lease, so another client may claim the cursor. Set by
    #: `Log.cursors` only.
    is_silent: bool = False


#: An event of a speculation.
Event = Delivery | Confirmed | Failed
