"""The segment store: cuts and resets, durable and atomic, with crashes and without space."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shard.storage.store import FullError
from tests.unit.shard.disk import Crash, Disk
from tests.unit.shard.logs import (
    HUGE,
    Oracle,
    apply,
    compare,
    compare_numbers,
    mark,
    part,
    place,
    reopen,
    skip,
    table,
)
from ziplog.core.node import Persisted
from ziplog.segments.entry import Entry, SessionTablePartRecord, WatermarkRecord
from ziplog.segments.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shard.storage.segment_store import SegmentStore

    Opened = Callable[..., SegmentStore]

# A test syncs thousands of files, which takes a minute on a busy disk.
pytestmark = pytest.mark.timeout(300)

SMALL = 700


def grown(directory: Path) -> tuple[SegmentStore, Oracle]:
    """Return a store of several segments with an unflushed end."""
    store, oracle = reopen(directory, segment_bytes=SMALL, cache_bytes=500), Oracle()
    for round_ in range(6):
        for step in (
            ("place", 1, [1, 2], 90),
            ("expire",),
            ("skip", 0, 7),
            ("mark", 3),
            ("table", round_ + 1),
            ("part", False, False),
            ("place", 0, [1], 120),
            ("part", True, round_ % 2 == 0),
            ("view",),
        ):
            apply(store, oracle, step)
        if round_ < 5:
            assert store.flush()
    return store, oracle


def go_on(store: SegmentStore, oracle: Oracle) -> None:
    """Append to both."""
    for step in (("place", 0, [2], 50), ("expire",), ("mark", 3), ("skip", 1, 3)):
        apply(store, oracle, step)


def after(oracle: Oracle, change: Callable[[Any], None]) -> Oracle:
    other = Oracle()
    other.entries, other.view = list(oracle.entries), oracle.view
    change(other)
    return other


CHANGES: dict[str, Callable[[Any], None]] = {
    **{
        f"truncate {fseq}": lambda log, fseq=fseq: log.truncate(fseq) for fseq in (3, 8, 13, 20, 23)
    },
    "reset at the end": lambda log: log.reset(log.last_fseq, log.last_gsn + 1),
    "reset beyond": lambda log: log.reset(100, 5_000),
}


@pytest.fixture(params=CHANGES, ids=lambda name: name.replace(" ", "-"))
def change(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], None]]:
    def run(log: Any) -> None:
        if isinstance(log, Oracle):
            CHANGES[request.param](log)
        elif request.param == "reset at the end":
            log.reset(log.last_fseq, log.last_end)
        else:
            CHANGES[request.param](log)

    return run


def test_a_cut_is_all_or_nothing_and_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]
) -> None:
    """A crash at every operation leaves the one log or the other, with any kept unsynced data."""
    outcomes = set()
    for allowed in range(200):
        directory = tmp_path / f"{allowed}"
        store, oracle = grown(directory)
        assert store.flush()
        changed = after(oracle, change)
        disk = Disk(monkeypatch, directory, allowed)
        try:
            change(store)
            is_done = True
        except Crash:
            is_done = False
        disk.restore()
        for image in (
            disk.everything(tmp_path / f"{allowed}-everything"),
            disk.only_synced(tmp_path / f"{allowed}-synced"),
        ):
            outcomes.add(check_image(image, oracle, changed, is_done=is_done))
        if is_done:
            compare(store, changed)
            break
    else:
        pytest.fail("it never ends")
    assert outcomes == {True, False}


def check_image(image: Path, before: Oracle, changed: Oracle, *, is_done: bool) -> bool:
    """Check that a directory has one of the two logs and accepts entries; return if it is cut."""
    store = reopen(image, segment_bytes=SMALL)
    is_cut = is_done or (store.last_fseq == changed.last_fseq and store.mark == changed.mark)
    expected = after(changed if is_cut else before, lambda _: None)
    expected.base_fseq, expected.base = (
        (changed.base_fseq, changed.base) if is_cut else (before.base_fseq, before.base)
    )
    compare_numbers(store, expected)
    go_on(store, expected)
    assert store.close()
    again = reopen(image, segment_bytes=SMALL)
    compare(again, expected)
    assert again.close()
    return is_cut


def test_a_start_that_tidies_up_may_be_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, oracle = grown(tmp_path / "log")
    assert store.flush()
    changed = after(oracle, lambda log: log.truncate(8))

    def stop(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr("shard.storage.segment_store.remove_void", stop)
        with pytest.raises(Crash):
            store.truncate(8)
    for allowed in range(200):
        directory = tmp_path / f"{allowed}"
        shutil.copytree(tmp_path / "log", directory)
        disk = Disk(monkeypatch, directory, allowed)
        try:
            reopen(directory)
            is_done = True
        except Crash:
            is_done = False
        disk.restore()
        for image in (
            disk.everything(tmp_path / f"{allowed}-everything"),
            disk.only_synced(tmp_path / f"{allowed}-synced"),
        ):
            again = reopen(image)
            compare(again, changed)
            assert again.close()
        if is_done:
            return
    pytest.fail("it never ends")


def test_unwritten_entries_are_cut_too(tmp_path: Path) -> None:
    events: list[Any] = []
    store, oracle = grown(tmp_path)
    store.start(events.append)
    assert store.backlog_bytes > 0
    store.truncate(22)
    oracle.truncate(22)
    assert store.flushed_fseq == 22
    compare(store, oracle)
    go_on(store, oracle)
    assert store.flushed_fseq == 22
    compare(store, oracle)
    assert store.close()
    assert events == []
    again = reopen(tmp_path)
    compare(again, oracle)
    again.close()


def test_entries_of_a_former_process_are_stored_once_the_store_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former process may have been killed between its write and its flush."""
    store, oracle = grown(tmp_path / "log")
    assert store.close()
    disk = Disk(monkeypatch, tmp_path / "log", 1000)
    disk.forget()
    again = reopen(tmp_path / "log", segment_bytes=SMALL)
    disk.restore()
    assert again.flushed_fseq == oracle.last_fseq
    newest = max((tmp_path / "log").glob("*.seg"))
    assert (disk.only_synced(tmp_path / "image") / newest.name).read_bytes() == newest.read_bytes()
    again.close()


