"""The segment store: against a list, over restarts, with damage, without space, and in time."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shard import flusher
from shard.entry import Entry, Mark, UnreadableError
from shard.segments import SegmentStore
from ziplog.node import Event, Persisted, StorageChanged
from ziplog.view import NO_DIGEST
from ziplog.wire import Expire, Place, Skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLIENT = b"c" * 16
HUGE = 2**62


def place(fseq: int, gsns: list[int], body: bytes = b"body") -> Entry:
    return Entry(fseq, 1, Place(CLIENT, fseq, 1, 0, gsns, 7, body))


def skip(fseq: int, start: int, stop: int) -> Entry:
    return Entry(fseq, 1, Skip(start, stop))


def expire(fseq: int) -> Entry:
    return Entry(fseq, 1, Expire(CLIENT))


def mark(stable: int, trim: int = 0) -> Entry:
    return Entry(0, 1, Mark(1, stable, 1, trim, 0, NO_DIGEST))


class Oracle:
    """A list of entries."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    @staticmethod
    def span(entry: Entry) -> tuple[int, int] | None:
        decision = entry.decision
        if isinstance(decision, Place):
            return decision.gsns[0], decision.gsns[-1]
        return (decision.start, decision.stop - 1) if isinstance(decision, Skip) else None

    def find(self, gsn: int) -> Entry | None:
        for entry in self.entries:
            span = self.span(entry)
            if span and span[0] <= gsn <= span[1]:
                decision = entry.decision
                return entry if isinstance(decision, Skip) or gsn in decision.gsns else None  # type: ignore[union-attr]
        return None

    def after(self, gsn: int) -> list[Entry]:
        spans = [(entry, self.span(entry)) for entry in self.entries]
        return [entry for entry, span in spans if span and span[1] >= gsn]

    def last_record_below(self, gsn: int) -> int:
        places = [entry.decision for entry in self.entries if isinstance(entry.decision, Place)]
        return max((g for decision in places for g in decision.gsns if g < gsn), default=0)

    @property
    def last_gsn(self) -> int:
        return max((span[1] for entry in self.entries if (span := self.span(entry))), default=0)

    @property
    def last_fseq(self) -> int:
        return next((entry.fseq for entry in reversed(self.entries) if entry.fseq), 0)

    @property
    def mark(self) -> Mark | None:
        marks = (e.decision for e in reversed(self.entries) if isinstance(e.decision, Mark))
        return next(marks, None)


def compare(store: SegmentStore, oracle: Oracle, gsns: range | list[int] | None = None) -> None:
    assert store.last_fseq == oracle.last_fseq
    assert store.mark == oracle.mark
    for gsn in gsns or range(oracle.last_gsn + 5):
        assert store.find(gsn) == oracle.find(gsn), gsn
        assert store.last_record_below(gsn) == oracle.last_record_below(gsn), gsn
        assert store.scan(gsn, HUGE) == oracle.after(gsn), gsn
    assert store.last_record_below(HUGE) == oracle.last_record_below(HUGE)


def walk(store: SegmentStore, limit: int) -> list[Entry]:
    """Scan from the start to the end in steps of `limit` bytes."""
    result: list[Entry] = []
    gsn = 0
    while entries := store.scan(gsn, limit):
        result += entries
        span = Oracle.span(entries[-1])
        assert span is not None
        gsn = span[1] + 1
    return result


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., SegmentStore]]:
    stores: list[SegmentStore] = []

    def start(name: str = "segments", **options: Any) -> SegmentStore:
        options = {"flush_interval_ms": 0, "reserve_bytes": 0} | options
        stores.append(SegmentStore.open(tmp_path / name, **options))
        return stores[-1]

    yield start
    for store in stores:
        store.close()


# --- against the oracle ----------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("place"),
            st.integers(0, 3),
            st.lists(st.integers(1, 3), min_size=1, max_size=4),
            st.integers(0, 900),
        ),
        st.tuples(st.just("skip"), st.integers(0, 3), st.integers(1, 20)),
        st.tuples(st.just("expire")),
        st.tuples(st.just("mark"), st.integers(0, 9)),
        st.tuples(st.just("flush")),
        st.tuples(st.just("reopen")),
    ),
    max_size=60,
)


