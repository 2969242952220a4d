"""Requests from the public APIs to the client node, and their results.

Every request has a `deadline` in monotonic nanoseconds (`NEVER`: no limit). The client node
completes each request exactly once, with a result or an exception, at its deadline at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from ziplog.core.cursors import Edit
from ziplog.core.entries import Origin, Unit
from ziplog.core.units import NEVER
from ziplog.core.view import Replica
from ziplog.core.writer_table import TableAt
from ziplog.types import RID_GENESIS, Event, Record, RecordId

#: Selects a shard: (payload, key, ids of the live shards) -> id.
Policy = Callable[[bytes, bytes | None, Sequence[int]], int]


class Preferences(NamedTuple):
    """How a client selects the shards of its inserts."""

    policy: Policy
    #: The region in which it runs, for `ziplog.policy.nearest`; "": none.
    region: str = ""
    #: Least number of regions of an insert that requests no number; 0: the cluster's.
    min_regions: int = 0


#: The changes of a shard.
Change = Literal["add", "remove", "finalize"]


class Request(msgspec.Struct, frozen=True, gc=False):
    """Base class of all requests."""

    deadline: int


class ConnectRequest(Request, frozen=True, gc=False):
    """Get the cluster's description from the membership service. Result: its `wire.Limits`."""


class InsertRequest(Request, frozen=True, gc=False):
    """Insert payloads in order at one shard, all after a gsn. Result: a list of rids."""

    payloads: list[bytes]
    after: RecordId
    key: bytes | None
    timestamp_us: int
    #: The caller passed a list, so results and errors contain a list.
    many: bool = False
    #: The key of each payload, instead of `key`.
    keys: list[bytes | None] | None = None
    #: The shard that gets the records; None: the policy selects one.
    shard: int | None = None
    #: Return only when no later record can get a position before these: an append.
    sealed: bool = False
    #: Origin of the first payload. If set, a unit is sent only when the previous unit is placed.
    origin: Origin | None = None
    #: Least number of regions of the shard that gets the records; 0: the client's.
    min_regions: int = 0

    @property
    def is_single(self) -> bool:
        """Whether the caller inserts one record that may share a unit with others."""
        return len(self.payloads) == 1 and not self.many and self.origin is None

    def key_of(self, index: int) -> bytes | None:
        """Return the key of a payload."""
        return self.key if self.keys is None else self.keys[index]


class SyncRequest(Request, frozen=True, gc=False):
    """Wait until all inserts of this client are on stable storage. Result: the last rid."""

    #: Records of other clients that must be on stable storage, too; each was read.
    others: tuple[RecordId, ...] = ()


class ReadRequest(Request, frozen=True, gc=False):
    """Read one position. Result: a `Record`."""

    rid: RecordId


class TailRequest(Request, frozen=True, gc=False):
    """Get the rid of the last record. Result: that rid, or RID_GENESIS if the log is empty."""

    #: Return only when no later record can get a position before the rid.
    sealed: bool = False


class SealRequest(Request, frozen=True, gc=False):
    """Wait until no later record can get a position before a rid. Result: the rid."""

    rid: RecordId


class TrimRequest(Request, frozen=True, gc=False):
    """Delete all records before a rid. Result: None."""

    rid: RecordId
    #: Also those that cursors hold.
    force: bool = False


class StatusRequest(Request, frozen=True, gc=False):
    """Get the status document, or a part of the history. Result: JSON as bytes."""

    #: As in `ziplog.wire.StatusQuery`.
    part: Literal["", "events", "epochs"] = ""
    start: int = 0
    stop: int = 0


class MeasureRequest(Request, frozen=True, gc=False):
    """Count the durations of inserts from now on. Result, at once: `Measurements`."""


class PolicyRequest(Request, frozen=True, gc=False):
    """Select the shards of later inserts by a policy. Result, at once: None."""

    policy: Policy


class FinishUpgradeRequest(Request, frozen=True, gc=False):
    """Have the cluster use a wire version. Result: the version that it uses then."""

    wire: int


class ChangeRequest(Request, frozen=True, gc=False):
    """Add, remove or finalize a shard. Result, once that is done: None."""

    shard: int
    change: Change
    #: The servers of a shard to add, the primary first.
    replicas: tuple[Replica, ...] = ()


