"""Records in order: the last part of the log that the feed returned, or what one task needs next.

The ring covers the positions [start, stop). It drops records from the front only while its size
exceeds the bound, and at least one record stays. It knows the records of each partition, so a task
does not look at those of others.

Invariant: the ring holds every record of the log in [start, stop), in order; or, if it is made for
one partition, every one of these.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from logplayer.partitions import hash_of, partition_of, size_of
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

#: Memory that Python needs for a record, besides its payload and key, in bytes.
RECORD_BYTES: Final = 400
#: Number of dropped records at the fronts of the lists from which on they are cut.
_CUT_RECORDS: Final = 4096
#: In the place of a record that was dropped: its memory is free before the lists are cut.
_DROPPED: Final = Record(RecordId(0, 0), b"", None, 0, 0)


class Found(NamedTuple):
    """The records of a partition from a position on."""

    #: Their numbers, in order: `number - Ring.cut` is an index of the ring's lists.
    numbers: Sequence[int]
    #: All records of the partition below it are among them.
    stop: int


class Ring:
    """Records in order, up to a size."""

    __slots__ = ("_arrived", "_first", "_only", "_parts", "cut", "ends", "gsns", "memory_bytes",
                 "records", "start", "stop")  # fmt: skip

    def __init__(
        self,
        memory_bytes: int,
        counts: Collection[int] = (),
        only: tuple[int, int] | None = None,
    ) -> None:
        """Make an empty ring that covers nothing.

        Args:
            memory_bytes: the bound of its size.
            counts: numbers of partitions that tasks look for; 1 may be left out.
            only: a partition and the number of partitions: no other records are kept.

        """
        self.memory_bytes: Final = memory_bytes
        self._only: Final = None if only is None or only[1] == 1 else only
        self.start = self.stop = 0
        #: Parallel lists. What is before `_first` was dropped.
        self.records: list[Record] = []
        self.gsns: list[int] = []
        self._arrived: list[int] = []
        #: Bytes of memory that records were added with: before each one of the lists, and in all.
        self.ends: list[int] = [0]
        self._first = 0
        #: How many records were cut from the lists.
        self.cut = 0
        #: By number of partitions: the numbers of each partition's records.
        self._parts: Final[dict[int, list[list[int]]]] = {
            count: [[] for _ in range(count)] for count in counts if count > 1
        }

    def __len__(self) -> int:
        return len(self.records) - self._first

    @property
    def size(self) -> int:
        """Size of the records in memory, in bytes."""
        return self.ends[-1] - self.ends[self._first]

    def reset(self, position: int) -> None:
        """Drop all records; cover nothing, from a position on."""
        self.start = self.stop = position
        self._first = self.cut = 0
        for part in (self.records, self.gsns, self._arrived):
            part.clear()
        self.ends[:] = [0]
        for parts in self._parts.values():
            for numbers in parts:
                numbers.clear()

    def append(self, records: Sequence[Record], now: int) -> None:
        """Add the records that follow `stop`; `now`: when they arrived, in monotonic ns."""
        if not records:
            return
        stop, kept = records[-1].rid.gsn + 1, records
        if self._only is not None:
            partition, count = self._only
            kept = [one for one in records if partition_of(one, count) == partition]
        elif self._parts:
            self._place(records)
        sizes = [len(one.payload) + len(one.key or b"") + RECORD_BYTES for one in kept]
        self.records += kept
        self.gsns += [one.rid.gsn for one in kept]
        self.ends += accumulate(sizes, initial=self.ends.pop())
        self._arrived += [now] * len(kept)
        self.stop = stop
        self._drop()

    def _place(self, records: Sequence[Record]) -> None:
        """Note the partition of each record that is about to be added."""
        hashes = [hash_of(one) for one in records]
        first = self.cut + len(self.records)
        for count, parts in self._parts.items():
            for number, value in enumerate(hashes, first):
                parts[value % count].append(number)

    def extend(self, stop: int) -> None:
        """Cover the positions up to `stop`, which have no further record."""
        self.stop = max(self.stop, stop)

    def _drop(self) -> None:
        """Drop from the front what exceeds the bound."""
        former, last = self._first, len(self.records) - 1
        first = min(bisect_left(self.ends, self.ends[-1] - self.memory_bytes, lo=former), last)
        if first <= former:
            return
        self.start = self.gsns[first - 1] + 1
        self.records[former:first] = [_DROPPED] * (first - former)
        self._first = first
        if first >= _CUT_RECORDS:
            self._cut_lists(first)

    def _cut_lists(self, first: int) -> None:
        for part in (self.records, self.gsns, self.ends, self._arrived):
            del part[:first]
        self._first = 0
        self.cut += first
        for parts in self._parts.values():
            for numbers in parts:
                del numbers[: bisect_left(numbers, self.cut)]

    def has_record(self, position: int) -> bool:
        """Whether it has a record at or after a position that it covers."""
        return bool(self.gsns) and self.gsns[-1] >= position

    def covers(self, position: int) -> bool:
        """Whether a reader at a position needs no other source."""
        return self.start <= position <= self.stop

    def index(self, position: int) -> int:
        """Return the index of the first record at or after a position that the ring covers."""
        assert self.covers(position), f"{position} is not in [{self.start}, {self.stop}]"
        return bisect_left(self.gsns, position, lo=self._first)

    def ahead(self, position: int) -> int:
        """Return the bytes in memory of the records from a position on that the ring covers."""
        return self.ends[-1] - self.ends[self.index(position)]

    def find(self, position: int, partition: int, count: int, most: int) -> Found:
        """Return the records of a partition from a position on that the ring covers.

        Args:
            position: a gsn.
            partition: from 0 to `count` - 1.
            count: number of partitions; 1, or one of those that the ring was made for.
            most: maximum number of records.

        """
        first = self.index(position) + self.cut
        if count == 1 or self._only is not None:
            assert count == 1 or self._only == (partition, count)
            end = self.cut + len(self.records)
            last = min(first + most, end)
            stop = self.stop if last == end else self.gsns[last - self.cut]
            return Found(range(first, last), stop)
        numbers = self._parts[count][partition]
        at = bisect_left(numbers, first)
        last = at + most
        stop = self.stop if last >= len(numbers) else self.gsns[numbers[last] - self.cut]
        return Found(numbers[at:last], stop)

    def arrived(self, index: int) -> int:
        """Return when a record arrived, in monotonic ns."""
        return self._arrived[index]

    def check(self) -> None:
        """Assert the invariants that can be seen here."""
        assert self.start <= self.stop
        kept = self.gsns[self._first :]
        assert kept == sorted(set(kept)), "records are out of order"
        assert not kept or self.start <= kept[0] <= kept[-1] < self.stop
        assert self.ends == sorted(set(self.ends))
        assert len(self.ends) == len(self.records) + 1
        assert self.size <= self.memory_bytes or len(kept) <= 1
        sizes = [size_of(one) for one in self.records[: self._first]]
        assert not any(sizes), "a dropped record is kept"
