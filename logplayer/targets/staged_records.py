"""Staged records: batches of a task that are durable, but not yet in a file that readers find.

    .TERM.PID.NUMBER.stage     frames: length, CRC-32C, MessagePack

A frame has the task's records of the positions [start, stop), column by column. A frame is whole or
absent: one that a crash cut, or that was not synced, has another checksum, and ends the file. All
frames are true of the log, whichever owner wrote them, so overlapping ones agree.
"""

from __future__ import annotations

import errno
import heapq
import os
import struct
from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec
from crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from logplayer.contract import Batch

_HEAD: Final = struct.Struct("<QI")


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The records of the positions [start, stop), in order."""

    start: int
    stop: int
    gsns: list[int] = []
    shards: list[int] = []
    epochs: list[int] = []
    timestamps_us: list[int] = []
    keys: list[bytes | None] = []
    payloads: list[bytes] = []

    def tail(self, start: int) -> Frame:
        """Return its part from a position on."""
        if start <= self.start:
            return self
        at = bisect_left(self.gsns, start)
        return Frame(
            start, self.stop, self.gsns[at:], self.shards[at:], self.epochs[at:],
            self.timestamps_us[at:], self.keys[at:], self.payloads[at:],
        )  # fmt: skip


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Frame)


def frame_of(batch: Batch) -> Frame:
    """Return a batch as a frame."""
    records = batch.records
    return Frame(
        batch.start,
        batch.stop,
        [record.rid.gsn for record in records],
        [record.rid.shard for record in records],
        [record.epoch for record in records],
        [record.timestamp_us for record in records],
        [record.key for record in records],
        [record.payload for record in records],
    )


class Stage:
    """A new file of frames, which one owner writes."""

    def __init__(self, path: Path) -> None:
        """Create the file; the caller syncs its directory."""
        self.path: Final = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        #: Size of the file, in bytes.
        self.size = 0

    def append(self, batch: Batch) -> None:
        """Append a batch, and sync it.

        Raises:
            OSError: the system refuses it; no further batch may follow.

        """
        body = _encoder.encode(frame_of(batch))
        head = _HEAD.pack(len(body), crc32c(body))
        written = os.pwritev(self._descriptor, [head, body], self.size)
        if written != len(head) + len(body):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.fdatasync(self._descriptor)
        self.size += written

    def close(self) -> None:
        """Close the file, which stays."""
        os.close(self._descriptor)


class Chain:
    """The records of staged files from a position on, as far as they follow without a gap."""

    def __init__(self, paths: Iterable[Path], start: int) -> None:
        """Read nothing yet; `start`: the first position."""
        self._paths: Final = list(paths)
        #: The position after the last frame that was read, and the first and the last record.
        self.stop = start
        self.first = self.last = -1

    def __iter__(self) -> Iterator[Frame]:
        """Read the files; memory holds one frame of each."""
        for frame in heapq.merge(*map(_frames, self._paths), key=attrgetter("start")):
            if frame.start <= self.stop < frame.stop:
                tail = frame.tail(self.stop)
                self.stop = frame.stop
                if tail.gsns:
                    self.first = tail.gsns[0] if self.first < 0 else self.first
                    self.last = tail.gsns[-1]
                    yield tail


def _frames(path: Path) -> Iterator[Frame]:
    """Return the frames of a file up to the first one that is not whole."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            if length > size - file.tell():
                return
            body = file.read(length)
            if not body or crc32c(body) != checksum:
                return
            yield _decoder.decode(body)
