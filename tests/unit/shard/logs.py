"""Entries of a log, and an oracle of a store's answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from hypothesis import strategies as st

from shard.storage.segment_store import SegmentStore
from shard.storage.store import watermark_after_reset
from ziplog.core.entries import Expire, Place, SessionTable, SettledUnit, Skip
from ziplog.core.view import NO_DIGEST
from ziplog.segments.entry import Entry, SessionTablePartRecord, SessionTableRecord, WatermarkRecord

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

#: The parts of a session table, each with the last entry before it.
_Parts = list[tuple[int, list[SessionTable]]]

CLIENT = b"c" * 16
HUGE = 2**62

#: The steps of a history that append an entry (see `apply`).
APPENDS: Final = (
    st.tuples(
        st.just("place"),
        st.integers(0, 3),
        st.lists(st.integers(1, 3), min_size=1, max_size=4),
        st.integers(0, 900),
    ),
    st.tuples(st.just("skip"), st.integers(0, 3), st.integers(1, 20)),
    st.tuples(st.just("expire")),
    st.tuples(st.just("mark"), st.integers(0, 9)),
    st.tuples(st.just("table"), st.integers(1, 9)),
    st.tuples(st.just("part"), st.booleans(), st.booleans()),
    st.tuples(st.just("view")),
)


def place(fseq: int, gsns: list[int], body: bytes = b"body", view: int = 1) -> Entry:
    return Entry(fseq, view, Place(CLIENT, fseq, 1, 0, gsns, 7, body))


def skip(fseq: int, start: int, stop: int, view: int = 1) -> Entry:
    return Entry(fseq, view, Skip(start, stop))


def expire(fseq: int, view: int = 1) -> Entry:
    return Entry(fseq, view, Expire(CLIENT))


def mark(stable: int, trim: int = 0) -> Entry:
    return Entry(0, 1, WatermarkRecord(1, stable, 1, trim, 0, NO_DIGEST))


def table(seq: int, size: int = 1) -> Entry:
    units = [SettledUnit(seq + index, [seq + index], 7) for index in range(size)]
    return Entry(0, 1, SessionTableRecord([SessionTable(CLIENT, 1, units)]))


def part(begun: int, number: int, *, is_last: bool) -> Entry:
    table = SessionTable(CLIENT, 1, [SettledUnit(begun, [begun], 7)])
    return Entry(0, 1, SessionTablePartRecord([table], 0, number, is_last))


def span(entry: Entry) -> tuple[int, int] | None:
    """Return the first and last gsn of an entry, None if it has none."""
    decision = entry.decision
    if isinstance(decision, Place):
        return decision.gsns[0], decision.gsns[-1]
    return (decision.start, decision.stop - 1) if isinstance(decision, Skip) else None


class Oracle:
    """A list of entries, watermark records and session tables, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        #: The view of the next entries.
        self.view = 1
        #: The values before the first entry.
        self.base_fseq, self.base = 0, 0

    def append(self, entry: Entry) -> None:
        self.entries.append(entry)

    @property
    def numbered(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.fseq]

    def find(self, gsn: int) -> Entry | None:
        for entry in self.entries:
            reach = span(entry)
            if reach and reach[0] <= gsn <= reach[1]:
                decision = entry.decision
                return entry if isinstance(decision, Skip) or gsn in decision.gsns else None  # type: ignore[union-attr]
        return None

    def after(self, gsn: int) -> list[Entry]:
        spans = [(entry, span(entry)) for entry in self.entries]
        return [entry for entry, reach in spans if reach and reach[1] >= gsn]

    def last_record_below(self, gsn: int) -> int:
        places = [entry.decision for entry in self.entries if isinstance(entry.decision, Place)]
        return max((g for decision in places for g in decision.gsns if g < gsn), default=0)

    @property
    def last_gsn(self) -> int:
        return max((reach[1] for e in self.entries if (reach := span(e))), default=self.base)

    @property
    def last_fseq(self) -> int:
        return self.numbered[-1].fseq if self.numbered else self.base_fseq

    @property
    def last_view(self) -> int:
        return self.numbered[-1].view if self.numbered else 0

    @property
    def mark(self) -> WatermarkRecord | None:
        marks = (
            e.decision for e in reversed(self.entries) if isinstance(e.decision, WatermarkRecord)
        )
        return next(marks, None)

    @property
    def last_table(self) -> tuple[int, list[SessionTable]]:
        parts = self._tables()[0]
        return (parts[0][0] if parts else 0), [table for _, tables in parts for table in tables]

    @property
    def next_part(self) -> int:
        return len(self._tables()[1])

    def _tables(self) -> tuple[_Parts, _Parts]:
        """Return the parts of the last complete table, and of an incomplete one after it."""
        whole: _Parts = []
        begun: _Parts = []
        fseq = self.base_fseq
        for entry in self.entries:
            fseq = entry.fseq or fseq
            match entry.decision:
                case SessionTableRecord(sessions):
                    whole, begun = [(fseq, sessions)], []
                case SessionTablePartRecord(sessions, _, number, is_last):
                    begun = [*begun[:number], (fseq, sessions)]
                    whole, begun = (begun, []) if is_last else (whole, begun)
        return whole, begun

    def truncate(self, fseq: int) -> None:
        known = self.mark
        dropped = (at for at, entry in enumerate(self.entries) if entry.fseq > fseq)
        del self.entries[next(dropped, len(self.entries)) :]
        if known is not None:
            self.entries.append(Entry(0, 1, known))

    def reset(self, fseq: int, gsn: int) -> None:
        known = self.mark
        self.entries = [Entry(0, 1, watermark_after_reset(known, fseq, gsn))] if known else []
        self.base_fseq, self.base = fseq, gsn - 1


