"""The buffered rows of a scan, common to the blocking and the asyncio iterator.

Rows that were received and not yet returned stay here, so a call that raises (timeout,
cancellation, signal handler) loses no row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator

    from logdb.client.arguments import Bounds
    from logdb.client.requests import DropRequest
    from ziplog.client.common.requests import Request

    Row = tuple[Any, Any]


class Pages(Protocol):
    """The source of a scan's rows."""

    @property
    def is_over(self) -> bool:
        """Whether there are no more pages."""

    def page(self) -> Generator[Request, Any, list[tuple[bytes, bytes]]]:
        """Return the next rows; may be started again if it did not return."""

    def close(self) -> list[DropRequest]:
        """Close it; return the requests to send, once."""


class RowBuffer:
    """The rows of a page that were not yet returned."""

    def __init__(self, bounds: Bounds, pages: Pages, owner: object) -> None:
        self._bounds: Final = bounds
        self._pages: Final = pages
        #: Keeps the snapshot that is read alive.
        self._owner = owner
        self._rows: list[tuple[bytes, bytes]] = []
        self._at = 0

    def _pop_row(self) -> Row | None:
        """Return the next buffered row; None: the buffer is empty."""
        at, rows = self._at, self._rows
        if at == len(rows):
            return None
        row = self._bounds.row(rows[at])
        # Last, because decoding may raise, and then the row must not be lost.
        self._at = at + 1
        return row

    def _page(self) -> Generator[Request, Any, None]:
        rows = yield from self._pages.page()
        self._rows, self._at = rows, 0

    def _close_pages(self) -> list[DropRequest]:
        self._rows, self._at, self._owner = [], 0, None
        return self._pages.close()
