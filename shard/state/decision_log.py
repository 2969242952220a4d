"""The decision log: the primary's decisions in order, and how much of it is stable and durable.

Entries are numbered by fseq from 1 without gaps. Every replica holds a prefix. An entry is stable
when all replicas hold it, and durable when all have it on stable storage (docs/protocol.md,
section 5). Only unstable entries are kept here.
Invariant: durable <= stable <= last; all three only grow; decisions are in increasing gsn order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ziplog.core.entries import Place, Skip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.core.entries import Decision
    from ziplog.segments.entry import (
        Entry,
        SessionTablePartRecord,
        SessionTableRecord,
        WatermarkRecord,
    )


def end_of(entry: Entry, before: int) -> int:
    """Return the gsn below which all owned positions are decided after `entry`."""
    return end_after(entry.decision, before)


def end_after(
    decision: Decision | WatermarkRecord | SessionTableRecord | SessionTablePartRecord, before: int
) -> int:
    """Return the gsn below which all owned positions are decided after a decision."""
    if type(decision) is Place:
        return decision.gsns[-1] + 1
    return decision.stop if type(decision) is Skip else before


class Watermark(NamedTuple):
    """A position in the stream: fseq, the gsn where it ends, and the last record before that."""

    fseq: int
    end: int
    record: int


#: Most bytes of a gsn in an encoded entry.
_GSN_BYTES: Final = 9
#: The watermark after an entry, and the entry's records and bytes.
_Mark = tuple[int, int, int, int, int]
_FSEQ: Final = itemgetter(0)
_RECORDS: Final = itemgetter(3)
_BYTES: Final = itemgetter(4)


def _with_record(mark: _Mark, record: int) -> _Mark:
    """Return a mark after which `record` is known, too."""
    fseq, end, before, records, size = mark
    return fseq, end, max(before, record), records, size


class DecisionLog:
    """The stream of decisions at one replica."""

    def __init__(self) -> None:
        self.restore(Watermark(0, 1, 0), Watermark(0, 1, 0), [])

    def restore(self, stable: Watermark, durable: Watermark, window: list[Entry]) -> None:
        """Reset to these watermarks, and to the entries after `stable`."""
        #: The last decided entry; every owned position below `end` is decided.
        self.last, self.end, self.last_record = stable
        #: Every replica holds the entries up to here; their positions lie below `stable_end`.
        self.stable, self.stable_end, self.stable_record = stable
        #: The same, on stable storage. `..._record` is the last record at or below; 0: none.
        self.durable, self.durable_end, self.durable_record = durable
        #: Entries after `stable`, in order: they may have to be sent again.
        self.window: list[Entry] = []
        #: Records and bytes in `window`; the primary bounds them.
        self.window_records = 0
        self.window_bytes = 0
        # The marks of the entries in `window`, and of those that are stable but not durable yet.
        self._unstable: list[_Mark] = []
        self._undurable: list[_Mark] = []
        if stable.fseq > durable.fseq:
            self._undurable.append((*stable, 0, 0))
        for entry in window:
            self.append(entry)

    @property
    def stable_mark(self) -> Watermark:
        """The end of what every replica holds."""
        return Watermark(self.stable, self.stable_end, self.stable_record)

    @property
    def durable_mark(self) -> Watermark:
        """The end of what every replica has on stable storage."""
        return Watermark(self.durable, self.durable_end, self.durable_record)

    def append(self, entry: Entry) -> int:
        """Append the next decided entry; return the bytes of its body and gsns, about."""
        assert entry.fseq == self.last + 1, "the stream has a gap"
        decision = entry.decision
        records = size = 0
        if type(decision) is Place:
            gsns = decision.gsns
            assert gsns[0] >= self.end, "a decided position was decided again"
            self.last_record = last = gsns[-1]
            self.end = last + 1
            records, size = len(gsns), len(decision.body or b"")
            self.window_records += records
            self.window_bytes += size
        elif type(decision) is Skip:
            assert decision.stop >= self.end, "a decision went backwards"
            self.end = decision.stop
        self.last = entry.fseq
        self.window.append(entry)
        self._unstable.append((self.last, self.end, self.last_record, records, size))
        return size + _GSN_BYTES * records

    def stabilise(self, fseq: int) -> list[Entry]:
        """Advance `stable` to `fseq`, which all replicas hold; return what became stable."""
        count = min(fseq, self.last) - self.stable
        if count <= 0:
            return []
        news, marks = self.window[:count], self._unstable[:count]
        del self.window[:count], self._unstable[:count]
        self.stable, self.stable_end, self.stable_record, *_ = marks[-1]
        self.window_records -= sum(map(_RECORDS, marks))
        self.window_bytes -= sum(map(_BYTES, marks))
        self._undurable += marks
        return news

    def make_durable(self, fseq: int) -> None:
        """Advance `durable` to `fseq`, which all replicas have on stable storage."""
        count = bisect_right(self._undurable, fseq, key=_FSEQ)
        if count:
            self.durable, self.durable_end, self.durable_record, *_ = self._undurable[count - 1]
            del self._undurable[:count]

    def add_repaired(self, entries: Iterable[Entry]) -> None:
        """Count repaired old entries: one of them may hold the last record."""
        for entry in entries:
            if type(entry.decision) is Place:
                record = entry.decision.gsns[-1]
                self.last_record = max(self.last_record, record)
                if entry.fseq <= self.stable:
                    self.stable_record = max(self.stable_record, record)
                if entry.fseq <= self.durable:
                    self.durable_record = max(self.durable_record, record)
                for marks in (self._unstable, self._undurable):
                    first = bisect_left(marks, entry.fseq, key=_FSEQ)
                    marks[first:] = [_with_record(mark, record) for mark in marks[first:]]

    def decisions_after(self, fseq: int) -> list[Decision]:
        """Return the unstable decisions that follow `fseq`."""
        entries = self.window[max(fseq - self.stable, 0) :]
        return [cast("Decision", entry.decision) for entry in entries]

    def check(self) -> None:
        """Assert the invariant."""
        assert self.durable <= self.stable <= self.last
        assert self.durable_end <= self.stable_end <= self.end
        assert len(self.window) == len(self._unstable) == self.last - self.stable
        assert self.window_records >= 0
        assert self.window_bytes >= 0
