"""The interface of a replica's entry store (docs/protocol.md, section 10)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from ziplog.core.entries import SessionTable
    from ziplog.segments.entry import Entry, WatermarkRecord
    from ziplog.wire import Step


def watermark_after_reset(mark: WatermarkRecord, fseq: int, gsn: int) -> WatermarkRecord:
    """Return the watermark record after `Store.reset(fseq, gsn)`."""
    return msgspec.structs.replace(
        mark,
        stable=max(mark.stable, fseq),
        frontier=max(mark.frontier, gsn),
        trim=max(mark.trim, gsn),
    )


class FullError(Exception):
    """No disk space for a change of the log now; nothing was changed (D53)."""


class Store(Protocol):
    """Stores a replica's entries. An appended entry can be read immediately, flushed or not.

    Entries are numbered without gaps, and their views never decrease.
    """

    #: The last entry's stream position; 0 if there never was one.
    last_fseq: int
    #: The last `WatermarkRecord`, if any.
    mark: WatermarkRecord | None

    @property
    def first_fseq(self) -> int:
        """The first entry that is kept; `last_fseq + 1` if there is none."""
        ...

    @property
    def last_view(self) -> int:
        """The view of the last entry that is kept; 0 if there is none."""
        ...

    @property
    def last_end(self) -> int:
        """The gsn after the last decided position; 1 if there never was one."""
        ...

    @property
    def flushed_fseq(self) -> int:
        """The last entry on stable storage."""
        ...

    @property
    def backlog_bytes(self) -> int:
        """Bytes appended and not yet on stable storage."""
        ...

    @property
    def free_bytes(self) -> int:
        """Free space of the disk; 0: unknown."""
        ...

    @property
    def reserve_bytes(self) -> int:
        """Free space below which the store is full."""
        ...

    @property
    def damage(self) -> list[tuple[int, int]]:
        """First and last numbers of the known unreadable ranges, in order."""
        ...

    def append(self, *entries: Entry) -> None:
        """Append the next entries, a `WatermarkRecord`, or a part of a session table."""
        ...

    def view_at(self, fseq: int) -> int:
        """Return the view of an entry; 0 if it is not kept."""
        ...

    def views_at(self, fseq: int) -> tuple[int, int]:
        """Return the lowest and the highest view that an entry can have; 0, 0 if it is not kept."""
        ...

    def last_of(self, view: int) -> int:
        """Return the last entry with a view of at most `view`; 0 if none is kept."""
        ...

    def read_after(self, fseq: int, limit_bytes: int) -> list[Entry]:
        """Return the entries after `fseq`, in order and without a gap; `Expire` too.

        They begin with the first kept entry if that is later. About `limit_bytes` of bodies and
        gsns; at least one entry if there is any.

        Raises:
            UnreadableError: the first of them is damaged.

        """
        ...

    def last_table(self) -> tuple[int, list[SessionTable]]:
        """Return the last session table, and the last entry before it; 0 and [] if there is none.

        Raises:
            UnreadableError: the table is damaged.

        """
        ...

    def find(self, gsn: int) -> Entry | None:
        """Return the `Place` that holds `gsn` or the `Skip` that covers it, else None.

        Raises:
            UnreadableError: the bytes at that position are damaged.

        """
        ...

    def scan(self, gsn: int, limit_bytes: int, max_entries: int = sys.maxsize) -> list[Entry]:
        """Return `Place` and `Skip` entries in order, from the first that ends at or after `gsn`.

        About `limit_bytes` of bodies, and at most `max_entries`; at least one if there is any.

        Raises:
            UnreadableError: the first of them is damaged.

        """
        ...

    def outline(self, start: int, stop: int) -> list[Step]:
        """Return the stored bytes of positions [start, stop), in stretches of about equal size.

        At most `MAX_STEPS`; each ends where an entry ends, or at `stop`. Quick.
        """
        ...

    def seal(self, stop: int) -> None:
        """Prepare for a bulk read up to `stop`: the store may seal the entries below."""
        ...

    def last_record_below(self, gsn: int) -> int:
        """Return the highest gsn below `gsn` that holds a record; 0 if there is none.

        Raises:
            BusyError: the system refuses to read the file now.

        """
        ...

    def segments_below(self, gsn: int) -> int:
        """Return the number of segment files that a trim to `gsn` deletes."""
        ...

    def trim(self, gsn: int) -> None:
        """Release the space of entries that end below `gsn`."""
        ...

    def truncate(self, fseq: int) -> None:
        """Drop every entry after `fseq` durably; the next one is `fseq + 1`. Slow.

        Atomic: a crash leaves all of them or none, and after the return none.

        Raises:
            FullError: there is no space for it; nothing was changed.
            UnreadableError: the entry's file cannot be read; nothing was changed.

        """
        ...

    def reset(self, fseq: int, gsn: int) -> None:
        """Drop all entries durably; the next one is `fseq + 1`, at `gsn` or later. Slow.

        Positions below `gsn` count as trimmed, and the dropped entries as stable.

        Raises:
            FullError: there is no space for it; nothing was changed.

        """
        ...

    def damaged_range(self, gsn: int) -> tuple[int, int] | None:
        """Return the first and last number of the unreadable entries that may hold `gsn`. Slow.

        None: it can be read, or the missing entries cannot be identified.

        Raises:
            UnreadableError: the file that would identify them cannot be read.

        """
        ...

    def damaged_after(self, fseq: int) -> tuple[int, int] | None:
        """Return the first and last number of the unreadable entries right after `fseq`. Slow.

        None: the next one can be read, or there is none.

        Raises:
            UnreadableError: the file that would identify them cannot be read.

        """
        ...

    def repair(self, entries: list[Entry]) -> bool:
        """Replace unreadable entries by copies, durably; return whether they fit. Slow.

        Args:
            entries: numbered without a gap, all in one reported range of unreadable entries.

        Raises:
            FullError: there is no space for it; nothing was changed.
            BusyError: other entries of the file cannot be read now; nothing was changed.
            UnreadableError: their segment file cannot be read.

        """
        ...