def test_persisted_is_reported_again_for_reused_numbers(opened: Opened) -> None:
    events: list[Any] = []
    store = opened(flush_interval_ms=0)
    store.start(events.append)
    for fseq in range(1, 9):
        store.append(place(fseq, [fseq]))
    store.flusher.flush_and_report()
    store.truncate(3)
    store.flusher.flush_and_report()
    assert events == [Persisted(8)]
    store.append(place(4, [4]))
    store.flusher.flush_and_report()
    assert events == [Persisted(8), Persisted(4)]


def test_positions_are_free_again_after_a_cut(opened: Opened) -> None:
    store = opened()
    store.append(place(1, [1, 2]))
    store.append(skip(2, 3, 50))
    store.append(place(3, [60]))
    store.truncate(1)
    assert (store.last_end, store.find(3), store.find(60)) == (3, None, None)
    store.append(place(2, [4], b"other", view=2))
    store.append(skip(3, 5, 61, view=2))
    assert store.flush()
    for again in (store, opened()):
        assert again.find(3) is None
        assert again.find(4) == place(2, [4], b"other", view=2)
        assert again.find(60) == skip(3, 5, 61, view=2)
        assert (again.view_at(1), again.view_at(2), again.last_of(1)) == (1, 2, 1)


def test_stable_entries_are_never_cut(opened: Opened) -> None:
    store = opened()
    for fseq in range(1, 5):
        store.append(place(fseq, [fseq]))
    store.append(mark(3))
    with pytest.raises(AssertionError):
        store.truncate(2)
    with pytest.raises(AssertionError):
        store.truncate(5)
    store.truncate(3)
    assert store.last_fseq == 3


def test_a_mark_survives_a_cut_of_its_segment(opened: Opened) -> None:
    store = opened(segment_bytes=300)
    for fseq in range(1, 20):
        store.append(place(fseq, [fseq], bytes(100)))
    store.append(mark(2, trim=2))
    store.truncate(2)
    assert store.mark == mark(2, trim=2).decision
    store.close()
    assert opened(segment_bytes=300).mark == mark(2, trim=2).decision


