"""The segment store: a replica's decided entries, in memory while recent and in segment files.

An entry is encoded and given its place in a file on the thread that appends it; the flusher then
only writes. The newest entries are answered from memory, up to a bound, and nothing leaves memory
before it is on stable storage; older ones are read from their block, found by bisection.

Invariant: positions increase from entry to entry and from segment to segment; what is damaged
raises `UnreadableError`, and is never answered as absent (docs/protocol.md, section 10).
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import structlog

from shard.entry import Entry, Mark, UnreadableError
from shard.flusher import Flusher, sync_directory
from shard.recent import Recent
from shard.segment import EXPIRE, HEADER_BYTES, MARK, PLACE, Segment, decode, encode
from shard.segment import positions as positions_of
from ziplog.runtime.tracing import halt
from ziplog.wire import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ziplog.node import Event

MIB: Final = 1024 * 1024
#: What an entry counts in `scan` beside its body.
_SCAN_BYTES: Final = 64


class SegmentStore:
    """A `Store` (shard/entry.py) in a directory. One thread; the flusher has its own."""

    #: The last entry's stream position; 0 if there is none.
    last_fseq: int
    #: The last `Mark`, if any.
    mark: Mark | None

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
        assert segments, "there is always a segment to append to"
        self._directory, self._segments, self._flusher = directory, segments, flusher
        self._segment_bytes, self._cache_bytes = segment_bytes, cache_bytes
        self._bases = [segment.base for segment in segments]
        self._active = segments[-1]
        self.last_fseq = next((s.last_fseq for s in reversed(segments) if s.last_fseq), 0)
        self.mark = next((s.mark for s in reversed(segments) if s.mark), None)
        self._trim = self.mark.trim if self.mark else 0
        self._last = self._active.last
        self._last_record = self._active.last_record or self._active.record_before
        self._appended_bytes = 0
        self._recent = Recent(self._last, self._last_record)

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

        A torn end of the last segment is cut off, and logged.

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
        segments = _load(directory)
        flusher = Flusher(
            directory,
            interval_s=flush_interval_ms / 1000,
            reserve_bytes=reserve_bytes,
            on_halt=on_halt,
        )
        store = cls(
            directory, segments, flusher, segment_bytes=segment_bytes, cache_bytes=cache_bytes
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

    # --- writing -----------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        """Take the next entry. It is found at once; it may wait to be written."""
        if self._active.size >= self._segment_bytes:
            self._rotate()
        self._put(entry)

    def _put(self, entry: Entry) -> None:
        kind, first, last, record = positions_of(entry)
        segment = self._active
        header, body = encode(entry, segment.salt, kind, first, last)
        size = HEADER_BYTES + len(body)
        segment.add(kind, first, last, record, entry.fseq, size)
        self._flusher.put(segment, header, body, entry.fseq)
        self._appended_bytes += size
        if entry.fseq:
            self.last_fseq = entry.fseq
        if kind >= EXPIRE:
            if isinstance(entry.decision, Mark):
                segment.mark = self.mark = entry.decision
            return
        self._last = last
        if record:
            self._last_record = record
        recent = self._recent
        recent.add(entry, last, self._last_record, self._appended_bytes)
        if recent.bytes > self._cache_bytes:
            recent.shrink(self._cache_bytes, self._flusher.flushed_bytes, 0)

    def _rotate(self) -> None:
        segment = _following(self._active)
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
        """Delete the segments that lie wholly below `gsn`; never the one that grows."""
        self._trim = max(self._trim, gsn)
        count = max(bisect_right(self._bases, gsn) - 1, 0)
        self._recent.shrink(self._cache_bytes, self._flusher.flushed_bytes, gsn)
        if count:
            gone, self._segments = self._segments[:count], self._segments[count:]
            del self._bases[:count]
            self._flusher.remove([name for s in gone for name in (s.index_name, s.name)])

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


# --- opening ---------------------------------------------------------------------------------


def _load(directory: Path) -> list[Segment]:
    """Return the segments of a directory, oldest first; the last one is to be appended to."""
    for leftover in directory.glob("*.tmp"):
        leftover.unlink()
    names = sorted(path.name for path in directory.iterdir())
    segments = [segment for name in names if (segment := Segment.named(name)) is not None]
    if not segments:
        return [Segment(1, 1, _salt())]
    for segment in segments[:-1]:
        _load_sealed(directory, segment)
    _load_last(directory, segments[-1])
    for before, segment in pairwise(segments):
        segment.record_before = before.last_record or before.record_before
        if segment.number != before.number + 1:
            before.is_torn = True
            structlog.get_logger().error("segments are missing", after=before.name)
    return segments


def _load_sealed(directory: Path, segment: Segment) -> None:
    path = directory / segment.name
    try:
        index = (directory / segment.index_name).read_bytes()
    except FileNotFoundError:
        index = b""
    if segment.take_index(index, path.stat().st_size):
        return
    segment.rebuild(path.read_bytes())
    if segment.is_torn:
        structlog.get_logger().error("the end of a segment is damaged", file=str(path))


def _load_last(directory: Path, segment: Segment) -> None:
    path = directory / segment.name
    data = path.read_bytes()
    whole = segment.rebuild(data)
    segment.is_torn = False
    if whole == len(data):
        return
    os.truncate(path, whole)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(directory)
    structlog.get_logger().warning(
        "a torn end was cut off", file=str(path), cut_bytes=len(data) - whole, last_gsn=segment.last
    )


def _following(segment: Segment) -> Segment:
    after = Segment(segment.number + 1, segment.last + 1, _salt())
    after.record_before = segment.last_record or segment.record_before
    return after


def _salt() -> int:
    """Return a salt; not 0, so that zeros are never taken for an entry."""
    return int.from_bytes(os.urandom(4), "little") | 1
