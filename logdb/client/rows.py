"""The row iterators of a scan, blocking and asyncio.

Rows that were received and not yet returned stay here, so a call that raises (timeout,
cancellation, signal handler) loses no row. A scan releases its snapshot at its end, and when it is
garbage collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator
    from typing import Self

    from logdb.client.arguments import Bounds
    from logdb.client.engines import AsyncDatabaseEngine, DatabaseEngine
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


class _Rows:
    """The buffered rows of both iterators."""

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


class Rows(_Rows):
    """A blocking iterator over keys and values, in key order."""

    def __init__(
        self, engine: DatabaseEngine, bounds: Bounds, pages: Pages, owner: object = None
    ) -> None:
        """Use a `scan`."""
        super().__init__(bounds, pages, owner)
        self._engine: Final = engine
        self._owned: Final = engine.owners.add(self, pages.close)

    def __iter__(self) -> Iterator[Row]:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Row:
        """Return the next row."""
        while True:
            row = self._pop_row()
            if row is not None:
                return row
            if self._pages.is_over:
                self.close()
                raise StopIteration
            self._engine.run(self._page())

    def __enter__(self) -> Self:
        """Return the iterator."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the scan. Idempotent."""
        self._engine.shielded(self._close)

    def _close(self) -> None:
        for request in self._close_pages():
            self._engine.post(request)
        self._engine.owners.remove(self._owned)


class AsyncRows(_Rows):
    """An async iterator over keys and values, in key order."""

    def __init__(
        self, engine: AsyncDatabaseEngine, bounds: Bounds, pages: Pages, owner: object = None
    ) -> None:
        """Use a `scan`."""
        super().__init__(bounds, pages, owner)
        self._engine: Final = engine
        self._owned: Final = engine.owners.add(self, pages.close)

    def __aiter__(self) -> AsyncIterator[Row]:
        """Return the iterator itself."""
        return self

    async def __anext__(self) -> Row:
        """Return the next row."""
        while True:
            row = self._pop_row()
            if row is not None:
                return row
            if self._pages.is_over:
                await self.aclose()
                raise StopAsyncIteration
            await self._engine.run(self._page())

    async def __aenter__(self) -> Self:
        """Return the iterator."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.aclose()

    async def aclose(self) -> None:
        """Close the scan. Idempotent."""
        for request in self._close_pages():
            self._engine.post(request)
        self._engine.owners.remove(self._owned)
