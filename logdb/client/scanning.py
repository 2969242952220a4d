"""A scan outside a transaction, as steps for both APIs.

As in `logdb/client/transaction.py`, methods that send requests are generators. A scan of one page
reads the present state; a longer one reads a snapshot (docs/logdb.md, section 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.client.arguments import PAGE_ROWS
from logdb.client.requests import DropRequest, ScanRequest, SnapshotRequest
from ziplog.core.units import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from logdb.client.arguments import Bounds
    from logdb.client.requests import Page, SnapshotId
    from ziplog.client.common.requests import Request

    Rows = list[tuple[bytes, bytes]]


class OpenScan:
    """An open scan."""

    __slots__ = ("_bounds", "_is_own", "_left", "_next_deadline", "_start", "snapshot")

    def __init__(
        self, bounds: Bounds, deadline_ns: Callable[[], int], snapshot: SnapshotId | None = None
    ) -> None:
        """Prepare.

        Args:
            bounds: the range.
            deadline_ns: returns the deadline of a call that starts now.
            snapshot: the snapshot to read; None: the state at the first page.

        """
        self._bounds: Final = bounds
        self._next_deadline: Final = deadline_ns
        #: The snapshot that is read; None: not needed so far.
        self.snapshot = snapshot
        self._is_own: Final = snapshot is None
        #: Rows left to return; None: all.
        self._left = bounds.limit
        #: Start of the next page; None: the scan is over.
        self._start: bytes | None = None if bounds.is_empty else bounds.start

    @property
    def is_over(self) -> bool:
        """Whether there are no more rows."""
        return self._start is None

    def page(self) -> Generator[Request, Any, Rows]:
        """Return the next rows; none if the scan was closed meanwhile."""
        start = self._start
        assert start is not None, "a finished scan has no next page"
        limit = PAGE_ROWS if self._left is None else min(self._left, PAGE_ROWS)
        page: Page = yield self._request(start, limit)
        is_all = page.is_end or len(page.rows) == self._left
        if self.snapshot is None and not is_all:
            taken, _ = yield SnapshotRequest(self._next_deadline())
            if self.is_over:
                yield DropRequest(NEVER, taken)
                return []
            self.snapshot = taken
            page = yield self._request(start, limit)
        if self.is_over:  # Another task closed the scan meanwhile.
            return []
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
        """Close it; return the requests to send, once."""
        self._start = None
        snapshot, self.snapshot = self.snapshot, None
        return [DropRequest(NEVER, snapshot)] if self._is_own and snapshot is not None else []
