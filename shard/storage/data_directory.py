"""The data directory of one server: lock, identity, and the checkpoint of a clean stop.

Rule: a checkpoint serves one start. It is deleted durably before the first message is handled, so
no two incarnations resume from the same one (docs/protocol.md, section 9). A used directory without
a checkpoint means that the server crashed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from ziplog import event_log
from ziplog.errors import ConfigError, UnavailableError
from ziplog.segments.durable_files import replace_contents, sync_directory, synced_names
from ziplog.segments.identity import IDENTITY_FILE, Identity, decode_identity, encode_identity
from ziplog.segments.segment import read_file

if TYPE_CHECKING:
    from pathlib import Path

_LOCK: Final = "lock"
_CHECKPOINT: Final = "checkpoint"
#: A file that exists from the first start on.
_STARTED: Final = "started"
_LOCK_TRIES: Final = 5
_LOCK_PAUSE_S: Final = 0.02


class DataDirectory:
    """A locked data directory."""

    #: The cluster and node that own it.
    identity: Identity
    #: Whether a server has started from it before.
    was_used: bool

    def __init__(self, path: Path, cluster: str, node: str) -> None:
        """Lock the directory of `node` of `cluster`; create it if it does not exist.

        Raises:
            UnavailableError: another process holds the lock.
            ConfigError: another node or cluster owns it, or it cannot be used at all.

        """
        self.path = path
        self._lock = _lock(path)
        try:
            self.identity = _identify(path, cluster, node)
            self.was_used = (path / _STARTED).exists()
        except BaseException:
            self.close()
            raise

    @property
    def segments(self) -> Path:
        """The directory of the segment files."""
        return self.path / "segments"

    def read_checkpoint(self) -> bytes | None:
        """Return the checkpoint of the last stop; None if there is none, or a damaged one."""
        return _read_checkpoint(self.path / _CHECKPOINT)

    def delete_checkpoint(self) -> None:
        """Delete the checkpoint durably, before the first message; the directory counts as used."""
        with synced_names(self.path):
            (self.path / _STARTED).touch(mode=0o600)
            (self.path / _CHECKPOINT).unlink(missing_ok=True)

    def write_checkpoint(self, checkpoint: bytes) -> None:
        """Write a checkpoint for the next start, atomically.

        Raises:
            OSError: the write failed; there is no checkpoint.

        """
        checksum = crc32c(checkpoint).to_bytes(4, "little")
        _write(self.path / _CHECKPOINT, checksum + checkpoint)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lock(path: Path) -> int:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        allowed = f"a directory that this user can write to ({error.strerror})"
        raise ConfigError("data directory", str(path), allowed) from error
    try:
        _lock_file(fd)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise UnavailableError(
            f"data directory {path} is in use by process {holder}: stop that process first"
        ) from error
    with contextlib.suppress(OSError):  # on a full disk, the file does not name this process
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def _lock_file(fd: int) -> None:
    """Lock a file, with retries: a process that only checks the lock releases it in a moment."""
    for _ in range(_LOCK_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_PAUSE_S)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _identify(path: Path, cluster: str, node: str) -> Identity:
    """Read the directory's identity; claim a directory that has none and was not used."""
    file = path / IDENTITY_FILE
    try:
        identity, is_checked = decode_identity(file.read_bytes())
    except FileNotFoundError:
        if (path / _STARTED).exists():
            raise _invalid_identity(file, "it is missing") from None
        identity = Identity(cluster, node, uuid.uuid4().hex)
        _write(file, encode_identity(identity))
        sync_directory(path.parent)
        return identity
    except ValueError as error:
        raise _invalid_identity(file, str(error)) from error
    if (identity.cluster, identity.node) != (cluster, node):
        raise ConfigError(
            "data directory",
            str(path),
            f"empty or that of node {node!r} of cluster {cluster!r}; it belongs to"
            f" {identity.node!r} of {identity.cluster!r}: choose another data_dir, or move it away",
        )
    if not is_checked:  # an earlier release wrote it
        _write(file, encode_identity(identity))
    return identity


def _invalid_identity(file: Path, why: str) -> ConfigError:
    allowed = (
        f"the file that was written there ({why}): restore it, or move the directory away;"
        " the server then copies the log from the other replicas of its shard"
    )
    return ConfigError("identity file", str(file), allowed)


def _read_checkpoint(path: Path) -> bytes | None:
    try:
        contents = read_file(path)
    except FileNotFoundError:
        return None
    checkpoint = contents[4:]
    if len(contents) < 4 or crc32c(checkpoint) != int.from_bytes(contents[:4], "little"):
        event_log.error("the checkpoint is damaged", file=str(path))
        return None
    return checkpoint


def _write(path: Path, contents: bytes) -> None:
    """Replace a file atomically: after a crash it is complete or unchanged."""
    with synced_names(path.parent):
        replace_contents(path, contents)
