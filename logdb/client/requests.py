"""The requests of the blocking and asyncio APIs to the client core, and their results.

As in `ziplog.client.common.requests`, each request has a deadline in monotonic nanoseconds and
completes exactly once, with a result or an exception, at the deadline at the latest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from logdb.client.commits import UnknownCommit  # noqa: TC001 - msgspec may read it
from logdb.records import KeyRead, RangeRead
from ziplog.client.common.requests import Request

if TYPE_CHECKING:
    from ziplog.types import RecordId


class SnapshotId(msgspec.Struct, frozen=True, gc=False):
    """A snapshot: its number, and the coordinator that keeps it."""

    number: int
    coordinator: bytes


class OpenRequest(Request, frozen=True, gc=False):
    """Find a coordinator, and the log. Result: the log's `wire.Limits`."""


class GetRequest(Request, frozen=True, gc=False):
    """Read keys of one state. Result: `Values`; or TransactionAborted after a conflict."""

    keys: list[bytes]
    #: Whether the state must contain everything that completed before.
    fresh: bool = False
    #: Earlier reads, which must be unchanged.
    reads: list[KeyRead] = msgspec.field(default_factory=list)
    ranges: list[RangeRead] = msgspec.field(default_factory=list)
    snapshot: SnapshotId | None = None
    #: If false, only versions are returned.
    wants_values: bool = True


class Values(msgspec.Struct, frozen=True, gc=False):
    """Versions (0: absent) and values (None: absent, or not requested), in the request's order."""

    versions: list[int]
    values: list[bytes | None]


class ScanRequest(Request, frozen=True, gc=False):
    """Read keys in order from `start` on, before `stop`. Result: a `Page`, or as for a get."""

    start: bytes
    stop: bytes | None
    #: Rows.
    limit: int
    fresh: bool = False
    reads: list[KeyRead] = msgspec.field(default_factory=list)
    ranges: list[RangeRead] = msgspec.field(default_factory=list)
    snapshot: SnapshotId | None = None


class Page(msgspec.Struct, frozen=True, gc=False):
    """All rows of a range, in order."""

    rows: list[tuple[bytes, bytes]]
    #: The range of the page, and its digest.
    range: RangeRead
    #: Whether the requested range ends with this page.
    is_end: bool


class ValidateRequest(Request, frozen=True, gc=False):
    """Validate earlier reads. Result: the position of the state; or TransactionAborted."""

    reads: list[KeyRead]
    ranges: list[RangeRead]


class CommitRequest(Request, frozen=True, gc=False):
    """Commit a transaction. Result: its rid; or TransactionAborted."""

    reads: list[KeyRead]
    ranges: list[RangeRead]
    #: Keys, each with its new value; None: deleted.
    writes: dict[bytes, bytes | None]


class PutRequest(Request, frozen=True, gc=False):
    """Write without reads. Result: the commit's rid."""

    writes: dict[bytes, bytes | None]


class CompareAndPutRequest(Request, frozen=True, gc=False):
    """Write if the keys have these values (None: or are absent). Result: whether they did."""

    expected: dict[bytes, Any]
    writes: dict[bytes, bytes | None]


class ResolveCommitRequest(Request, frozen=True, gc=False):
    """Resolve a commit's outcome. Result: its rid; None: it has no effect and never will."""

    commit: UnknownCommit


class TakenSnapshot(NamedTuple):
    """A snapshot, and the position of its state."""

    snapshot: SnapshotId
    position: RecordId


class SnapshotRequest(Request, frozen=True, gc=False):
    """Take a snapshot of the present state. Result: `TakenSnapshot`."""


class DropRequest(Request, frozen=True, gc=False):
    """End a snapshot. Completes immediately with None."""

    snapshot: SnapshotId


class WatchHandle:
    """A user's watch, which may be closed while a request of it is open."""

    __slots__ = ("is_closed",)

    def __init__(self) -> None:
        #: Set before the `UnwatchRequest`, so that no later request of the watch can start.
        self.is_closed = False


class WatchRequest(Request, frozen=True, gc=False):
    """Wait until a key has another version; -1: any. Result: a `KeyState`; None: closed."""

    key: bytes
    version: int
    #: None: it cannot be closed.
    handle: WatchHandle | None = None


class UnwatchRequest(Request, frozen=True, gc=False):
    """Close a watch and its open request. Completes immediately with None."""

    handle: WatchHandle


class KeyState(msgspec.Struct, frozen=True, gc=False):
    """A key's state."""

    version: int
    value: bytes | None


class CoordinatorStatusRequest(Request, frozen=True, gc=False):
    """Request a coordinator's status. Result: a JSON document, and the coordinator's endpoint."""
