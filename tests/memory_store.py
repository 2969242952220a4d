"""An in-memory entry store with injected damage, for tests of pure nodes."""

from __future__ import annotations

import sys
from bisect import bisect_left
from itertools import takewhile

from shard.state.decision_log import end_of
from shard.storage.store import watermark_after_reset
from ziplog import wire
from ziplog.core.entries import Expire, Place, SessionTable, Skip
from ziplog.segments.entry import (
    Entry,
    SessionTablePartRecord,
    SessionTableRecord,
    UnreadableError,
    WatermarkRecord,
)


class MemoryStore:
    """A `Store` (shard/storage/store.py) in a list."""

    def __init__(self) -> None:
        #: The kept log: entry number `first_fseq` and those after it.
        self.log: list[Entry] = []
        #: Those of it that have positions.
        self.entries: list[Entry] = []
        #: All appended entries that were not dropped, watermark records and trimmed ones too.
        self.history: list[Entry] = []
        self._ends: list[int] = []
        #: Parts of session tables: the last entry before each, its number, whether it is the last.
        self._tables: list[tuple[int, int, bool, list[SessionTable]]] = []
        self.last_fseq = 0
        self.last_view = 0
        self.last_end = self._base = 1
        #: Entries that cannot be read until they are repaired.
        self.damaged: set[int] = set()
        self.mark: WatermarkRecord | None = None
        #: A bulk reader reads up to this position.
        self.sealed_below = 0
        self.backlog_bytes = 0
        self.free_bytes = self.reserve_bytes = 0

    @property
    def first_fseq(self) -> int:
        return self.last_fseq - len(self.log) + 1

    @property
    def flushed_fseq(self) -> int:
        return self.last_fseq

    def append(self, entry: Entry) -> None:
        self.history.append(entry)
        match entry.decision:
            case WatermarkRecord():
                self.mark = entry.decision
            case SessionTableRecord(sessions):
                self._tables.append((self.last_fseq, 0, True, sessions))
            case SessionTablePartRecord(sessions, _, number, is_last):
                self._tables.append((self.last_fseq, number, is_last, sessions))
            case _:
                self._append(entry)

    def _append(self, entry: Entry) -> None:
        assert entry.fseq == self.last_fseq + 1, "the log has a gap"
        assert entry.view >= self.last_view, "a view went backwards"
        self.last_fseq, self.last_view = entry.fseq, entry.view
        self.log.append(entry)
        if not isinstance(entry.decision, Expire):
            self.entries.append(entry)
            self.last_end = end_of(entry, 0)
            self._ends.append(self.last_end)

    def view_at(self, fseq: int) -> int:
        in_log = self.first_fseq <= fseq <= self.last_fseq
        return self.log[fseq - self.first_fseq].view if in_log else 0

    def views_at(self, fseq: int) -> tuple[int, int]:
        return self.view_at(fseq), self.view_at(fseq)

    def last_of(self, view: int) -> int:
        return max((entry.fseq for entry in self.log if entry.view <= view), default=0)

    def read_after(self, fseq: int, limit_bytes: int) -> list[Entry]:
        start = max(fseq + 1 - self.first_fseq, 0)
        return self._readable(within(self.log[start:], limit_bytes))

    def last_table(self) -> tuple[int, list[SessionTable]]:
        parts = self._whole(self.last_fseq)
        return (parts[0][0] if parts else 0), [table for *_, tables in parts for table in tables]

    def _whole(self, fseq: int) -> list[tuple[int, int, bool, list[SessionTable]]]:
        """Return the parts of the last table that ends at an entry, or before."""
        ends = [i for i, part in enumerate(self._tables) if part[2] and part[0] <= fseq]
        if not ends:
            return []
        end = ends[-1] + 1
        parts = self._tables[end - self._tables[end - 1][1] - 1 : end]
        assert [part[1] for part in parts] == list(range(len(parts))), "a table is torn"
        return parts

    def find(self, gsn: int) -> Entry | None:
        index = bisect_left(self._ends, gsn + 1)
        if index == len(self.entries):
            return None
        entry = self.entries[index]
        decision = entry.decision
        if entry.fseq in self.damaged:
            raise UnreadableError(f"entry {entry.fseq} is damaged")
        if isinstance(decision, Place):
            return entry if gsn in decision.gsns else None
        assert isinstance(decision, Skip)
        return entry if decision.start <= gsn < decision.stop else None

    def scan(self, gsn: int, limit_bytes: int, max_entries: int = sys.maxsize) -> list[Entry]:
        first = bisect_left(self._ends, gsn + 1)
        entries = (
            self.entries[first:]
            if max_entries == sys.maxsize
            else self.entries[first : first + max_entries]
        )
        return self._readable(within(entries, limit_bytes))

    def _readable(self, entries: list[Entry]) -> list[Entry]:
        readable = list(takewhile(lambda entry: entry.fseq not in self.damaged, entries))
        if entries and not readable:
            raise UnreadableError(f"entry {entries[0].fseq} is damaged")
        return readable

    def outline(self, start: int, stop: int) -> list[wire.Step]:
        first, last = bisect_left(self._ends, start + 1), bisect_left(self._ends, stop)
        over = [
            (min(end, stop), entry.decision)
            for entry, end in zip(
                self.entries[first : last + 1], self._ends[first : last + 1], strict=True
            )
        ]
        each = -(-len(over) // wire.MAX_STEPS) or 1
        groups = [over[index : index + each] for index in range(0, len(over), each)]
        return [wire.Step(group[-1][0], sum(map(weight_of, group))) for group in groups]

    def seal(self, stop: int) -> None:
        self.sealed_below = max(stop, self.sealed_below)

    def last_record_below(self, gsn: int) -> int:
        for entry in reversed(self.entries):
            if isinstance(entry.decision, Place):
                below = [g for g in entry.decision.gsns if g < gsn]
                if below:
                    return below[-1]
        return 0

    def segments_below(self, gsn: int) -> int:
        del gsn
        return 0

    def trim(self, gsn: int) -> None:
        keep = bisect_left(self._ends, gsn + 1)
        del self.entries[:keep], self._ends[:keep]
        first = self.entries[0].fseq if self.entries else self.last_fseq + 1
        # As in a segment store: entries after the last session table are kept.
        parts = self._whole(self.mark.stable) if self.mark else []
        first = min(first, parts[0][0] + 1) if parts else first
        del self.log[: max(first - self.first_fseq, 0)]

    def truncate(self, fseq: int) -> None:
        assert self.first_fseq - 1 <= fseq <= self.last_fseq, "the log does not reach there"
        assert self.mark is None or self.mark.stable <= fseq, "stable entries are dropped"
        kept = fseq + 1 - self.first_fseq
        self.last_view = self.log[kept - 1].view if kept else 0
        del self.log[kept:]
        self.last_fseq = fseq
        self.history = [entry for entry in self.history if entry.fseq <= fseq]
        self._tables = [part for part in self._tables if part[0] <= fseq]
        while self.entries and self.entries[-1].fseq > fseq:
            del self.entries[-1], self._ends[-1]
        decided = [e for e in self.history if isinstance(e.decision, Place | Skip)]
        self.last_end = end_of(decided[-1], 0) if decided else self._base

    def reset(self, fseq: int, gsn: int) -> None:
        mark = self.mark
        MemoryStore.__init__(self)
        self.last_fseq, self.last_end, self._base = fseq, gsn, gsn
        if mark is not None:
            self.mark = watermark_after_reset(mark, fseq, gsn)

    @property
    def damage(self) -> list[tuple[int, int]]:
        firsts = [fseq for fseq in sorted(self.damaged) if fseq - 1 not in self.damaged]
        lasts = [fseq for fseq in sorted(self.damaged) if fseq + 1 not in self.damaged]
        return list(zip(firsts, lasts, strict=True))

    def damaged_range(self, gsn: int) -> tuple[int, int] | None:
        index = bisect_left(self._ends, gsn + 1)
        fseq = self.entries[index].fseq if index < len(self.entries) else 0
        return next((hole for hole in self.damage if hole[0] <= fseq <= hole[1]), None)

    def damaged_after(self, fseq: int) -> tuple[int, int] | None:
        return next((hole for hole in self.damage if hole[0] <= fseq + 1 <= hole[1]), None)

    def repair(self, entries: list[Entry]) -> bool:
        numbers = [entry.fseq for entry in entries]
        if entries != [self.log[fseq - self.first_fseq] for fseq in numbers]:
            return False
        self.damaged -= set(numbers)
        return True

    def lose(self, appended: int) -> None:
        """Drop all but the first `appended` appends, as a crash does."""
        history = self.history[:appended]
        first = next((entry.fseq for entry in self.history if entry.fseq), self.last_fseq + 1)
        base = self._base
        MemoryStore.__init__(self)
        self.last_fseq, self.last_end, self._base = first - 1, base, base
        for entry in history:
            self.append(entry)


def weight_of(step: tuple[int, object]) -> int:
    """Return about how many bytes a decision takes."""
    decision = step[1]
    return 64 + (len(decision.body or b"") if isinstance(decision, Place) else 0)


def within(entries: list[Entry], limit_bytes: int) -> list[Entry]:
    """Return the first entries, up to about `limit_bytes`; at least one if there is any."""
    result: list[Entry] = []
    for entry in entries:
        result.append(entry)
        if isinstance(entry.decision, Place):
            limit_bytes -= len(entry.decision.body or b"") + 9 * (len(entry.decision.gsns) - 1)
        if limit_bytes <= 0:
            break
    return result
