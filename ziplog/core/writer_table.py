"""The writer table: the last row of each writer, for duplicate recognition by readers.

A writer that is repeated writes the same rows again, under the same `Origin`. Within a shard, a
writer's row counts if its (batch, row) is higher than that of all the writer's rows before it in
the log.
Invariant: the result of `first_new_row` is a function of the origins seen before, in their order;
the table holds the 65,536 writers with the most recent rows (docs/protocol.md, section 14.3).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.core.entries import Origin

#: Maximum number of writers in a table; the writer with the oldest last row is removed first.
MAX_WRITERS: Final = 65_536


class WriterTable:
    """The writer table at one position of one shard's log."""

    __slots__ = ("_last",)

    def __init__(self, rows: Iterable[tuple[bytes, int, int]] = ()) -> None:
        """Start with the rows that `export` returned; without any at the start of the log."""
        self._last = OrderedDict((writer, (batch, row)) for writer, batch, row in rows)
        assert len(self._last) <= MAX_WRITERS, "a table is bounded"

    def __bool__(self) -> bool:
        """Whether any writer is known."""
        return bool(self._last)

    def first_new_row(self, origin: Origin, count: int) -> int:
        """Add `count` rows from `origin` on; return the index of the first one that is new.

        Consecutive units of one batch with consecutive rows may be added in one call.

        Returns:
            From 0 (all rows are new) to `count` (all rows are duplicates).

        """
        assert count > 0, "a unit has records"
        last = self._last.get(origin.writer)
        end = (origin.batch, origin.row + count - 1)
        if last is None:
            self._last[origin.writer] = end
            if len(self._last) > MAX_WRITERS:
                self._last.popitem(last=False)
            return 0
        self._last.move_to_end(origin.writer)
        self._last[origin.writer] = max(last, end)
        if origin.batch != last[0]:
            return count if origin.batch < last[0] else 0
        return min(max(last[1] + 1 - origin.row, 0), count)

    def with_older(self, older: WriterTable) -> WriterTable:
        """Return this table with what another one, of a lower position, has besides."""
        rows = {writer: last for writer, last in older._last.items() if writer not in self._last}
        room = MAX_WRITERS - len(self._last)
        merged = WriterTable()
        merged._last.update(list(rows.items())[max(len(rows) - room, 0) :])
        for writer, last in self._last.items():
            merged._last[writer] = max(last, older._last.get(writer, last))
        return merged

    def export(self) -> list[tuple[bytes, int, int]]:
        """Return writer, last batch and last row of each writer, the most recent writer last."""
        return [(writer, batch, row) for writer, (batch, row) in self._last.items()]


#: A position, and the table there.
TableAt = tuple[int, WriterTable]


def merged_tables(one: TableAt, other: TableAt) -> TableAt:
    """Return what two replicas' tables of one shard know, at the higher position.

    After a trim a replica may have a table that lacks the rows from before; the other's has them.
    """
    (_, lower), (position, higher) = sorted((one, other), key=lambda table: table[0])
    return position, higher.with_older(lower)
