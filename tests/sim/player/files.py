"""Directories of files on one simulated disk: the production target, and what the oracle sees.

All processes use the disk, as one file server or one machine. At any call of the disk a worker may
stand still while all others go on, and it may be dead afterwards. A power cut ends all processes.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from crc32c import crc32c

from logplayer.contract import Fenced
from logplayer.targets import file_formats, files_target, staged_records
from logplayer.targets.files_target import FilesTarget
from logplayer.targets.staged_records import Frame
from tests.simulator.disk import Disk
from ziplog.cli.rendering import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from random import Random

    from logplayer.contract import Batch, Opened, Task
    from tests.sim.player.oracle import Oracle
    from tests.simulator.filesystem import Descriptor, DiskPath, File
    from ziplog.types import Record

#: Modules that use the disk.
MODULES: Final = (files_target, staged_records, file_formats)
#: Seconds after which staged records become a file.
ROLL_S: Final = 1
_HEAD_BYTES: Final = 12


class Killed(BaseException):
    """The process of a worker died in a call of the disk."""


class SharedDisk(Disk):
    """A disk whose calls may stand still, and that may show changes of others late."""

    def __init__(self, random: Random, *, shows_late: bool) -> None:
        """`shows_late`: an owner sees neither files that others begin nor that its own is gone."""
        super().__init__(random)
        self.shows_late: Final = shows_late
        #: Called at every call.
        self.on_call: Callable[[], object] = lambda: None

    def names(self, path: DiskPath) -> list[str]:
        self.on_call()
        found = super().names(path)
        return [one for one in found if not one.endswith(".part")] if self.shows_late else found

    def exists(self, path: DiskPath) -> bool:
        self.on_call()
        return super().exists(path) or (self.shows_late and path.name.startswith(".ziplog-"))

    def link(self, path: DiskPath, target: DiskPath) -> None:
        self.on_call()
        super().link(path, target)

    def unlink(self, path: DiskPath) -> None:
        self.on_call()
        super().unlink(path)

    def rename(self, path: DiskPath, target: DiskPath) -> None:
        self.on_call()
        super().rename(path, target)

    def sync(self, fd: Descriptor) -> None:
        self.on_call()
        super().sync(fd)


class _Line(msgspec.Struct):
    gsn: int


class _Stored(msgspec.Struct):
    """What the oracle reads of an identity file."""

    seek: int
    position: int
    birth: int


def _decoded(data: bytes, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise AssertionError(f"the file {name} is not complete: {error}") from error


def _frames(data: bytes) -> list[Frame]:
    """Return the staged batches of a file, up to the first one that is not whole."""
    frames, at = [], 0
    while len(data) - at > _HEAD_BYTES:
        size, checksum = struct.unpack_from("<QI", data, at)
        body = data[at + _HEAD_BYTES : at + _HEAD_BYTES + size]
        if len(body) < size or crc32c(body) != checksum:
            break
        frames.append(msgspec.msgpack.decode(body, type=Frame))
        at += _HEAD_BYTES + size
    return frames


class _Contents(NamedTuple):
    """What the directory of a partition has."""

    #: Of its records, also of those that are staged.
    gsns: list[int]
    #: How many of them are in files, and all lines of the files.
    filed: int
    lines: bytes
    position: int
    #: The number of seeks that it knows, and the birth of its cursor; -1: it has no identity.
    seek: int
    birth: int


class SharedFiles:
    """The directory of one target, for all processes."""

    stores_position: Final = True

    def __init__(self, name: str, disk: SharedDisk, roll_bytes: int) -> None:
        self.name: Final = name
        self.disk: Final = disk
        self.roll_bytes: Final = roll_bytes
        self.directory: Final = disk.path(name)
        #: Rejects nothing.
        self.rejects: Final[Callable[[Record], str]] = lambda _record: ""
        self._parsed: Final[dict[File, list[int]]] = {}
        #: Stretches that an operator's seeks passed over, by partition.
        self.gaps: Final[dict[int, list[tuple[int, int]]]] = {}
        #: Partitions whose cursors were created again, at the first record that was left.
        self.renewed: Final[set[int]] = set()

    def _read(self, partition: int) -> _Contents:
        """Return what the directory of a partition has."""
        part = files_target.part_of(self.directory, partition)  # type: ignore[arg-type, type-var]
        gsns: list[int] = []
        lines: list[bytes] = []
        stored: list[_Stored] = []
        frames: list[Frame] = []
        directory: Any = self.disk.find(part)  # type: ignore[arg-type]
        for name, node in sorted(directory.names.items() if directory is not None else ()):
            data = bytes(node.data)
            if name.endswith(".jsonl"):
                if node not in self._parsed:
                    rows = [_decoded(one, _Line, name) for one in data.splitlines()]
                    self._parsed[node] = [row.gsn for row in rows]
                gsns += self._parsed[node]
                lines.append(data)
            elif name.endswith(".stage"):
                frames += _frames(data)
            elif name.startswith(".ziplog-"):
                stored.append(_decoded(data, _Stored, name))
        filed = len(gsns)
        position = max([0, *(one.position for one in stored), *(gsn + 1 for gsn in gsns[-1:])])
        for frame in sorted(frames, key=lambda one: one.start):
            if frame.start <= position < frame.stop:
                gsns += frame.tail(position).gsns
                position = frame.stop
        seek = max((one.seek for one in stored), default=-1)
        birth = max((one.birth for one in stored), default=-1)
        return _Contents(gsns, filed, b"".join(lines), position, seek, birth)

    def position(self, partition: int) -> int:
        """Return the position that the directory has; 0: none."""
        return self._read(partition).position

    def era(self, partition: int) -> tuple[int, int]:
        """Return the birth and the seek of the cursor that it knows; -1: it has no identity."""
        found = self._read(partition)
        return found.birth, found.seek

    def sought(self, partition: int, position: int) -> None:
        """Note that an operator sought the cursor: what is not there before it is passed over."""
        gsns = [gsn for gsn in self._read(partition).gsns if gsn < position]
        start = gsns[-1] + 1 if gsns else 0
        self.gaps.setdefault(partition, []).append((start, position))

    def drop(self, partition: int) -> None:
        """Remove all files of a partition."""
        part = files_target.part_of(self.directory, partition)  # type: ignore[arg-type, type-var]
        node: Any = self.disk.find(part)  # type: ignore[arg-type]
        if node is not None:
            node.change(dict.fromkeys(node.names))
            node.sync()

    def remove(self) -> None:
        """Remove the directory with those of all partitions."""
        above: Any = self.disk.find(self.directory.parent)
        if self.directory.name in above.names:
            above.change({self.directory.name: None})
            above.sync()

    def check(self, name: str, partition: int) -> None:
        """Check that it has each record once, in order."""
        gsns = self._read(partition).gsns
        assert all(a < b for a, b in pairwise(gsns)), (
            f"exactly-once: the directory of {name} has {gsns}"
        )

    def compare(self, name: str, partition: int, wanted: Sequence[Record], trim: int) -> None:
        """Check that it has all records of its task but those that were passed over."""
        found = self._read(partition)
        gaps, own = list(self.gaps.get(partition, [])), set(found.gsns)
        if partition in self.renewed:
            gaps.append((0, trim))
        lacking = [
            record.rid.gsn
            for record in wanted
            if record.rid.gsn not in own
            and not any(start <= record.rid.gsn < stop for start, stop in gaps)
        ]
        assert not lacking, f"loss: the directory of {name} lacks {lacking}"
        filed = set(found.gsns[: found.filed])
        lines = b"".join(as_json(one) for one in wanted if one.rid.gsn in filed)
        assert found.lines == lines, f"exactly-once: the directory of {name} has {found.gsns}"


class FilesConnection:
    """The connection of a worker."""

    def __init__(self, files: SharedFiles, oracle: Oracle) -> None:
        self._files: Final = files
        self._oracle: Final = oracle
        #: A step is under way.
        self.is_busy = False
        directory: Any = files.directory
        self._target: Final = FilesTarget(directory, roll_bytes=files.roll_bytes)

    def open(self, task: Task) -> Opened:
        with self._busy():
            return self._target.open(task)

    def deliver(self, batch: Batch) -> bytes | None:
        with self._busy():
            self._target.deliver(batch)
        self._oracle.check_of(batch.task)
        return None

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def close(self) -> None:
        """End the connection, as its worker does."""
        with suppress(OSError, Fenced):
            self._target.close()

    def flush(self, partition: int) -> None:
        """Do nothing: the target has synced what it returned."""
