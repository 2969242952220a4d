"""What the façades ask of the core, and what they get back.

Every request has a `deadline` in monotonic nanoseconds; the core answers each exactly once, with a
result or an exception, at the deadline at the latest (`NEVER`: without limit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from ziplog.client.common.unknown_outcome import Doubt
from ziplog.core.entries import Origin, Unit
from ziplog.core.view import Replica
from ziplog.types import Record, RecordId

#: Chooses a shard: (payload, key, ids of the live shards) -> id.
Policy = Callable[[bytes, bytes | None, Sequence[int]], int]

#: What can be done with a shard.
Change = Literal["add", "remove", "finalize"]

#: A deadline that does not come.
NEVER: Final = 2**63 - 1


class Request(msgspec.Struct, frozen=True, gc=False):
    """Base of all requests."""

    deadline: int


class ConnectRequest(Request, frozen=True, gc=False):
    """Learn the cluster from the membership service. Result: its `wire.Limits`."""


class InsertRequest(Request, frozen=True, gc=False):
    """Insert payloads, in order, all after a gsn, at one shard. Result: a list of rids."""

    payloads: list[bytes]
    after: RecordId
    key: bytes | None
    timestamp_us: int
    #: The user gave a list, and gets one, also in errors.
    many: bool = False
    #: Each payload's key, instead of `key`.
    keys: list[bytes | None] | None = None
    #: The only shard that may get them; None: the policy chooses.
    shard: int | None = None
    #: Who wrote them, that of the first payload: then a unit goes out when the one before is done.
    origin: Origin | None = None

    def key_of(self, index: int) -> bytes | None:
        """Return the key of a payload."""
        return self.key if self.keys is None else self.keys[index]


class ResolveRequest(Request, frozen=True, gc=False):
    """What became of a call in doubt? Result: each payload's rid; None: it never will exist."""

    doubt: Doubt


class SyncRequest(Request, frozen=True, gc=False):
    """Wait until all that this client inserted is on stable storage. Result: its last rid."""


class ReadRequest(Request, frozen=True, gc=False):
    """Read one position. Result: a `Record`."""

    rid: RecordId


class TailRequest(Request, frozen=True, gc=False):
    """Where does the log end? Result: the rid of the last record; RID_GENESIS if there is none."""


class TrimRequest(Request, frozen=True, gc=False):
    """Delete everything before a rid. Result: None."""

    rid: RecordId


class StatusRequest(Request, frozen=True, gc=False):
    """How is the cluster? Result: the status document, JSON as bytes."""


class ChangeRequest(Request, frozen=True, gc=False):
    """Add a shard, take one out for good, or have one sealed. Result, once that is done: None."""

    shard: int
    change: Change
    #: For "add": its servers, the primary first.
    replicas: tuple[Replica, ...] = ()


class SubscribeRequest(Request, frozen=True, gc=False):
    """Begin a subscription. Result: its number."""

    start: RecordId
    follow: bool


class FetchRequest(Request, frozen=True, gc=False):
    """Take records that are due. Result: a `Fetched`, empty at the deadline and at the end.

    The answer may be lost between the core and the reader (a cancelled task, a signal), so the
    reader names what it has: the same request gives the same records again.
    """

    subscription: int
    max_records: int
    #: The gsn of the last record that the reader has (0: none); NEVER: the last one handed out.
    after: int = NEVER


class ProgressRequest(Request, frozen=True, gc=False):
    """How far is a subscription? Answered at once with a `Progress`."""

    subscription: int
    #: As in `FetchRequest`.
    after: int = NEVER


class BarrierRequest(Request, frozen=True, gc=False):
    """How far is any reader at most? Result: a gsn that none had passed when this was asked.

    Whoever's subscription reaches it has been given all that anybody had been given before.
    """

    subscription: int


class UnsubscribeRequest(Request, frozen=True, gc=False):
    """End a subscription. Answered at once with None; fetches under way get an empty `Fetched`."""

    subscription: int


class ExtentsRequest(Request, frozen=True, gc=False):
    """Which shards own positions of [start, stop)? None: to the end. Result: `Extents`."""

    start: int
    stop: int | None


class OutlineRequest(Request, frozen=True, gc=False):
    """How much does a shard hold of [start, stop), and who serves it? Result: `ShardOutline`."""

    shard: int
    start: int
    stop: int


class ScanRequest(Request, frozen=True, gc=False):
    """Begin to read a shard's units of [start, stop). Result: its number."""

    shard: int
    start: int
    stop: int


class ScanFetchRequest(Request, frozen=True, gc=False):
    """Take units that are due. Result: a `Scanned`; at the deadline one that goes no further.

    As with a `FetchRequest`, the answer may be lost: the same request gives the same units again.
    """

    scan: int
    #: The last `reached` that the reader has, at first the scan's start; NEVER: the last one.
    position: int = NEVER


class ScanCloseRequest(Request, frozen=True, gc=False):
    """End such a reader. Answered at once with None; fetches under way with `ClosedError`."""

    scan: int


class Scanned(msgspec.Struct, frozen=True, gc=False):
    """Units of one shard, in order; whole, so the first and the last may stick out."""

    units: list[Unit]
    #: All before it was handed out; the range's end at most.
    reached: int


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """Records in gsn order."""

    records: list[Record]
    #: Nothing will ever follow.
    ended: bool


class Blocked(NamedTuple):
    """What holds a subscription's records back: this shard's positions of this epoch."""

    shard: int
    epoch: int


class Progress(msgspec.Struct, frozen=True, gc=False):
    """How far a subscription is, of what the core handed out."""

    #: Nothing below it is still to come.
    position: RecordId
    #: Everything that the servers last reported was handed out.
    caught_up: bool
    blocked_on: Blocked | None


class Counters(msgspec.Struct):
    """What a client did. Records, unless said otherwise."""

    inserts: int = 0
    #: Inserted by two message delays: all backups guessed right, or knew. And all others: a backup
    #: corrected its guess, or made none and waited for the primary's word, or a recovery told.
    fast_path: int = 0
    slow_path: int = 0
    #: Units that were sent again.
    retries: int = 0
    #: Answers that sent us elsewhere.
    redirects: int = 0
    #: Inserts that a recovery told us were done; and those sent to another shard instead, as no
    #: server of the first one had them.
    located: int = 0
    moved: int = 0
    reads: int = 0
    delivered: int = 0
    #: Messages that a peer may not send.
    protocol_errors: int = 0
