"""Simulated disk of a machine, with faults, under the production code for files.

`installed` replaces `os`, `fcntl` and similar names in given modules; `Disk.path` creates paths.
tests/simulator/filesystem.py defines what a power cut loses.

Rule: nothing here touches a real file, and every random choice uses the given generator.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import secrets
import uuid
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple
from weakref import WeakValueDictionary

from tests.simulator.filesystem import (
    CAPACITY_BYTES,
    LATENCY_NS,
    SECTOR_BYTES,
    Descriptor,
    Directory,
    DiskPath,
    File,
    descriptor,
    error,
    flags_of,
    stat_of,
    stream,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

_FIRST_DESCRIPTOR: Final = 1000
_ABSENT: Final = object()
#: All disks by name, for paths that were converted to strings.
_disks: Final[WeakValueDictionary[str, Disk]] = WeakValueDictionary()


class Damage(NamedTuple):
    """Damaged bytes `start` to `stop` of a file, by its former length."""

    path: DiskPath
    start: int
    stop: int


class Disk:
    """One machine's disk.

    Args:
        random: selects the losses of a power cut, and the place of damage.
        capacity_bytes: total size of all files.

    """

    def __init__(self, random: Random, capacity_bytes: int = CAPACITY_BYTES) -> None:
        #: Total size of all files; may change at any time.
        self.capacity_bytes = capacity_bytes
        #: Duration of a sync; may change at any time.
        self.latency_ns = LATENCY_NS
        #: A server's frames leave after the flush before them, and frames that arrive during a
        #: flush wait. Otherwise a flush delays nothing but the next turn. Read at a start.
        self.delays_frames = False
        #: Bytes of all files, including open files without a name.
        self.used_bytes = 0
        #: Error number of every open, as in a process without free descriptors; 0: opens succeed.
        #: May change at any time.
        self.refuses_opens = 0
        #: Number of calls so far that can fail (see `fail_on`).
        self.calls = 0
        #: Prefix of its paths as strings.
        self.name: Final = f"/disk-{random.getrandbits(32):08x}"
        self._random = random
        self._failing: dict[int, int | BaseException] = {}
        self._owed_ns = 0
        self._root = Directory()
        self._opened = 0
        self._open: dict[int, Descriptor] = {}
        _disks[self.name] = self

    def path(self, name: str) -> DiskPath:
        """Return the path of a name in the root directory, which always exists."""
        return DiskPath(self, tuple(name.split("/")) if name else ())

    # --- faults ---

    def kill(self) -> None:
        """End the process that uses the disk: close its descriptors and locks, keep its writes."""
        for fd in list(self._open.values()):
            self.close(fd)
        self._owed_ns = 0

    def power_cut(self) -> None:
        """Stop the machine, and lose a random part of the unsynced data."""
        self.kill()
        self._root.power_cut(self._random)
        self.used_bytes = 0
        for file in {id(file): file for _, file in self._files()}.values():
            file.is_linked = True
            self.used_bytes += len(file.data)

    def fail_on(self, call_number: int, error: int | BaseException = errno.EIO) -> None:
        """Make a call fail once, without an effect.

        Writes, syncs, renames, truncations and opens that create a file are counted.

        Args:
            call_number: the failing call, from now on; 1 is the next.
            error: its error number, or an exception that ends the process there.

        """
        self._failing[self.calls + call_number] = error

    def clear_failures(self) -> None:
        """Clear all scheduled failures."""
        self._failing.clear()

    def flip(self, path_filter: Callable[[DiskPath], bool] = lambda _: True) -> Damage | None:
        """Flip one bit in the synced part of a file; None if no matching file has one."""
        found = [pair for pair in self._matching(path_filter) if pair[1].synced_bytes]
        if not found:
            return None
        path, file = self._random.choice(found)
        at = self._random.randrange(file.synced_bytes)
        file.data[at] ^= 1 << self._random.randrange(8)
        return Damage(path, at, at + 1)

    def tear(self, path_filter: Callable[[DiskPath], bool] = lambda _: True) -> Damage | None:
        """Damage the end of a synced file, like a disk that lies about syncs.

        Up to a sector is cut off, zeroed or overwritten; None if no matching file is synced.
        """
        found = [pair for pair in self._matching(path_filter) if pair[1].data and pair[1].is_synced]
        if not found:
            return None
        path, file = self._random.choice(found)
        size = len(file.data)
        torn = self._random.randint(1, min(size, SECTOR_BYTES))
        del file.data[size - torn :]
        file.data += self._random.choice((b"", bytes(torn), self._random.randbytes(torn)))
        self.used_bytes += len(file.data) - size
        return Damage(path, size - torn, size)

    def sync_ns(self) -> int:
        """Return the nanoseconds that syncs took since the last call."""
        owed, self._owed_ns = self._owed_ns, 0
        return owed

    def _matching(self, path_filter: Callable[[DiskPath], bool]) -> list[tuple[DiskPath, File]]:
        return [(path, file) for path, file in self._files() if path_filter(path)]

    def _files(self) -> Iterator[tuple[DiskPath, File]]:
        """Yield all named files, in order."""
        directories = [(self.path(""), self._root)]
        while directories:
            path, directory = directories.pop()
            for name, node in sorted(directory.names.items(), key=lambda item: item[0]):
                if isinstance(node, File):
                    yield path / name, node
                else:
                    directories.append((path / name, node))

    # --- names ---

    def find(self, path: DiskPath) -> File | Directory | None:
        """Return the file or directory at a path, if any."""
        node: File | Directory | None = self._root
        for name in path.parts:
            if not isinstance(node, Directory):
                return None
            node = node.names.get(name)
        return node

    def names(self, path: DiskPath) -> list[str]:
        """Return the names in a directory."""
        return list(self._directory(path).names)

    def stat(self, path: DiskPath) -> os.stat_result:
        """Return the stat result of a path; unsupported fields are 0."""
        return stat_of(self._existing(path))

    def mkdir(self, path: DiskPath, _mode: int = 0o777) -> None:
        """Make a directory."""
        if self.find(path) is not None:
            raise error(errno.EEXIST, path)
        self._directory(path.parent).change({path.name: Directory()})

    def exists(self, path: DiskPath) -> bool:
        """Whether a path exists."""
        return self.find(path) is not None

    def link(self, path: DiskPath, target: DiskPath) -> None:
        """Give a file another name in its directory; it replaces no other file."""
        self._count(path)
        node = self._existing(path)
        if isinstance(node, Directory):
            raise error(errno.EPERM, path)
        if target.parent != path.parent:
            raise error(errno.EXDEV, target)
        if self.find(target) is not None:
            raise error(errno.EEXIST, target)
        self._directory(path.parent).change({target.name: node})

    def unlink(self, path: DiskPath) -> None:
        """Remove a file's name."""
        node = self._existing(path)
        if isinstance(node, Directory):
            raise error(errno.EISDIR, path)
        directory = self._directory(path.parent)
        directory.change({path.name: None})
        if node not in directory.names.values():
            self._unlinked(node)

    def rename(self, path: DiskPath, target: DiskPath) -> None:
        """Rename a file within its directory, atomically; it may replace another file."""
        self._count(path)
        node, replaced = self._existing(path), self.find(target)
        if target.parent != path.parent:
            raise error(errno.EXDEV, target)
        if isinstance(replaced, Directory):
            raise error(errno.EISDIR, target)
        if node is replaced:
            return
        directory = self._directory(path.parent)
        directory.change({path.name: None, target.name: node})
        if replaced is not None and replaced not in directory.names.values():
            self._unlinked(replaced)

    def _existing(self, path: DiskPath) -> File | Directory:
        node = self.find(path)
        if node is None:
            is_below_file = path.parts and isinstance(self._existing(path.parent), File)
            raise error(errno.ENOTDIR if is_below_file else errno.ENOENT, path)
        return node

    def _directory(self, path: DiskPath) -> Directory:
        node = self._existing(path)
        if not isinstance(node, Directory):
            raise error(errno.ENOTDIR, path)
        return node

    def _unlinked(self, file: File) -> None:
        file.is_linked = False
        self._give_back(file)

    def _give_back(self, node: File | Directory) -> None:
        """Release the space of an unreachable file."""
        if isinstance(node, File) and not node.is_linked and not node.opens:
            self.used_bytes -= len(node.data)

    # --- calls with descriptors ---

    def open(self, path: DiskPath, flags: int, _mode: int = 0o777) -> Descriptor:
        """Open a file or directory, as `os.open` does."""
        if self.refuses_opens:
            raise error(self.refuses_opens, path)
        if flags & os.O_CREAT:
            self._count(path)
        node = self.find(path) if flags & os.O_CREAT else self._existing(path)
        if node is None:
            node = File()
            node.is_linked = True
            self._directory(path.parent).change({path.name: node})
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise error(errno.EEXIST, path)
        if isinstance(node, Directory) and flags & os.O_ACCMODE != os.O_RDONLY:
            raise error(errno.EISDIR, path)
        if isinstance(node, File) and flags & os.O_DIRECTORY:
            raise error(errno.ENOTDIR, path)
        if isinstance(node, File) and flags & os.O_TRUNC:
            self._resize(node, 0)
        return self._descriptor(node, flags)

    def _descriptor(self, node: File | Directory, flags: int) -> Descriptor:
        self._opened += 1
        node.opens += 1
        fd = Descriptor(_FIRST_DESCRIPTOR + self._opened)
        fd.disk, fd.node, fd.flags, fd.position = self, node, flags, 0
        self._open[int(fd)] = fd
        return fd

    def close(self, fd: Descriptor) -> None:
        """Close a descriptor, and release its lock."""
        node = fd.target
        if node.lock is fd:
            node.lock = None
        fd.node = None
        del self._open[int(fd)]
        node.opens -= 1
        self._give_back(node)

    def read(self, fd: Descriptor, size: int) -> bytes:
        """Read at the current position."""
        data = self.pread(fd, size, fd.position)
        fd.position += len(data)
        return data

    def pread(self, fd: Descriptor, size: int, offset: int) -> bytes:
        """Read at an offset; fewer than `size` bytes only at the end of the file."""
        if fd.flags & os.O_ACCMODE == os.O_WRONLY:
            raise error(errno.EBADF)
        return bytes(fd.file.data[offset : offset + size])

    def write(self, fd: Descriptor, content: bytes) -> int:
        """Write at the current position; return the number of written bytes."""
        written = self.pwrite(fd, content, fd.position)
        is_moved = written and fd.flags & os.O_APPEND
        fd.position = len(fd.file.data) if is_moved else fd.position + written
        return written

    def pwrite(self, fd: Descriptor, content: bytes, offset: int) -> int:
        """Write at an offset (at the end in append mode); return the number of written bytes."""
        file = fd.file
        if fd.flags & os.O_APPEND:
            offset = len(file.data)
        if fd.flags & os.O_ACCMODE == os.O_RDONLY:
            raise error(errno.EBADF)
        self._count()
        growth = offset + len(content) - len(file.data)
        if growth > 0 and content:
            missing = growth - max(self.capacity_bytes - self.used_bytes, 0)
            if missing >= len(content):
                raise error(errno.ENOSPC)
            if missing > 0:
                content = content[:-missing]
                growth -= missing
            self.used_bytes += growth
        if content:
            file.write(offset, content)
        return len(content)

    def sync(self, fd: Descriptor) -> None:
        """Sync a descriptor: a file's bytes, or a directory's names.

        A failed sync writes nothing; a later one may still write everything.
        """
        node = fd.target
        self._owed_ns += self.latency_ns
        self._count()
        node.sync()

    def resize(self, file: File, size: int, path: DiskPath | None = None) -> None:
        """Cut a file, or extend it with zeros."""
        self._count(path)
        if size - len(file.data) > max(self.capacity_bytes - self.used_bytes, 0):
            raise error(errno.ENOSPC, path)
        self._resize(file, size)

    def _resize(self, file: File, size: int) -> None:
        self.used_bytes += size - len(file.data)
        file.resize(size)

    def _count(self, path: DiskPath | None = None) -> None:
        """Count a call that can fail, and raise its scheduled failure."""
        self.calls += 1
        if self._failing:
            failure = self._failing.pop(self.calls, None)
            if isinstance(failure, BaseException):
                raise failure
            if failure is not None:
                raise error(failure, path)


