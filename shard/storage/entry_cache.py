"""The newest entries of a store, in memory: what most reads ask for.

Rule: only the oldest is ever forgotten, and only once it is on stable storage. Invariant: every
position from `first` on is answered from here, and so is every entry from `first_fseq` on
(docs/protocol.md, section 10).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ziplog.segments.entry import Entry

#: What an entry in memory costs beside its bytes on disk, roughly.
_OBJECT_BYTES: Final = 512
#: So many dead places at the front are given back at once.
_SWEEP: Final = 1024


class EntryCache:
    """The newest entries, without a gap up to the last one."""

    def __init__(self, first: int, first_fseq: int, last_record: int, start: int) -> None:
        """Begin empty, after `start` bytes of the store and the record `last_record`."""
        #: Every position from here on is answered from memory,
        self.first = first
        #: and every entry.
        self.first_fseq = first_fseq
        self._record_before = last_record
        self._entries: list[Entry | None] = []
        #: Of each: the last gsn and record so far, and the store's bytes up to its end.
        self._lasts: list[int] = []
        self._records: list[int] = []
        self._ends: list[int] = []
        self._head = 0
        self._start = start

    def add(self, entry: Entry, last: int, record: int, end: int) -> None:
        """Take the next entry; see the columns."""
        self._entries.append(entry)
        self._lasts.append(last)
        self._records.append(record)
        self._ends.append(end)

    @property
    def bytes(self) -> int:
        """What all this costs, roughly."""
        if not self._ends:
            return 0
        return self._ends[-1] - self._start + _OBJECT_BYTES * (len(self._ends) - self._head)

    def shrink(self, limit: int, flushed: int, trim: int) -> None:
        """Forget from the oldest on what is too much or trimmed, but only what is flushed."""
        head, ends, lasts = self._head, self._ends, self._lasts
        while head < len(ends) and ends[head] <= flushed:
            if self.bytes <= limit and lasts[head] >= trim:
                break
            self.first, self._record_before = max(self.first, lasts[head] + 1), self._records[head]
            self.first_fseq += 1
            self._start, self._entries[head] = ends[head], None
            head += 1
            self._head = head
        if head >= _SWEEP and head * 2 >= len(ends):
            del self._entries[:head], self._lasts[:head], self._records[:head], self._ends[:head]
            self._head = 0

    def from_gsn(self, gsn: int) -> int:
        """Return the index of the first entry that ends at or after `gsn`."""
        return bisect_left(self._lasts, gsn, self._head)

    def from_fseq(self, fseq: int) -> int:
        """Return the index of an entry by its number, which is one of those in memory."""
        return self._head + fseq - self.first_fseq

    def at(self, index: int) -> Entry | None:
        """Return an entry by index, None behind the last."""
        return self._entries[index] if index < len(self._entries) else None

    def record_before(self, index: int) -> int:
        """Return the last record before an entry."""
        return self._records[index - 1] if index > self._head else self._record_before
