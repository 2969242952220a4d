"""Which records of a shard's blocks are there a second time, because their writer ran again.

Rule: the writers' table before the first block with origins is asked for when that block comes, not
before: few logs have any. Invariant: what is said of a record depends on the log before it, not on
where the reading began, nor on how blocks are cut (docs/protocol.md, section 14.3).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from ziplog.core.writer_table import WriterTable
from ziplog.errors import TrimmedError, UnavailableError
from ziplog.segments.blocks import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ziplog.segments.blocks import Block


class Deduplicator:
    """Tells them for one shard's blocks, in the order of the log."""

    def __init__(
        self,
        table: Callable[[int], tuple[int, WriterTable]],
        blocks: Callable[[int, int], Iterable[Block]],
    ) -> None:
        """Begin anywhere.

        Args:
            table: gives for a position one at or before it, and the writers' table there.
            blocks: gives the shard's blocks that cover positions [start, stop); they may reach over
                both ends.

        """
        self._table: Final = table
        self._blocks: Final = blocks
        #: The table behind the last block, and where that is; None before it is needed.
        self._writers: WriterTable | None = None
        self._at = 0

    def repeated_rows(self, block: Block) -> list[tuple[int, int]]:
        """Return the index ranges [start, stop) of the records of a block that are repetitions.

        What is said of records that blocks before had, too, or that lie before the first block's
        start, does not count. Where blocks leave something out, it was trimmed meanwhile.

        Raises:
            TrimmedError: nobody knows any more what came before the block.
            UnavailableError: nobody knows it yet, as it is being trimmed.

        """
        if self._writers is not None and block.start > self._at:
            self._writers = None
        self._at = max(self._at, block.stop)
        if not block.origins:
            return []
        if self._writers is None:
            self._writers = self._table_at(block.start)
        # To take note of the last records again changes nothing: no row is later than itself.
        return _apply(self._writers, block, block.rows)

    def reset_at(self, block: Block) -> list[tuple[int, int]]:
        """Return the same of a block that nobody knows what was before; what follows goes on so."""
        self._writers = WriterTable()
        return _apply(self._writers, block, block.rows)

    def _table_at(self, stop: int) -> WriterTable:
        """Return the table at a position.

        Errors are those of `of`.

        """
        reached = 0
        while True:
            at, writers = self._table(stop)
            if at <= reached:
                raise UnavailableError(f"what came before gsn {stop} is being trimmed")
            reached = self._replay(writers, at, stop)
            if reached >= stop:
                return writers

    def _replay(self, writers: WriterTable, at: int, stop: int) -> int:
        """Let a table at `at` go on up to `stop`; return where it stops before what was trimmed."""
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
    """Let the table go on over a block's first `high` records; return which are repetitions."""
    found: list[tuple[int, int]] = []
    for run in block.origins:
        count = min(run.count, high - run.at)
        if count > 0:
            old = writers.fresh(run.origin, count)
            if old:
                found.append((run.at, run.at + old))
    return found


def gsns_of(block: Block) -> memoryview[int]:
    """Return the positions of a block's records."""
    place = layout(block.rows, has_keys=block.has_keys).gsns
    return memoryview(block.columns)[place].cast("q")
