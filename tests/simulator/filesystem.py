"""What is on a simulated disk: files and directories, as they are and as a power cut leaves them.

A file is kept as the running process sees it, with what undoes every write since its last sync; so
is a directory, with its names. A power cut undoes the newest of these steps, as chance decides.

Rule: what was synced survives, and of what was not a prefix, in order; only the first write that is
lost may be there in part. Files and directories know nothing of each other's order.
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

#: What a disk writes at once.
SECTOR_BYTES: Final = 512
#: What a sync takes, and what all files together may, on a disk of which nothing else is said.
LATENCY_NS: Final = 500 * US
CAPACITY_BYTES: Final = 1 << 30
#: With more steps than this unsynced, the system has written the older half back by itself.
_UNSYNCED_STEPS: Final = 1024

_FLAGS: Final = {
    "rb": os.O_RDONLY,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}


class File:
    """A regular file."""

    __slots__ = ("_undo", "data", "is_linked", "lock", "opens")

    def __init__(self) -> None:
        #: What the running process sees.
        self.data = bytearray()
        self.is_linked = False
        #: How many descriptors are open, and which of them has the lock.
        self.opens = 0
        self.lock: Descriptor | None = None
        #: Of each step since the last sync: where, how long what it put there is, what was there.
        self._undo: list[tuple[int, int, bytes]] = []

    def write(self, offset: int, content: bytes) -> None:
        """Put bytes at an offset; a gap before it becomes zeros."""
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
        """Cut the file off, or lengthen it with zeros."""
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
        """Let everything be on the disk."""
        self._undo.clear()

    @property
    def synced_bytes(self) -> int:
        """How many bytes, from the first, are as they were at the last sync."""
        return min((start for start, _, _ in self._undo), default=len(self.data))

    @property
    def is_synced(self) -> bool:
        """Whether nothing was changed since the last sync."""
        return not self._undo

    def power_cut(self, random: Random) -> None:
        """Lose some of what was not synced."""
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
        """Let a part of the first lost write be there."""
        part = random.randint(0, len(content))
        if random.random() < 1 / 2:
            part = max((start + part) // SECTOR_BYTES * SECTOR_BYTES - start, 0)
        self.data[start : start + part] = content[:part]
        if is_longer and random.random() < 1 / 2:
            # The new length was there before the blocks were written.
            end = random.choice((start + len(content), size))
            missing = max(end - len(self.data), 0)
            self.data += random.choice((bytes(missing), random.randbytes(missing)))


class Directory:
    """A directory: its names, and what they stand for."""

    __slots__ = ("_undo", "lock", "names", "opens")

    def __init__(self) -> None:
        #: As the running process sees them.
        self.names: dict[str, File | Directory] = {}
        self.opens = 0
        self.lock: Descriptor | None = None
        #: Of each step since the last sync: the names it changed, and what they stood for.
        self._undo: list[list[tuple[str, File | Directory | None]]] = []

    def change(self, names: dict[str, File | Directory | None]) -> None:
        """Let names stand for something else from now on (None: for nothing), all at once."""
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
        """Let all names be on the disk as they are."""
        self._undo.clear()

    def power_cut(self, random: Random) -> None:
        """Lose some of the names that were not synced, and so within."""
        for step in reversed(self._undo[_survivors(random, len(self._undo)) :]):
            for name, former in step:
                self._set(name, former)
        self._undo.clear()
        for node in self.names.values():
            node.power_cut(random)


def _survivors(random: Random, count: int) -> int:
    """Return how many of so many steps, from the first, survive: often none or all of them."""
    return random.choice((0, count, random.randint(0, count), random.randint(0, count)))


class Descriptor(int):
    """A file descriptor: a number of the disk's own, and what it stands for while it is open."""

    disk: Disk
    #: None once it is closed.
    node: File | Directory | None
    flags: int
    position: int

    @property
    def target(self) -> File | Directory:
        """What it stands for.

        Raises:
            OSError: it is closed.

        """
        if self.node is None:
            raise error(errno.EBADF)
        return self.node

    @property
    def file(self) -> File:
        """The regular file that it stands for.

        Raises:
            OSError: it stands for none.

        """
        if not isinstance(self.node, File):
            raise error(errno.EBADF if self.node is None else errno.EISDIR)
        return self.node


