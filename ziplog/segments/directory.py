"""Read-only access to a server's segment directory, while the server may run and change it.

Rule: entries that a newer segment replaces count as deleted, even if their files remain. Nothing
above the frontier of the last watermark record is returned, because only that is known to be
stable. Invariant: units are returned in the order of their positions without a gap, or
`UnreadableError` is raised (docs/protocol.md, sections 10 and 14).
"""

from __future__ import annotations

import fcntl
import os
import time
from bisect import bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.core.entries import Place, Unit
from ziplog.segments.entry import SCARCE, UnreadableError, unreadable
from ziplog.segments.entry_codec import DAMAGED, PLACE, decode
from ziplog.segments.segment import Segment, read_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

#: A directory may change again with the same modification time for this long after a change.
_SETTLED_NS: Final = 200_000_000


class ListedSegment(NamedTuple):
    """A segment that a directory holds."""

    #: Parsed from the file's name only, without an index.
    segment: Segment
    #: The number of the first entry that belongs to a newer segment; 0: it is the newest.
    limit: int
    has_block_file: bool


def listed_segments(names: Collection[str]) -> list[ListedSegment]:
    """Return the segments among file names that no newer one replaces, oldest first."""
    segments = [segment for name in names if (segment := Segment.named(name)) is not None]
    segments.sort(key=lambda segment: segment.number)
    listed: list[ListedSegment] = []
    limit = 0
    for segment in reversed(segments):
        if listed and (listed[-1].segment.is_first or segment.base_fseq > limit > 0):
            continue
        listed.append(ListedSegment(segment, limit, segment.block_file_name in names))
        # Files of the first format have no entry number in their names (0).
        limit = min(limit or segment.base_fseq, segment.base_fseq) or limit
    return listed[::-1]


