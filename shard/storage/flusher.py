"""Writes entries to stable storage: one thread per store, group commit, segment rotation.

At level `memory` the thread writes and flushes entries at most one interval later; it sleeps while
no entry arrives. At level `disk` the caller of `flush` does it at once. A write that fails for lack
of space is repeated at the same offset until it succeeds. So is the open of the next
segment file, which fails while the process has no free descriptor; the store is full meanwhile. A
failed fdatasync ends the process, because the content of the disk is unknown then
(docs/protocol.md, section 10).

Files are deleted beside the queue, so a trim frees space although writes fail.

Invariant: entries reach the disk in order, and `flushed_bytes` never counts an entry that is not on
stable storage.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from shard.storage.segment_files import open_flushed, pack_flushed
from ziplog import event_log
from ziplog.core.histogram import Histogram
from ziplog.core.node import Event, Persisted, StorageChanged
from ziplog.runtime.process_logging import halt
from ziplog.segments.durable_files import free_bytes, open_directory
from ziplog.segments.entry import NO_SPACE, REFUSED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ziplog.segments.segment import Segment

#: Most buffers of one `pwritev`, by the system's limit.
MAX_BUFFERS: Final = 1024
_FULL_RETRY_S: Final = 0.1
_MIB: Final = 1024 * 1024
_SHORTEST_PAUSE_S: Final = 0.001


class _Write(NamedTuple):
    """Entries that follow each other in a segment."""

    segment: Segment
    buffers: list[bytes]
    size: int
    #: The number of the last one.
    fseq: int


class _Removal(NamedTuple):
    names: list[str]
    #: It is due once this many bytes are on stable storage.
    after_bytes: int


class Flusher:
    """The write queue between a store and its segment files."""

    #: Bytes of entries on stable storage since the store was opened.
    flushed_bytes: int
    #: The last entry on stable storage.
    flushed_fseq: int
    #: Durations of fdatasync.
    flush_durations: Histogram

    def __init__(
        self,
        directory: Path,
        segment: Segment,
        *,
        interval_s: float,
        in_background: bool = True,
        reserve_bytes: int,
        on_halt: Callable[[str], object] = halt,
    ) -> None:
        """Write to files in `directory`.

        Args:
            directory: an existing directory.
            segment: the newest segment; its content is on stable storage.
            interval_s: maximum delay of a flush by the thread; 0: only `flush` writes.
            in_background: entries wake the thread; otherwise only `flush` writes.
            reserve_bytes: free space below which the store is full.
            on_halt: ends the process; receives the reason.

        """
        self.flushed_bytes = 0
        self.flush_durations = Histogram()
        self._directory = directory
        self._interval_s, self._on_halt = interval_s, on_halt
        self._in_background = in_background
        #: Free space below which the store is full.
        self.reserve_bytes = reserve_bytes
        self._put_bytes = self._written_bytes = 0
        self._written_fseq = self.flushed_fseq = segment.last_fseq
        self._reported_bytes = 0
        self._flushed_fd = open_flushed(directory)
        # Kept open: the sync after a new name or a removal must not fail without free descriptors.
        self._names_fd = open_directory(directory)
        self._note_flushed(segment)
        self._queue: deque[_Write] = deque()
        self._removals: deque[_Removal] = deque()
        self._batch: list[_Write] = []
        self._segment: Segment | None = None
        self._fd = -1
        self._offset = 0
        self._is_full = False
        #: The error of the last refused write; None: it succeeded.
        self._refusal: OSError | None = None
        # Held by the writing thread: the flusher's, or a caller of `flush`.
        self._writing = threading.Lock()
        self._on_event: Callable[[Event], None] = lambda _: None
        #: Receives the last entry of each sealed segment, on the writing thread. Must be quick.
        self.on_seal: Callable[[int], object] = lambda _: None
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._is_awake = False

    @property
    def backlog_bytes(self) -> int:
        """Bytes of queued entries that are not yet on stable storage."""
        return self._put_bytes - self.flushed_bytes

    @property
    def free_bytes(self) -> int | None:
        """Free space of the disk; None if the system does not report it now."""
        return free_bytes(self._directory)

    @property
    def is_full(self) -> bool:
        """Whether space is below the reserve, or the system refuses to open the next file."""
        return self._is_full

    def set_listener(self, on_event: Callable[[Event], None]) -> None:
        """Set the receiver of events; `flush` and `flush_and_report` call it. It must be quick."""
        self._on_event = on_event

    def set_reserve(self, reserve_bytes: int) -> None:
        """Change the reserve, and check the space by it. From any thread."""
        if reserve_bytes != self.reserve_bytes:
            self.reserve_bytes = reserve_bytes
            self.flush()

    def flush_in_background(self, is_on: bool) -> None:
        """Have entries wake the thread, or not."""
        self._in_background = is_on
        if is_on and self._interval_s:
            self.wake()

    def start(self) -> None:
        """Start the thread, which flushes queued entries."""
        self._thread = threading.Thread(target=self._run, name="flusher", daemon=True)
        self._thread.start()

    def put(self, segment: Segment, buffers: list[bytes], size: int, fseq: int) -> None:
        """Queue the next entries; they follow the ones before them, or begin their segment.

        Args:
            segment: their segment.
            buffers: their bytes, at most `MAX_BUFFERS`.
            size: the number of these bytes.
            fseq: the number of the last one, or of the last entry before a record.

        """
        assert len(buffers) <= MAX_BUFFERS, "one write cannot hold these entries"
        self._put_bytes += size
        self._queue.append(_Write(segment, buffers, size, fseq))
        if not self._is_awake and self._in_background and self._interval_s:
            self.wake()

    def remove(self, names: list[str], *, at_once: bool = False) -> None:
        """Delete files, in the order of the calls, after everything queued before is flushed.

        `at_once`: the log needs nothing that is queued in their place.
        """
        self._removals.append(_Removal(names, 0 if at_once else self._put_bytes))
        self.wake()

    def wake(self) -> None:
        """Wake the thread to process the queue."""
        self._is_awake = True
        self._woken.set()

    def flush(self) -> bool:
        """Write everything to stable storage; False if there is no space now."""
        with self._writing:
            is_done = self._write_out()
            self._sync()
            is_done = self._try(self._remove_files) and is_done
            self._check_space(is_done=is_done)
            return is_done

    def close(self) -> bool:
        """Stop the thread and flush; False if a write failed. May be repeated."""
        self._closing.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        is_done = self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._segment = -1, None
        if self._flushed_fd >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._flushed_fd)
            os.close(self._flushed_fd)
            self._flushed_fd = -1
        if is_done and self._names_fd >= 0:
            os.close(self._names_fd)
            self._names_fd = -1
        return is_done

    def switch_segment(self, segment: Segment) -> None:
        """Continue after `segment`. It is flushed, like all entries before, and may be earlier."""
        with self._writing:
            assert not self._queue, "queued entries may be void"
            assert not self._batch, "queued entries may be void"
            if self._fd >= 0:
                os.close(self._fd)
                self._fd, self._segment = -1, None
            self._written_fseq = self.flushed_fseq = segment.last_fseq
            self._note_flushed(segment)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._writing:
                self._check_space(is_done=True)
            while not self._closing.is_set():
                self._woken.wait()
                self._woken.clear()
                self._flush_loop()
        except Exception as error:  # noqa: BLE001 - without this thread, nothing is ever durable
            self._on_halt(f"the flusher failed: {type(error).__name__}: {error}")

    def _flush_loop(self) -> None:
        """Flush every interval until no entry arrives during one."""
        took_s = 0.0
        while not self._closing.is_set():
            # An entry that arrives during a flush waits for its end, the pause, and its own flush.
            pause_s = max(self._interval_s - 2 * took_s, _SHORTEST_PAUSE_S)
            self._closing.wait(_FULL_RETRY_S if self._is_full else pause_s)
            if self._is_idle() and not self._is_full:
                self._is_awake = False
                if self._is_idle():  # From now on, `put` wakes the thread.
                    return
                self._is_awake = True
            started = time.monotonic()
            self.flush_and_report()
            took_s = time.monotonic() - started

    def _is_idle(self) -> bool:
        """Whether all is flushed and reported: another thread may flush, which reports nothing."""
        return self._reported_bytes == self._put_bytes and not self._removals

    def flush_and_report(self) -> None:
        """Flush, and report the last entry on stable storage, also if only records follow it."""
        self.flush()
        with self._writing:
            if self.flushed_bytes > self._reported_bytes:
                self._reported_bytes = self.flushed_bytes
                self._on_event(Persisted(self.flushed_fseq))

    # --- writing; the lock is held -----------------------------------------------------------

    def _try(self, change: Callable[[], None]) -> bool:
        """Change files; return False if the system refuses it for now."""
        try:
            change()
        except OSError as error:
            if error.errno not in REFUSED:
                self._on_halt(f"writing to {self._directory} failed: {error}")
                raise
            self._refusal = error
            return False
        return True

    def _write_out(self) -> bool:
        """Write the queue; return False if the system refuses it for now."""
        self._refusal = None
        return self._try(self._write_queue)

    def _write_queue(self) -> None:
        while self._batch or self._queue:
            if not self._batch:
                self._fill_batch()
            self._write()

    def _fill_batch(self) -> None:
        """Move the next writes to one segment into the batch."""
        queue, batch = self._queue, self._batch
        segment, room = queue[0].segment, MAX_BUFFERS
        while queue and queue[0].segment is segment and len(queue[0].buffers) <= room:
            room -= len(queue[0].buffers)
            batch.append(queue.popleft())

    def _write(self) -> None:
        batch = self._batch
        segment = batch[0].segment
        if segment is not self._segment:
            self._open_next(segment)
        buffers: list[bytes] = []
        total = 0
        for write in batch:
            buffers += write.buffers
            total += write.size
        self._write_at(self._offset, buffers, total)
        self._offset += total
        self._written_bytes += total
        self._written_fseq = batch[-1].fseq
        batch.clear()

    def _write_at(self, offset: int, buffers: list[bytes], total: int) -> None:
        written = os.pwritev(self._fd, buffers, offset)
        if written == total:
            return
        rest = memoryview(b"".join(buffers))
        while written < total:
            written += os.pwrite(self._fd, rest[written:], offset + written)

    def _open_next(self, segment: Segment) -> None:
        """Seal the current segment, and open the file of the next one."""
        self._sync()
        path = self._directory / segment.name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._sync_names()
        if self._segment is not None:
            os.close(self._fd)
            self._seal(self._segment)
        self._fd, self._segment, self._offset = fd, segment, segment.flushed

    def _seal(self, segment: Segment) -> None:
        """Write the index file; without it, the next start reads the whole segment instead."""
        path = self._directory / segment.index_name
        fresh = path.with_suffix(".tmp")
        try:
            fresh.write_bytes(segment.index())
            fresh.replace(path)
        except OSError as error:
            event_log.warning(
                "the segment index cannot be written", file=str(path), error=str(error)
            )
            with contextlib.suppress(OSError):
                fresh.unlink()
        self.on_seal(segment.last_fseq)

    def _sync(self) -> None:
        if self._segment is None or self.flushed_bytes == self._written_bytes:
            return
        started = time.monotonic_ns()
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._on_halt(f"fdatasync of {self._segment.name} failed: {error}")
            raise
        self.flush_durations.add(time.monotonic_ns() - started)
        self._segment.flushed = self._offset
        self.flushed_fseq = self._written_fseq
        self.flushed_bytes = self._written_bytes
        self._note_flushed(self._segment)

    def _sync_names(self) -> None:
        try:
            os.fsync(self._names_fd)
        except OSError as error:
            self._on_halt(f"fsync of {self._directory} failed: {error}")
            raise

    def _note_flushed(self, segment: Segment) -> None:
        """Record the last flushed entry. It is not synced: an older value is correct, too."""
        if self._flushed_fd >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._flushed_fd, pack_flushed(segment, self.flushed_fseq), 0)

    def _remove_files(self) -> None:
        """Delete the files that are due."""
        removals = self._removals
        while removals and removals[0].after_bytes <= self.flushed_bytes:
            for name in removals[0].names:
                (self._directory / name).unlink(missing_ok=True)
            self._sync_names()
            removals.popleft()  # Not before: a refused removal is repeated.

    def _check_space(self, *, is_done: bool) -> None:
        free = self.free_bytes
        if free is None:
            free = self.reserve_bytes
        # Hysteresis: a full store needs more than the reserve before it counts as free again.
        least = self.reserve_bytes + (self.reserve_bytes // 8 if self._is_full else 0)
        is_full = not is_done or free < least
        if is_full == self._is_full:
            return
        self._is_full = is_full
        if is_full:
            reason = self._why_full(free)
            event_log.warning("disk full", free_bytes=free, reason=reason)
            self.wake()
            self._on_event(StorageChanged(full=True, reason=reason))
        else:
            event_log.warning("disk has room again", free_bytes=free)
            self._on_event(StorageChanged(full=False))

    def _why_full(self, free_bytes: int) -> str:
        """Return why the store is full, and what to do."""
        refusal = self._refusal
        if refusal is not None and refusal.errno not in NO_SPACE:
            return (
                f"the system does not open the next file ({refusal}); raise the limit of open files"
                " (ulimit -n), or close idle connections"
            )
        # The text stays while the store is full, so it has no number that changes meanwhile.
        if refusal is not None and free_bytes >= self.reserve_bytes:
            return f"the system takes no more bytes ({refusal}); free space, or raise the quota"
        return (
            f"less than {self.reserve_bytes / _MIB:.1f} MiB free, which is the limit"
            " (disk_reserve_bytes); free space or lower it"
        )