class ChangeRegionRequest(Request, frozen=True, gc=False):
    """Give up a region, or let it count again. Result, once that is committed: None."""

    region: str
    is_lost: bool


class SubscribeRequest(Request, frozen=True, gc=False):
    """Open a subscription. Result: its number."""

    start: RecordId
    follow: bool
    #: The shards whose records are wanted; None: all.
    shards: frozenset[int] | None = None
    #: Rows before `start` count, too, when duplicates are dropped.
    known_rows: bool = False
    #: Rows are left out if their writer begins with one of these.
    skip_writers: tuple[bytes, ...] = ()
    #: Bytes that each shard may send before the next credit; 0: the default.
    window_bytes: int = 0


class FetchRequest(Request, frozen=True, gc=False):
    """Fetch records that are due. Result: a `Fetched`, empty at the deadline and at the end.

    The reader may lose a result (a cancelled task, a signal). So each request names the last record
    that the reader has, and the same request returns the same records again.
    """

    subscription: int
    max_records: int
    #: The gsn of the last record that the reader has (0: none); NEVER: the last one returned.
    after: int = NEVER


class SpeculateRequest(SubscribeRequest, frozen=True, gc=False):
    """Open a speculation. Result: its number."""

    #: Most deliveries that are neither confirmed nor void.
    max_pending: int = 10_000


class EventsRequest(Request, frozen=True, gc=False):
    """Fetch events of a speculation. Result: an `EventBatch`, empty at the deadline.

    As with `FetchRequest`, the reader may lose the result; the same request returns the same events
    again, and maybe more.
    """

    subscription: int
    max_events: int
    #: The number of events that the reader has.
    after: int


class ProgressRequest(Request, frozen=True, gc=False):
    """Get the progress of a subscription or speculation. Result, at once: a `Progress`."""

    subscription: int
    #: As in `FetchRequest`; of a speculation, as in `EventsRequest`.
    after: int = NEVER


class BarrierRequest(Request, frozen=True, gc=False):
    """Get an upper bound of all readers. Result: a position that none of them had passed.

    A subscription that reaches this position has received all records that any reader of at least
    its shards had received before.
    """

    subscription: int


class UnsubscribeRequest(Request, frozen=True, gc=False):
    """Close a subscription. Result, at once: None. Pending fetches get an empty `Fetched`."""

    subscription: int


class ClaimState(NamedTuple):
    """A claimed cursor, as far as this client knows."""

    name: str
    term: int
    #: The last position that was committed, and the mark that was committed with it.
    position: RecordId
    mark: bytes
    is_paused: bool
    #: What ended the claim; "": nothing did.
    lost: str
    #: The term of the cursor's creation, and the number of its seeks.
    birth: int = 0
    seek: int = 0
    #: It was moved since it was created or sought.
    has_moved: bool = False
    #: While it is paused: the gsn where it stops; 0: at once.
    pause_at: int = 0


class ClaimRequest(Request, frozen=True, gc=False):
    """Claim a cursor, and subscribe from its position on. Result: the number of both."""

    name: str
    #: The position of a new cursor; RID_RECENT: after the last record.
    start: RecordId
    #: Describes this client to people.
    owner: str
    lease_ms: int
    hold_s: int
    #: Wait while another client owns it.
    wait: bool
    #: Whether a subscription belongs to it.
    reads: bool = True


class CommitRequest(Request, frozen=True, gc=False):
    """Move a claimed cursor forward. Result: the position."""

    subscription: int
    position: RecordId
    mark: bytes
    #: Complete at once; move within `COMMIT_INTERVAL_NS`, together with later moves.
    is_soon: bool = False


class ClaimQuery(Request, frozen=True, gc=False):
    """Get the state of a claim. Result, at once: a `ClaimState`."""

    subscription: int


class WatchClaimRequest(Request, frozen=True, gc=False):
    """Wait until a claim is paused, continued or lost. Result: its `ClaimState`.

    It is due as soon as the state differs from `known` in `is_paused`, `pause_at` or `lost`, and at
    the deadline.
    """

    subscription: int
    known: ClaimState


class ReleaseRequest(Request, frozen=True, gc=False):
    """Commit what is due, and end the ownership of a cursor. Result: None."""

    subscription: int