def apply(store: SegmentStore, oracle: Oracle, step: Any) -> None:
    gsn, fseq = oracle.last_gsn + 1, oracle.last_fseq + 1
    match step:
        case "place", gap, gaps, size:
            gsns = [gsn + gap + sum(gaps[: i + 1]) for i in range(len(gaps))]
            entry = place(fseq, gsns, os.urandom(size))
        case "skip", gap, length:
            entry = skip(fseq, gsn + gap, gsn + gap + length)
        case ("expire",):
            entry = expire(fseq)
        case _:
            entry = mark(step[1])
    store.append(entry)
    oracle.entries.append(entry)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
    monkeypatch.setattr("shard.segment.BLOCK_BYTES", block_bytes)
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


def test_without_index_files_it_is_the_same(opened: Callable[..., SegmentStore]) -> None:
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


def test_scan_stops_near_its_limit(opened: Callable[..., SegmentStore]) -> None:
    store = opened(cache_bytes=0)
    for fseq in range(1, 200):
        store.append(place(fseq, [fseq], bytes(1_000)))
        store.flush()
    for limit in (1, 1_064, 5_000, 100_000):
        expected = max(1, -(-limit // 1_064))
        assert len(store.scan(3, limit)) == expected
    assert store.scan(200, 1_000) == []


def test_memory_is_bounded_by_what_is_flushed(opened: Callable[..., SegmentStore]) -> None:
    store = opened(cache_bytes=100_000)
    for fseq in range(1, 1_001):
        store.append(place(fseq, [fseq], bytes(1_000)))
    assert store._recent.bytes > 1_000_000  # nothing is flushed, so nothing may go
    assert store.backlog_bytes > 1_000_000
    store.flush()
    for fseq in range(1_001, 5_001):
        store.append(place(fseq, [fseq], bytes(1_000)))
        if fseq % 20 == 0:
            store.flush()
    assert store._recent.bytes <= 100_000
    assert len(store._recent._entries) < 2_500
    assert store.find(1) is not None
    assert store.find(5_000) is not None


def test_entries_must_go_upwards(opened: Callable[..., SegmentStore]) -> None:
    store = opened()
    store.append(place(1, [5, 7]))
    with pytest.raises(AssertionError):
        store.append(place(2, [7]))


# --- trim ------------------------------------------------------------------------------------


def test_trim_deletes_whole_segments(opened: Callable[..., SegmentStore]) -> None:
    store = opened(segment_bytes=1_000, cache_bytes=0)
    oracle = Oracle()
    for _ in range(100):
        apply(store, oracle, ("place", 0, [1], 100))
    store.append(mark(1, trim=150))
    oracle.entries.append(mark(1, trim=150))
    store.flush()
    before = len(list(store._directory.glob("*.seg")))
    store.trim(150)
    store.trim(0)
    assert store.flush()
    left = len(list(store._directory.glob("*.seg")))
    assert 0 < left < before
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


def test_trim_never_deletes_what_is_not_written(opened: Callable[..., SegmentStore]) -> None:
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
    opened: Callable[..., SegmentStore],
) -> None:
    store = opened(segment_bytes=500)
    store.append(mark(7, trim=3))
    for fseq in range(1, 50):
        store.append(place(fseq, [fseq], bytes(100)))
    store.trim(49)
    store.close()
    assert opened(segment_bytes=500).mark == mark(7, trim=3).decision


def test_nothing_is_deleted_before_what_came_before_is_flushed(
    opened: Callable[..., SegmentStore], monkeypatch: pytest.MonkeyPatch
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


# --- damage ----------------------------------------------------------------------------------


def write_five(opened: Callable[..., SegmentStore]) -> tuple[Path, list[Entry]]:
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
    """Copy a segment with other contents; `flushed`: and the note that all of it was flushed."""
    directory = path.parent.parent / name
    directory.mkdir()
    (directory / path.name).write_bytes(contents)
    if flushed:
        shutil.copy(path.parent / "flushed", directory)
    return directory


def reopen(directory: Path) -> SegmentStore:
    return SegmentStore.open(directory, flush_interval_ms=0, reserve_bytes=0)


def test_a_torn_end_is_cut_off_wherever_it_is_torn(opened: Callable[..., SegmentStore]) -> None:
    path, entries = write_five(opened)
    data = path.read_bytes()
    lengths = set()
    for length in range(len(data)):
        directory = copy_with(path, f"torn-{length}", data[:length], flushed=False)
        store = reopen(directory)
        found = walk(store, HUGE)
        ranged = [entry for entry in entries if Oracle.span(entry)]
        assert found == ranged[: len(found)]
        lengths.add(len(found))
        new = place(store.last_fseq + 1, [100], b"new")
        store.append(new)
        assert store.close()
        again = reopen(directory)
        assert walk(again, HUGE) == [*found, new]
        assert again.close()
    assert lengths == {0, 1, 2, 3}


def test_any_flipped_bit_is_noticed(opened: Callable[..., SegmentStore]) -> None:
    """No position ever gets another answer: the right one, or unknown."""
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
        hurt = [e for e in entries if (s := Oracle.span(e)) and s[0] in unknown]
        assert len(hurt) <= 1
        assert [(e.fseq, e.fseq) for e in hurt] == store.damage
        assert hurt or (store.mark is None and store.find(25) == entries[-1])
        assert store.last_fseq == 4
        store.close()


def test_scan_goes_up_to_the_damage_and_on_behind_it(opened: Callable[..., SegmentStore]) -> None:
    path, entries = write_five(opened)
    data = bytearray(path.read_bytes())
    data[data.index(b"three")] ^= 255
    store = reopen(copy_with(path, "damaged", bytes(data)))
    assert store.scan(0, HUGE) == entries[:2]
    with pytest.raises(UnreadableError):
        store.scan(21, HUGE)
    assert store.scan(24, HUGE) == [entries[4]]
    assert store.last_record_below(25) == 23  # its header is whole
    store.close()


def test_damage_to_a_single_position_is_noticed(opened: Callable[..., SegmentStore]) -> None:
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
    opened: Callable[..., SegmentStore],
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
    # Every scan either gives entries or says that it cannot: none jumps over the damage.
    with pytest.raises(UnreadableError):
        walk(again, 10_000)


@pytest.mark.parametrize("has_index", [True, False])
def test_damage_in_sealed_segments(opened: Callable[..., SegmentStore], has_index: bool) -> None:
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


def test_a_segment_that_vanishes_under_us_is_unknown(opened: Callable[..., SegmentStore]) -> None:
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


def test_a_payload_cannot_pass_for_an_entry(opened: Callable[..., SegmentStore]) -> None:
    path, _ = write_five(opened)
    inner = path.read_bytes()  # entries of another segment, hence of another salt
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


# --- the thread ------------------------------------------------------------------------------


class Events:
    def __init__(self) -> None:
        self.all: list[Event] = []
        self._came = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._came:
            self.all.append(event)
            self._came.notify_all()

    def wait_for(self, event: Event) -> None:
        with self._came:
            assert self._came.wait_for(lambda: event in self.all, 10), self.all


def test_what_is_appended_is_flushed_by_itself(opened: Callable[..., SegmentStore]) -> None:
    events = Events()
    store = opened(flush_interval_ms=5, on_event=events)
    for fseq in range(1, 200):
        store.append(place(fseq, [fseq], bytes(100)))
        if fseq % 40 == 1:
            events.wait_for(Persisted(fseq))
    events.wait_for(Persisted(199))
    assert store.backlog_bytes == 0
    fseqs = [event.fseq for event in events.all if isinstance(event, Persisted)]
    assert fseqs == sorted(set(fseqs))


def test_persisted_is_said_after_fdatasync_only(
    opened: Callable[..., SegmentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    store = opened(flush_interval_ms=1, on_event=events)
    entered, go_on, real = threading.Event(), threading.Event(), os.fdatasync

    def slow(fd: int) -> None:
        entered.set()
        assert go_on.wait(10)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    store.append(place(1, [1]))
    assert entered.wait(10)
    store.append(place(2, [2]))
    assert events.all == []
    assert store.backlog_bytes > 0
    assert store.find(2) is not None
    go_on.set()
    events.wait_for(Persisted(2))


def test_the_thread_sleeps_while_nothing_comes(opened: Callable[..., SegmentStore]) -> None:
    events = Events()
    store = opened(flush_interval_ms=1, on_event=events)
    inner = store._flusher
    for fseq in range(1, 4):
        store.append(place(fseq, [fseq]))
        events.wait_for(Persisted(fseq))
        for _ in range(1_000):
            if not inner._is_awake:
                break
            inner._closing.wait(0.01)
        assert not inner._is_awake
        assert not inner._called.is_set()


def test_an_entry_that_comes_when_the_thread_turns_in_is_flushed(
    opened: Callable[..., SegmentStore],
) -> None:
    events = Events()
    store = opened(flush_interval_ms=1, on_event=events)

    class Racing(deque[Any]):
        """Gets an entry just after the thread saw that there is none."""

        is_armed = True

        def __len__(self) -> int:
            length = super().__len__()
            if length == 0 and self.is_armed and store.last_fseq == 1 and not store.backlog_bytes:
                self.is_armed = False
                assert store._flusher._is_awake
                store.append(place(2, [2]))
            return length

    store._flusher._queue = Racing()
    store.append(place(1, [1]))
    events.wait_for(Persisted(2))


def test_a_failed_fdatasync_halts(
    opened: Callable[..., SegmentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    store = opened(on_halt=reasons.append)
    store.append(place(1, [1]))

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="I/O"):
            store.flush()
    assert len(reasons) == 1
    assert "fdatasync" in reasons[0]
    assert store.backlog_bytes > 0


def test_a_failed_fdatasync_in_the_thread_halts(
    opened: Callable[..., SegmentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    halted = threading.Event()
    events = Events()
    store = opened(flush_interval_ms=1, on_event=events, on_halt=lambda _: halted.set())

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        store.append(place(1, [1]))
        assert halted.wait(10)
    assert events.all == []


# --- a full disk -----------------------------------------------------------------------------


class SmallDisk:
    """Lets writes fail, after half of the bytes, once `room` bytes are written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._real = os.pwritev
        monkeypatch.setattr(os, "pwritev", self.pwritev)

    def pwritev(self, fd: int, buffers: list[bytes], offset: int) -> int:
        data = b"".join(buffers)
        if len(data) > self.room:
            os.pwrite(fd, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(data)
        return self._real(fd, buffers, offset)


def test_what_finds_no_space_waits_and_is_written_later(
    opened: Callable[..., SegmentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch, 5_000)
    events = Events()
    store, oracle = opened(segment_bytes=2_000, flush_interval_ms=1, on_event=events), Oracle()
    for _ in range(30):
        apply(store, oracle, ("place", 0, [1], 200))
    events.wait_for(StorageChanged(full=True))
    assert store.is_full
    assert not store.flush()
    for _ in range(5):
        apply(store, oracle, ("place", 0, [1], 200))
    assert store.backlog_bytes > 0
    compare(store, oracle)
    disk.room = 1 << 30
    events.wait_for(StorageChanged(full=False))
    events.wait_for(Persisted(35))
    assert store.close()
    compare(opened(segment_bytes=2_000), oracle)


def test_below_the_reserve_it_is_full_and_goes_on_writing(
    opened: Callable[..., SegmentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    free = {"blocks": 10}

    def statvfs(path: Any) -> os.statvfs_result:
        fields = list(real(path))
        fields[1], fields[4] = 100, free["blocks"]  # f_frsize, f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(flusher, "_FULL_RETRY_S", 0.001)
    events = Events()
    store = opened(reserve_bytes=8_000, on_event=events)
    store.append(place(1, [1]))
    assert store.flush()
    events.wait_for(StorageChanged(full=True))
    store.append(place(2, [2]))
    assert store.flush()
    assert store.backlog_bytes == 0
    free["blocks"] = 85  # above the reserve, but not by an eighth of it
    assert store.flush()
    assert store.is_full
    free["blocks"] = 90
    events.wait_for(StorageChanged(full=False))
    changes = [event.full for event in events.all if isinstance(event, StorageChanged)]
    assert changes == [True, False]


def test_a_short_write_is_completed(
    opened: Callable[..., SegmentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, real_one = os.pwritev, os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, b, o: real(fd, [b"".join(b)[:10]], o))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, o: real_one(fd, data[:7], o))
    store, oracle = opened(), Oracle()
    for _ in range(10):
        apply(store, oracle, ("place", 0, [1], 20))
    assert store.close()
    monkeypatch.undo()
    compare(opened(), oracle)


def test_other_write_errors_halt(
    opened: Callable[..., SegmentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    store = opened(on_halt=reasons.append)
    store.append(place(1, [1]))

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        with pytest.raises(OSError, match="I/O"):
            store.flush()
    assert len(reasons) == 1


def test_files_are_private_and_new_names_are_synced(
    opened: Callable[..., SegmentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = flusher.sync_directory

    def sync_directory(path: Path) -> None:
        synced.append(path)
        real(path)

    monkeypatch.setattr(flusher, "sync_directory", sync_directory)
    store = opened(segment_bytes=500)
    for fseq in range(1, 20):
        store.append(place(fseq, [fseq], bytes(100)))
    store.flush()
    files = list(store._directory.glob("*.seg"))
    assert len(synced) == len(files) > 1
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert store._directory.stat().st_mode & 0o777 == 0o700
