"""The shard's stream: what the primary decided, in its order, as far as it is not stable yet.

Numbered by fseq from 1 without gaps. Every replica holds a prefix; what all replicas hold is
stable, what all have on stable storage is durable (docs/protocol.md, section 5).
Invariant: durable <= stable <= last, all of them only ever grow, and decisions go upwards in gsn.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

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


#: While the stream was heard of this lately, it says which epoch the shard is in, not a clock.
STREAM_ACTIVE_NS: Final = 40_000_000
#: A backup that has subscribers says so with every report, and so often at least ...
SUBSCRIBERS_REPORT_NS: Final = 500_000_000
#: ... and after a report that says so, the primary believes it for so long.
SUBSCRIBERS_EXPIRY_NS: Final = 3 * SUBSCRIBERS_REPORT_NS


class Watermark(NamedTuple):
    """A place in the stream: its number, the gsn where it ends, and the last record before that."""

    fseq: int
    end: int
    record: int


class DecisionLog:
    """The decided stream at one replica."""

    def __init__(self) -> None:
        self.restore(Watermark(0, 1, 0), Watermark(0, 1, 0), [])

    def restore(self, stable: Watermark, durable: Watermark, window: list[Entry]) -> None:
        """Begin, or begin anew, with the watermarks and what follows `stable`."""
        #: The last decided entry; every owned position below `end` is decided.
        self.last, self.end, self.last_record = stable
        #: Every replica holds the entries up to here; their positions lie below `stable_end`.
        self.stable, self.stable_end, self.stable_record = stable
        #: The same, on stable storage. `..._record` is the last record at or below; 0: none.
        self.durable, self.durable_end, self.durable_record = durable
        #: Entries after `stable`, in order: what may still have to be sent again.
        self.window: deque[Entry] = deque()
        #: What they hold, to bound it.
        self.window_records = 0
        self.window_bytes = 0
        # Where entries end that are stable but not durable yet.
        self._undurable: deque[Watermark] = deque()
        if stable.fseq > durable.fseq:
            self._undurable.append(stable)
        for entry in window:
            self.append(entry)

    @property
    def stable_mark(self) -> Watermark:
        """Up to where every replica holds the stream."""
        return Watermark(self.stable, self.stable_end, self.stable_record)

    @property
    def durable_mark(self) -> Watermark:
        """Up to where every replica has it on stable storage."""
        return Watermark(self.durable, self.durable_end, self.durable_record)

    def append(self, entry: Entry) -> None:
        """Take the next decided entry."""
        assert entry.fseq == self.last + 1, "the stream has a gap"
        end = end_of(entry, self.end)
        assert end >= self.end, "a decision went backwards"
        decision = entry.decision
        if type(decision) is Place:
            assert decision.gsns[0] >= self.end, "a decided position was decided again"
            self.last_record = decision.gsns[-1]
            self.window_records += len(decision.gsns)
            self.window_bytes += len(decision.body or b"")
        self.last = entry.fseq
        self.end = end
        self.window.append(entry)

    def stabilise(self, fseq: int) -> list[Entry]:
        """Take the news that all replicas hold up to `fseq`; return what became stable."""
        news: list[Entry] = []
        while self.stable < fseq and self.window:
            entry = self.window.popleft()
            decision = entry.decision
            if type(decision) is Place:
                self.stable_record = decision.gsns[-1]
                self.window_records -= len(decision.gsns)
                self.window_bytes -= len(decision.body or b"")
            self.stable = entry.fseq
            self.stable_end = end_of(entry, self.stable_end)
            self._undurable.append(self.stable_mark)
            news.append(entry)
        return news

    def make_durable(self, fseq: int) -> None:
        """Take the news that all replicas have up to `fseq` on stable storage."""
        while self._undurable and self._undurable[0][0] <= fseq:
            self.durable, self.durable_end, self.durable_record = self._undurable.popleft()

    def add_repaired(self, entries: Iterable[Entry]) -> None:
        """Take entries of the past that could not be read: one may hold what is the last record."""
        for entry in entries:
            if type(entry.decision) is Place:
                record = entry.decision.gsns[-1]
                self.last_record = max(self.last_record, record)
                if entry.fseq <= self.stable:
                    self.stable_record = max(self.stable_record, record)
                if entry.fseq <= self.durable:
                    self.durable_record = max(self.durable_record, record)

    def after(self, fseq: int) -> list[Entry]:
        """Return the unstable entries that follow `fseq`."""
        return list(islice(self.window, max(fseq - self.stable, 0), None))

    def check(self) -> None:
        """Assert the invariant."""
        assert self.durable <= self.stable <= self.last
        assert self.durable_end <= self.stable_end <= self.end
        assert len(self.window) == self.last - self.stable
        assert self.window_records >= 0
        assert self.window_bytes >= 0