class EndClaimsRequest(Request, frozen=True, gc=False):
    """End the claims that the service has not granted yet. Result: None.

    It is due once the service replied to them, and the releases of granted ones are sent; at the
    deadline at the latest.
    """


class CursorsRequest(Request, frozen=True, gc=False):
    """List the cursors. Result: a list of `CursorInfo`, by name."""


class EditRequest(Request, frozen=True, gc=False):
    """Create, change or delete a cursor. Result: its `CursorInfo`; None if it was deleted."""

    name: str
    edit: Edit
    position: RecordId = RID_GENESIS
    hold_s: int = 0


class ExtentsRequest(Request, frozen=True, gc=False):
    """Get the shards that own positions of [start, stop); None: to the end. Result: `Extents`."""

    start: int
    stop: int | None


class OutlineRequest(Request, frozen=True, gc=False):
    """Get a shard's size and archives for the range [start, stop). Result: `ShardOutline`."""

    shard: int
    start: int
    stop: int


class ArchiveReply(Request, frozen=True, gc=False):
    """The engine's reply to `AskArchive`. Result, at once: None."""

    number: int
    #: A position at or before the requested one, and the table there; None: there was no answer.
    table: TableAt | None


class ScanRequest(Request, frozen=True, gc=False):
    """Open a scan of a shard's units of [start, stop). Result: its number."""

    shard: int
    start: int
    stop: int


class ScanFetchRequest(Request, frozen=True, gc=False):
    """Fetch units of a scan. Result: a `Scanned`; at the deadline one without progress.

    As with `FetchRequest`, the reader may lose the result; the same request returns the same units.
    """

    scan: int
    #: The last `reached` that the reader has, at first the scan's start; NEVER: the last one.
    position: int = NEVER


class ScanCloseRequest(Request, frozen=True, gc=False):
    """Close a scan. Result, at once: None. Pending fetches raise `ClosedError`."""

    scan: int


class Scanned(msgspec.Struct, frozen=True, gc=False):
    """Whole units of one shard, in order; the first and the last may exceed the range."""

    units: list[Unit]
    #: The end of what was returned so far, at most the range's end.
    reached: int


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """Records in gsn order."""

    records: list[Record]
    #: No more records will follow.
    ended: bool


class EventBatch(msgspec.Struct, frozen=True, gc=False):
    """Events of a speculation, in order."""

    events: list[Event]
    #: The number of events before these.
    first: int
    #: No more events will follow: the speculation is closed.
    ended: bool = False


class Blocked(NamedTuple):
    """The shard and the epoch of the undecided positions that block a subscription."""

    shard: int
    epoch: int


class Progress(msgspec.Struct, frozen=True, gc=False):
    """The progress of a subscription or speculation, as returned by the client node."""

    #: Every record below it was returned; of a speculation: and is confirmed.
    position: RecordId
    #: Every record that the servers last reported was returned.
    caught_up: bool
    blocked_on: Blocked | None
    #: Of a speculation: the number of deliveries that are neither confirmed nor void.
    pending: int = 0


class Counters(msgspec.Struct):
    """Counters of a client, in records unless stated otherwise."""

    inserts: int = 0
    #: `fast_path`: inserts after two message delays, with correct guesses of all backups.
    #: `slow_path`: all others; a backup waited for the primary's decision, or a recovery placed the
    #: unit.
    fast_path: int = 0
    slow_path: int = 0
    #: Inserts that raised an error and are not known to be in the log. `failed`: they are not.
    #: `unknown`: they may be; a record that is found later also counts as an insert.
    failed: int = 0
    unknown: int = 0
    #: Records of appends that were placed in time (they count as inserts, too), and calls that
    #: ended without a seal.
    appends: int = 0
    unsealed: int = 0
    #: Units and requests that were sent again.
    retries: int = 0
    #: Refusals with code `redirect`.
    redirects: int = 0
    #: `located`: inserts that a `Located` reply found. `moved`: inserts that were sent to another
    #: shard, because no replica of the first shard had them.
    located: int = 0
    moved: int = 0
    reads: int = 0
    delivered: int = 0
    #: Of speculations: records that were delivered early; those of them that were `confirmed`, and
    #: those that were `withdrawn` by `failures` (events).
    speculated: int = 0
    confirmed: int = 0
    failures: int = 0
    withdrawn: int = 0
    #: Messages that violate the protocol.
    protocol_errors: int = 0
