"""Deduplication: finds records that a repeated writer inserted a second time.

Rule: the writer table before the first block with origins is requested when that block arrives;
most logs have none. Invariant: the verdict on a record depends only on the log before it, not on
the start of the read or on block boundaries (docs/protocol.md, section 14.3).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from ziplog.errors import TrimmedError, UnavailableError
from ziplog.segments.blocks import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ziplog.core.writer_table import WriterTable
    from ziplog.segments.blocks import Block


class Deduplicator:
    """Finds the duplicate records of one shard's blocks, in the order of the log."""

    def __init__(
        self,
        table: Callable[[int], tuple[int, WriterTable]],
        blocks: Callable[[int, int], Iterable[Block]],
    ) -> None:
        """Start at any position.

        Args:
            table: returns a position at or before the given one, and the writer table there.
            blocks: returns the shard's blocks that cover positions [start, stop); they may extend
                beyond both ends.

        """
        self._table: Final = table
        self._blocks: Final = blocks
        #: The table after the last block; None until it is needed.
        self._writers: WriterTable | None = None
        self._at = 0

    def repeated_rows(self, block: Block) -> list[tuple[int, int]]:
        """Return the index ranges [start, stop) of a block's duplicate records.

        The result is undefined for records that an earlier block contained too, and for records
        before the start of the first block. A gap between two blocks was trimmed meanwhile.

        Raises:
            TrimmedError: no replica has the records or the writer table before the block any more.
            UnavailableError: they are being trimmed right now.

        """
        if self._writers is not None and block.start > self._at:
            self._writers = None
        self._at = max(self._at, block.stop)
        if not block.origins:
            return []
        if self._writers is None:
            self._writers = self._table_at(block.start)
        # Applying overlapping records again changes nothing: no row is later than itself.
        return _apply(self._writers, block, block.rows)

    def reset_at(self, block: Block, known: WriterTable) -> list[tuple[int, int]]:
        """Return the same for a block after trimmed records, with what is known of their writers.

        A table without some of the rows may find fewer duplicates, and never others.
        """
        self._writers = known
        return _apply(self._writers, block, block.rows)

    def _table_at(self, stop: int) -> WriterTable:
        """Return the table at a position; errors are those of `repeated_rows`."""
        reached = 0
        while True:
            at, writers = self._table(stop)
            if at <= reached:
                raise UnavailableError(f"the log before gsn {stop} is being trimmed; try again")
            reached = self._replay(writers, at, stop)
            if reached >= stop:
                return writers

    def _replay(self, writers: WriterTable, at: int, stop: int) -> int:
        """Advance a table from `at` to `stop`; return where it ends: `stop`, or before a gap."""
        if at < stop:
            try:
                for block in self._blocks(at, stop):
                    if block.start > at:
                        return at
                    _apply(writers, block, bisect_left(gsns_of(block), stop))
                    at = max(at, block.stop)
            except TrimmedError:
                return at
        return stop


def _apply(writers: WriterTable, block: Block, high: int) -> list[tuple[int, int]]:
    """Apply a block's first `high` records to the table; return the duplicate ranges."""
    found: list[tuple[int, int]] = []
    for run in block.origins:
        count = min(run.count, high - run.at)
        if count > 0:
            old = writers.first_new_row(run.origin, count)
            if old:
                found.append((run.at, run.at + old))
    return found


def gsns_of(block: Block) -> memoryview[int]:
    """Return the positions of a block's records."""
    place = layout(block.rows, has_keys=block.has_keys).gsns
    return memoryview(block.columns)[place].cast("q")
