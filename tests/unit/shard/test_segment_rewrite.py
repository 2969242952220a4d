"""Repair of the segment store: all damage is noticed, and copies replace damaged entries."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.storage.store import FullError
from tests.properties import examples
from tests.unit.shard.disk import Crash, Disk
from tests.unit.shard.logs import HUGE, Oracle, apply, expire, mark, place, reopen, skip, span
from ziplog.segments.entry import Entry, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.storage.segment_store import SegmentStore

    Opened = Callable[..., SegmentStore]

SMALL = 900


def grown(directory: Path, rounds: int = 6) -> Oracle:
    """Create a store of several segments, all flushed."""
    store, oracle = reopen(directory, segment_bytes=SMALL), Oracle()
    for round_ in range(rounds):
        apply(store, oracle, ("place", 1, [1, 2], 60))
        apply(store, oracle, ("expire",))
        apply(store, oracle, ("skip", 0, 7))
        apply(store, oracle, ("mark", 3))
        apply(store, oracle, ("place", 2, [3], 90))
        if round_ % 3 == 2:
            apply(store, oracle, ("view",))
            apply(store, oracle, ("table", 2))
    assert store.close()
    return oracle


def unknown(store: SegmentStore, oracle: Oracle) -> list[int]:
    """Return the unreadable positions; check the answers for all others."""
    result = []
    for gsn in range(1, oracle.last_gsn + 3):
        try:
            found = store.find(gsn)
        except UnreadableError:
            result.append(gsn)
            with pytest.raises(UnreadableError):
                store.scan(gsn, HUGE)
        else:
            assert found == oracle.find(gsn), gsn
            with suppress(UnreadableError):
                scanned = store.scan(gsn, HUGE)
                assert scanned == oracle.after(gsn)[: len(scanned)], gsn
    return result


def check_numbers(store: SegmentStore, oracle: Oracle) -> set[int]:
    """Return the unreadable entries; check all others."""
    lost = set()
    for entry in oracle.numbered:
        try:
            read = store.read_after(entry.fseq - 1, HUGE)
        except UnreadableError:
            lost.add(entry.fseq)
        else:
            assert read == oracle.numbered[entry.fseq - 1 :][: len(read)]
            assert store.view_at(entry.fseq) == entry.view
    return lost


def mend(store: SegmentStore, oracle: Oracle, most: int = 1000) -> int:
    """Repair all known damage and all unreadable positions; return the number of repairs."""
    for count in range(500):
        hidden = unknown(store, oracle)
        hole = store.damaged_range(hidden[0]) if hidden else None
        lost = check_numbers(store, oracle)
        hole = hole or (store.damaged_after(min(lost) - 1) if lost else None)
        if hole is None:
            assert not hidden
            assert not lost
            return count
        entries = [e for e in oracle.numbered if hole[0] <= e.fseq <= hole[1]]
        assert store.repair(entries[:most])
    pytest.fail("it never ends")


def check_whole(store: SegmentStore, oracle: Oracle) -> None:
    assert unknown(store, oracle) == []
    assert check_numbers(store, oracle) == set()
    assert store.damage == []
    assert store.last_fseq == oracle.last_fseq
    assert (store.last_view, store.last_end) == (oracle.last_view, oracle.last_gsn + 1)
    assert store.last_record_below(HUGE) == oracle.last_record_below(HUGE)


# --- any damage ------------------------------------------------------------------------------


def hurt(path: Path, kind: str, at: int, length: int) -> None:
    data = bytearray(path.read_bytes())
    if not data:
        return
    start, stop = at % len(data), min(at % len(data) + length, len(data))
    match kind:
        case "flip":
            data[start] ^= 1 << length % 8
        case "zero":
            data[start:stop] = bytes(stop - start)
        case "cut":
            del data[start:]
        case "lose":
            del data[start:stop]
    path.write_bytes(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    directory = tmp_path_factory.mktemp("whole") / "segments"
    return directory, grown(directory)


damages = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.sampled_from(["flip", "zero", "cut", "lose", "unlink"]),
        st.integers(0, 5_000),
        st.integers(1, 400),
    ),
    min_size=1,
    max_size=3,
)


@examples(25)
@given(damages, st.booleans(), st.sampled_from([1, 2, 1000]))
def test_any_damage_is_noticed_and_repaired(
    whole: tuple[Path, Oracle],
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[int, str, int, int]],
    has_indexes: bool,
    most: int,
) -> None:
    """Any damage to files after a clean stop: no wrong answer, and copies repair it."""
    origin, oracle = whole
    directory = tmp_path_factory.mktemp("hurt") / "segments"
    shutil.copytree(origin, directory)
    for which, kind, at, length in history:
        # Without the first file, a log's beginning is unknown. The checkpoint needs the last one.
        paths = sorted(directory.glob("*.seg"))
        path = paths[which % len(paths)]
        if kind != "unlink":
            hurt(path, kind, at, length)
        elif path not in {paths[0], paths[-1]}:
            path.unlink()
    if not has_indexes:
        for path in directory.glob("*.idx"):
            path.unlink()
    store = reopen(directory, segment_bytes=SMALL)
    lost = check_numbers(store, oracle)
    hidden = unknown(store, oracle)
    assert store.last_fseq == oracle.last_fseq
    for first, last in store.damage:
        assert lost >= {first, last}
    for entry in oracle.numbered:
        reach = span(entry)
        assert reach is None or (entry.fseq in lost) == (reach[0] in hidden)
    mend(store, oracle, most)
    check_whole(store, oracle)
    apply(store, oracle_copy := copy_of(oracle), ("place", 0, [1], 10))
    assert store.close()
    again = reopen(directory, segment_bytes=SMALL)
    check_whole(again, oracle_copy)
    assert again.close()


def copy_of(oracle: Oracle) -> Oracle:
    other = Oracle()
    other.entries, other.view = list(oracle.entries), oracle.view
    return other


# --- torn and damaged ends -------------------------------------------------------------------


def two_batches(opened: Opened) -> tuple[SegmentStore, Path, list[Entry]]:
    """Return a store of two batches that was not closed."""
    store = opened()
    entries = [place(fseq, [2 * fseq], b"number %d" % fseq) for fseq in range(1, 7)]
    for entry in entries[:3]:
        store.append(entry)
    assert store.flush()
    for entry in entries[3:]:
        store.append(entry)
    assert store.flush()
    (path,) = store._directory.glob("*.seg")
    return store, path, entries


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize("hit", range(1, 7))
def test_the_next_batch_proves_the_one_before(
    opened: Opened, tmp_path: Path, hit: int, is_noted: bool
) -> None:
    """A crash of the machine may lose the note: then the last batch proves nothing."""
    _, path, entries = two_batches(opened)
    data = path.read_bytes().replace(b"number %d" % hit, b"nUmber %d" % hit)
    directory = tmp_path / "copy"
    directory.mkdir()
    (directory / path.name).write_bytes(data)
    if is_noted:
        shutil.copy(path.parent / "flushed", directory)
    store = reopen(directory)
    if is_noted or hit <= 3:
        assert store.damage == [(hit, hit)]
        assert store.last_fseq == 6
        with pytest.raises(UnreadableError):
            store.find(2 * hit)
        assert store.find(12 if hit < 6 else 10) == entries[5 if hit < 6 else 4]
    else:
        assert store.damage == []
        assert store.last_fseq == hit - 1
        assert store.find(2 * hit) is None
        assert store.read_after(0, HUGE) == entries[: hit - 1]
    store.close()


def without_end(opened: Opened, left: int) -> list[Entry]:
    """Create a store that lost its last entry, except `kept` bytes of its header."""
    store, path, entries = two_batches(opened)
    store.close()
    data = path.read_bytes()
    os.truncate(path, data.rindex(data[:4]) + left)
    return entries


@pytest.mark.parametrize("left", [0, 3, 30])
def test_a_missing_end_that_was_flushed_is_damage(opened: Opened, left: int) -> None:
    """Later entries are readable, and the lost one is unknown, before and after a flush."""
    entries = without_end(opened, left)
    store = opened()
    assert (store.damage, store.last_fseq) == ([(6, 6)], 6)
    new = [expire(7), place(8, [20], b"new")]
    for entry in [None, *new]:
        if entry is not None:
            store.append(entry)
        for _ in range(2):
            for gsn in (11, 12, 19):
                with pytest.raises(UnreadableError):
                    store.find(gsn)
                with pytest.raises(UnreadableError):
                    store.scan(gsn, HUGE)
            with pytest.raises(UnreadableError):
                store.read_after(5, HUGE)
            assert store.find(10) == entries[4]
            if entry == new[1]:
                assert store.find(20) == entry
                assert store._cache.first == 20, "answered from memory"
            assert store.flush()
    assert store.read_after(6, HUGE) == new
    assert store.find(20) == new[1]
    store.close()
    again = opened()
    assert again.damage == [(6, 6)]
    assert again.damaged_range(13) == (6, 6)
    assert again.repair([entries[5]])
    assert again.read_after(0, HUGE) == [*entries, *new]
    assert [again.find(gsn) for gsn in (11, 12, 13, 20)] == [None, entries[5], None, new[1]]


def test_an_entry_without_its_end_hides_no_other(opened: Opened) -> None:
    """Its header contains its position; bytes written after it are not taken for its body."""
    store, path, entries = two_batches(opened)
    store.close()
    os.truncate(path, path.stat().st_size - 30)
    again = opened()
    new = [expire(7), place(8, [20], b"new")]
    for entry in new:
        again.append(entry)
    again.close()
    for last in (again, opened()):
        assert last.read_after(6, HUGE) == new
        assert [last.find(gsn) for gsn in (11, 19, 20)] == [None, None, new[1]]
        with pytest.raises(UnreadableError):
            last.find(12)
    assert last.repair([entries[5]])
    assert last.read_after(0, HUGE) == [*entries, *new]


@pytest.mark.parametrize("left", [0, 30])
def test_a_missing_end_stays_unknown_over_a_rotation_and_a_cut(opened: Opened, left: int) -> None:
    entries = without_end(opened, left)
    store = opened(segment_bytes=50)
    new = [expire(7), place(8, [20], b"new")]
    for entry in new:
        store.append(entry)
    assert len(store._segments) == 3
    assert store.flush()
    for again in (store, opened(segment_bytes=50)):
        for gsn in (11, 12, 19):
            with pytest.raises(UnreadableError):
                again.find(gsn)
        assert again.find(20) == new[1]
        assert again.damaged_range(19) == (6, 6)
        store.close()
    again.truncate(7)
    again.append(place(8, [30], b"other"))
    for gsn in (11, 12, 29):
        with pytest.raises(UnreadableError):
            again.find(gsn)
    assert again.repair([entries[5]])
    assert [again.find(gsn) for gsn in (12, 20, 29)] == [entries[5], None, None]
    assert again.find(30) == place(8, [30], b"other")
    assert again.read_after(0, HUGE) == [*entries, new[0], place(8, [30], b"other")]


def test_a_missing_segment_is_reported_when_the_store_opens(opened: Opened, tmp_path: Path) -> None:
    oracle = grown(tmp_path / "segments")
    paths = sorted((tmp_path / "segments").glob("*.seg"))
    gone = paths[2]
    following = int(paths[3].name.split("-")[2])
    first = int(gone.name.split("-")[2])
    gone.unlink()
    store = opened(segment_bytes=SMALL)
    assert store.damage == [(first, following - 1)]
    assert mend(store, oracle, 3) > 1
    check_whole(store, oracle)


def test_damage_before_all_that_is_kept_cannot_be_repaired(opened: Opened, tmp_path: Path) -> None:
    grown(tmp_path / "segments")
    min((tmp_path / "segments").glob("*.seg")).unlink()
    store = opened(segment_bytes=SMALL)
    with pytest.raises(UnreadableError):
        store.find(3)
    assert store.damaged_range(3) is None


# --- copies ----------------------------------------------------------------------------------


def damaged_at(opened: Opened, *hits: int) -> tuple[SegmentStore, list[Entry]]:
    """Return a store of six entries with some damaged ones."""
    first, path, entries = two_batches(opened)
    first.close()
    data = path.read_bytes()
    for hit in hits:
        data = data.replace(b"number %d" % hit, b"nUmber %d" % hit)
    path.write_bytes(data)
    return opened(), entries


def test_only_what_fits_is_put_back(opened: Opened) -> None:
    store, entries = damaged_at(opened, 3)
    good = entries[2]
    unfit = {
        "position of another": place(3, [4]),
        "after the next": place(3, [6, 9]),
        "newer view than the next": place(3, [6], view=2),
        "older view than the one before": place(3, [6], view=0),
        "no body": Entry(3, 1, good.decision.__class__(b"c" * 16, 3, 1, 0, [6], 7, None)),  # type: ignore[union-attr,call-arg]
        "a mark": Entry(3, 1, mark(1).decision),
        "a skip too far": skip(3, 6, 9),
    }
    for why, entry in unfit.items():
        assert not store.repair([entry]), why
    assert not store.repair([good, entries[4]]), "a gap"
    assert not store.repair([place(2, [4], b"other"), good]), "the entry before differs"
    assert not store.repair([good, place(4, [8], b"other")]), "the entry after differs"
    assert not store.repair([place(7, [14])]), "there is no such entry yet"
    with pytest.raises(UnreadableError):
        store.find(6)
    assert store.repair([entries[1], good, entries[3]])
    assert store.find(6) == good


def test_what_can_be_read_again_is_repaired(opened: Opened) -> None:
    """The disk failed at the start; it can read the file by the time that the copies come."""
    store, entries = damaged_at(opened, 3)
    (path,) = store._directory.glob("*.seg")
    path.write_bytes(path.read_bytes().replace(b"nUmber", b"number"))
    assert store.damage == [(3, 3)]
    assert not store.repair([place(3, [6], b"other")])
    assert store.repair([entries[2]])
    assert store.damage == []
    assert store.read_after(0, HUGE) == entries
    store.append(place(7, [20]))
    assert store.close()
    assert opened().read_after(0, HUGE) == [*entries, place(7, [20])]


def test_what_is_put_back_at_the_end_of_a_segment_fits_the_next(opened: Opened) -> None:
    entries = without_end(opened, 0)
    store = opened(segment_bytes=50)
    store.append(place(7, [20]))
    assert len(store._segments) == 2
    assert not store.repair([place(6, [12, 20])])
    assert not store.repair([skip(6, 12, 30)])
    assert store.find(20) == place(7, [20])
    assert store.repair([entries[5]])
    assert store.find(20) == place(7, [20])


def test_a_damaged_entry_without_a_position_is_known_by_number(opened: Opened) -> None:
    store = opened(segment_bytes=200)
    entries = [place(1, [1]), expire(2), place(3, [2]), place(4, [3]), place(5, [4])]
    for entry in entries:
        store.append(entry)
    store.close()
    path = min(store._directory.glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[data.index(data[:4], 4) + 50] ^= 1
    path.write_bytes(data)
    again = opened(segment_bytes=200)
    assert [again.find(gsn) for gsn in range(1, 5)] == [e for e in entries if e.fseq != 2]
    with pytest.raises(UnreadableError):
        again.read_after(1, HUGE)
    assert again.damaged_after(1) == (2, 2)
    assert (again.damaged_after(0), again.damaged_after(2), again.damaged_after(5)) == (None,) * 3
    assert again.repair([entries[1]])
    assert again.read_after(0, HUGE) == entries


def test_one_hole_can_be_filled_bit_by_bit_and_another_one_stays(opened: Opened) -> None:
    store, entries = damaged_at(opened, 2, 3, 5)
    assert store.damaged_range(5) == (2, 3)
    assert store.damaged_range(10) == (5, 5)
    assert store.damaged_range(8) is None
    assert store.repair([entries[2]])
    assert (store.damage, store.damaged_range(4)) == ([(2, 2), (5, 5)], (2, 2))
    assert store.repair([entries[1]])
    assert store.damage == [(5, 5)]
    with pytest.raises(UnreadableError):
        store.find(10)
    assert store.find(12) == entries[5]


def test_an_index_of_before_the_repair_does_not_count(opened: Opened) -> None:
    """It has the right size by chance: other entries of other lengths end at the same offset."""
    store = opened(segment_bytes=200)
    entries = [place(fseq, [fseq], bytes(10 * fseq)) for fseq in range(1, 9)]
    for entry in entries:
        store.append(entry)
    store.close()
    path = min(store._directory.glob("*.seg"))
    index = path.with_suffix(".idx").read_bytes()
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    again = opened(segment_bytes=200)
    assert again.damaged_range(1) == (1, 1)
    assert again.repair([entries[0]])
    assert path.stat().st_size == len(data)
    assert not path.with_suffix(".idx").exists()
    assert index
    again.close()


def test_a_repair_is_all_or_nothing_and_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = grown(tmp_path / "segments")
    path = sorted((tmp_path / "segments").glob("*.seg"))[1]
    hurt(path, "zero", 100, 300)
    outcomes = set()
    for allowed in range(50):
        directory = tmp_path / f"{allowed}"
        shutil.copytree(tmp_path / "segments", directory)
        store = reopen(directory, segment_bytes=SMALL)
        hole = store.damaged_range(unknown(store, oracle)[0])
        assert hole is not None
        entries = [e for e in oracle.numbered if hole[0] <= e.fseq <= hole[1]]
        disk = Disk(monkeypatch, directory, allowed)
        try:
            assert store.repair(entries)
            is_done = True
        except Crash:
            is_done = False
        disk.restore()
        for image in (
            disk.everything(tmp_path / f"{allowed}-everything"),
            disk.only_synced(tmp_path / f"{allowed}-synced"),
        ):
            again = reopen(image, segment_bytes=SMALL)
            lost = check_numbers(again, oracle)
            assert lost in ([set(range(hole[0], hole[1] + 1))] if not is_done else []) + [set()]
            outcomes.add(bool(lost))
            mend(again, oracle)
            check_whole(again, oracle)
            assert again.close()
        if is_done:
            break
    else:
        pytest.fail("it never ends")
    assert outcomes == {True, False}


def test_without_space_for_a_repair_nothing_changes(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, entries = damaged_at(opened, 3)

    real = os.fsync

    def full(fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(FullError, match="no room"):
            store.repair([entries[2]])
        with pytest.raises(UnreadableError):
            store.find(6)
        assert store.find(8) == entries[3]
    store.append(place(7, [20]))
    assert store.flush()
    assert store.repair([entries[2]])
    store.close()
    assert opened().read_after(0, HUGE) == [*entries, place(7, [20])]


def test_a_store_opens_without_space_and_loses_nothing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, path, entries = two_batches(opened)
    first.close()
    (path.parent / "flushed").unlink()
    with path.open("ab") as file:
        file.write(b"torn")
    real = os.open

    def full(name: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_CREAT and not Path(name).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(name, flags, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        store = opened()
        assert store.read_after(0, HUGE) == entries
        store.append(place(7, [20]))
        assert store.flush()
        store.close()
    assert opened().read_after(0, HUGE) == [*entries, place(7, [20])]