def test_after_a_reset_all_before_counts_as_trimmed_and_stable(opened: Opened) -> None:
    store = opened()
    for fseq in range(1, 5):
        store.append(place(fseq, [2 * fseq]))
    store.append(mark(3))
    store.reset(40, 500)
    store.append(place(41, [505]))
    store.close()
    for again in (store, opened()):
        assert [again.find(gsn) for gsn in (2, 8, 499)] == [None] * 3
        assert again.scan(1, HUGE) == [place(41, [505])]
        assert again.last_record_below(505) == 0
        assert isinstance(again.mark, WatermarkRecord)
        assert (again.mark.stable, again.mark.frontier, again.mark.trim) == (40, 500, 500)


def test_a_reset_without_a_mark_is_remembered(opened: Opened) -> None:
    store = opened()
    store.append(place(1, [1]))
    store.reset(40, 500)
    store.close()
    again = opened()
    assert (again.first_fseq, again.last_fseq, again.last_end, again.mark) == (41, 40, 500, None)
    assert (again.last_view, again.view_at(40), again.last_of(9)) == (0, 0, 0)
    assert again.find(1) is None
    assert again.read_after(0, HUGE) == []


# --- tables ----------------------------------------------------------------------------------


def test_the_last_table_that_cannot_be_cut_outlives_a_trim(opened: Opened) -> None:
    store = opened(segment_bytes=300)
    sought = table(5, 3)
    for fseq in range(1, 60):
        store.append(place(fseq, [fseq], bytes(100)))
        if fseq == 20:
            store.append(sought)
    store.append(table(9))
    store.append(mark(40, trim=50))
    store.trim(50)
    assert store.flush()
    assert 10 < store.first_fseq <= 21
    store.truncate(45)
    assert store.last_table() == (20, sought.decision.sessions)  # type: ignore[union-attr]
    assert [e.fseq for e in store.read_after(20, HUGE)] == list(range(21, 46))
    store.close()
    again = opened(segment_bytes=300)
    assert again.last_table() == (20, sought.decision.sessions)  # type: ignore[union-attr]


