"""What the façades ask of the database's core, and what they get back.

As in `ziplog.client.common.requests`: each request has a deadline in monotonic nanoseconds, and is
answered exactly once, with a result or an exception, at the deadline at the latest.
"""

from __future__ import annotations

from typing import Any

import msgspec

from logdb.client.commits import UnknownCommit  # noqa: TC001 - msgspec may read it
from logdb.records import KeyRead, RangeRead
from ziplog.client.common.requests import Request


class SnapshotId(msgspec.Struct, frozen=True, gc=False):
    """A snapshot: its number, and the coordinator that keeps it."""

    number: int
    coordinator: bytes


class OpenRequest(Request, frozen=True, gc=False):
    """Find a coordinator, and the log. Result: the log's `wire.Limits`."""


class GetRequest(Request, frozen=True, gc=False):
    """Read keys, all of one state. Result: `Values`; TransactionAborted if a read has changed."""

    keys: list[bytes]
    #: Of everything that completed before; else maybe of a little earlier.
    fresh: bool = False
    #: What must be still so.
    reads: list[KeyRead] = msgspec.field(default_factory=list)
    ranges: list[RangeRead] = msgspec.field(default_factory=list)
    snapshot: SnapshotId | None = None
    #: Else only versions are told.
    wants_values: bool = True


class Values(msgspec.Struct, frozen=True, gc=False):
    """Versions (0: absent) and values (None: absent, or not wanted), in the order of the keys."""

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
    """All that there is in a range, in order."""

    rows: list[tuple[bytes, bytes]]
    #: What the page covers, and its digest.
    range: RangeRead
    #: Nothing comes behind it that was asked for.
    is_end: bool


class ValidateRequest(Request, frozen=True, gc=False):
    """Is this still so, now? Result: the position where it is; or TransactionAborted."""

    reads: list[KeyRead]
    ranges: list[RangeRead]


class CommitRequest(Request, frozen=True, gc=False):
    """Commit a transaction. Result: its rid; or TransactionAborted."""

    reads: list[KeyRead]
    ranges: list[RangeRead]
    #: Keys, each with its new value; None: deleted.
    writes: dict[bytes, bytes | None]


class PutRequest(Request, frozen=True, gc=False):
    """Write, whatever was there. Result: the commit's rid."""

    writes: dict[bytes, bytes | None]


class CompareAndPutRequest(Request, frozen=True, gc=False):
    """Write if the keys have these values (None: or are absent). Result: whether they had."""

    expected: dict[bytes, Any]
    writes: dict[bytes, bytes | None]


class ResolveCommitRequest(Request, frozen=True, gc=False):
    """What became of a commit in doubt? Result: its rid; None: it has, and will have, no effect."""

    commit: UnknownCommit


class SnapshotRequest(Request, frozen=True, gc=False):
    """Have the present state kept. Result: (`SnapshotId`, its position)."""


class DropRequest(Request, frozen=True, gc=False):
    """Have a snapshot forgotten. Answered at once with None."""

    snapshot: SnapshotId


class Watching:
    """A watch of a user, whose end may come while a request of it is under way."""

    __slots__ = ("is_closed",)

    def __init__(self) -> None:
        #: Set before the `UnwatchRequest`, so that no request can begin after it and wait.
        self.is_closed = False


class WatchRequest(Request, frozen=True, gc=False):
    """Wait until a key has another version; -1: none yet. Result: a `KeyState`; None: closed."""

    key: bytes
    version: int
    #: None: nobody closes it.
    watching: Watching | None = None


class UnwatchRequest(Request, frozen=True, gc=False):
    """End a watch: what is under way of it, too. Answered at once with None."""

    watching: Watching


class KeyState(msgspec.Struct, frozen=True, gc=False):
    """A key's state."""

    version: int
    value: bytes | None


class CoordinatorStatusRequest(Request, frozen=True, gc=False):
    """How is the coordinator? Result: a JSON document, and the endpoint of whoever answered."""
