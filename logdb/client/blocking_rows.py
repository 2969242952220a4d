# Generated from logdb/client/async_rows.py by scripts/generate_blocking.py; do not edit.
"""The row iterator of a scan.

A scan releases its snapshot at its end, and when it is garbage collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logdb.client.rows import RowBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from logdb.client.arguments import Bounds
    from logdb.client.engines import DatabaseEngine
    from logdb.client.rows import Pages, Row


class Rows(RowBuffer):
    """An iterator over keys and values, in key order."""

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
