"""What a task gets of the log: the records of its partition and keys, as its map returns them.

A selection is a pure function of a record, so every owner of a task, at any time, delivers the same
records for the same positions.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from fnmatch import translate
from typing import TYPE_CHECKING, Any, Final

from logplayer.partitions import size_of
from logplayer.ring import RECORD_BYTES
from ziplog.types import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logplayer.contract import Map, TargetSpec
    from logplayer.ring import Ring

#: Maximum number of records that one cut looks at, as they are, and with keys or a map. Each takes
#: a few milliseconds, in which the other tasks wait.
MAX_LOOKED: Final = 10_000
MAX_MAPPED: Final = 1000


class Cut:
    """Selected records of the positions [start, stop), before they are a batch."""

    __slots__ = ("arrived", "is_full", "origins", "records", "size", "start", "stop")

    def __init__(self, start: int, stop: int, arrived: int) -> None:
        """Make an empty cut.

        Args:
            start: its first position.
            stop: the position behind it.
            arrived: when its first record was fetched, in monotonic ns.

        """
        self.start, self.stop, self.arrived = start, stop, arrived
        #: What the target gets, and for each of them the gsn of the log's record.
        self.records: list[Record] = []
        self.origins: list[int] = []
        #: Size of `records`, in bytes.
        self.size = 0
        #: It gets no further records.
        self.is_full = False

    def __len__(self) -> int:
        return len(self.records)

    def positions(self) -> list[int]:
        """Return the gsns of the log's records in it, in order."""
        return sorted(set(self.origins))

    def head(self, stop: int) -> Cut:
        """Return its part below a position."""
        if stop >= self.stop:
            return self
        return self._part(self.start, stop)

    def tail(self, start: int) -> Cut:
        """Return its part from a position on."""
        return self._part(start, self.stop)

    def _part(self, start: int, stop: int) -> Cut:
        part = Cut(start, stop, self.arrived)
        part.is_full = self.is_full
        for record, origin in zip(self.records, self.origins, strict=True):
            if start <= origin < stop:
                part.add([record], origin)
        return part

    def add(self, records: Sequence[Record], origin: int) -> None:
        """Append what one record of the log became."""
        for record in records:
            self.records.append(record)
            self.origins.append(origin)
            self.size += size_of(record)

    def extend(self, more: Cut) -> None:
        """Append the records of the positions that follow."""
        self.records += more.records
        self.origins += more.origins
        self.size += more.size
        self.stop, self.is_full = more.stop, more.is_full


class Selection:
    """The selection of one task."""

    __slots__ = ("_keys", "_map", "_max_bytes", "_max_records", "_partition", "_partitions")

    def __init__(self, spec: TargetSpec, partition: int) -> None:
        """Select the records of a partition, from 0 on."""
        self._partition, self._partitions = partition, spec.partitions
        self._keys: Final = re.compile("|".join(map(translate, spec.keys))) if spec.keys else None
        self._map: Final[Map | None] = spec.map
        self._max_records, self._max_bytes = spec.batch_records, spec.batch_bytes

    def matches(self, record: Record) -> bool:
        """Whether the task gets a record of its partition."""
        if self._keys is None:
            return True
        key = record.key
        if key is None:
            return False
        try:
            return self._keys.match(key.decode()) is not None
        except UnicodeDecodeError:
            return False

    def mapped(self, record: Record) -> list[Record]:
        """Return what the target gets for a record.

        Raises:
            TypeError: the map returned neither None, nor a record, nor a list of records.

        """
        if self._map is None:
            return [record]
        result = self._map(record)
        if result is None:
            return []
        found: list[Any] = result if isinstance(result, list) else [result]
        for one in found:
            if not isinstance(one, Record):
                text = f"the map returned {one!r} for the record {record.rid}"
                raise TypeError(f"{text}; it must return None, a record, or a list of records")
        return found

    def cut(
        self, ring: Ring, start: int, reached: int, limit: int, before: Cut | None = None
    ) -> Cut:
        """Return the next records of a task; without records it covers all that was looked at.

        Args:
            ring: covers `reached`.
            start: the task's position.
            reached: [start, reached) has no record of the task.
            limit: the position to stop at.
            before: the records of the same batch that were taken before; it is not full.

        """
        before = before or Cut(start, start, 0)
        is_plain = self._keys is None and self._map is None
        left = self._max_records - len(before)
        most = min(left, MAX_LOOKED) if is_plain else MAX_MAPPED
        numbers, stop = ring.find(reached, self._partition, self._partitions, most)
        found = Cut(start, max(min(stop, limit), start), 0)
        if is_plain:
            self._add_plain(found, ring, numbers, limit, before)
        else:
            self._add_selected(found, ring, numbers, limit, before)
        found.is_full |= len(found) >= left
        return found

    def _add_plain(
        self, cut: Cut, ring: Ring, numbers: Sequence[int], limit: int, before: Cut
    ) -> None:
        """Add records as they are."""
        origins = [ring.gsns[number - ring.cut] for number in numbers]
        del origins[bisect_left(origins, limit) :]
        count, ends = 0, ring.ends
        for number in numbers[: len(origins)]:
            index = number - ring.cut
            size = cut.size + ends[index + 1] - ends[index] - RECORD_BYTES
            if (count or before.records) and size + before.size > self._max_bytes:
                cut.is_full = True
                cut.stop = min(cut.stop, origins[0])  # If none is added, it was not looked at.
                break
            cut.size = size
            count += 1
        if count:
            cut.records = [ring.records[number - ring.cut] for number in numbers[:count]]
            cut.origins = origins[:count]
            cut.stop = cut.origins[-1] + 1
            cut.arrived = ring.arrived(numbers[0] - ring.cut)

    def _add_selected(
        self, found: Cut, ring: Ring, numbers: Sequence[int], limit: int, before: Cut
    ) -> None:
        """Add what keys select, and what the map makes of it."""
        records, gsns, cut = ring.records, ring.gsns, ring.cut
        for number in numbers:
            index = number - cut
            gsn, record = gsns[index], records[index]
            if gsn >= limit:
                break
            if not self.matches(record):
                continue
            became = self.mapped(record)
            if not became:
                continue
            if self._is_full(found, before, became):
                found.is_full = True
                if not found.records:
                    found.stop = min(found.stop, gsn)
                break
            if not found.records:
                found.arrived = ring.arrived(index)
            found.add(became, gsn)
            found.stop = gsn + 1

    def _is_full(self, cut: Cut, before: Cut, more: list[Record]) -> bool:
        """Whether a batch would be too large with further records; an empty one never is."""
        count = len(before) + len(cut)
        if count and count + len(more) > self._max_records:
            return True
        size = before.size + cut.size
        return count > 0 and size + sum(map(size_of, more)) > self._max_bytes