def descriptor(fd: int) -> Descriptor:
    """Return an open descriptor, if a number is one.

    Raises:
        OSError: it is none.

    """
    if not isinstance(fd, Descriptor) or fd.node is None:
        raise error(errno.EBADF)
    return fd


def stat_of(node: File | Directory) -> os.stat_result:
    """Return what is known of a file; what none has here is 0."""
    is_file = isinstance(node, File)
    mode = stat.S_IFREG | 0o600 if is_file else stat.S_IFDIR | 0o700
    size = len(node.data) if isinstance(node, File) else 0
    return os.stat_result((mode, 0, 0, 1, 0, 0, size, 0, 0, 0))


def error(number: int, path: object = None) -> OSError:
    """Return the exception that stands for an error number."""
    text = os.strerror(number)
    return OSError(number, text) if path is None else OSError(number, text, str(path))


class _Raw(io.RawIOBase):
    """A descriptor as the library of streams wants it."""

    def __init__(self, fd: Descriptor, *, closefd: bool) -> None:
        self._fd, self._closefd = fd, closefd

    def readable(self) -> bool:
        return True  # the disk refuses what it was not opened for

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

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
    """Return a buffered stream over a descriptor; `mode` is "rb", "wb" or "ab"."""
    raw = cast("io.RawIOBase", _Raw(fd, closefd=closefd))
    made = io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)
    return cast("BinaryIO", made)


def flags_of(mode: str) -> int:
    """Return how a file is opened for a stream of this mode."""
    return _FLAGS[mode]


@total_ordering
class DiskPath:
    """A path on a simulated disk: what is used of `pathlib.Path`, and never a real file."""

    __slots__ = ("disk", "parts")

    def __init__(self, disk: Disk, parts: tuple[str, ...]) -> None:
        self.disk: Final = disk
        #: The names on the way from the disk's root.
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
        """The end of the name, from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> DiskPath:
        """The directory that it is in; the root is in itself."""
        return DiskPath(self.disk, self.parts[:-1])

    def with_name(self, name: str) -> DiskPath:
        """Return another path in the same directory."""
        return DiskPath(self.disk, (*self.parts[:-1], name))

    def with_suffix(self, suffix: str) -> DiskPath:
        """Return the path with another suffix."""
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    # --- what is there ---

    def exists(self) -> bool:
        """Whether anything is there."""
        return self.disk.find(self) is not None

    def is_file(self) -> bool:
        """Whether a regular file is there."""
        return isinstance(self.disk.find(self), File)

    def is_dir(self) -> bool:
        """Whether a directory is there."""
        return isinstance(self.disk.find(self), Directory)

    def stat(self) -> os.stat_result:
        """Return what is known of it: of use are `st_size` and `st_mode`."""
        return self.disk.stat(self)

    def iterdir(self) -> Iterator[DiskPath]:
        """Give what is in a directory."""
        for name in self.disk.names(self):
            yield DiskPath(self.disk, (*self.parts, name))

    def glob(self, pattern: str) -> Iterator[DiskPath]:
        """Give what is in a directory and matches a pattern without slashes."""
        assert "/" not in pattern, "only names in this directory are matched"
        assert "**" not in pattern, "only names in this directory are matched"
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open a file; `mode` is "rb", "wb" or "ab"."""
        return stream(self.disk.open(self, flags_of(mode)), mode)

    def read_bytes(self) -> bytes:
        """Return what is in a file."""
        with self.open("rb") as file:
            return file.read()

    def write_bytes(self, content: bytes) -> int:
        """Put something else into a file, which is made if need be; it is not synced."""
        with self.open("wb") as file:
            return file.write(content)

    # --- changes ---

    def touch(self, mode: int = 0o666) -> None:
        """Make an empty file if there is none."""
        self.disk.close(self.disk.open(self, os.O_WRONLY | os.O_CREAT, mode))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a directory."""
        if parents and self.parts and not self.parent.exists():
            self.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.disk.mkdir(self, mode)
        except FileExistsError:
            if not exist_ok or not self.is_dir():
                raise

    def chmod(self, mode: int) -> None:  # noqa: ARG002 - everybody may do everything here
        """Do nothing, to what must be there."""
        self.stat()

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file's name."""
        try:
            self.disk.unlink(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def replace(self, target: DiskPath) -> DiskPath:
        """Give a file another name in its directory; what had that before has none any more."""
        self.disk.rename(self, target)
        return target

    rename = replace
