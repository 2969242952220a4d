"""Cache of a store's newest entries: it answers most reads from memory.

Rule: only the oldest entry is evicted, and only after it is on stable storage. Invariant: every
position from `first` on, and every entry from `first_fseq` on, is answered from here
(docs/protocol.md, section 10).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
        return self._bytes_after(self._head) if self._ends else 0

    def _bytes_after(self, index: int) -> int:
        """Return the approximate memory of the entries from an index on."""
        ends = self._ends
        start = ends[index - 1] if index > self._head else self._start
        return ends[-1] - start + _OBJECT_BYTES * (len(ends) - index)

    def shrink(self, limit: int, flushed: int, trim: int) -> None:
        """Evict flushed entries, oldest first, that exceed the limit or are trimmed."""
        head, ends, lasts = self._head, self._ends, self._lasts
        last = bisect_right(ends, flushed, head)
        end = bisect_left(lasts, trim, head, last)
        if end < last and self._bytes_after(end) > limit:
            indexes = range(end, last)
            end += bisect_left(indexes, True, key=lambda index: self._bytes_after(index) <= limit)
        if end == head:
            return
        self.first = max(self.first, lasts[end - 1] + 1)
        self.first_fseq += end - head
        self._record_before, self._start = self._records[end - 1], ends[end - 1]
        self._entries[head:end] = [None] * (end - head)
        self._head = end
        if end >= _EVICTED_SLOTS and end * 2 >= len(ends):
            del self._entries[:end], self._lasts[:end], self._records[:end], self._ends[:end]
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
