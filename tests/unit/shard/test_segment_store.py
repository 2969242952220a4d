"""The segment store: against a list, over restarts, cuts and trims."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from shard.storage.segment_store import SegmentStore
from tests.properties import examples
from tests.unit.shard.logs import (
    APPENDS,
    HUGE,
    Oracle,
    apply,
    compare,
    mark,
    place,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Opened = Callable[..., SegmentStore]

# --- against the oracle ----------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        *APPENDS,
        st.tuples(st.just("truncate"), st.integers(0, 12)),
        st.tuples(st.just("reset"), st.integers(0, 9), st.integers(0, 30)),
        st.tuples(st.just("flush")),
        st.tuples(st.just("seal"), st.integers(1, 60)),
        st.tuples(st.just("reopen")),
    ),
    max_size=60,
)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps,
    st.sampled_from([1, 600, 2_000, 1 << 20]),
    st.sampled_from([0, 1_500, 1 << 20]),
    st.sampled_from([1, 1_000, 64 * 1024]),
)
def test_like_a_list(
    monkeypatch: pytest.MonkeyPatch,
    history: list[Any],
    segment_bytes: int,
    cache_bytes: int,
    block_bytes: int,
) -> None:
    monkeypatch.setattr("ziplog.segments.segment.BLOCK_BYTES", block_bytes)
    with TemporaryDirectory() as directory:

        def start() -> SegmentStore:
            return SegmentStore.open(
                Path(directory),
                flush_interval_ms=0,
                segment_bytes=segment_bytes,
                cache_bytes=cache_bytes,
                reserve_bytes=0,
            )

        store, oracle = start(), Oracle()
        try:
            for step in history:
                if step == ("flush",):
                    assert store.flush()
                    assert store.backlog_bytes == 0
                elif step[0] == "seal":
                    store.seal(step[1])
                elif step == ("reopen",):
                    assert store.close()
                    store = start()
                else:
                    apply(store, oracle, step)
            compare(store, oracle)
            assert walk(store, 1) == walk(store, 2_000) == oracle.after(0)
            assert store.close()
            store = start()
            compare(store, oracle)
        finally:
            store.close()


def test_without_index_files_it_is_the_same(opened: Opened) -> None:
    store, oracle = opened(segment_bytes=2_000), Oracle()
    for _ in range(100):
        apply(store, oracle, ("place", 1, [1, 2], 100))
        apply(store, oracle, ("mark", 4))
    store.close()
    indexes = sorted(store._directory.glob("*.idx"))
    assert len(indexes) > 5
    indexes[0].unlink()
    indexes[1].write_bytes(b"")
    indexes[2].write_bytes(b"\xff" * 50)
    damaged = bytearray(indexes[3].read_bytes())
    damaged[20] ^= 1
    indexes[3].write_bytes(damaged)
    shutil.copy(indexes[5], indexes[4])
    compare(opened(segment_bytes=2_000), oracle)


def test_scan_stops_near_its_limit(opened: Opened) -> None:
    store = opened(cache_bytes=0)
    for fseq in range(1, 200):
        store.append(place(fseq, [fseq], bytes(1_000)))
        store.flush()
    for limit in (1, 1_064, 5_000, 100_000):
        expected = max(1, -(-limit // 1_064))
        assert len(store.scan(3, limit)) == expected
    assert store.scan(200, 1_000) == []


def test_memory_is_bounded_by_what_is_flushed(opened: Opened) -> None:
    store = opened(cache_bytes=100_000)
    for fseq in range(1, 1_001):
        store.append(place(fseq, [fseq], bytes(1_000)))
    assert store._cache.bytes > 1_000_000  # nothing is flushed, so nothing may be evicted
    assert store.backlog_bytes > 1_000_000
    store.flush()
    for fseq in range(1_001, 5_001):
        store.append(place(fseq, [fseq], bytes(1_000)))
        if fseq % 20 == 0:
            store.flush()
    assert store._cache.bytes <= 100_000
    assert len(store._cache._entries) < 2_500
    assert store.find(1) is not None
    assert store.find(5_000) is not None


def test_entries_must_go_upwards(opened: Opened) -> None:
    store = opened()
    store.append(place(1, [5, 7]))
    with pytest.raises(AssertionError):
        store.append(place(2, [7]))


# --- trim ------------------------------------------------------------------------------------


def test_trim_deletes_whole_segments(opened: Opened) -> None:
    store = opened(segment_bytes=1_000, cache_bytes=0)
    oracle = Oracle()
    for _ in range(100):
        apply(store, oracle, ("place", 0, [1], 100))
    store.append(mark(1, trim=150))
    oracle.entries.append(mark(1, trim=150))
    store.flush()
    before = len(list(store._directory.glob("*.seg")))
    announced = store.segments_below(150)
    store.trim(150)
    store.trim(0)
    assert store.flush()
    left = len(list(store._directory.glob("*.seg")))
    assert 0 < left == before - announced < before
    assert len(list(store._directory.glob("*.idx"))) == left - 1
    assert store.last_record_below(150) == 0
    kept = oracle.after(150)
    assert store.scan(150, HUGE) == kept
    assert store.find(2) is None
    assert store.scan(0, HUGE)[-len(kept) :] == kept
    store.close()
    again = opened(segment_bytes=1_000)
    assert again.scan(150, HUGE) == kept
    assert again.mark == mark(1, trim=150).decision
    assert again.last_record_below(150) == 0
    assert again.last_record_below(153) == 152


def test_trim_never_deletes_what_is_not_written(opened: Opened) -> None:
    store = opened(segment_bytes=500)
    for fseq in range(1, 50):
        store.append(place(fseq, [fseq], bytes(100)))
    store.trim(40)
    assert store.find(45) is not None
    assert store.flush()
    assert store.find(45) is not None
    store.trim(10_000)
    assert store.flush()
    assert len(list(store._directory.glob("*.seg"))) == 1


def test_a_mark_outlives_the_segment_that_it_was_written_to(
    opened: Opened,
) -> None:
    store = opened(segment_bytes=500)
    store.append(mark(7, trim=3))
    for fseq in range(1, 50):
        store.append(place(fseq, [fseq], bytes(100)))
    store.trim(49)
    store.close()
    assert opened(segment_bytes=500).mark == mark(7, trim=3).decision


def test_a_segment_without_a_watermark_record_is_not_sealed(opened: Opened) -> None:
    store = opened(segment_bytes=8_000)
    store.append(place(1, [1], bytes(5_000)))
    store.seal(2**62)
    assert store.sealed_fseq == 0, "nothing would be written after it"
    store.append(mark(1))
    store.seal(2**62)
    assert store.sealed_fseq == 1


def test_a_bulk_reader_seals_segments_that_are_large_enough(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(segment_bytes=8_000)
    for fseq in range(1, 6):
        store.append(place(fseq, [fseq], bytes(100)))
    store.append(mark(5))
    store.seal(2**62)
    assert store.sealed_fseq == 0, "the segment is too small"
    for fseq in range(6, 11):
        store.append(place(fseq, [fseq], bytes(100)))
    store.seal(1)
    assert store.sealed_fseq == 0, "the segment is after the requested range"
    woken: list[bool] = []
    monkeypatch.setattr(store.flusher, "wake", lambda: woken.append(True))
    store.seal(2)
    assert store.sealed_fseq == 10
    assert woken == [True], "the thread, which also runs without an interval"
    sealed: list[int] = []
    store.flusher.on_seal = sealed.append
    assert store.flush()
    assert sealed == [10], "its file is written, although no entry arrives"
    fseq = 10
    while len(store._segments) == 2:
        fseq += 1
        store.append(place(fseq, [fseq], bytes(100)))
        store.seal(2**62)
    assert store._segments[1].size >= 2 * store._segments[0].size, "only few files are small"
    assert [entry.fseq for entry in store.scan(1, 1 << 20)] == list(range(1, fseq + 1))


def test_nothing_is_deleted_before_what_came_before_is_flushed(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(segment_bytes=500)
    for fseq in range(1, 20):
        store.append(place(fseq, [fseq], bytes(100)))
    store.flush()
    store.append(mark(1, trim=15))
    appended = store._appended_bytes
    deleted: list[str] = []
    real = Path.unlink

    def unlink(path: Path, *, missing_ok: bool = False) -> None:
        assert store._flusher.flushed_bytes >= appended
        deleted.append(path.name)
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    store.trim(15)
    assert store.flush()
    segments = [name for name in deleted if name.endswith(".seg")]
    assert segments == sorted(segments) != []