# --- stand-ins -----------------------------------------------------------------------------------


def resolve(path: DiskPath | str) -> DiskPath:
    """Return the path of a string.

    Raises:
        ValueError: the string names no simulated disk.

    """
    if isinstance(path, DiskPath):
        return path
    _, root, *names = path.split("/") if path.startswith("/") else ("", "")
    disk = _disks.get(f"/{root}")
    if disk is None:
        raise ValueError(f"{path!r} is on no simulated disk")
    return DiskPath(disk, tuple(names))


class _System:
    """The used part of `os`, with its names."""

    O_RDONLY, O_WRONLY, O_RDWR = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
    O_CREAT, O_EXCL, O_TRUNC, O_APPEND = os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND
    O_CLOEXEC, O_DIRECTORY = os.O_CLOEXEC, os.O_DIRECTORY
    SEEK_END = os.SEEK_END

    def __init__(self, random: Random) -> None:
        self.urandom: Final = random.randbytes

    def getpid(self) -> int:
        return 1

    def open(self, path: DiskPath | str, flags: int, mode: int = 0o777) -> Descriptor:
        at = resolve(path)
        return at.disk.open(at, flags, mode)

    def fdopen(self, fd: int, mode: str, *, closefd: bool = True) -> BinaryIO:
        return stream(descriptor(fd), mode, closefd=closefd)

    def close(self, fd: int) -> None:
        found = descriptor(fd)
        found.disk.close(found)

    def read(self, fd: int, size: int) -> bytes:
        found = descriptor(fd)
        return found.disk.read(found, size)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        found = descriptor(fd)
        return found.disk.pread(found, size, offset)

    def write(self, fd: int, content: bytes) -> int:
        found = descriptor(fd)
        return found.disk.write(found, bytes(content))

    def pwrite(self, fd: int, content: bytes, offset: int) -> int:
        found = descriptor(fd)
        return found.disk.pwrite(found, bytes(content), offset)

    def pwritev(self, fd: int, buffers: Iterable[bytes], offset: int) -> int:
        found = descriptor(fd)
        return found.disk.pwrite(found, b"".join(buffers), offset)

    def fsync(self, fd: int) -> None:
        found = descriptor(fd)
        found.disk.sync(found)

    fdatasync = fsync

    def fstat(self, fd: int) -> os.stat_result:
        return stat_of(descriptor(fd).target)

    def ftruncate(self, fd: int, size: int) -> None:
        found = descriptor(fd)
        found.disk.resize(found.file, size)

    def link(self, path: DiskPath | str, target: DiskPath | str) -> None:
        at = resolve(path)
        at.disk.link(at, resolve(target))

    def truncate(self, path: DiskPath | str, size: int) -> None:
        at = resolve(path)
        fd = at.disk.open(at, os.O_WRONLY)
        try:
            at.disk.resize(fd.file, size, at)
        finally:
            at.disk.close(fd)

    def statvfs(self, path: DiskPath | str) -> os.statvfs_result:
        disk = resolve(path).disk
        free = max(disk.capacity_bytes - disk.used_bytes, 0)
        return os.statvfs_result((1, 1, disk.capacity_bytes, free, free, 0, 0, 0, 0, 255))