def test_a_table_is_found_without_reading_older_segments(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(segment_bytes=300)
    for fseq in range(1, 60):
        store.append(place(fseq, [fseq], bytes(100)))
        if fseq % 20 == 0:
            store.append(table(fseq))
    store.close()
    reads: list[str] = []
    real, real_bytes = os.open, Path.read_bytes

    def spy(path: Any, *arguments: Any, **options: Any) -> int:
        reads.append(Path(path).name)
        return real(path, *arguments, **options)

    def spy_bytes(path: Path) -> bytes:
        reads.append(path.name)
        return real_bytes(path)

    monkeypatch.setattr(os, "open", spy)
    monkeypatch.setattr(Path, "read_bytes", spy_bytes)
    again = opened(segment_bytes=300)
    assert again.last_table() == (40, table(40).decision.sessions)  # type: ignore[union-attr]
    assert again.last_view == again.view_at(1) == 1
    assert len({name for name in reads if name.endswith(".seg")}) <= 2


def test_an_unknown_directory_after_a_cut_is_no_full_disk(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown if the new file is present: continuing without it would lose entries."""
    store = opened()
    for fseq in range(1, 9):
        store.append(place(fseq, [fseq]))
    assert store.flush()

    real = os.fsync

    def full(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            store.truncate(5)


def test_a_damaged_table_is_replaced_by_the_one_before(opened: Opened) -> None:
    store = opened()
    for fseq in range(1, 4):
        store.append(place(fseq, [fseq]))
        store.append(table(700 + fseq))
    store.append(place(4, [4]))
    store.close()
    (path,) = store._directory.glob("*.seg")
    data = bytearray(path.read_bytes())
    body = data.index((703).to_bytes(2, "big"))
    data[body] ^= 1
    path.write_bytes(data)
    again = opened()
    assert again.damage == []
    assert again.last_table() == (2, table(702).decision.sessions)  # type: ignore[union-attr]


def seqs(store: SegmentStore) -> tuple[int, list[int]]:
    """Return the last entry before the last table, and the table's units."""
    fseq, tables = store.last_table()
    return fseq, [unit.seq for table in tables for unit in table.units]


def test_a_table_lasts_from_its_first_part_on(opened: Opened) -> None:
    """Entries between its parts survive a trim, and an incomplete table is ignored."""
    store = opened(segment_bytes=300)
    for fseq in range(1, 60):
        store.append(place(fseq, [fseq], bytes(100)))
        if fseq in {20, 30, 40, 41}:
            store.append(part(fseq, {20: 0, 30: 1, 40: 2, 41: 0}[fseq], is_last=fseq == 40))
    store.append(mark(45, trim=50))
    store.append(part(1, 1, is_last=True))
    assert seqs(store) == (41, [41, 1])
    store.trim(50)
    store.truncate(50)
    assert seqs(store) == (20, [20, 30, 40])
    assert store.first_fseq <= 21
    store.close()
    again = opened(segment_bytes=300)
    assert seqs(again) == (20, [20, 30, 40])


def test_parts_of_two_tables_are_no_table(opened: Opened) -> None:
    """The state if the end of one table and the beginning of the next cannot be read."""
    store = opened()
    store.append(place(1, [1]))
    store.append(table(701))
    for number in range(2):
        store.append(Entry(0, 1, SessionTablePartRecord([], number, number, is_last=number == 1)))
    assert seqs(store) == (1, [701])


def test_a_table_of_which_a_part_is_damaged_counts_as_none(opened: Opened) -> None:
    store = opened()
    store.append(place(1, [1]))
    store.append(table(701))
    for number in range(3):
        store.append(place(2 + number, [2 + number]))
        store.append(part(710 + number, number, is_last=number == 2))
    store.close()
    (path,) = store._directory.glob("*.seg")
    data = bytearray(path.read_bytes())
    data[data.index((711).to_bytes(2, "big"))] ^= 1
    path.write_bytes(data)
    again = opened()
    assert again.last_table() == (1, table(701).decision.sessions)  # type: ignore[union-attr]


# --- files of earlier releases ---------------------------------------------------------------


def test_segments_from_before_entries_were_counted_are_taken_over(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names have no number, and their headers no flushed position."""
    real = Segment.__init__

    def init(segment: Segment, *arguments: Any, **options: Any) -> None:
        real(segment, *arguments, **options)
        number, base, _, salt = arguments
        segment.name = f"{number:08d}-{base:019d}-{salt:08x}.seg"

    with monkeypatch.context() as patched:
        patched.setattr(Segment, "__init__", init)
        patched.setattr("ziplog.segments.entry_codec._MAX_LAG", -1)
        store, oracle = opened(segment_bytes=SMALL), Oracle()
        for _ in range(30):
            apply(store, oracle, ("place", 1, [1, 2], 90))
            apply(store, oracle, ("expire",))
        store.close()
    for path in [*store._directory.glob("*.idx"), store._directory / "flushed"]:
        path.unlink()
    again = opened(segment_bytes=SMALL)
    assert len(again._segments) > 3
    compare(again, oracle)
    again.truncate(33)
    oracle.truncate(33)
    go_on(again, oracle)
    again.close()
    compare(opened(segment_bytes=SMALL), oracle)


# --- without space ---------------------------------------------------------------------------


def test_without_space_for_a_cut_nothing_changes(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, oracle = opened(segment_bytes=SMALL), Oracle()
    for _ in range(20):
        apply(store, oracle, ("place", 1, [1, 2], 90))
    apply(store, oracle, ("mark", 3))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        with pytest.raises(FullError, match="no room"):
            store.truncate(5)
    assert store.flush()
    real = os.open

    def open_(path: Any, flags: int, *arguments: Any) -> int:
        return full() if flags & os.O_CREAT else real(path, flags, *arguments)

    for name, failing in (("fsync", full), ("open", open_)):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, failing)
            for change in (lambda: store.truncate(5), lambda: store.reset(50, 500)):
                with pytest.raises(FullError, match="no room"):
                    change()
    assert not list(store._directory.glob("*.tmp"))
    compare(store, oracle)
    apply(store, oracle, ("place", 0, [2], 10))
    store.close()
    again = opened(segment_bytes=SMALL)
    compare(again, oracle)
    again.truncate(5)
    oracle.truncate(5)
    compare(again, oracle)
