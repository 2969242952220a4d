"""Changes of files and of directories' names that survive a crash of the machine."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def free_bytes(directory: Path) -> int | None:
    """Return the free space of a directory's disk; None if the system does not report it now."""
    try:
        space = os.statvfs(directory)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize


def open_directory(directory: Path) -> int:
    """Return a descriptor to sync a directory's names with."""
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def synced_names(directory: Path) -> Iterator[None]:
    """Sync a directory's names after the changes in the block, if it raises nothing.

    The directory is opened before the changes, so that a system without free descriptors refuses
    them as a whole.
    """
    descriptor = open_directory(directory)
    try:
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Sync a directory's names: earlier creations, renamings and removals."""
    with synced_names(directory):
        pass


def replace_contents(path: Path, contents: bytes) -> None:
    """Create or replace a file: it has all of its contents, which are synced, or is unchanged.

    The caller syncs the directory.

    Raises:
        OSError: the system refuses it; nothing has changed.

    """
    fresh = path.with_name(f"{path.name}.tmp")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
