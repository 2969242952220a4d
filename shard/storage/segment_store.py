"""The segment store: a replica's decided entries, in memory while cache and in segment files.

An entry is encoded and given its place in a file on the thread that appends it; the flusher then
only writes. Nothing leaves memory before it is on stable storage. How it is read:
shard/storage/segment_reader.py.

Rule: a change of what is stored already (a cut, a repair) is one new file that counts as soon as it
has its name. Invariant: numbers, positions and views increase from entry to entry
(docs/protocol.md, section 10).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from shard.storage.flusher import Flusher
from shard.storage.segment_files import (
    link_segments,
    create,
    delete,
    delete_rows,
    new_segment_after,
    load,
    file_names,
    remove_void,
)
from shard.storage.segment_reader import NOWHERE, SegmentReader
from shard.storage.segment_rewrite import (
    readable_entries,
    rewrite_segment,
    missing_around,
    missing_from,
)
from shard.storage.store import FullError, watermark_after_reset
from ziplog.runtime.process_logging import halt
from ziplog.segments.entry import (
    Entry,
    SessionTablePartRecord,
    SessionTableRecord,
    UnreadableError,
    WatermarkRecord,
)
from ziplog.segments.entry_codec import EXPIRE, HEADER_BYTES, MARK, decode, encode
from ziplog.segments.entry_codec import positions as positions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ziplog.core.entries import SessionTable
    from ziplog.core.node import Event
    from ziplog.segments.segment import Segment

MIB: Final = 1024 * 1024
#: Who reads in bulk has a segment sealed that has this part of what it may have.
_LEAST_PART: Final = 8


class _Part(NamedTuple):
    """Where a part of a table is."""

    #: The index of its segment.
    segment: int
    start: int
    size: int
    #: The last entry before it.
    fseq: int
    number: int


class SegmentStore(SegmentReader):
    """A `Store` (shard/storage/store.py) in a directory. One thread; the flusher has its own."""

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
        super().__init__(directory, segments)
        self._flusher = flusher
        self._segment_bytes, self._cache_bytes = segment_bytes, cache_bytes
        #: Gets the trim point as soon as `trim` or `reset` is called.
        self.on_trim: Callable[[int], object] = lambda _: None

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
        self._flusher.set_listener(on_event)
        self._flusher.start()

    @property
    def flusher(self) -> Flusher:
        """Who writes; for whoever wants to tend it without its thread."""
        return self._flusher

    @property
    def sealed_fseq(self) -> int:
        """The last entry that is in a sealed segment; 0: there is no such segment."""
        return self._segments[-2].last_fseq if len(self._segments) > 1 else 0

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

    # --- writing -----------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        """Append an entry: it can be read at once, and is written later."""
        if self._active.size >= self._segment_bytes:
            self._rotate()
        self._put(entry)

    def _put(self, entry: Entry) -> None:
        kind, first, last, record = positions_of(entry)
        segment, flusher = self._active, self._flusher
        if kind < MARK:
            assert entry.fseq == self.last_fseq + 1, "the log has a gap"
            if entry.view != self.last_view or not segment.views:
                self._start_view(entry)
            self.last_fseq = entry.fseq
        place = self.last_fseq
        header, body = encode(entry, segment.salt, kind, first, last, place, flusher.flushed_fseq)
        size = HEADER_BYTES + len(body)
        if kind >= MARK:
            self._note_record(entry, size, first)
        elif kind != EXPIRE:
            if segment.is_torn:
                # What is below may have been in what is damaged.
                self._cache.first = first
            self._last = last
            self._last_record = record or self._last_record
        segment.add(kind, first, last, record, place, size)
        flusher.put(segment, header, body, place)
        self._appended_bytes += size
        if kind < MARK:
            cache = self._cache
            cache.add(entry, self._last, self._last_record, self._appended_bytes)
            if cache.bytes > self._cache_bytes:
                cache.shrink(self._cache_bytes, flusher.flushed_bytes, 0)

    def _start_view(self, entry: Entry) -> None:
        assert entry.view >= self.last_view, "a view went backwards"
        self.last_view = entry.view
        self._active.add_view(entry.view, entry.fseq)

    def _note_record(self, entry: Entry, size: int, part: int) -> None:
        """Take note of a `WatermarkRecord` or table that is about to be added."""
        segment = self._active
        if isinstance(entry.decision, WatermarkRecord):
            segment.mark = self.mark = entry.decision
        else:
            segment.tables.append((segment.size, size, self.last_fseq, part))

    def _rotate(self) -> None:
        before = self._active
        segment = new_segment_after(before, before.last + 1, before.last_fseq + 1)
        link_segments([before, segment])
        self._segments.append(segment)
        self._bases.append(segment.base)
        self._active = segment
        if self.mark is not None:
            self._put(Entry(0, 0, self.mark))

    def seal(self, stop: int) -> None:
        """End the segment that grows, if it reaches below `stop` and is worth a file.

        Only what is sealed gets rows (docs/protocol.md, section 14.2). Each segment that ended
        early is followed by one of twice its size at least, up to a whole one. What is torn waits
        for its repair, so that the next one begins where it does not end yet.
        """
        active, whole = self._active, self._segment_bytes
        before = self._segments[-2].size if len(self._segments) > 1 else whole
        least = max(whole // _LEAST_PART, 2 * before if before < whole else 0)
        if active.base < stop and active.size >= least and not active.is_torn and self.mark:
            self._rotate()
            self._flusher.schedule()

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
        self.on_trim(self._trim)
        count = min(max(bisect_right(self._bases, gsn) - 1, 0), self._needed_from())
        self._cache.shrink(self._cache_bytes, self._flusher.flushed_bytes, gsn)
        if count:
            gone, self._segments = self._segments[:count], self._segments[count:]
            del self._bases[:count]
            self._flusher.remove([name for s in gone for name in file_names(s)])

    def _needed_from(self) -> int:
        """Return the index of the first segment that is needed whatever is trimmed."""
        stable = self.mark.stable if self.mark else 0
        last = len(self._segments) - 1
        whole = (parts for parts in self._whole_tables() if parts[-1].fseq <= stable)
        table = next((parts[0].segment for parts in whole), last)
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
        is_all = fseq < self.first_fseq
        end = segment.base if is_all else segment.last_at(self._directory, fseq) + 1
        self._start_segment(new_segment_after(self._active, end, fseq + 1), self.mark)

    def reset(self, fseq: int, gsn: int) -> None:
        """Drop everything, for good: the next entry is `fseq + 1`, at `gsn` or later. Slow.

        What is below `gsn` counts as trimmed, and what was before as stable.

        Raises:
            FullError: there is no space for it; nothing has changed.

        """
        self._flush_all()
        mark = watermark_after_reset(self.mark, fseq, gsn) if self.mark else None
        self._start_segment(new_segment_after(self._active, gsn, fseq + 1, is_first=True), mark)
        self.on_trim(self._trim)

    def _flush_all(self) -> None:
        if not self._flusher.flush():
            raise FullError(f"no room in {self._directory}: what is waiting must be written first")

    def _start_segment(self, segment: Segment, mark: WatermarkRecord | None) -> None:
        """Let the log go on in a new segment, which makes what it does not follow void."""
        contents = b""
        if mark is not None:
            place = segment.last_fseq
            header, body = encode(Entry(0, 0, mark), segment.salt, MARK, 0, 0, place, place)
            contents = header + body
            segment.add(MARK, 0, 0, 0, place, len(contents))
            segment.mark, segment.flushed = mark, len(contents)
        first = 0 if segment.is_first else segment.base_fseq
        changing = [before for before in self._segments if before.last_fseq >= first]
        delete_rows(self._directory, changing)
        create(self._directory, segment, contents)
        self._flusher.switch_segment(segment)
        self._continue_with(link_segments(remove_void(self._directory, [*self._segments, segment])))

    # --- mending -----------------------------------------------------------------------------

    def damaged_range(self, gsn: int) -> tuple[int, int] | None:
        """Return the first and last number of the unreadable entries that may hold `gsn`. Slow.

        None: it can be read, or nothing tells which entries are missing.

        Raises:
            UnreadableError: the file that would tell cannot be read.

        """
        self._flusher.flush()
        index = bisect_right(self._bases, gsn) - 1
        while index > 0 and self._segments[index].is_torn_before:
            index -= 1
        if index < 0:
            return None
        segments = self._segments[index:]
        hole = missing_around(self._directory, segments, gsn, self._flusher.flushed_fseq)
        return hole and (hole[0], min(hole[1], self._end_of(self._segment_with(hole[0])) - 1))

    def damaged_after(self, fseq: int) -> tuple[int, int] | None:
        """Return the first and last number of the unreadable entries right after `fseq`. Slow.

        None: the next one can be read, or there is none.

        Raises:
            UnreadableError: the file that would tell cannot be read.

        """
        self._flusher.flush()
        first = max(fseq + 1, self.first_fseq)
        if first > self.flushed_fseq:
            return None
        segment = self._segment_with(first)
        return missing_from(self._directory, segment, first, self._end_of(segment))

    def repair(self, entries: list[Entry]) -> bool:
        """Put good entries in the place of damaged ones, for good; whether they fit. Slow.

        Args:
            entries: numbered without a gap, all in one range of unreadable ones that was told.

        Raises:
            FullError: there is no space for it; nothing has changed.
            UnreadableError: the file that they belong to cannot be read.

        """
        self._flush_all()
        segment = self._segment_with(entries[0].fseq)
        end = self._end_of(segment)
        contents = rewrite_segment(self._directory, segment, entries, end, self._limit_of(segment))
        if contents is None:
            return False
        delete(self._directory, [segment.rows_name, segment.index_name])
        create(self._directory, segment, contents)
        segment.rebuild(contents, end - 1)
        self._flusher.switch_segment(self._active)
        self._continue_with(link_segments(self._segments))
        return True

    def _end_of(self, segment: Segment) -> int:
        """Return the number of the first entry behind a segment."""
        index = self._segments.index(segment) + 1
        return (
            self._segments[index].base_fseq if index < len(self._segments) else self.last_fseq + 1
        )

    def _limit_of(self, segment: Segment) -> int:
        """Return the first position behind a segment."""
        for after in self._segments[self._segments.index(segment) + 1 :]:
            for _, found in readable_entries(self._directory, after):
                if found.kind < EXPIRE:
                    return found.first
        return NOWHERE

    def _whole_tables(self) -> Iterator[list[_Part]]:
        """Give the parts of each table that has all of them, the last table first."""
        parts: list[_Part] = []
        for index in range(len(self._segments) - 1, -1, -1):
            for start, size, fseq, code in reversed(self._segments[index].tables):
                number, is_cut = divmod(code, 2)
                follows = parts and parts[-1].number == number + 1
                if is_cut and not follows:
                    parts = []
                    continue
                part = _Part(index, start, size, fseq, number)
                parts = [*parts, part] if is_cut else [part]
                if number == 0:
                    yield parts[::-1]
                    parts = []

    def last_table(self) -> tuple[int, list[SessionTable]]:
        """Return the last table on stable storage, and the last entry before it; or 0, nothing.

        If it is damaged, the one before it serves; so does the beginning of the log, if it is kept.

        Raises:
            UnreadableError: it is damaged, and nothing else serves.

        """
        self._flusher.flush()
        fault: UnreadableError | None = None
        for parts in self._whole_tables():
            try:
                read = [self._read_part(part) for part in parts]
            except UnreadableError as error:
                fault = fault or error
                continue
            if len({begun for begun, _ in read}) == 1:  # they are of one table
                return parts[0].fseq, [table for _, tables in read for table in tables]
        if fault is not None and self.first_fseq > 1:
            raise fault
        return 0, []

    def _read_part(self, part: _Part) -> tuple[int, list[SessionTable]]:
        """Return which table a part is of, and what is in it."""
        segment = self._segments[part.segment]
        data, found = segment.read_table(self._directory, part.start, part.size)
        table = decode(data, found, segment.name).decision
        assert isinstance(table, SessionTableRecord | SessionTablePartRecord), (
            "something else is where a table was put"
        )
        return table.begun if isinstance(
            table, SessionTablePartRecord
        ) else part.fseq, table.sessions
