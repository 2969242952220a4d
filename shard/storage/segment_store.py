"""The segment store: a replica's decided entries, in segment files and in a cache.

The appending thread encodes an entry and assigns its place in a file; the flusher only writes. The
cache evicts no entry before it is on stable storage. Reads: shard/storage/segment_reader.py.

Rule: a change of stored entries (a cut, a repair) is one new file that takes effect when it has its
name. Invariant: numbers, positions and views increase from entry to entry
(docs/protocol.md, section 10).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from shard.storage.flusher import MAX_BUFFERS, Flusher
from shard.storage.segment_files import (
    create,
    delete,
    delete_block_files,
    file_names,
    link_segments,
    load,
    new_segment_after,
    remove_void,
)
from shard.storage.segment_reader import ABOVE_EVERY_GSN, SegmentReader
from shard.storage.segment_rewrite import (
    missing_around,
    missing_from,
    readable_entries,
    rewrite_segment,
)
from shard.storage.store import FullError, watermark_after_reset
from ziplog import event_log
from ziplog.core.view import KEPT_RUNS, extend_runs
from ziplog.runtime.process_logging import halt
from ziplog.segments.entry import (
    Entry,
    SessionTablePartRecord,
    SessionTableRecord,
    UnreadableError,
    WatermarkRecord,
    unreadable,
)
from ziplog.segments.entry_codec import EXPIRE, decode, encode, encode_run
from ziplog.segments.entry_codec import positions as positions_of
from ziplog.segments.segment import read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ziplog.core.entries import SessionTable
    from ziplog.core.node import Event
    from ziplog.core.view import LeaseRun
    from ziplog.segments.segment import Segment

MIB: Final = 1024 * 1024
#: A bulk reader has a segment sealed early if it has 1/8 of the full segment size.
_MIN_SEALED_PART: Final = 8
#: Most entries of a run: it is one write, with up to three buffers for each entry.
_MAX_RUN: Final = MAX_BUFFERS // 3


class _Part(NamedTuple):
    """The location of a part of a session table."""

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
        """Continue after `segments`; use `open`."""
        super().__init__(directory, segments)
        self._flusher = flusher
        self._segment_bytes, self._cache_bytes = segment_bytes, cache_bytes
        #: The leases of the watermark records since the store was opened, from the frontier on.
        self._leases: list[LeaseRun] = []
        #: By segment file: the entries that read errors hid in repairs that were put off.
        self._hidden: dict[str, set[int]] = {}
        #: Receives the trim point as soon as `trim` or `reset` is called.
        self.on_trim: Callable[[int], object] = lambda _: None
        #: Called after a repair, which deletes the block file of its segment.
        self.on_repair: Callable[[], object] = lambda: None

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        flush_interval_ms: float = 10,
        in_background: bool = True,
        segment_bytes: int = 64 * MIB,
        cache_bytes: int = 64 * MIB,
        reserve_bytes: int = 64 * MIB,
        on_halt: Callable[[str], object] = halt,
    ) -> SegmentStore:
        """Open the store in `directory`; create it if it does not exist.

        A torn end of the last segment is cut off and logged; damage is logged (see `damage`).

        Args:
            directory: used by this store only.
            flush_interval_ms: maximum delay of a flush by the thread; 0: only `flush` writes.
            in_background: entries wake the thread; otherwise only `flush` writes.
            segment_bytes: size at which a segment is followed by a new one.
            cache_bytes: memory for recent entries.
            reserve_bytes: free space below which the store is full.
            on_halt: ends the process when the content of the disk is unknown.

        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        segments = load(directory)
        flusher = Flusher(
            directory,
            segments[-1],
            interval_s=flush_interval_ms / 1000,
            in_background=in_background,
            reserve_bytes=reserve_bytes,
            on_halt=on_halt,
        )
        store = cls(
            directory, segments, flusher, segment_bytes=segment_bytes, cache_bytes=cache_bytes
        )
        for first, last in store.damage:
            event_log.error("entries are damaged", directory=str(directory), first=first, last=last)
        return store

    def start(self, on_event: Callable[[Event], None]) -> None:
        """Start the flusher. Call once.

        `on_event` receives `Persisted` and `StorageChanged` on another thread.
        """
        self._flusher.set_listener(on_event)
        self._flusher.start()

    @property
    def flusher(self) -> Flusher:
        """The flusher; for callers that run it without its thread."""
        return self._flusher

    @property
    def sealed_fseq(self) -> int:
        """The last entry of the newest sealed segment; 0 if there is none."""
        return self._segments[-2].last_fseq if len(self._segments) > 1 else 0

    @property
    def backlog_bytes(self) -> int:
        """Bytes appended and not yet on stable storage; the appending replica bounds them."""
        return self._flusher.backlog_bytes

    @property
    def free_bytes(self) -> int:
        """Free space of the disk; 0 if the system does not report it now."""
        return self._flusher.free_bytes or 0

    @property
    def reserve_bytes(self) -> int:
        """Free space below which the store is full."""
        return self._flusher.reserve_bytes

    def flush_in_background(self, is_on: bool) -> None:
        """Have the flusher's thread write what is appended, or only `flush`."""
        self._flusher.flush_in_background(is_on)

    def resize(self, cache_bytes: int, reserve_bytes: int) -> None:
        """Change these two limits (see `open`). From any thread; it may wait for the disk."""
        self._cache_bytes = cache_bytes
        self._flusher.set_reserve(reserve_bytes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all entries that are kept, in files or soon."""
        return sum(segment.size for segment in self._segments)

    def sealed_bytes(self, first: int, last: int) -> int:
        """Return the bytes of the sealed segments that end within these entries, inclusive."""
        sealed = self._segments[:-1]
        return sum(segment.size for segment in sealed if first <= segment.last_fseq <= last)

    @property
    def segment_count(self) -> int:
        """Number of segments."""
        return len(self._segments)

    @property
    def is_full(self) -> bool:
        """Whether there is less space than the reserve."""
        return self._flusher.is_full

    @property
    def flushed_fseq(self) -> int:
        """The last entry on stable storage."""
        return self._flusher.flushed_fseq

    # --- writing -----------------------------------------------------------------------------

    def append(self, *entries: Entry) -> None:
        """Append entries: they can be read immediately, and are written later."""
        start = 0
        while start < len(entries):
            if self._active.size >= self._segment_bytes:
                self._rotate()
            if entries[start].fseq:
                start += self._put_run(entries[start : start + _MAX_RUN])
            else:
                self._put_record(entries[start])
                start += 1

    def _put_run(self, entries: Sequence[Entry]) -> int:
        """Append the entries of one view up to a record or the end of the segment; return how many.

        A server does this for each insert, so it has no loop: it works on the lists of the run.
        """
        segment, flusher, cache = self._active, self._flusher, self._cache
        fseq, limit = self.last_fseq + 1, self._segment_bytes - segment.size
        assert entries[0].fseq == fseq, "the log has a gap"
        if entries[0].view != self.last_view or not segment.views:
            self._start_view(entries[0])
        buffers, facts = encode_run(
            entries, segment.salt, fseq, flusher.flushed_fseq, limit, self._last, self._last_record
        )
        sizes, firsts, lasts, records = zip(*facts, strict=True)
        if segment.is_torn and any(firsts):
            # Positions below may have been in the damaged part.
            cache.first = next(filter(None, firsts))
        segment.add(fseq, facts)
        self.last_fseq, self._last, self._last_record = segment.last_fseq, lasts[-1], records[-1]
        flusher.put(segment, buffers, sum(sizes), self.last_fseq)
        ends = list(accumulate(sizes, initial=self._appended_bytes))
        self._appended_bytes = ends[-1]
        cache.add(entries[: len(facts)], lasts, records, ends[1:])
        if cache.bytes > self._cache_bytes:
            cache.shrink(self._cache_bytes, flusher.flushed_bytes, 0)
        return len(facts)

    def _put_record(self, entry: Entry) -> None:
        """Append a `WatermarkRecord`, or a part of a session table: it has no number."""
        segment, flusher, place = self._active, self._flusher, self.last_fseq
        data = encode(entry, segment.salt, place, flusher.flushed_fseq)
        if isinstance(entry.decision, WatermarkRecord):
            segment.mark = self.mark = entry.decision
            self._keep_leases(entry.decision)
        else:
            part = positions_of(entry)[1]
            segment.tables.append((segment.size, len(data), place, part))
        segment.size += len(data)
        flusher.put(segment, [data], len(data), place)
        self._appended_bytes += len(data)

    def _start_view(self, entry: Entry) -> None:
        assert entry.view >= self.last_view, "a view went backwards"
        self.last_view = entry.view
        self._active.add_view(entry.view, entry.fseq)

    def _rotate(self) -> None:
        before = self._active
        segment = new_segment_after(before, before.last + 1, before.last_fseq + 1)
        link_segments([before, segment])
        self._segments.append(segment)
        self._bases.append(segment.base)
        self._active = segment
        if self.mark is not None:
            self._put_record(Entry(0, 0, self._whole_mark(self.mark)))

    def _keep_leases(self, mark: WatermarkRecord) -> None:
        """Keep the leases of a record, and drop those that end at its frontier or before."""
        extend_runs(self._leases, mark.leases)
        ended = sum(run.last.stop <= mark.frontier for run in self._leases[:-1])
        del self._leases[:ended]
        del self._leases[:-KEPT_RUNS]

    def _whole_mark(self, mark: WatermarkRecord) -> WatermarkRecord:
        """Return the record that begins a file: files before it may be trimmed."""
        return msgspec.structs.replace(mark, leases=list(self._leases) or mark.leases)

    def seal(self, stop: int) -> None:
        """Seal the active segment, if it has positions below `stop` and is large enough.

        Only sealed segments get block files (docs/protocol.md, section 14.2). After a segment that
        was sealed early, the next one has at least twice its size, up to the full size. A torn
        segment stays open until its repair, which sets the start of the next one.
        """
        active, whole = self._active, self._segment_bytes
        before = self._segments[-2].size if len(self._segments) > 1 else whole
        least = max(whole // _MIN_SEALED_PART, 2 * before if before < whole else 0)
        if active.base < stop and active.size >= least and not active.is_torn and self.mark:
            self._rotate()
            self._flusher.wake()

    def flush(self) -> bool:
        """Write everything to stable storage; False if there is no space now."""
        return self._flusher.flush()

    def close(self) -> bool:
        """Flush, and stop the thread; False if a write failed."""
        return self._flusher.close()

    def segments_below(self, gsn: int) -> int:
        """Return the number of segments that a trim to `gsn` deletes."""
        before = max(bisect_right(self._bases, gsn) - 1, 0)
        return min(before, self._needed_from(len(self._segments) - 1))

    def trim(self, gsn: int) -> None:
        """Delete segments that end below `gsn`, except the active one.

        The last entry stays. So does the last session table that no truncation can drop, with all
        entries after it.
        """
        self._trim = max(self._trim, gsn)
        self.on_trim(self._trim)
        count = self.segments_below(gsn)
        self._cache.shrink(self._cache_bytes, self._flusher.flushed_bytes, gsn)
        if count:
            # The files on the disk are a log without these, whether or not more is written.
            at_once = min(count, self._needed_from(self._last_written()))
            gone, self._segments = self._segments[:count], self._segments[count:]
            del self._bases[:count]
            for part, is_at_once in ((gone[:at_once], True), (gone[at_once:], False)):
                names = [name for segment in part for name in file_names(segment)]
                if names:
                    self._flusher.remove(names, at_once=is_at_once)

    def _last_written(self) -> int:
        """Return the index of the last segment that is complete on stable storage; or 0."""
        sealed = range(len(self._segments) - 2, 0, -1)
        is_whole = (i for i in sealed if self._segments[i].flushed == self._segments[i].size)
        return next(is_whole, 0)

    def _needed_from(self, last: int) -> int:
        """Return the index of the first segment that no trim may delete.

        `last`: the last segment; a table that is in a later one does not count.
        """
        segments = self._segments
        mark = self.mark if segments[last] is self._active else segments[last].mark
        stable = mark.stable if mark else 0
        first = 0 if any(segment.tables for segment in segments[last + 1 :]) else last
        whole = (
            parts
            for parts in self._whole_tables()
            if parts[-1].segment <= last and parts[-1].fseq <= stable
        )
        table = next((parts[0].segment for parts in whole), first)
        entry = next((i for i in range(last, -1, -1) if segments[i].views), last)
        return min(table, entry)

    # --- cutting -----------------------------------------------------------------------------

    def truncate(self, fseq: int) -> None:
        """Drop every entry after `fseq` durably; the next one is `fseq + 1`. Slow.

        A crash leaves all of them, or none.

        Raises:
            FullError: there is no space for it; nothing has changed.
            UnreadableError: the file that holds it cannot be read.

        """
        assert self.first_fseq - 1 <= fseq <= self.last_fseq, "the log does not reach there"
        assert self.mark is None or self.mark.stable <= fseq, "stable entries are dropped"
        if fseq == self.last_fseq:
            return
        self._flush_all()
        segment = self._segment_with(fseq)
        is_all = fseq < self.first_fseq
        end = segment.base if is_all else segment.last_at(self._directory, fseq) + 1
        mark = self._whole_mark(self.mark) if self.mark else None
        self._start_segment(new_segment_after(self._active, end, fseq + 1), mark)

    def reset(self, fseq: int, gsn: int) -> None:
        """Drop all entries durably; the next one is `fseq + 1`, at `gsn` or later. Slow.

        Positions below `gsn` count as trimmed, and the dropped entries as stable.

        Raises:
            FullError: there is no space for it; nothing has changed.

        """
        self._flush_all()
        mark = self._whole_mark(watermark_after_reset(self.mark, fseq, gsn)) if self.mark else None
        self._start_segment(new_segment_after(self._active, gsn, fseq + 1, is_first=True), mark)
        self.on_trim(self._trim)

    def _flush_all(self) -> None:
        if not self._flusher.flush():
            raise FullError(f"no room in {self._directory}: queued entries must be written first")

    def _start_segment(self, segment: Segment, mark: WatermarkRecord | None) -> None:
        """Continue the log in a new segment; entries that it does not follow become void."""
        contents = b""
        if mark is not None:
            place = segment.last_fseq
            contents = encode(Entry(0, 0, mark), segment.salt, place, place)
            segment.mark, segment.size, segment.flushed = mark, len(contents), len(contents)
        first = 0 if segment.is_first else segment.base_fseq
        changing = [before for before in self._segments if before.last_fseq >= first]
        # Before the cut takes effect: afterwards, the system may refuse to open a file.
        read = {cut.name: self._contents(cut) for cut in changing if cut.base_fseq < first}
        delete_block_files(self._directory, changing)
        create(self._directory, segment, contents)
        self._flusher.switch_segment(segment)
        kept = remove_void(self._directory, [*self._segments, segment], read)
        self._continue_with(link_segments(kept))

    def _contents(self, segment: Segment) -> bytes:
        try:
            return read_file(self._directory / segment.name)
        except OSError as error:
            raise unreadable(segment.name, error) from error

    # --- repair ------------------------------------------------------------------------------

    def damaged_range(self, gsn: int) -> tuple[int, int] | None:
        """Return the first and last number of the unreadable entries that may hold `gsn`. Slow.

        None: it can be read, or the missing entries cannot be identified.

        Raises:
            UnreadableError: the file that would identify them cannot be read.

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
            UnreadableError: the file that would identify them cannot be read.

        """
        self._flusher.flush()
        first = max(fseq + 1, self.first_fseq)
        if first > self.flushed_fseq:
            return None
        segment = self._segment_with(first)
        return missing_from(self._directory, segment, first, self._end_of(segment))

    def repair(self, entries: list[Entry]) -> bool:
        """Replace unreadable entries by copies, durably; return whether they fit. Slow.

        Args:
            entries: numbered without a gap, all in one reported range of unreadable entries.

        Raises:
            FullError: there is no space for it; nothing has changed.
            BusyError: the disk cannot read other entries of the file now; try again later. Then
                they are left out, too.
            UnreadableError: their segment file cannot be read.

        """
        self._flush_all()
        segment = self._segment_with(entries[0].fseq)
        end = self._end_of(segment)
        limit, hidden = self._limit_of(segment), self._hidden.setdefault(segment.name, set())
        contents = rewrite_segment(self._directory, segment, entries, end, limit, hidden)
        if contents is None:
            return False
        delete(self._directory, [segment.block_file_name, segment.index_name])
        create(self._directory, segment, contents)
        del self._hidden[segment.name]
        segment.rebuild(contents, end - 1)
        self._flusher.switch_segment(self._active)
        self._continue_with(link_segments(self._segments))
        self.on_repair()
        return True

    def _end_of(self, segment: Segment) -> int:
        """Return the number of the first entry after a segment."""
        index = self._segments.index(segment) + 1
        return (
            self._segments[index].base_fseq if index < len(self._segments) else self.last_fseq + 1
        )

    def _limit_of(self, segment: Segment) -> int:
        """Return the first position after a segment."""
        for after in self._segments[self._segments.index(segment) + 1 :]:
            for _, found in readable_entries(self._directory, after):
                if found.kind < EXPIRE:
                    return found.first
        return ABOVE_EVERY_GSN

    def _whole_tables(self) -> Iterator[list[_Part]]:
        """Yield the parts of each complete session table, the last table first."""
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
        """Return the last session table on stable storage, and the last entry before it; or 0, [].

        If it is damaged, the table before it is used, or the beginning of the log if that is kept.

        Raises:
            UnreadableError: the tables are damaged, and the beginning of the log was trimmed.

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
        if self.first_fseq > 1:
            if fault is None and any(segment.has_lost_table for segment in self._segments):
                fault = UnreadableError(f"a session table in {self._directory} may be damaged")
            if fault is not None:
                raise fault
        return 0, []

    def _read_part(self, part: _Part) -> tuple[int, list[SessionTable]]:
        """Return the last entry when a part's table was begun, and the part's sessions."""
        segment = self._segments[part.segment]
        data, found = segment.read_table(self._directory, part.start, part.size)
        table = decode(data, found, segment.name).decision
        assert isinstance(table, SessionTableRecord | SessionTablePartRecord), (
            "the entry at a table's place is not a table"
        )
        begun = table.begun if isinstance(table, SessionTablePartRecord) else part.fseq
        return begun, table.sessions
