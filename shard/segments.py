"""The segment store: a replica's decided entries, in memory while recent and in segment files.

An entry is encoded and given its place in a file on the thread that appends it; the flusher then
only writes. The newest entries are answered from memory, up to a bound, and nothing leaves memory
before it is on stable storage; older ones are read from their block, found by bisection.

Invariant: positions increase from entry to entry and from segment to segment; what is damaged
raises `UnreadableError`, and is never answered as absent (docs/protocol.md, section 10).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from shard.entry import Entry, FullError, Mark, Table, UnreadableError, mark_of_reset
from shard.files import connect, create, following, load, tidy
from shard.flusher import NO_SPACE, Flusher
from shard.recent import Recent
from shard.stored import EXPIRE, HEADER_BYTES, MARK, PLACE, decode, encode
from shard.stored import positions as positions_of
from ziplog.runtime.tracing import halt
from ziplog.wire import Expire, Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shard.segment import Segment
    from ziplog.node import Event
    from ziplog.wire import SessionTable

MIB: Final = 1024 * 1024
#: What an entry counts in `scan` beside its body.
_SCAN_BYTES: Final = 64
#: Above every position.
_NOWHERE: Final = 1 << 63


class SegmentStore:
    """A `Store` (shard/entry.py) in a directory. One thread; the flusher has its own."""

    #: The last entry's stream position; 0 if there never was one.
    last_fseq: int
    #: The last `Mark`, if any.
    mark: Mark | None
    #: The view of the last entry that is kept; 0 if there is none.
    last_view: int

    def __init__(
        self,
        directory: Path,
        segments: list[Segment],
        flusher: Flusher,
        *,
        segment_bytes: int,
        cache_bytes: int,
    ) -> None:
        """Go on after `segments`; use `open`."""
        self._directory, self._flusher = directory, flusher
        self._segment_bytes, self._cache_bytes = segment_bytes, cache_bytes
        self._trim = 0
        self._appended_bytes = 0
        self._go_on(segments)

    def _go_on(self, segments: list[Segment]) -> None:
        """Go on after `segments`, all of them flushed."""
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
        first = _NOWHERE if active.is_torn else active.last + 1
        self._recent = Recent(first, active.last_fseq + 1, self._last_record, self._appended_bytes)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        flush_interval_ms: int = 10,
        segment_bytes: int = 64 * MIB,
        cache_bytes: int = 64 * MIB,
        reserve_bytes: int = 64 * MIB,
        on_event: Callable[[Event], None] | None = None,
        on_halt: Callable[[str], object] = halt,
    ) -> SegmentStore:
        """Open the store in `directory`, which is made if it does not exist.

        A torn end of the last segment is cut off, and logged; so is damage (see `damage`).

        Args:
            directory: of this store alone.
            flush_interval_ms: within how long an entry is flushed; 0: only `flush` does it.
            segment_bytes: a segment that has so many is followed by a new one.
            cache_bytes: how much is kept in memory for readers.
            reserve_bytes: with less free space the store is full.
            on_event: gets `Persisted` and `StorageChanged` from another thread; `start` if None.
            on_halt: ends the process when it is not known what is on the disk.

        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        segments = load(directory)
        flusher = Flusher(
            directory,
            segments[-1],
            interval_s=flush_interval_ms / 1000,
            reserve_bytes=reserve_bytes,
            on_halt=on_halt,
        )
        store = cls(
            directory, segments, flusher, segment_bytes=segment_bytes, cache_bytes=cache_bytes
        )
        for first, last in store.damage:
            structlog.get_logger().error(
                "entries are damaged", directory=str(directory), first=first, last=last
            )
        if on_event is not None:
            store.start(on_event)
        return store

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Flush from now on, and tell `on_event` (see `open`) about it. Once."""
        self._flusher.start(on_event)

    @property
    def backlog_bytes(self) -> int:
        """Bytes appended and not yet on stable storage; whoever appends keeps them bounded."""
        return self._flusher.backlog_bytes

    @property
    def is_full(self) -> bool:
        """Whether there is less space than the reserve."""
        return self._flusher.is_full

    @property
    def flushed_fseq(self) -> int:
        """The last entry on stable storage."""
        return self._flusher.flushed_fseq

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
        """First and last number of entries that were damaged or missing when the store was opened.

        What was flushed by a start before is looked at when it is read.
        """
        return [hole for segment in self._segments for hole in segment.holes]

    # --- writing -----------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        """Take the next entry, or a `Mark` or `Table`. It is found at once, and written later."""
        if self._active.size >= self._segment_bytes:
            self._rotate()
        self._put(entry)

    def _put(self, entry: Entry) -> None:
        kind, first, last, record = positions_of(entry)
        segment, flusher = self._active, self._flusher
        if kind < MARK:
            assert entry.fseq == self.last_fseq + 1, "the log has a gap"
            if entry.view != self.last_view or not segment.views:
                self._turn_view(entry)
            self.last_fseq = entry.fseq
        place = self.last_fseq
        header, body = encode(entry, segment.salt, kind, first, last, place, flusher.flushed_fseq)
        size = HEADER_BYTES + len(body)
        if kind >= MARK:
            self._note(entry, size)
        elif kind != EXPIRE:
            if segment.is_torn:
                # What is below may have been in what is damaged.
                self._recent.first = first
            self._last = last
            self._last_record = record or self._last_record
        segment.add(kind, first, last, record, place, size)
        flusher.put(segment, header, body, place)
        self._appended_bytes += size
        if kind < MARK:
            recent = self._recent
            recent.add(entry, self._last, self._last_record, self._appended_bytes)
            if recent.bytes > self._cache_bytes:
                recent.shrink(self._cache_bytes, flusher.flushed_bytes, 0)

    def _turn_view(self, entry: Entry) -> None:
        assert entry.view >= self.last_view, "a view went backwards"
        self.last_view = entry.view
        self._active.add_view(entry.view, entry.fseq)

    def _note(self, entry: Entry, size: int) -> None:
        """Take note of a `Mark` or `Table` that is about to be added."""
        segment = self._active
        if isinstance(entry.decision, Mark):
            segment.mark = self.mark = entry.decision
        else:
            segment.tables.append((segment.size, size, self.last_fseq))

    def _rotate(self) -> None:
        before = self._active
        segment = following(before, before.last + 1, before.last_fseq + 1)
        connect([before, segment])
        self._segments.append(segment)
        self._bases.append(segment.base)
        self._active = segment
        if self.mark is not None:
            self._put(Entry(0, 0, self.mark))

    def flush(self) -> bool:
        """Put everything on stable storage; False if there is no space for it now."""
        return self._flusher.flush()

    def close(self) -> bool:
        """Flush, and stop the thread; False if something could not be written."""
        return self._flusher.close()

    def trim(self, gsn: int) -> None:
        """Delete the segments that lie wholly below `gsn`; never the one that grows.

        Nor the last entry, nor the last table that no truncation can drop, and what follows it.
        """
        self._trim = max(self._trim, gsn)
        count = min(max(bisect_right(self._bases, gsn) - 1, 0), self._needed_from())
        self._recent.shrink(self._cache_bytes, self._flusher.flushed_bytes, gsn)
        if count:
            gone, self._segments = self._segments[:count], self._segments[count:]
            del self._bases[:count]
            self._flusher.remove([name for s in gone for name in (s.index_name, s.name)])

    def _needed_from(self) -> int:
        """Return the index of the first segment that is needed whatever is trimmed."""
        stable = self.mark.stable if self.mark else 0
        last = len(self._segments) - 1
        table = next(
            (
                index
                for index in range(last, -1, -1)
                if any(fseq <= stable for _, _, fseq in self._segments[index].tables)
            ),
            last,
        )
        entry = next((i for i in range(last, -1, -1) if self._segments[i].views), last)
        return min(table, entry)

    # --- cutting -----------------------------------------------------------------------------

    def truncate(self, fseq: int) -> None:
        """Drop every entry after `fseq`, for good; the next one is `fseq + 1`. Slow.

        A crash leaves all of them, or none.

        Raises:
            FullError: there is no space for it; nothing has changed.
            UnreadableError: the file that holds it cannot be read.

        """
        assert self.first_fseq - 1 <= fseq <= self.last_fseq, "the log does not reach there"
        assert self.mark is None or self.mark.stable <= fseq, "what was stable is dropped"
        if fseq == self.last_fseq:
            return
        self._flush_all()
        segment = self._segment_with(fseq)
        end = segment.base if fseq < self.first_fseq else segment.last_at(self._directory, fseq) + 1
        self._begin(following(self._active, end, fseq + 1), self.mark)

    def reset(self, fseq: int, gsn: int) -> None:
        """Drop everything, for good: the next entry is `fseq + 1`, at `gsn` or later. Slow.

        What is below `gsn` counts as trimmed, and what was before as stable.

        Raises:
            FullError: there is no space for it; nothing has changed.

        """
        self._flush_all()
        mark = mark_of_reset(self.mark, fseq, gsn) if self.mark else None
        self._begin(following(self._active, gsn, fseq + 1, is_first=True), mark)

    def _flush_all(self) -> None:
        if not self._flusher.flush():
            raise FullError(f"no space in {self._directory}: what is waiting must be written first")

    def _begin(self, segment: Segment, mark: Mark | None) -> None:
        """Let the log go on in a new segment, which makes what it does not follow void."""
        contents = b""
        if mark is not None:
            place = segment.last_fseq
            header, body = encode(Entry(0, 0, mark), segment.salt, MARK, 0, 0, place, place)
            contents = header + body
            segment.add(MARK, 0, 0, 0, place, len(contents))
            segment.mark, segment.flushed = mark, len(contents)
        try:
            create(self._directory, segment, contents)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise FullError(f"no space in {self._directory} to cut the log: {error}") from error
            raise
        self._flusher.turn(segment)
        self._go_on(connect(tidy(self._directory, [*self._segments, segment])))

    # --- reading -----------------------------------------------------------------------------

    def find(self, gsn: int) -> Entry | None:
        """Return the `Place` that holds `gsn` or the `Skip` that covers it, else None.

        Raises:
            UnreadableError: the bytes that would tell are damaged.

        """
        if gsn >= self._recent.first:
            entry = self._recent.at(self._recent.from_gsn(gsn))
        else:
            entry = self._stored(gsn)
        return entry if entry is not None and _covers(entry, gsn) else None

    def _stored(self, gsn: int) -> Entry | None:
        """Return the stored entry whose positions reach over `gsn`."""
        segment = self._segment_of(gsn)
        if segment is None:
            self._check_trimmed(gsn)
            return None
        if gsn > segment.last:
            self._check_torn(segment, gsn)
            return None
        data, entries = segment.read(self._directory, segment.block_at(gsn))
        for found in entries:
            if found.last >= gsn:
                return decode(data, found) if found.first <= gsn else None
        return None

    def scan(self, gsn: int, limit_bytes: int) -> list[Entry]:
        """Return `Place` and `Skip` entries in order, from the first that ends at or after `gsn`.

        About `limit_bytes` of bodies (an entry counts 64 more); at least one if there is any.

        Raises:
            UnreadableError: the first of them is damaged.

        """
        result: list[Entry] = []
        left = limit_bytes
        try:
            while gsn < self._recent.first and left > 0:
                gsn, left = self._scan_block(gsn, left, result)
        except UnreadableError:
            if not result:
                raise
            return result
        index = self._recent.from_gsn(gsn)
        while left > 0 or not result:
            entry = self._recent.at(index)
            if entry is None:
                break
            if not isinstance(entry.decision, Expire):
                result.append(entry)
                left -= _weight(entry)
            index += 1
        return result

    def _scan_block(self, gsn: int, left: int, result: list[Entry]) -> tuple[int, int]:
        """Add the entries of the block of `gsn`; return where to go on, and what is left."""
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
            if found.last < gsn or found.first >= self._recent.first:
                continue
            if left <= 0 and result:
                return found.first, left
            entry = decode(data, found)
            result.append(entry)
            left -= _weight(entry)
        return min(segment.block_last(block) + 1, self._recent.first), left

    def view_at(self, fseq: int) -> int:
        """Return the view of an entry; 0 if it is not kept."""
        return self._segment_with(fseq).view_at(fseq) if fseq >= self.first_fseq else 0

    def last_of(self, view: int) -> int:
        """Return the last entry whose view is `view` or less; 0 if none is kept."""
        return next((last for s in reversed(self._segments) if (last := s.last_of(view))), 0)

    def read_after(self, fseq: int, limit_bytes: int) -> list[Entry]:
        """Return the entries after `fseq`, in order and without a gap; `Expire` too.

        They begin with the first that is kept if that is later. About `limit_bytes` of bodies (an
        entry counts 64 more); at least one if there is any.

        Raises:
            UnreadableError: the first of them is damaged.

        """
        fseq = max(fseq + 1, self.first_fseq)
        result: list[Entry] = []
        left = max(limit_bytes, 1)
        try:
            while fseq < self._recent.first_fseq and left > 0:
                fseq, left = self._read_block(fseq, left, result)
        except UnreadableError:
            if not result:
                raise
            return result
        while left > 0:
            entry = self._recent.at(self._recent.from_fseq(fseq))
            if entry is None:
                break
            result.append(entry)
            left -= _weight(entry)
            fseq += 1
        return result

    def _read_block(self, fseq: int, left: int, result: list[Entry]) -> tuple[int, int]:
        """Add entries of one block, from `fseq` on; return where to go on, and what is left."""
        segment = self._segment_with(fseq)
        data, entries = segment.read_from(self._directory, fseq)
        if not entries:
            raise UnreadableError(f"entry {fseq} is missing in {segment.name}")
        for found in entries:
            if found.fseq != fseq:
                raise UnreadableError(f"entry {fseq} is damaged in {segment.name}")
            if left <= 0 or fseq >= self._recent.first_fseq:
                break
            entry = decode(data, found)
            result.append(entry)
            left -= _weight(entry)
            fseq += 1
        return fseq, left

    def last_table(self) -> tuple[int, list[SessionTable]]:
        """Return the last `Table` on stable storage, and the last entry before it; or 0, nothing.

        If it is damaged, the one before it serves; so does the beginning of the log, if it is kept.

        Raises:
            UnreadableError: it is damaged, and nothing else serves.

        """
        self._flusher.flush()
        fault: UnreadableError | None = None
        for segment in reversed(self._segments):
            for start, size, fseq in reversed(segment.tables):
                try:
                    data, found = segment.read_table(self._directory, start, size)
                    table = decode(data, found).decision
                except UnreadableError as error:
                    fault = fault or error
                    continue
                assert isinstance(table, Table), "something else is where a table was put"
                return fseq, table.sessions
        if fault is not None and self.first_fseq > 1:
            raise fault
        return 0, []

    def last_record_below(self, gsn: int) -> int:
        """Return the highest gsn below `gsn` that holds a record; 0 if there is none."""
        record = self._last_record if gsn > self._last_record else self._record_below(gsn)
        return record if record >= self._trim else 0

    def _record_below(self, gsn: int) -> int:
        if gsn >= self._recent.first:
            index = self._recent.from_gsn(gsn)
            found = _record_in(self._recent.at(index), gsn)
            return found or self._recent.record_before(index)
        segment = self._segment_of(gsn)
        if segment is None:
            return 0
        if gsn > segment.last:
            return segment.last_record or segment.record_before
        block = segment.block_at(gsn)
        return self._record_in_block(segment, block, gsn) or segment.record_up_to(block)

    def _record_in_block(self, segment: Segment, block: int, gsn: int) -> int:
        """Return the block's last record below `gsn` that can be read, 0 if there is none."""
        try:
            data, entries = segment.read(self._directory, block)
        except UnreadableError:
            return 0
        for found in reversed(entries):
            if found.first >= gsn or found.kind != PLACE:
                continue
            if found.last < gsn:
                return found.last
            with suppress(UnreadableError):
                return _record_in(decode(data, found), gsn)
        return 0

    def _segment_of(self, gsn: int) -> Segment | None:
        index = bisect_right(self._bases, gsn) - 1
        return self._segments[index] if index >= 0 else None

    def _segment_with(self, fseq: int) -> Segment:
        """Return the segment of an entry, or the one before the hole that it is in."""
        index = bisect_right(self._segments, fseq, key=lambda segment: segment.base_fseq) - 1
        return self._segments[max(index, 0)]

    def _next_base(self, segment: Segment) -> int:
        index = bisect_right(self._bases, segment.base)
        return self._bases[index] if index < len(self._bases) else self._recent.first

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
    body = decision.body if isinstance(decision, Place) else None
    return _SCAN_BYTES + (len(body) if body else 0)
