"""Reads the log: recent entries from the cache, older ones from a block of a segment file.

Positions and entries are found by bisection, first over the segments, then over a segment's blocks.
Invariant: positions and numbers increase from segment to segment; a damaged entry raises
`UnreadableError`, and is never reported as absent (docs/protocol.md, section 10).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from shard.storage.entry_cache import EntryCache
from shard.storage.segment_files import holes
from ziplog.core.entries import Expire, Place
from ziplog.segments.entry import BusyError, UnreadableError
from ziplog.segments.entry_codec import MARK, PLACE, decode
from ziplog.segments.entry_codec import positions as positions_of
from ziplog.wire import MAX_STEPS, Step

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.segments.entry import Entry, WatermarkRecord
    from ziplog.segments.segment import Segment

#: Bytes that `scan` counts for an entry in addition to its body.
_SCAN_BYTES: Final = 64
#: Bytes that `scan` counts for each further gsn of an entry.
_GSN_BYTES: Final = 9
#: A gsn above every position.
ABOVE_EVERY_GSN: Final = 1 << 63


class SegmentReader:
    """The reading half of a segment store (shard/storage/segment_store.py)."""

    #: The last entry's stream position; 0 if there never was one.
    last_fseq: int
    #: The last `WatermarkRecord`, if any.
    mark: WatermarkRecord | None
    #: The view of the last entry that is kept; 0 if there is none.
    last_view: int

    def __init__(self, directory: Path, segments: list[Segment]) -> None:
        """Read `segments` in `directory`; all of them are flushed."""
        self._directory = directory
        self._trim = 0
        #: Bytes appended so far.
        self._appended_bytes = 0
        self._continue_with(segments)

    def _continue_with(self, segments: list[Segment]) -> None:
        """Continue after `segments`, all of them flushed."""
        assert segments, "there is always a segment to append to"
        self._segments = segments
        self._bases = [segment.base for segment in segments]
        self._active = active = segments[-1]
        self.last_fseq = active.last_fseq
        self.last_view = next((s.views[-1][0] for s in reversed(segments) if s.views), 0)
        self.mark = next((s.mark for s in reversed(segments) if s.mark), None)
        self._trim = max(self._trim, self.mark.trim if self.mark else 0)
        if segments[0].is_first:
            self._trim = max(self._trim, segments[0].base)
        self._last = active.last
        self._last_record = active.last_record or active.record_before
        first = ABOVE_EVERY_GSN if active.is_torn else active.last + 1
        self._cache = EntryCache(
            first, active.last_fseq + 1, self._last_record, self._appended_bytes
        )

    @property
    def first_fseq(self) -> int:
        """The first entry that is kept; `last_fseq + 1` if there is none."""
        return self._segments[0].base_fseq

    @property
    def last_end(self) -> int:
        """The gsn after the last decided position; 1 if there never was one."""
        return self._last + 1

    @property
    def damage(self) -> list[tuple[int, int]]:
        """First and last numbers of entries that were damaged or missing when the store was opened.

        The start does not read sealed segments: a later read finds their damage.
        """
        return holes(self._segments)

    # --- reading -----------------------------------------------------------------------------

    def find(self, gsn: int) -> Entry | None:
        """Return the `Place` that holds `gsn` or the `Skip` that covers it, else None.

        Raises:
            UnreadableError: the bytes at that position are damaged.

        """
        if gsn >= self._cache.first:
            entry = self._cache.at(self._cache.from_gsn(gsn))
        else:
            entry = self._stored(gsn)
        return entry if entry is not None and _covers(entry, gsn) else None

    def _stored(self, gsn: int) -> Entry | None:
        """Return the stored entry with `gsn` in its range of positions."""
        segment = self._segment_of(gsn)
        if segment is None:
            self._check_trimmed(gsn)
            return None
        if gsn > segment.last:
            self._check_torn(segment, gsn)
            return None
        data, found = segment.find(self._directory, gsn)
        return decode(data, found, segment.name) if found is not None else None

    def scan(self, gsn: int, limit_bytes: int, max_entries: int = sys.maxsize) -> list[Entry]:
        """Return `Place` and `Skip` entries in order, from the first that ends at or after `gsn`.

        About `limit_bytes` of bodies (plus 64 per entry), and at most `max_entries`; at least one
        if there is any.

        Raises:
            UnreadableError: the first of them is damaged.

        """
        result: list[Entry] = []
        left = limit_bytes
        try:
            while gsn < self._cache.first and left > 0:
                gsn, left = self._scan_block(gsn, left, max_entries, result)
        except UnreadableError:
            if not result:
                raise
            return result
        index = self._cache.from_gsn(gsn)
        while (left > 0 and len(result) < max_entries) or not result:
            entry = self._cache.at(index)
            if entry is None:
                break
            if not isinstance(entry.decision, Expire):
                result.append(entry)
                left -= _weight(entry)
            index += 1
        return result

    def _scan_block(
        self, gsn: int, left: int, max_entries: int, result: list[Entry]
    ) -> tuple[int, int]:
        """Add the entries of the block of `gsn`; return the next gsn and the remaining limit."""
        segment = self._segment_of(gsn)
        if segment is None:
            self._check_trimmed(gsn)
            return self._bases[0], left
        if gsn > segment.last:
            self._check_torn(segment, gsn)
            return self._next_base(segment), left
        block = segment.block_at(gsn)
        data, entries = segment.read(self._directory, block)
        for found in entries:
            if found.last < gsn or found.first >= self._cache.first:
                continue
            if (left <= 0 or len(result) >= max_entries) and result:
                return found.first, 0
            entry = decode(data, found, segment.name)
            result.append(entry)
            left -= _weight(entry)
        return min(segment.block_last(block) + 1, self._cache.first), left

    def outline(self, start: int, stop: int) -> list[Step]:
        """Return the stored bytes of positions [start, stop), in stretches of about equal size.

        A stretch ends with a block of a segment, or at `stop`. At most `MAX_STEPS`.
        """
        index = max(bisect_right(self._bases, start) - 1, 0)
        over = [s for s in self._segments[index:] if s.base < stop and s.last >= start]
        least = max(2 * sum(segment.size for segment in over) // MAX_STEPS, 1)
        steps: list[Step] = []
        gathered = 0
        for segment in over:
            ends, count = segment.ends, len(segment.ends)
            block, until = segment.block_at(start), segment.block_at(stop - 1)
            at = ends[block - 1] if block else 0
            while block <= count:
                # Bisection, since a scan over all blocks is slow. The last block is still open.
                block = min(bisect_left(ends, at + least - gathered, block), until)
                end = ends[block] if block < count else segment.size
                last = segment.block_last(block)
                gathered += end - at
                at, block = end, block + 1
                if last + 1 >= stop:
                    return [*steps, Step(stop, gathered)]
                if gathered >= least:
                    _extend(steps, last + 1, gathered)
                    gathered = 0
        if gathered:
            _extend(steps, over[-1].last + 1, gathered)
        return steps

    def view_at(self, fseq: int) -> int:
        """Return the view of an entry; 0 if it is not kept."""
        return self._segment_with(fseq).view_at(fseq) if fseq >= self.first_fseq else 0

    def views_at(self, fseq: int) -> tuple[int, int]:
        """Return the lowest and the highest view that an entry can have; 0, 0 if it is not kept."""
        return self._segment_with(fseq).views_at(fseq) if fseq >= self.first_fseq else (0, 0)

    def last_of(self, view: int) -> int:
        """Return the last entry with a view of at most `view`; 0 if none is kept."""
        return next((last for s in reversed(self._segments) if (last := s.last_of(view))), 0)

    def read_after(self, fseq: int, limit_bytes: int) -> list[Entry]:
        """Return the entries after `fseq`, in order and without a gap; `Expire` too.

        They begin with the first kept entry if that is later. About `limit_bytes` of bodies (plus
        64 per entry); at least one entry if there is any.

        Raises:
            UnreadableError: the first of them is damaged.

        """
        fseq = max(fseq + 1, self.first_fseq)
        result: list[Entry] = []
        left = max(limit_bytes, 1)
        try:
            while fseq < self._cache.first_fseq and left > 0:
                fseq, left = self._read_block(fseq, left, result)
        except UnreadableError:
            if not result:
                raise
            return result
        while left > 0:
            entry = self._cache.at(self._cache.from_fseq(fseq))
            if entry is None:
                break
            result.append(entry)
            left -= _weight(entry)
            fseq += 1
        return result

    def _read_block(self, fseq: int, left: int, result: list[Entry]) -> tuple[int, int]:
        """Add entries of one block, from `fseq` on; return the next one and the remaining limit."""
        segment = self._segment_with(fseq)
        data, entries = segment.read_from(self._directory, fseq)
        if not entries:
            raise UnreadableError(f"entry {fseq} is missing in {segment.name}")
        for found in entries:
            if found.fseq != fseq:
                raise UnreadableError(f"entry {fseq} is damaged in {segment.name}")
            if left <= 0 or fseq >= self._cache.first_fseq:
                break
            entry = decode(data, found, segment.name)
            result.append(entry)
            left -= _weight(entry)
            fseq += 1
        return fseq, left

    def last_record_below(self, gsn: int) -> int:
        """Return the highest gsn below `gsn` that holds a record; 0 if there is none.

        Raises:
            BusyError: the system refuses to read the file now.

        """
        record = self._last_record if gsn > self._last_record else self._record_below(gsn)
        return record if record >= self._trim else 0

    def _record_below(self, gsn: int) -> int:
        if gsn >= self._cache.first:
            index = self._cache.from_gsn(gsn)
            found = _record_in(self._cache.at(index), gsn)
            return found or self._cache.record_before(index)
        segment = self._segment_of(gsn)
        if segment is None:
            return 0
        if gsn > segment.last:
            return segment.last_record or segment.record_before
        block = segment.block_at(gsn)
        return self._record_in_block(segment, block, gsn) or segment.record_up_to(block)

    def _record_in_block(self, segment: Segment, block: int, gsn: int) -> int:
        """Return the block's last readable record below `gsn`; 0 if there is none."""
        try:
            data, entries = segment.read(self._directory, block)
        except BusyError:
            raise
        except UnreadableError:
            return 0
        for found in reversed(entries):
            if found.first >= gsn or found.kind != PLACE:
                continue
            if found.last < gsn:
                return found.last
            with suppress(UnreadableError):
                return _record_in(decode(data, found, segment.name), gsn)
        return 0

    def _segment_of(self, gsn: int) -> Segment | None:
        index = bisect_right(self._bases, gsn) - 1
        return self._segments[index] if index >= 0 else None

    def _segment_with(self, fseq: int) -> Segment:
        """Return the segment of an entry, or the segment before the entry's hole."""
        index = bisect_right(self._segments, fseq, key=lambda segment: segment.base_fseq) - 1
        return self._segments[max(index, 0)]

    def _next_base(self, segment: Segment) -> int:
        index = bisect_right(self._bases, segment.base)
        return self._bases[index] if index < len(self._bases) else self._cache.first

    def _check_trimmed(self, gsn: int) -> None:
        if gsn >= max(self._trim, 1):
            raise UnreadableError(f"gsn {gsn} was in a segment that is missing")

    def _check_torn(self, segment: Segment, gsn: int) -> None:
        if segment.is_torn:
            raise UnreadableError(f"gsn {gsn} was in the damaged end of {segment.name}")


def _covers(entry: Entry, gsn: int) -> bool:
    decision = entry.decision
    if isinstance(decision, Place):
        gsns = decision.gsns
        index = bisect_left(gsns, gsn)
        return index < len(gsns) and gsns[index] == gsn
    kind, first, last, _ = positions_of(entry)
    return kind < MARK and first <= gsn <= last


def _record_in(entry: Entry | None, gsn: int) -> int:
    """Return the last record of an entry below `gsn`, 0 if there is none."""
    if entry is None or not isinstance(entry.decision, Place):
        return 0
    gsns = entry.decision.gsns
    index = bisect_left(gsns, gsn)
    return gsns[index - 1] if index else 0


def _weight(entry: Entry) -> int:
    decision = entry.decision
    if not isinstance(decision, Place):
        return _SCAN_BYTES
    return _SCAN_BYTES + _GSN_BYTES * (len(decision.gsns) - 1) + len(decision.body or b"")


def _extend(steps: list[Step], stop: int, size: int) -> None:
    """Add a stretch; bytes without a position (watermark records, tables) join the previous one."""
    if steps and steps[-1].stop == stop:
        size += steps.pop().size
    steps.append(Step(stop, size))
