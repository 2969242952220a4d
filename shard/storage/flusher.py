"""Puts entries on stable storage: one thread per store, group commit, rotation, a full disk.

At level `memory` what was put is written and flushed at most one interval later, by the thread; at
level `disk` whoever calls `flush` does it at once. Nothing wakes the thread while nothing comes.
A write that fails for lack of space is repeated, at the same place, until it succeeds. So is the
opening of the next segment's file, which fails where the process has no file descriptor left: the
store is full meanwhile. A failed fdatasync ends the process, since nobody knows what it lost
(docs/protocol.md, section 10).

Invariant: entries reach the disk in order, and `flushed_bytes` never counts one that is not
on stable storage.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from shard.storage.segment_files import open_directory, open_flushed, pack_flushed
from ziplog.core.node import Event, Persisted, StorageChanged
from ziplog.runtime.process_logging import halt
from ziplog.segments.entry import NO_SPACE, REFUSED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ziplog.segments.segment import Segment

#: Entries of one write: it takes two buffers each, and the system takes 1,024.
_WRITE_ENTRIES: Final = 512
_FULL_RETRY_S: Final = 0.1
_SHORTEST_PAUSE_S: Final = 0.001


class _Write(NamedTuple):
    segment: Segment
    header: bytes
    body: bytes
    fseq: int


class _Removal(NamedTuple):
    names: list[str]


class Flusher:
    """The queue between a store and its files."""

    #: Bytes of entries on stable storage since the store was opened.
    flushed_bytes: int
    #: The last entry on stable storage.
    flushed_fseq: int

    def __init__(
        self,
        directory: Path,
        segment: Segment,
        *,
        interval_s: float,
        reserve_bytes: int,
        on_halt: Callable[[str], object] = halt,
    ) -> None:
        """Write to files in `directory`.

        Args:
            directory: exists.
            segment: the newest one; all that is in it is on stable storage.
            interval_s: how long an entry may wait to be flushed; 0: until `flush` is called.
            reserve_bytes: with less free space than this the store is full.
            on_halt: ends the process; gets the reason.

        """
        self.flushed_bytes = 0
        self._directory = directory
        self._interval_s, self._reserve_bytes, self._on_halt = interval_s, reserve_bytes, on_halt
        self._log = structlog.get_logger()
        self._put_bytes = self._written_bytes = 0
        self._written_fseq = self.flushed_fseq = self._reported_fseq = segment.last_fseq
        self._flushed_fd = open_flushed(directory)
        # Held open: the sync after a new name or a removal must not fail for want of a descriptor.
        self._names_fd = open_directory(directory)
        self._note_flushed(segment)
        self._queue: deque[_Write | _Removal] = deque()
        self._batch: list[_Write] = []
        self._segment: Segment | None = None
        self._fd = -1
        self._offset = 0
        self._is_full = False
        #: Why the last write was refused; None: it was not.
        self._refusal: OSError | None = None
        # Held by whoever writes: the thread, or a caller of `flush`.
        self._writing = threading.Lock()
        self._on_event: Callable[[Event], None] = lambda _: None
        #: Gets the last entry of each segment that is sealed, from whoever writes. Must be quick.
        self.on_seal: Callable[[int], object] = lambda _: None
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._is_awake = False

    @property
    def backlog_bytes(self) -> int:
        """Bytes of entries put and not yet on stable storage."""
        return self._put_bytes - self.flushed_bytes

    @property
    def is_full(self) -> bool:
        """Whether there is too little space, or the system refuses to open the next file."""
        return self._is_full

    def set_listener(self, on_event: Callable[[Event], None]) -> None:
        """From now on, tell `on_event` what happens, in `flush` and `flush_and_report`. It must be quick."""
        self._on_event = on_event

    def start(self) -> None:
        """Start the thread, which tends the files whenever something was put."""
        self._thread = threading.Thread(target=self._run, name="flusher", daemon=True)
        self._thread.start()

    def put(self, segment: Segment, header: bytes, body: bytes, fseq: int) -> None:
        """Take the next entry. It goes right behind the one before, or begins its segment.

        `fseq`: its number, or that of the last entry before it.
        """
        self._put_bytes += len(header) + len(body)
        self._queue.append(_Write(segment, header, body, fseq))
        if not self._is_awake and self._interval_s:
            self._wake()

    def remove(self, names: list[str]) -> None:
        """Delete files, in this order, once everything that was put before is flushed."""
        self._queue.append(_Removal(names))
        self._wake()

    def schedule(self) -> None:
        """Have the thread carry out what was put, though nobody waits for it."""
        self._wake()

    def _wake(self) -> None:
        self._is_awake = True
        self._woken.set()

    def flush(self) -> bool:
        """Put everything on stable storage; False if there is no space for it now."""
        with self._writing:
            is_done = self._write_out()
            self._sync()
            self._check_space(is_done)
            return is_done

    def close(self) -> bool:
        """Stop the thread and flush; False if something could not be written. May be repeated."""
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
        """Go on behind `segment`, which is flushed like all that was put, and may follow less."""
        with self._writing:
            assert not self._queue, "what waits to be written may be void"
            assert not self._batch, "what waits to be written may be void"
            if self._fd >= 0:
                os.close(self._fd)
                self._fd, self._segment = -1, None
            self._written_fseq = self.flushed_fseq = self._reported_fseq = segment.last_fseq
            self._note_flushed(segment)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._woken.wait()
                self._woken.clear()
                self._flush_loop()
        except Exception as error:  # noqa: BLE001 - without this thread, nothing is ever durable
            self._on_halt(f"the flusher failed: {type(error).__name__}: {error}")

    def _flush_loop(self) -> None:
        """Flush every interval until nothing came during one."""
        took_s = 0.0
        while not self._closing.is_set():
            # What comes while a flush runs waits for its end, the pause, and its own flush.
            pause_s = max(self._interval_s - 2 * took_s, _SHORTEST_PAUSE_S)
            self._closing.wait(_FULL_RETRY_S if self._is_full else pause_s)
            if not self._queue and not self._batch and not self._is_full:
                self._is_awake = False
                if not self._queue:  # Nothing came just now, and from now on `put` calls.
                    return
                self._is_awake = True
            started = time.monotonic()
            self.flush_and_report()
            took_s = time.monotonic() - started

    def flush_and_report(self) -> None:
        """Flush, and tell how far everything is on stable storage."""
        self.flush()
        with self._writing:
            flushed = self.flushed_fseq
            if flushed > self._reported_fseq:
                self._reported_fseq = flushed
                self._on_event(Persisted(flushed))

    # --- writing; the lock is held -----------------------------------------------------------

    def _write_out(self) -> bool:
        """Write all that is waiting; False if the system refuses it for now."""
        self._refusal = None
        try:
            while self._batch or self._queue:
                if not self._batch:
                    self._fill_batch()
                if self._batch:
                    self._write()
        except OSError as error:
            if error.errno not in REFUSED:
                self._on_halt(f"writing to {self._directory} failed: {error}")
                raise
            self._refusal = error
            return False
        return True

    def _fill_batch(self) -> None:
        """Take writes to one segment from the queue, or carry out one removal."""
        queue, batch = self._queue, self._batch
        while queue and len(batch) < _WRITE_ENTRIES:
            item = queue[0]
            if isinstance(item, _Removal):
                if not batch:
                    self._remove(item.names)
                    queue.popleft()  # not before: a removal that is refused is repeated
                return
            if batch and item.segment is not batch[0].segment:
                return
            batch.append(item)
            queue.popleft()

    def _write(self) -> None:
        batch = self._batch
        segment = batch[0].segment
        if segment is not self._segment:
            self._open_next(segment)
        buffers: list[bytes] = []
        for write in batch:
            buffers.append(write.header)
            buffers.append(write.body)
        total = sum(map(len, buffers))
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
        """Seal the segment written so far, and open the file of the next one."""
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
            self._log.warning("no index written", file=str(path), error=str(error))
            with contextlib.suppress(OSError):
                fresh.unlink()
        self.on_seal(segment.last_fseq)

    def _sync(self) -> None:
        if self._segment is None or self.flushed_bytes == self._written_bytes:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._on_halt(f"fdatasync of {self._segment.name} failed: {error}")
            raise
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
        """Leave a note of what is flushed. It is not waited for: late, it only tells less."""
        if self._flushed_fd >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._flushed_fd, pack_flushed(segment, self.flushed_fseq), 0)

    def _remove(self, names: list[str]) -> None:
        self._sync()
        for name in names:
            (self._directory / name).unlink(missing_ok=True)
        self._sync_names()

    def _free_bytes(self) -> int:
        """Return the free space, or the reserve if the system does not report it now."""
        try:
            space = os.statvfs(self._directory)
        except OSError:
            return self._reserve_bytes
        return space.f_bavail * space.f_frsize

    def _check_space(self, is_done: bool) -> None:
        free = self._free_bytes()
        # Some more than the reserve before it counts as room again, so that it does not flutter.
        least = self._reserve_bytes + (self._reserve_bytes // 8 if self._is_full else 0)
        is_full = not is_done or free < least
        if is_full == self._is_full:
            return
        self._is_full = is_full
        self._report(free)
        if is_full:
            self._wake()
        self._on_event(StorageChanged(full=is_full))

    def _report(self, free_bytes: int) -> None:
        """Log that the store is full, with what to do, or that it no longer is."""
        refusal = self._refusal
        if not self._is_full:
            self._log.warning("disk has room again", free_bytes=free_bytes)
        elif refusal is not None and refusal.errno not in NO_SPACE:
            self._log.warning(
                "records are refused as on a full disk: the system does not open the next file",
                error=str(refusal),
                advice="raise the limit of open files (ulimit -n), or close idle connections",
            )
        else:
            self._log.warning("disk full", free_bytes=free_bytes)
