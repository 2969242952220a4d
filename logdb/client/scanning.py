"""A scan outside a transaction, of a snapshot or of the present state, as steps for both APIs.

As in `logdb/client/transaction.py`, methods that ask are generators of requests. Rule: a scan that
one answer covers is read from the present state; a longer one from a snapshot (docs/logdb.md,
section 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.client.arguments import PAGE_ROWS
from logdb.client.requests import DropRequest, ScanRequest, SnapshotRequest
from ziplog.client.common.requests import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from logdb.client.arguments import Bounds
    from logdb.client.requests import Page, SnapshotId
    from ziplog.client.common.requests import Request

    Rows = list[tuple[bytes, bytes]]


class OpenScan:
    """A scan under way."""

    __slots__ = ("_bounds", "_is_own", "_left", "_next_deadline", "_start", "snapshot")

    def __init__(
        self, bounds: Bounds, deadline_ns: Callable[[], int], snapshot: SnapshotId | None = None
    ) -> None:
        """Make it.

        Args:
            bounds: what is scanned.
            until: gives the deadline of a call that begins now.
            snapshot: what is read; None: the state at the beginning.

        """
        self._bounds: Final = bounds
        self._next_deadline: Final = deadline_ns
        #: Read from; None: nothing was read yet.
        self.snapshot = snapshot
        self._is_own: Final = snapshot is None
        #: Rows still wanted; None: all.
        self._left = bounds.limit
        #: Where to go on; None: nowhere.
        self._start: bytes | None = None if bounds.is_empty else bounds.start

    @property
    def is_over(self) -> bool:
        """Whether there are no more rows."""
        return self._start is None

    def page(self) -> Generator[Request, Any, Rows]:
        """Return the next rows."""
        assert self._start is not None, "a scan that is over was asked for more"
        limit = PAGE_ROWS if self._left is None else min(self._left, PAGE_ROWS)
        page: Page = yield self._request(self._start, limit)
        is_all = page.is_end or len(page.rows) == self._left
        if self.snapshot is None and not is_all:
            self.snapshot, _ = yield SnapshotRequest(self._next_deadline())
            page = yield self._request(self._start, limit)
        if self._left is not None:
            self._left -= len(page.rows)
        self._start = None if page.is_end or self._left == 0 else page.range.stop
        return page.rows

    def _request(self, start: bytes, limit: int) -> ScanRequest:
        return ScanRequest(
            self._next_deadline(),
            start,
            self._bounds.stop,
            limit,
            fresh=self.snapshot is None,
            snapshot=self.snapshot,
        )

    def close(self) -> list[DropRequest]:
        """End it; returns what to ask for, once, and is answered at once."""
        self._start = None
        snapshot, self.snapshot = self.snapshot, None
        return [DropRequest(NEVER, snapshot)] if self._is_own and snapshot is not None else []
