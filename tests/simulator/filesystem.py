"""Files and directories of a simulated disk, and what a power cut leaves of them.

A file holds the running process's content, and the undo steps of every write since its last sync.
A directory does the same with its names. A power cut undoes the newest steps, a random number of
them.

Rule: synced data survives. Of unsynced data a prefix survives, in order; only the first lost write
may survive in part. The order between different files and directories is not kept.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from fnmatch import fnmatchcase
from functools import total_ordering
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Final, NoReturn, cast

from tests.simulator.kernel import US

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from tests.simulator.disk import Disk

#: Bytes that a disk writes atomically.
SECTOR_BYTES: Final = 512
#: Defaults of a disk: duration of a sync, and total size of all files.
LATENCY_NS: Final = 500 * US
CAPACITY_BYTES: Final = 1 << 30
#: Unsynced steps after which the system writes the older half back.
_UNSYNCED_STEPS: Final = 1024

_FLAGS: Final = {
    "rb": os.O_RDONLY,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}


class File:
    """A regular file."""

    __slots__ = ("_undo", "data", "is_linked", "lock", "opens")

    def __init__(self) -> None:
        #: The content for the running process.
        self.data = bytearray()
        self.is_linked = False
        #: Number of open descriptors, and the one that holds the lock.
        self.opens = 0
        self.lock: Descriptor | None = None
        #: Per step since the last sync: offset, written length, former content.
        self._undo: list[tuple[int, int, bytes]] = []

    def write(self, offset: int, content: bytes) -> None:
        """Write bytes at an offset; a gap before it becomes zeros."""
        data, size = self.data, len(self.data)
        if offset == size:
            self._note((size, len(content), b""))
            data += content
            return
        start, stop = min(offset, size), offset + len(content)
        self._note((start, stop - start, bytes(data[start:stop])))
        if offset > size:
            data.extend(bytes(offset - size))
        data[offset:stop] = content

    def resize(self, size: int) -> None:
        """Cut the file, or extend it with zeros."""
        former = len(self.data)
        if size < former:
            self._note((size, 0, bytes(self.data[size:])))
            del self.data[size:]
        elif size > former:
            self._note((former, size - former, b""))
            self.data.extend(bytes(size - former))

    def _note(self, step: tuple[int, int, bytes]) -> None:
        self._undo.append(step)
        if len(self._undo) > _UNSYNCED_STEPS:
            del self._undo[: _UNSYNCED_STEPS // 2]

    def sync(self) -> None:
        """Mark all content as stored."""
        self._undo.clear()

    @property
    def synced_bytes(self) -> int:
        """Length of the prefix that is unchanged since the last sync."""
        return min((start for start, _, _ in self._undo), default=len(self.data))

    @property
    def is_synced(self) -> bool:
        """Whether the file is unchanged since the last sync."""
        return not self._undo

    def power_cut(self, random: Random) -> None:
        """Lose a part of the unsynced content."""
        data, size = self.data, len(self.data)
        lost = self._undo[_survivors(random, len(self._undo)) :]
        content = b""
        for start, length, former in reversed(lost):
            content = bytes(data[start : start + length])
            data[start : start + length] = former
        if lost and random.random() < 1 / 2:
            start, _, former = lost[0]
            self._tear(random, start, content, is_longer=len(content) > len(former), size=size)
        self._undo.clear()

    def _tear(
        self, random: Random, start: int, content: bytes, *, is_longer: bool, size: int
    ) -> None:
        """Keep a part of the first lost write."""
        part = random.randint(0, len(content))
        if random.random() < 1 / 2:
            part = max((start + part) // SECTOR_BYTES * SECTOR_BYTES - start, 0)
        self.data[start : start + part] = content[:part]
        if is_longer and random.random() < 1 / 2:
            # The new length was stored before the blocks.
            end = random.choice((start + len(content), size))
            missing = max(end - len(self.data), 0)
            self.data += random.choice((bytes(missing), random.randbytes(missing)))


class Directory:
    """A directory: names of files and directories."""

    __slots__ = ("_undo", "lock", "names", "opens")

    def __init__(self) -> None:
        #: The names for the running process.
        self.names: dict[str, File | Directory] = {}
        self.opens = 0
        self.lock: Descriptor | None = None
        #: Per step since the last sync: the changed names and their former targets.
        self._undo: list[list[tuple[str, File | Directory | None]]] = []

    def change(self, names: dict[str, File | Directory | None]) -> None:
        """Change the targets of names (None: remove), atomically."""
        self._undo.append([(name, self.names.get(name)) for name in names])
        if len(self._undo) > _UNSYNCED_STEPS:
            del self._undo[: _UNSYNCED_STEPS // 2]
        for name, node in names.items():
            self._set(name, node)

    def _set(self, name: str, node: File | Directory | None) -> None:
        if node is None:
            self.names.pop(name, None)
        else:
            self.names[name] = node

    def sync(self) -> None:
        """Mark all names as stored."""
        self._undo.clear()

    def power_cut(self, random: Random) -> None:
        """Lose a part of the unsynced name changes, recursively."""
        for step in reversed(self._undo[_survivors(random, len(self._undo)) :]):
            for name, former in step:
                self._set(name, former)
        self._undo.clear()
        for node in self.names.values():
            node.power_cut(random)


def _survivors(random: Random, count: int) -> int:
    """Return a random number of surviving steps, from the first: often none or all."""
    return random.choice((0, count, random.randint(0, count), random.randint(0, count)))


class Descriptor(int):
    """A file descriptor: a number of the disk, and its file or directory while it is open."""

    disk: Disk
    #: None once it is closed.
    node: File | Directory | None
    flags: int
    position: int

    @property
    def target(self) -> File | Directory:
        """The open file or directory.

        Raises:
            OSError: the descriptor is closed.

        """
        if self.node is None:
            raise error(errno.EBADF)
        return self.node

    @property
    def file(self) -> File:
        """The open regular file.

        Raises:
            OSError: the descriptor is closed, or a directory's.

        """
        if not isinstance(self.node, File):
            raise error(errno.EBADF if self.node is None else errno.EISDIR)
        return self.node


def descriptor(fd: int) -> Descriptor:
    """Return the open descriptor of a number.

    Raises:
        OSError: no such descriptor is open.

    """
    if not isinstance(fd, Descriptor) or fd.node is None:
        raise error(errno.EBADF)
    return fd


def stat_of(node: File | Directory) -> os.stat_result:
    """Return a file's stat result; unsupported fields are 0."""
    is_file = isinstance(node, File)
    mode = stat.S_IFREG | 0o600 if is_file else stat.S_IFDIR | 0o700
    size = len(node.data) if isinstance(node, File) else 0
    return os.stat_result((mode, 0, 0, 1, 0, 0, size, 0, 0, 0))


