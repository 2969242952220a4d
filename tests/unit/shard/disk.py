"""Fault injection: a disk that stops at any operation, and its possible contents afterwards.

Operations on one directory are counted, and the first one over the limit raises `Crash` (a write
does half of its work first). There are two extreme contents after it: all completed operations, or
only synced ones (a file's bytes as of its last fsync, names as of the directory's).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

NAMES = ("pwritev", "pwrite", "fsync", "fdatasync", "ftruncate", "link")


class Crash(BaseException):
    """The machine stops."""


class Disk:
    """Watches a directory, from its creation until `restore`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, allowed: int) -> None:
        self._directory, self._left = directory, allowed
        #: Synced bytes by inode, and synced inodes by name.
        self._contents = {path.stat().st_ino: path.read_bytes() for path in directory.iterdir()}
        self._names = {path.name: path.stat().st_ino for path in directory.iterdir()}
        #: The completed operations as text.
        self.done: list[str] = []
        self._patch = monkeypatch
        for name in NAMES:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))
        for name in ("replace", "unlink"):
            monkeypatch.setattr(Path, name, self._counted(name, getattr(Path, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            if self._left == 0:
                if name == "pwritev":
                    fd, buffers, offset = arguments
                    data = b"".join(buffers)
                    os.lseek(fd, offset, os.SEEK_SET)
                    os.write(fd, data[: len(data) // 2])
                self.done.append(f"half {name}")
                raise Crash
            self._left -= 1
            result = real(*arguments, **options)
            self.done.append(f"{name} {arguments[0] if isinstance(arguments[0], Path) else ''}")
            if name in {"fsync", "fdatasync"}:
                self._synced(arguments[0])
            return result

        return act

    def _synced(self, fd: int) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._names = {path.name: path.stat().st_ino for path in self._directory.iterdir()}
            return
        for path in self._directory.iterdir():
            if path.stat().st_ino == status.st_ino:
                self._contents[status.st_ino] = path.read_bytes()

    def forget(self) -> None:
        """Treat all former writes as unsynced."""
        self._contents.clear()

    def restore(self) -> None:
        """Restore the normal operations."""
        self._patch.undo()

    def everything(self, directory: Path) -> Path:
        """Create a directory with all completed operations."""
        directory.mkdir()
        for path in self._directory.iterdir():
            (directory / path.name).write_bytes(path.read_bytes())
        return directory

    def only_synced(self, directory: Path) -> Path:
        """Create a directory with synced operations only."""
        directory.mkdir()
        for name, inode in self._names.items():
            (directory / name).write_bytes(self._contents.get(inode, b""))
        return directory
