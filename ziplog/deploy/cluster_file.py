"""Changes of a cluster file: by one process at a time, in one step; hand-written parts stay.

A change replaces the file by a new one. A crash leaves the old file or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from typing import TYPE_CHECKING, Final

from ziplog.config import parse
from ziplog.errors import ConfigError, DeadlineError
from ziplog.segments.durable_files import open_directory, sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Added to the name of a cluster file that is being written.
NEW: Final = ".new"
_POLL_S: Final = 0.02
_TABLE: Final = re.compile(r"^\[cluster\][^\n]*\n", re.MULTILINE)
_ID: Final = re.compile(r'^id = "[0-9a-f]+"\n', re.MULTILINE)


@contextlib.contextmanager
def exclusive_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock on changes of the cluster file `path`.

    Raises:
        ConfigError: its directory cannot be opened.
        DeadlineError: another process holds the lock.

    """
    try:
        # The directory is locked, because each change replaces the file.
        descriptor = open_directory(path.parent)
    except OSError as error:
        raise ConfigError(
            "cluster file",
            str(path),
            "in a readable directory",
            message=f"cannot open the directory of the cluster file {path}: {error.strerror}",
        ) from error
    try:
        _lock(descriptor, path, time.monotonic() + timeout_s)
        yield
    finally:
        os.close(descriptor)


def create(path: Path, text: str) -> bool:
    """Write a new cluster file, which is complete or absent; return whether there was none.

    The caller holds its `exclusive_lock`, so that one of two processes creates a cluster.

    Raises:
        OSError: it cannot be written.

    """
    if path.exists():
        return False
    _write(path, text, 0o600)
    return True


def set_id(path: Path, cluster_id: str) -> None:
    """Write the id of the cluster into its file; do nothing if there is no place for it.

    Raises:
        ConfigError: the file is not valid, or cannot be replaced.

    """
    text = path.read_text(encoding="utf-8")
    if parse(text, path).id is not None:
        return
    changed = _TABLE.sub(lambda table: f'{table[0]}id = "{cluster_id}"\n', text, count=1)
    if changed != text and parse(changed, path).id == cluster_id:
        replace(path, changed)


def remove_id(path: Path) -> None:
    """Remove the id of the cluster from its file; raises what `set_id` raises."""
    text = path.read_text(encoding="utf-8")
    changed = _ID.sub("", text, count=1)
    if changed != text and parse(changed, path).id is None:
        replace(path, changed)


def replace(path: Path, text: str) -> None:
    """Replace the contents of a cluster file; its mode stays.

    Raises:
        ConfigError: it cannot be replaced.

    """
    try:
        # Replace the target of a link, not the link.
        _replace(path.resolve(), text)
    except OSError as error:
        raise ConfigError(
            "cluster file",
            str(path),
            "a writable file",
            message=f"cannot replace the cluster file {path}: {error.strerror}",
        ) from error


def _replace(path: Path, text: str) -> None:
    _write(path, text, stat.S_IMODE(path.stat().st_mode))


def _write(path: Path, text: str, mode: int) -> None:
    new = path.with_name(path.name + NEW)
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123 - a descriptor
        os.fchmod(file.fileno(), mode)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    # The service will remember the shard permanently, so the file must survive a crash.
    sync_directory(path.parent)


def _lock(descriptor: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"another process is changing {path}; try again when it has finished"
                ) from None
            time.sleep(_POLL_S)
        else:
            return
