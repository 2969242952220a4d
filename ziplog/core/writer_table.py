"""Who wrote last, and up to where: by it readers tell repetitions from rows.

A writer that runs again writes the same rows again, under the same `Origin`. Rule: of a writer's
rows in one shard those count that are later, by batch and row, than all before them in the log.
Invariant: what `fresh` answers is a function of the origins seen before, in their order; of all
writers the 65,536 that wrote last are known (docs/protocol.md, section 14.3).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.core.entries import Origin

#: No table knows more writers; who wrote least recently is forgotten first.
MAX_WRITERS: Final = 65_536


class WriterTable:
    """The writers' table at a position of one shard's log."""

    __slots__ = ("_last",)

    def __init__(self, rows: Iterable[tuple[bytes, int, int]] = ()) -> None:
        """Begin with what `export` gave; with nothing at the beginning of the log."""
        self._last = OrderedDict((writer, (batch, row)) for writer, batch, row in rows)
        assert len(self._last) <= MAX_WRITERS, "a table is bounded"

    def __bool__(self) -> bool:
        """Whether any writer is known."""
        return bool(self._last)

    def first_new_row(self, origin: Origin, count: int) -> int:
        """Take note of `count` rows from `origin` on: how many of the first are repetitions.

        Units that follow each other, of one batch and with consecutive rows, may be taken as one.

        Returns:
            From 0 (none) to `count` (all).

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

    def export(self) -> list[tuple[bytes, int, int]]:
        """Return writer, last batch and last row of each; who wrote last comes last."""
        return [(writer, batch, row) for writer, (batch, row) in self._last.items()]