def _flock(fd: int, operation: int) -> None:
    """Lock or unlock a file; waiting for a lock is not supported."""
    found = descriptor(fd)
    node = found.target
    if operation & fcntl.LOCK_UN:
        node.lock = None if node.lock is found else node.lock
        return
    assert operation & fcntl.LOCK_EX, "only exclusive locks are supported"
    if node.lock is not None and node.lock is not found:
        assert operation & fcntl.LOCK_NB, "it would wait for ever"
        raise error(errno.EWOULDBLOCK)
    node.lock = found


def _open_file(
    path: DiskPath | str, mode: str, opener: Callable[[Any, int], int] | None = None
) -> BinaryIO:
    """Replacement for the built-in `open`."""
    at, flags = resolve(path), flags_of(mode) | os.O_CLOEXEC
    fd = at.disk.open(at, flags) if opener is None else opener(at, flags)
    return stream(descriptor(fd), mode)


@contextmanager
def installed(modules: Iterable[ModuleType], random: Random | None = None) -> Iterator[None]:
    """Make modules use simulated disks and deterministic random numbers within the context.

    Args:
        modules: their names `os`, `fcntl`, `uuid`, `secrets` and `pathlib.Path` are replaced if
            present (`Path` then accepts paths as strings), and `open` always.
        random: their random generator; None: a new one with a fixed seed.

    """
    stand_ins = _stand_ins(random or Random(0))
    former: list[tuple[ModuleType, str, object]] = []
    try:
        for module in modules:
            for name, real, stand_in in stand_ins:
                present = vars(module).get(name, _ABSENT)
                if present is real:
                    former.append((module, name, present))
                    setattr(module, name, stand_in)
        yield
    finally:
        for module, name, value in reversed(former):
            if value is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, value)


def _stand_ins(random: Random) -> list[tuple[str, object, object]]:
    """Return the replacements: name, real object, stand-in."""
    uuids = SimpleNamespace(uuid4=lambda: uuid.UUID(int=random.getrandbits(128), version=4))
    tokens = SimpleNamespace(
        token_bytes=random.randbytes, token_hex=lambda size: random.randbytes(size).hex()
    )
    locks = SimpleNamespace(
        flock=_flock, LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB, LOCK_UN=fcntl.LOCK_UN
    )
    return [
        ("os", os, _System(random)),
        ("fcntl", fcntl, locks),
        ("uuid", uuid, uuids),
        ("secrets", secrets, tokens),
        ("Path", pathlib.Path, resolve),
        ("open", _ABSENT, _open_file),
    ]
