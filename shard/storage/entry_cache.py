"""Cache of a store's newest entries: it answers most reads from memory.

Rule: only the oldest entry is evicted, and only after it is on stable storage. Invariant: every
position from `first` on, and every entry from `first_fseq` on, is answered from here
(docs/protocol.md, section 10).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.segments.entry import Entry

#: Approximate memory of an entry in addition to its bytes on disk.
_OBJECT_BYTES: Final = 512
#: Number of evicted list items at the front that are deleted at once.
_EVICTED_SLOTS: Final = 1024


class EntryCache:
    """The newest entries, contiguous up to the last one."""

    def __init__(self, first: int, first_fseq: int, last_record: int, start: int) -> None:
        """Start empty, after `start` bytes of the store and the record `last_record`."""
        #: The first position that is answered from memory.
        self.first = first
        #: The first entry that is answered from memory.
        self.first_fseq = first_fseq
        self._record_before = last_record
        self._entries: list[Entry | None] = []
        #: Per entry: the last gsn and record so far, and the store's bytes up to its end.
        self._lasts: list[int] = []
        self._records: list[int] = []
        self._ends: list[int] = []
        self._head = 0
        self._start = start

    def add(
        self,
        entries: Iterable[Entry],
        lasts: Iterable[int],
        records: Iterable[int],
        ends: Iterable[int],
    ) -> None:
        """Add the next entries, with their values for the columns above."""
        self._entries.extend(entries)
        self._lasts.extend(lasts)
        self._records.extend(records)
        self._ends.extend(ends)

    @property
    def bytes(self) -> int:
        """The approximate memory of all entries."""
        if not self._ends:
            return 0
        return self._ends[-1] - self._start + _OBJECT_BYTES * (len(self._ends) - self._head)

    def shrink(self, limit: int, flushed: int, trim: int) -> None:
        """Evict flushed entries, oldest first, that exceed the limit or are trimmed."""
        head, ends, lasts = self._head, self._ends, self._lasts
        while head < len(ends) and ends[head] <= flushed:
            if self.bytes <= limit and lasts[head] >= trim:
                break
            self.first, self._record_before = max(self.first, lasts[head] + 1), self._records[head]
            self.first_fseq += 1
            self._start, self._entries[head] = ends[head], None
            head += 1
            self._head = head
        if head >= _EVICTED_SLOTS and head * 2 >= len(ends):
            del self._entries[:head], self._lasts[:head], self._records[:head], self._ends[:head]
            self._head = 0

    def from_gsn(self, gsn: int) -> int:
        """Return the index of the first entry that ends at or after `gsn`."""
        return bisect_left(self._lasts, gsn, self._head)

    def from_fseq(self, fseq: int) -> int:
        """Return the index of an entry in memory by its number."""
        return self._head + fseq - self.first_fseq

    def at(self, index: int) -> Entry | None:
        """Return an entry by index; None after the last."""
        return self._entries[index] if index < len(self._entries) else None

    def record_before(self, index: int) -> int:
        """Return the last record before an entry."""
        return self._records[index - 1] if index > self._head else self._record_before