def apply(store: SegmentStore, oracle: Oracle, step: Any) -> None:
    gsn, fseq = oracle.last_gsn + 1, oracle.last_fseq + 1
    match step:
        case "place", gap, gaps, size:
            gsns = [gsn + gap + sum(gaps[: i + 1]) for i in range(len(gaps))]
            entry = place(fseq, gsns, os.urandom(size), oracle.view)
        case "skip", gap, length:
            entry = skip(fseq, gsn + gap, gsn + gap + length, oracle.view)
        case ("expire",):
            entry = expire(fseq, oracle.view)
        case "table", seq:
            entry = table(seq, seq)
        case "part", goes_on, is_last:
            entry = part(fseq, oracle.next_part if goes_on else 0, is_last=is_last)
        case "mark", stable:
            entry = mark(min(stable, oracle.last_fseq))
        case _:
            cut(store, oracle, step)
            return
    store.append(entry)
    oracle.append(entry)


def cut(store: SegmentStore, oracle: Oracle, step: Any) -> None:
    match step:
        case ("view",):
            oracle.view += 1
        case "truncate", back:
            stable = oracle.mark.stable if oracle.mark else 0
            fseq = max(oracle.last_fseq - back, stable, oracle.base_fseq)
            store.truncate(fseq)
            if fseq < oracle.last_fseq:
                oracle.truncate(fseq)
        case "reset", ahead, gap:
            fseq, gsn = oracle.last_fseq + ahead, oracle.last_gsn + 1 + gap
            store.reset(fseq, gsn)
            oracle.reset(fseq, gsn)


def compare(store: SegmentStore, oracle: Oracle, gsns: Iterable[int] | None = None) -> None:
    """Compare all answers of a store with the oracle's."""
    assert store.mark == oracle.mark
    for gsn in gsns or range(oracle.last_gsn + 5):
        assert store.find(gsn) == oracle.find(gsn), gsn
        assert store.last_record_below(gsn) == oracle.last_record_below(gsn), gsn
        assert store.scan(gsn, HUGE) == oracle.after(gsn), gsn
    assert store.last_record_below(HUGE) == oracle.last_record_below(HUGE)
    compare_numbers(store, oracle)


def compare_numbers(store: SegmentStore, oracle: Oracle) -> None:
    numbered = oracle.numbered
    assert store.last_fseq == oracle.last_fseq
    assert store.first_fseq == oracle.base_fseq + 1
    assert (store.last_view, store.last_end) == (oracle.last_view, oracle.last_gsn + 1)
    views = {entry.fseq: entry.view for entry in numbered}
    for fseq in range(oracle.base_fseq - 1, oracle.last_fseq + 3):
        assert store.view_at(fseq) == views.get(fseq, 0), fseq
        assert store.read_after(fseq, HUGE) == [e for e in numbered if e.fseq > fseq], fseq
        assert store.read_after(fseq, 0) == [e for e in numbered if e.fseq > fseq][:1], fseq
    for view in range(oracle.last_view + 2):
        assert store.last_of(view) == max((n for n, v in views.items() if v <= view), default=0)
    assert store.damage == []
    assert store.last_table() == oracle.last_table


def walk(store: SegmentStore, limit: int) -> list[Entry]:
    """Scan from the start to the end in steps of `limit` bytes."""
    result: list[Entry] = []
    gsn = 0
    while entries := store.scan(gsn, limit):
        result += entries
        reach = span(entries[-1])
        assert reach is not None
        gsn = reach[1] + 1
    return result


def reopen(directory: Path, **options: Any) -> SegmentStore:
    """Open a directory's store; only `flush` and `close` flush it."""
    options = {"flush_interval_ms": 0, "reserve_bytes": 0} | options
    return SegmentStore.open(directory, **options)