def error(number: int, path: object = None) -> OSError:
    """Return the exception of an error number."""
    text = os.strerror(number)
    return OSError(number, text) if path is None else OSError(number, text, str(path))


class _Raw(io.RawIOBase):
    """A descriptor as a raw stream for `io`."""

    def __init__(self, fd: Descriptor, *, closefd: bool) -> None:
        self._fd, self._closefd = fd, closefd

    def readable(self) -> bool:
        return True  # the disk checks the mode

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._fd.position}
        self._fd.position = base.get(whence, len(self._fd.file.data)) + offset
        return self._fd.position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._fd.disk.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, content: memoryview) -> int:  # type: ignore[override]
        return self._fd.disk.write(self._fd, bytes(content))

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._closefd:
                self._fd.disk.close(self._fd)


def stream(fd: Descriptor, mode: str, *, closefd: bool = True) -> BinaryIO:
    """Return a buffered stream over a descriptor; `mode` is "rb", "wb", "xb" or "ab"."""
    raw = cast("io.RawIOBase", _Raw(fd, closefd=closefd))
    made = io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)
    return cast("BinaryIO", made)


def flags_of(mode: str) -> int:
    """Return the open flags of a stream mode."""
    return _FLAGS[mode]


@total_ordering
class DiskPath:
    """A path on a simulated disk: the used part of `pathlib.Path`; never a real file."""

    __slots__ = ("disk", "parts")

    def __init__(self, disk: Disk, parts: tuple[str, ...]) -> None:
        self.disk: Final = disk
        #: The names from the disk's root.
        self.parts: Final = parts

    # --- the path itself ---

    def __truediv__(self, name: str) -> DiskPath:
        return DiskPath(self.disk, (*self.parts, *name.strip("/").split("/")))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DiskPath):
            return NotImplemented
        return self.disk is other.disk and self.parts == other.parts

    def __lt__(self, other: DiskPath) -> bool:
        return (self.disk.name, self.parts) < (other.disk.name, other.parts)

    def __hash__(self) -> int:
        return hash(self.parts)

    def __str__(self) -> str:
        return "/".join((self.disk.name, *self.parts))

    def __repr__(self) -> str:
        return f"DiskPath({str(self)!r})"

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is on a simulated disk: only its stand-ins may open it")

    @property
    def name(self) -> str:
        """The last name; "" for the root."""
        return self.parts[-1] if self.parts else ""

    @property
    def suffix(self) -> str:
        """The name's suffix, from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> DiskPath:
        """The parent directory; the root is its own parent."""
        return DiskPath(self.disk, self.parts[:-1])

    def with_name(self, name: str) -> DiskPath:
        """Return another path in the same directory."""
        return DiskPath(self.disk, (*self.parts[:-1], name))

    def with_suffix(self, suffix: str) -> DiskPath:
        """Return the path with another suffix."""
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    # --- reads ---

    def exists(self) -> bool:
        """Whether the path exists."""
        return self.disk.exists(self)

    def is_file(self) -> bool:
        """Whether the path is a regular file."""
        return isinstance(self.disk.find(self), File)

    def is_dir(self) -> bool:
        """Whether the path is a directory."""
        return isinstance(self.disk.find(self), Directory)

    def stat(self) -> os.stat_result:
        """Return its stat result: only `st_size` and `st_mode` are set."""
        return self.disk.stat(self)

    def iterdir(self) -> Iterator[DiskPath]:
        """Yield the paths in a directory."""
        for name in self.disk.names(self):
            yield DiskPath(self.disk, (*self.parts, name))

    def glob(self, pattern: str) -> Iterator[DiskPath]:
        """Yield the paths in a directory that match a pattern without slashes."""
        assert "/" not in pattern, "only names in this directory are matched"
        assert "**" not in pattern, "only names in this directory are matched"
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open a file; `mode` is "rb", "wb", "xb" or "ab"."""
        return stream(self.disk.open(self, flags_of(mode)), mode)

    def read_bytes(self) -> bytes:
        """Return a file's content."""
        with self.open("rb") as file:
            return file.read()

    def write_bytes(self, content: bytes) -> int:
        """Replace a file's content without a sync; create the file if needed."""
        with self.open("wb") as file:
            return file.write(content)

    # --- changes ---

    def touch(self, mode: int = 0o666) -> None:
        """Create an empty file if there is none."""
        self.disk.close(self.disk.open(self, os.O_WRONLY | os.O_CREAT, mode))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Create a directory."""
        if parents and self.parts and not self.parent.exists():
            self.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.disk.mkdir(self, mode)
        except FileExistsError:
            if not exist_ok or not self.is_dir():
                raise

    def chmod(self, mode: int) -> None:  # noqa: ARG002 - there are no permissions
        """Do nothing, to an existing file."""
        self.stat()

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file's name."""
        try:
            self.disk.unlink(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def replace(self, target: DiskPath) -> DiskPath:
        """Rename a file within its directory, and replace the target."""
        self.disk.rename(self, target)
        return target

    rename = replace
