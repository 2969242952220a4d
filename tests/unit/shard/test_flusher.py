"""The flusher of the segment store: flush intervals, and a full disk."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from typing import TYPE_CHECKING, Any

import pytest

from shard.storage import flusher
from tests.unit.shard.logs import (
    HUGE,
    Oracle,
    apply,
    compare,
    mark,
    place,
)
from ziplog.core.node import Event, Persisted, StorageChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.storage.segment_store import SegmentStore

    Opened = Callable[..., SegmentStore]

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

    def wait_for_full(self) -> str:
        """Wait until the store is full; return the reason."""
        with self._came:
            assert self._came.wait_for(self._reasons, 10), self.all
            return self._reasons()[-1]

    def _reasons(self) -> list[str]:
        return [e.reason for e in self.all if isinstance(e, StorageChanged) and e.full]


def test_what_is_appended_is_flushed_by_itself(opened: Opened) -> None:
    events = Events()
    store = opened(flush_interval_ms=5)
    store.start(events)
    for fseq in range(1, 200):
        store.append(place(fseq, [fseq], bytes(100)))
        if fseq % 40 == 1:
            events.wait_for(Persisted(fseq))
    events.wait_for(Persisted(199))
    assert store.backlog_bytes == 0
    fseqs = [event.fseq for event in events.all if isinstance(event, Persisted)]
    assert fseqs == sorted(set(fseqs))


def test_flush_of_a_watermark_record_alone_is_reported(opened: Opened) -> None:
    """A server waits for it with the report of its trim point."""
    events: list[Event] = []
    store = opened(flush_interval_ms=0)
    store.start(events.append)
    store.append(place(1, [1]))
    store.flusher.flush_and_report()
    store.append(mark(1, trim=1))
    store.flusher.flush_and_report()
    store.flusher.flush_and_report()
    assert events == [Persisted(1), Persisted(1)]


def test_what_another_thread_flushes_is_reported(opened: Opened) -> None:
    """A repair flushes first; a server waits for the report of what was appended before."""
    events = Events()
    store = opened(flush_interval_ms=20)
    store.start(events)
    store.append(place(1, [1]))
    assert store.flush()
    events.wait_for(Persisted(1))


def test_the_thread_is_not_idle_before_the_report(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would sleep beside another thread that is within its flush, or just after it."""
    store, seen = opened(), list[bool]()
    flusher, sync = store.flusher, os.fdatasync

    def observed(fd: int) -> None:
        seen.append(flusher._is_idle())
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", observed)
    store.append(place(1, [1]))
    assert store.flush()
    seen.append(flusher._is_idle())
    flusher.flush_and_report()
    assert [*seen, flusher._is_idle()] == [False, False, True]