class SegmentDirectory:
    """The segments in a directory. One thread."""

    def __init__(self, directory: Path) -> None:
        """Open a storage server's `segments` directory."""
        self._directory = directory
        self._listed: list[ListedSegment] = []
        self._stamp: tuple[int, bool] = (0, False)
        #: Loaded segments with the stamp of their file, by name.
        self._loaded: dict[str, tuple[tuple[int, int, int], Segment]] = {}

    @property
    def is_locked(self) -> bool:
        """Whether a server on this machine uses the directory."""
        try:
            fd = os.open(self._directory.parent / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return error.errno in SCARCE  # its files may change, as those of a running server
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    @property
    def was_stopped(self) -> bool:
        """Whether the server stopped cleanly and does not run: its files are complete."""
        return (self._directory.parent / "checkpoint").exists() and not self.is_locked

    # --- the segments ------------------------------------------------------------------------

    def listed(self) -> list[ListedSegment]:
        """Return the segments that no newer one replaces, oldest first.

        Raises:
            OSError: the directory cannot be listed now.

        """
        try:
            changed = self._directory.stat().st_mtime_ns
            if self._stamp != (changed, True):
                is_settled = time.time_ns() - changed > _SETTLED_NS
                self._listed = self._list()
                self._stamp = (changed, is_settled)
        except FileNotFoundError:
            self._listed, self._stamp = [], (0, False)
        return self._listed

    def _readable(self) -> list[ListedSegment]:
        """Return the same.

        Raises:
            UnreadableError: the directory cannot be listed now.

        """
        try:
            return self.listed()
        except OSError as error:
            raise unreadable(str(self._directory), error) from error

    @property
    def sealed_end(self) -> int:
        """The start of the newest segment: all positions before it are sealed or trimmed.

        Raises:
            OSError: the directory cannot be listed now.

        """
        listed = self.listed()
        return listed[-1].segment.base if listed else 0

    def _list(self) -> list[ListedSegment]:
        listed = listed_segments({path.name for path in self._directory.iterdir()})
        present = {entry.segment.name for entry in listed}
        self._loaded = {name: kept for name, kept in self._loaded.items() if name in present}
        return listed

    @property
    def start(self) -> int:
        """The first position in the files; 1 if there are none, or they cannot be listed now."""
        with suppress(UnreadableError):
            listed = self._readable()
            return listed[0].segment.base if listed else 1
        return 1

    @property
    def stable_end(self) -> int:
        """The frontier in the last watermark record: all positions below it are stable; 1: none.

        Raises:
            UnreadableError: the directory or the newest file cannot be read.

        """
        return self._marked()[0]

    @property
    def trim(self) -> int:
        """The trim point in the files: all positions before it were trimmed; 1: none.

        Raises:
            UnreadableError: the directory or the newest file cannot be read.

        """
        return self._marked()[1]

    def _marked(self) -> tuple[int, int]:
        listed = self._readable()
        trim = listed[0].segment.base if listed and listed[0].segment.is_first else 1
        for entry in reversed(listed):
            mark = self._load(entry).mark
            if mark is not None:
                return max(mark.frontier, 1), max(mark.trim, trim, 1)
        return 1, trim

    # --- units -------------------------------------------------------------------------------

    def units(self, start: int, stop: int) -> Iterator[tuple[list[Unit], int]]:
        """Yield the stable units that overlap [start, stop), in batches.

        Each batch comes with the position up to which it is complete. The last one ends at `stop`
        or `stable_end`, whichever is lower. Units may extend over both ends of the range.

        Raises:
            UnreadableError: a file is damaged, or was deleted in the meantime.

        """
        end = min(stop, self.stable_end)
        listed = self._readable()
        first = bisect_right(listed, start, key=lambda entry: entry.segment.base) - 1
        before: Segment | None = None
        for entry in listed[max(first - 1, 0) :]:
            if start >= end:
                return
            segment = self._load(entry)
            self._check_no_gap(before, segment, start)
            before = segment
            if segment.last < start:
                continue
            for units, reached in self._units(segment, entry.limit, start, end):
                yield units, reached
                start = reached
        if start < end:
            raise UnreadableError(f"gsn {start} was in the damaged end of {self._directory}")

    def _check_no_gap(self, before: Segment | None, segment: Segment, start: int) -> None:
        """Check that no segment is missing before `segment`, and set its `is_torn_before`."""
        is_torn = before is not None and (
            before.is_torn or segment.base_fseq > before.last_fseq + 1
        )
        end = before.last + 1 if before is not None else 1
        if start < segment.base and (is_torn or end < segment.base):
            raise UnreadableError(f"gsn {start} was in a missing segment of {self._directory}")
        segment.is_torn_before = is_torn and end == segment.base

    def _units(
        self, segment: Segment, limit: int, start: int, end: int
    ) -> Iterator[tuple[list[Unit], int]]:
        """Yield the units of one segment, and the position up to which they are complete."""
        for block in range(segment.block_at(start), len(segment.lasts) + 1):
            data, entries = segment.read(self._directory, block)
            units: list[Unit] = []
            reached = start
            for found in entries:
                if found.last < start:
                    continue
                is_damaged = found.kind == DAMAGED
                if found.first >= end or (not is_damaged and found.fseq >= limit > 0):
                    reached = end if found.first >= end else reached
                    if reached > start:
                        yield units, reached
                    return
                if is_damaged:
                    raise UnreadableError(f"{segment.name} is damaged at gsn {found.first}")
                if found.kind == PLACE:
                    place = decode(data, found, segment.name).decision
                    assert isinstance(place, Place), "the header has the kind"
                    units.append(Unit(place.epoch, place.gsns, place.body or b""))
                reached = found.last + 1
            if reached > start:
                yield units, min(reached, end)
                start = reached

    def _load(self, entry: ListedSegment) -> Segment:
        """Return a segment with its index, from its index file or rebuilt from the segment."""
        segment = entry.segment
        path = self._directory / segment.name
        try:
            facts = path.stat()
            stamp = (facts.st_size, facts.st_mtime_ns, entry.limit)
            kept = self._loaded.get(segment.name)
            if kept is not None and kept[0] == stamp:
                return kept[1]
            loaded = Segment.named(segment.name)
            assert loaded is not None, "it was listed"
            index = self._directory / segment.index_name
            contents = read_file(index) if index.exists() else b""
            if not loaded.load_index(contents, facts.st_size):
                loaded.rebuild(read_file(path), max(entry.limit - 1, 0))
        except OSError as error:
            raise unreadable(segment.name, error) from error
        self._loaded[segment.name] = (stamp, loaded)
        return loaded
