"""The records that the tasks of a process share: the last part of the log that the feed returned.

The ring covers the positions [start, stop). It drops records from the front only while their size
exceeds the bound, and at least one record stays.

Invariant: the ring holds every record of the log in [start, stop), in order.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from logplayer.partitions import hash_of, size_of
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The lists are cut once so many records were dropped from their fronts.
_CUT_RECORDS: Final = 4096
#: In the place of a record that was dropped: its memory is free before the lists are cut.
_DROPPED: Final = Record(RecordId(0, 0), b"", None, 0, 0)


class Ring:
    """Records in order, up to a size."""

    __slots__ = ("_arrived", "_first", "_sizes", "gsns", "hashes", "memory_bytes", "records",
                 "size", "start", "stop")  # fmt: skip

    def __init__(self, memory_bytes: int) -> None:
        """Make an empty ring that covers nothing; `memory_bytes`: the bound of its size."""
        self.memory_bytes: Final = memory_bytes
        self.start = self.stop = 0
        #: Size of the records' payloads and keys, in bytes.
        self.size = 0
        #: Parallel lists. What is before `_first` was dropped.
        self.records: list[Record] = []
        self.gsns: list[int] = []
        self.hashes: list[int] = []
        self._sizes: list[int] = []
        self._arrived: list[int] = []
        self._first = 0

    def __len__(self) -> int:
        return len(self.records) - self._first

    def reset(self, position: int) -> None:
        """Drop all records; cover nothing, from a position on."""
        self.start = self.stop = position
        self.size = self._first = 0
        for part in (self.records, self.gsns, self.hashes, self._sizes, self._arrived):
            part.clear()

    def append(self, records: Sequence[Record], now: int) -> None:
        """Add the records that follow `stop`; `now`: when they arrived, in monotonic ns."""
        for record in records:
            size = size_of(record)
            self.records.append(record)
            self.gsns.append(record.rid.gsn)
            self.hashes.append(hash_of(record))
            self._sizes.append(size)
            self._arrived.append(now)
            self.size += size
        if records:
            self.stop = records[-1].rid.gsn + 1
            self._drop()

    def extend(self, stop: int) -> None:
        """Cover the positions up to `stop`, which have no further record."""
        self.stop = max(self.stop, stop)

    def _drop(self) -> None:
        """Drop from the front what exceeds the bound."""
        first, last = self._first, len(self.records) - 1
        while self.size > self.memory_bytes and first < last:
            self.size -= self._sizes[first]
            self.start = self.gsns[first] + 1
            self.records[first] = _DROPPED
            first += 1
        self._first = first
        if first >= _CUT_RECORDS:
            for part in (self.records, self.gsns, self.hashes, self._sizes, self._arrived):
                del part[:first]
            self._first = 0

    def covers(self, position: int) -> bool:
        """Whether a reader at a position needs no other source."""
        return self.start <= position <= self.stop

    def index(self, position: int) -> int:
        """Return the index of the first record at or after a position that the ring covers."""
        assert self.covers(position), f"{position} is not in [{self.start}, {self.stop}]"
        return bisect_left(self.gsns, position, lo=self._first)

    def arrived(self, index: int) -> int:
        """Return when a record arrived, in monotonic ns."""
        return self._arrived[index]

    def check(self) -> None:
        """Assert the invariants that can be seen here."""
        assert self.start <= self.stop
        kept = self.gsns[self._first :]
        assert kept == sorted(set(kept)), "records are out of order"
        assert not kept or self.start <= kept[0] <= kept[-1] < self.stop
        assert self.size == sum(self._sizes[self._first :])
        assert self.size <= self.memory_bytes or len(kept) <= 1
        assert self.size == sum(map(size_of, self.records)), "a dropped record is kept"