def test_persisted_is_reported_after_fdatasync_only(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    store = opened(flush_interval_ms=1)
    store.start(events)
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


def test_the_thread_sleeps_while_nothing_comes(opened: Opened) -> None:
    events = Events()
    store = opened(flush_interval_ms=1)
    store.start(events)
    inner = store._flusher
    for fseq in range(1, 4):
        store.append(place(fseq, [fseq]))
        events.wait_for(Persisted(fseq))
        for _ in range(1_000):
            if not inner._is_awake:
                break
            inner._closing.wait(0.01)
        assert not inner._is_awake
        assert not inner._woken.is_set()


def test_an_entry_that_comes_when_the_thread_turns_in_is_flushed(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    store = opened(flush_interval_ms=1)
    store.start(events)

    check = store.flusher._is_idle

    def racing() -> bool:
        """Append an entry just after the thread saw that it was idle."""
        is_idle = check()
        if is_idle and store.last_fseq == 1:
            assert store.flusher._is_awake
            store.append(place(2, [2]))
        return is_idle

    monkeypatch.setattr(store.flusher, "_is_idle", racing)
    store.append(place(1, [1]))
    events.wait_for(Persisted(2))


def test_a_failed_fdatasync_halts(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
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
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    halted = threading.Event()
    events = Events()
    store = opened(flush_interval_ms=1, on_halt=lambda _: halted.set())
    store.start(events)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        store.append(place(1, [1]))
        assert halted.wait(10)
    assert events.all == []


# --- a full disk -----------------------------------------------------------------------------


class SmallDisk:
    """Fails writes, after half of the bytes, once `room` bytes are written."""

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


def test_entries_without_space_wait_and_are_written_later(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch, 5_000)
    events = Events()
    store, oracle = opened(segment_bytes=2_000, flush_interval_ms=1), Oracle()
    store.start(events)
    for _ in range(30):
        apply(store, oracle, ("place", 0, [1], 200))
    events.wait_for_full()
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


def files(store: SegmentStore) -> list[str]:
    return sorted(path.name for path in store._directory.glob("*.seg"))


def after_a_crash(store: SegmentStore, opened: Opened) -> SegmentStore:
    """Open what is on the disk, in another directory."""
    shutil.copytree(store._directory, store._directory.with_name("copy"))
    return opened("copy", segment_bytes=1_000)


def test_a_trim_frees_space_while_writes_fail(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch, 6_000)
    store, oracle = opened(segment_bytes=1_000), Oracle()
    for _ in range(40):
        apply(store, oracle, ("place", 0, [1], 200))
    assert not store.flush()
    before, written = files(store), store.flushed_fseq
    store.trim(1 << 40)
    assert not store.flush()
    assert store.backlog_bytes > 0
    assert len(before) > 4
    assert files(store) == before[-2:], "the last one that is whole, and the one that is full"
    left = after_a_crash(store, opened)
    assert left.damage == []
    assert (last := left.last_fseq) >= written
    kept = left.scan(0, HUGE)
    assert kept == oracle.numbered[last - len(kept) : last] != []
    disk.room = 1 << 30
    assert store.flush()
    assert len(files(store)) == 1
    assert store.scan(0, HUGE)[-1] == oracle.numbered[-1]


PLACES = [("place", 0, [1], 200)]


@pytest.mark.parametrize(
    ("written", "waiting"),
    [
        ([("table", 1), *PLACES * 30], [("table", 2), ("mark", 30)]),
        (PLACES * 30, [("table", 2), ("mark", 30)]),
        # By the mark on the disk, a truncation may drop the second table.
        ([("table", 1), *PLACES * 10, ("table", 2), *PLACES * 20], [("mark", 30)]),
        # The mark fills a file, and the second table is the first entry of the next one.
        (
            [("table", 1), *PLACES * 30, ("place", 0, [1], 350), ("mark", 31)],
            [("table", 2), ("mark", 31)],
        ),
    ],
)
def test_a_trim_deletes_no_table_before_the_next_one_is_written(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, written: list[Any], waiting: list[Any]
) -> None:
    disk = SmallDisk(monkeypatch, 1 << 30)
    store, oracle = opened(segment_bytes=1_000), Oracle()
    for entry in written:
        apply(store, oracle, entry)
    assert store.flush()
    before, held = files(store), oracle.last_table
    disk.room = 0
    for entry in [*waiting, ("place", 0, [1], 2_000), *PLACES]:
        apply(store, oracle, entry)
    store.trim(1 << 40)
    store.trim((1 << 40) + 1)
    assert not store.flush()
    assert set(before) <= set(files(store))
    assert after_a_crash(store, opened).last_table() in (held, oracle.last_table)
    disk.room = 1 << 30
    assert store.flush()
    assert len(files(store)) < len(before)
    assert store.last_table() == oracle.last_table


def test_below_the_reserve_it_is_full_and_goes_on_writing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    free = {"blocks": 10}

    def statvfs(path: Any) -> os.statvfs_result:
        fields = list(real(path))
        fields[1], fields[4] = 100_000, free["blocks"]  # f_frsize, f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(flusher, "_FULL_RETRY_S", 0.001)
    events = Events()
    store = opened(reserve_bytes=8_000_000)
    store.start(events)
    assert events.wait_for_full() == (
        "less than 7.6 MiB free, which is the limit (disk_reserve_bytes); free space or lower it"
    ), "at the start"
    store.append(place(1, [1]))
    assert store.flush()
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


def test_a_short_write_is_completed(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    real, real_one = os.pwritev, os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, b, o: real(fd, [b"".join(b)[:10]], o))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, o: real_one(fd, data[:7], o))
    store, oracle = opened(), Oracle()
    for _ in range(10):
        apply(store, oracle, ("place", 0, [1], 20))
    assert store.close()
    monkeypatch.undo()
    compare(opened(), oracle)


def test_other_write_errors_halt(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
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
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            synced.append(fd)
        real(fd)

    store = opened(segment_bytes=500)
    monkeypatch.setattr(os, "fsync", fsync)
    for fseq in range(1, 20):
        store.append(place(fseq, [fseq], bytes(100)))
    store.flush()
    files = list(store._directory.glob("*.seg"))
    assert len(synced) == len(files) > 1
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert store._directory.stat().st_mode & 0o777 == 0o700
