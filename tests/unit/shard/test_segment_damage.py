"""The segment store with damage: torn ends, flipped bits, missing files."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

from shard.recovery.log_comparison import digest_of, may_be_same
from tests.unit.shard.logs import (
    HUGE,
    Oracle,
    apply,
    mark,
    place,
    reopen,
    skip,
    span,
    walk,
)
from ziplog.core.entries import Place
from ziplog.segments.entry import Entry, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shard.storage.segment_store import SegmentStore

    Opened = Callable[..., SegmentStore]

# --- damage ----------------------------------------------------------------------------------


def write_five(opened: Opened) -> tuple[Path, list[Entry]]:
    store = opened("whole")
    entries = [
        place(1, [1, 3, 5], b"one"),
        skip(2, 7, 20),
        mark(1),
        place(3, [21, 23], b"three"),
        place(4, [25], b"four"),
    ]
    for entry in entries:
        store.append(entry)
    assert store.close()
    (path,) = store._directory.glob("*.seg")
    return path, entries


def copy_with(path: Path, name: str, contents: bytes, *, flushed: bool = True) -> Path:
    """Copy a segment with other contents; `flushed`: also the note that all of it was flushed."""
    directory = path.parent.parent / name
    directory.mkdir()
    (directory / path.name).write_bytes(contents)
    if flushed:
        shutil.copy(path.parent / "flushed", directory)
    return directory


def test_a_torn_end_is_cut_off_wherever_it_is_torn(opened: Opened) -> None:
    path, entries = write_five(opened)
    data = path.read_bytes()
    lengths = set()
    for length in range(len(data)):
        directory = copy_with(path, f"torn-{length}", data[:length], flushed=False)
        store = reopen(directory)
        found = walk(store, HUGE)
        ranged = [entry for entry in entries if span(entry)]
        assert found == ranged[: len(found)]
        lengths.add(len(found))
        new = place(store.last_fseq + 1, [100], b"new")
        store.append(new)
        assert store.close()
        again = reopen(directory)
        assert walk(again, HUGE) == [*found, new]
        assert again.close()
    assert lengths == {0, 1, 2, 3}


def test_any_flipped_bit_is_noticed(opened: Opened) -> None:
    """Every position has the right answer, or unknown."""
    path, entries = write_five(opened)
    data = path.read_bytes()
    oracle = Oracle()
    oracle.entries = entries
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        store = reopen(copy_with(path, f"flip-{at}", bytes(damaged)))
        unknown = []
        for gsn in range(28):
            try:
                found = store.find(gsn)
            except UnreadableError:
                unknown.append(gsn)
                with pytest.raises(UnreadableError):
                    store.scan(gsn, HUGE)
                continue
            assert found == oracle.find(gsn), (at, gsn)
        hurt = [e for e in entries if (s := span(e)) and s[0] in unknown]
        assert len(hurt) <= 1
        assert [(e.fseq, e.fseq) for e in hurt] == store.damage
        assert hurt or (store.mark is None and store.find(25) == entries[-1])
        assert store.last_fseq == 4
        store.close()


@pytest.mark.parametrize("is_flushed", [False, True])
def test_lost_end_is_unknown_before_and_after_the_next_flush(
    opened: Opened, is_flushed: bool
) -> None:
    path, entries = write_five(opened)
    data = path.read_bytes()
    salt = data[:4]
    store = reopen(copy_with(path, "lost", data[: data.rindex(salt)]))
    assert store.damage == [(4, 4)]
    store.append(place(5, [30], b"five"))
    if is_flushed:
        assert store.flush()
    for gsn in (24, 25, 29):
        with pytest.raises(UnreadableError):
            store.find(gsn)
        with pytest.raises(UnreadableError):
            store.scan(gsn, HUGE)
    assert store.scan(1, HUGE) == [entries[0], entries[1], entries[3]]
    assert store.find(30) == place(5, [30], b"five")
    assert store.close()


def test_scan_goes_up_to_the_damage_and_on_behind_it(opened: Opened) -> None:
    path, entries = write_five(opened)
    data = bytearray(path.read_bytes())
    data[data.index(b"three")] ^= 255
    store = reopen(copy_with(path, "damaged", bytes(data)))
    assert store.scan(0, HUGE) == entries[:2]
    with pytest.raises(UnreadableError):
        store.scan(21, HUGE)
    assert store.scan(24, HUGE) == [entries[4]]
    assert store.last_record_below(25) == 23  # its header is complete
    store.close()


def test_damage_to_a_single_position_is_noticed(opened: Opened) -> None:
    store = opened()
    for gsn in (1, 2, 3):
        store.append(place(gsn, [gsn]))
    store.close()
    (path,) = store._directory.glob("*.seg")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1  # the second entry's header
    path.write_bytes(data)
    again = opened()
    with pytest.raises(UnreadableError):
        again.find(2)
    assert again.find(1) == place(1, [1])
    assert again.find(3) == place(3, [3])


def test_a_zeroed_file_hole_is_unknown_and_the_rest_readable(
    opened: Opened,
) -> None:
    store = opened()
    for fseq in range(1, 2_001):
        store.append(place(fseq, [2 * fseq], bytes([fseq % 256]) * 200))
    store.close()
    (path,) = store._directory.glob("*.seg")
    data = bytearray(path.read_bytes())
    data[100_000:104_096] = bytes(4_096)
    path.write_bytes(data)
    again = opened()
    answers = []
    for fseq in range(1, 2_001):
        try:
            entry = again.find(2 * fseq)
            assert entry == place(fseq, [2 * fseq], bytes([fseq % 256]) * 200)
            answers.append(True)
        except UnreadableError:
            answers.append(False)
    first, last = answers.index(False), 2_000 - answers[::-1].index(False)
    assert answers[first:last] == [False] * (last - first)
    assert 10 < last - first < 25
    assert again.last_record_below(HUGE) == 4_000
    # Every scan returns entries or raises: none skips the damage.
    with pytest.raises(UnreadableError):
        walk(again, 10_000)


@pytest.mark.parametrize("has_index", [True, False])
def test_damage_in_sealed_segments(opened: Opened, has_index: bool) -> None:
    store = opened(segment_bytes=1_000)
    oracle = Oracle()
    for _ in range(40):
        apply(store, oracle, ("place", 1, [1, 1], 150))
    store.close()
    paths = sorted(store._directory.glob("*.seg"))
    flips = random.Random(1)
    for path in paths[:-1]:
        if not has_index:
            path.with_suffix(".idx").unlink()
        data = bytearray(path.read_bytes())
        data[flips.randrange(len(data))] ^= 4
        path.write_bytes(data)
    cut = paths[1].read_bytes()[:-300]
    paths[1].write_bytes(cut)
    paths[3].unlink()
    again = opened(segment_bytes=1_000)
    unknown = 0
    for gsn in range(1, oracle.last_gsn + 1):
        try:
            assert again.find(gsn) == oracle.find(gsn)
        except UnreadableError:
            unknown += 1
        again.last_record_below(gsn)
    assert 20 < unknown < oracle.last_gsn // 2
    assert again.last_fseq == oracle.last_fseq


def test_a_segment_that_vanishes_under_us_is_unknown(opened: Opened) -> None:
    store = opened(segment_bytes=1_000, cache_bytes=0)
    oracle = Oracle()
    for _ in range(40):
        apply(store, oracle, ("place", 0, [1], 150))
        store.flush()
    min(store._directory.glob("*.seg")).unlink()
    with pytest.raises(UnreadableError):
        store.find(2)
    assert store.last_record_below(3) == 0
    assert store.find(oracle.last_gsn) == oracle.entries[-1]


def test_a_payload_cannot_pass_for_an_entry(opened: Opened) -> None:
    path, _ = write_five(opened)
    inner = path.read_bytes()  # entries of another segment, and so of another salt
    store = opened("outer")
    store.append(place(1, [1], inner))
    store.append(place(2, [30], b"end"))
    store.close()
    (outer,) = store._directory.glob("*.seg")
    data = bytearray(outer.read_bytes())
    data[0] ^= 1
    outer.write_bytes(data)
    again = opened("outer")
    for gsn in range(1, 30):
        with pytest.raises(UnreadableError):
            again.find(gsn)
    assert again.find(30) == place(2, [30], b"end")


@pytest.mark.parametrize("place_of_damage", [10, 50], ids=["header", "body"])
def test_damaged_table_of_the_newest_segment_is_noticed(
    opened: Opened, place_of_damage: int
) -> None:
    """Without it, the sessions before the kept log are unknown: copies would be accepted again."""
    store, oracle = opened(segment_bytes=1_000), Oracle()
    while store.segment_count < 3:
        apply(store, oracle, ("place", 0, [1], 90))
    apply(store, oracle, ("table", 3))
    apply(store, oracle, ("mark", oracle.last_fseq))
    apply(store, oracle, ("place", 0, [1], 90))
    assert store.flush()
    store.trim(oracle.last_gsn)
    assert store.close()
    assert store.first_fseq > 1
    (start, *_), *_ = store._active.tables
    path = max(store._directory.glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[start + place_of_damage] ^= 1
    path.write_bytes(data)
    again = opened(segment_bytes=1_000)
    with pytest.raises(UnreadableError):
        again.last_table()


@pytest.mark.parametrize("number", range(1, 11))
def test_damaged_entry_does_not_move_the_start_of_a_view(opened: Opened, number: int) -> None:
    """Servers compare logs by view: a moved start makes equal logs differ."""
    store, oracle = opened(), Oracle()
    for fseq in range(1, 11):
        if fseq == 6:
            apply(store, oracle, ("view",))
        apply(store, oracle, ("place", 0, [1], 60))
    assert store.close()
    (path,) = store._directory.glob("*.seg")
    decision = oracle.entries[number - 1].decision
    assert isinstance(decision, Place)
    assert decision.body is not None
    data = path.read_bytes()
    whole = reopen(copy_with(path, "whole-copy", data))
    changed = data.replace(decision.body, bytes(len(decision.body)))
    again = reopen(copy_with(path, "damaged", changed))
    assert again.damage == [(number, number)]
    assert may_be_same(digest_of(again), digest_of(whole))
    low, high = again.views_at(number)
    assert low <= oracle.entries[number - 1].view <= high
    others = [fseq for fseq in range(1, 11) if fseq != number]
    assert all(again.view_at(fseq) == whole.view_at(fseq) for fseq in others)
    assert again.close()
    assert whole.close()
