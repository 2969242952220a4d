"""Entries that are appended together are stored like entries that are appended one by one."""

from __future__ import annotations

import os
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from shard.storage.flusher import MAX_BUFFERS
from tests.properties import examples
from tests.unit.shard.logs import (
    APPENDS,
    HUGE,
    Oracle,
    apply,
    compare,
    expire,
    mark,
    place,
    reopen,
    skip,
)
from ziplog.segments.entry import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.storage.segment_store import SegmentStore
    from ziplog.segments.entry import Entry

    Opened = Callable[..., SegmentStore]

steps = st.lists(st.one_of(*APPENDS), max_size=60)


def entries_of(history: list[Any]) -> list[Entry]:
    """Return the entries that these steps append."""
    oracle = Oracle()
    for step in history:
        apply(Oracle(), oracle, step)  # type: ignore[arg-type]
    return oracle.entries


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files of a store, but for the note of what is flushed."""
    return {path.name: path.read_bytes() for path in directory.glob("*.*")}


def facts(store: SegmentStore) -> list[Any]:
    """Return what a store knows of its entries in memory: the indexes, and the cache."""
    cache = store._cache
    columns = [
        column[cache._head :]
        for column in (cache._entries, cache._lasts, cache._records, cache._ends)
    ]
    return [
        [vars(segment) for segment in store._segments], columns,
        cache.first, cache.first_fseq, cache.bytes, cache.record_before(cache._head),
        store._last, store._last_record, store._appended_bytes, store._leases, store.mark,
        store.last_fseq, store.last_view,
    ]  # fmt: skip


@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps,
    st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([1, 600, 2_000, 1 << 20]),
    st.sampled_from([0, 1_500, 1 << 20]),
    st.sampled_from([1, 1_000, 64 * 1024]),
)
def test_it_makes_no_difference_how_many_entries_are_appended_at_once(
    monkeypatch: pytest.MonkeyPatch,
    history: list[Any],
    pieces: list[tuple[int, bool]],
    segment_bytes: int,
    cache_bytes: int,
    block_bytes: int,
) -> None:
    entries = entries_of(history)
    ends = list(accumulate((size for size, _ in pieces), initial=0))
    bounds = [*ends, max(len(entries), ends[-1])]
    monkeypatch.setattr("ziplog.segments.segment.BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(os, "urandom", bytes)  # All segments have one salt.
    options = {"segment_bytes": segment_bytes, "cache_bytes": cache_bytes}
    with TemporaryDirectory() as parent:
        one, other = (reopen(Path(parent) / name, **options) for name in ("one", "other"))
        flushes = [*(is_flushed for _, is_flushed in pieces), False]
        for (start, stop), is_flushed in zip(pairwise(bounds), flushes, strict=True):
            for entry in entries[start:stop]:
                one.append(entry)
            other.append(*entries[start:stop])
            assert facts(other) == facts(one)
            if is_flushed:
                assert one.flush()
                assert other.flush()
        oracle = Oracle()
        oracle.entries = entries
        compare(other, oracle)
        assert one.close()
        assert other.close()
        assert contents(Path(parent) / "other") == contents(Path(parent) / "one")
        again = reopen(Path(parent) / "other", **options)
        compare(again, oracle)
        again.close()


def test_a_gap_between_entries_that_are_appended_together_is_noticed(opened: Opened) -> None:
    for wrong in (place(4, [7]), place(2, [7]), place(1, [7])):
        store = opened(str(wrong.fseq))
        with pytest.raises(AssertionError, match="gap"):
            store.append(place(1, [1]), place(2, [2]), wrong)


def test_positions_and_views_of_entries_that_are_appended_together_go_upwards(
    opened: Opened,
) -> None:
    store = opened("positions")
    with pytest.raises(AssertionError, match="gsns must increase"):
        store.append(place(1, [5, 7]), skip(2, 7, 9))
    store = opened("views")
    with pytest.raises(AssertionError, match="backwards"):
        store.append(place(1, [1], view=1), place(2, [2], view=2), place(3, [3], view=1))


def test_unflushed_entries_that_are_appended_together_stay_in_memory(opened: Opened) -> None:
    store = opened(cache_bytes=0)
    store.append(*(place(fseq, [fseq]) for fseq in range(1, 21)))
    store.append(mark(3))
    assert store._cache.first_fseq == 1
    assert store.flush()
    store.append(*(place(fseq, [fseq]) for fseq in range(21, 31)))
    assert store._cache.first_fseq == 21
    assert [entry.fseq for entry in store.read_after(0, HUGE)] == list(range(1, 31))


def test_a_block_ends_with_the_entry_that_fills_it(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziplog.segments.segment.BLOCK_BYTES", 1_000)
    store = opened()
    store.append(*(place(fseq, [2 * fseq], bytes(300)) for fseq in range(1, 10)))
    store.append(*(place(fseq, [2 * fseq], bytes(300)) for fseq in range(10, 14)))
    (segment,) = store._segments
    assert list(segment.fseqs) == [3, 6, 9, 12]
    assert list(segment.lasts) == list(segment.records) == [6, 12, 18, 24]
    assert store.flush()
    assert [found.first for found in segment.read(store._directory, 1)[1]] == [8, 10, 12]


def test_entries_after_a_torn_end_are_answered_from_memory(opened: Opened) -> None:
    store = opened()
    store.append(*(place(fseq, [fseq]) for fseq in range(1, 4)))
    size = store._active.size
    assert store.close()
    (path,) = store._directory.glob("*.seg")
    path.write_bytes(path.read_bytes()[: size // 3 * 2])
    store = opened()
    assert store._active.is_torn
    store.append(expire(4))
    assert store._active.is_torn
    new = [place(6, [10]), skip(7, 11, 20)]
    store.append(expire(5), *new)
    assert not store._active.is_torn
    assert [store.find(gsn) for gsn in (1, 2, 10, 11)] == [place(1, [1]), place(2, [2]), *new]
    assert store.flush()
    for gsn in (3, 5, 9):
        with pytest.raises(UnreadableError):
            store.find(gsn)


def test_one_write_has_no_more_buffers_than_the_system_accepts(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    real = os.pwritev

    def counted(fd: int, buffers: list[bytes], offset: int) -> int:
        counts.append(len(buffers))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", counted)
    store, oracle = opened(), Oracle()
    oracle.entries = [place(fseq, [fseq]) for fseq in range(1, 2_001)]
    store.append(*oracle.entries[:400])
    store.append(*oracle.entries[400:])
    assert store.flush()
    assert sum(counts) == 4_000
    assert max(counts) <= MAX_BUFFERS
    store.close()
    assert opened().read_after(0, HUGE) == oracle.entries
