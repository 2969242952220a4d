"""The data directory of one server: its lock, whose it is, and the checkpoint of a clean stop.

Rule: a checkpoint serves one start. It is gone, for good, before the first message is handled, so
that no two incarnations go on from the same one (docs/protocol.md, section 9). A directory from
which a server started before, without a checkpoint now, means that it crashed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from typing import TYPE_CHECKING, Final

import structlog
from crc32c import crc32c

from ziplog.errors import ConfigError, UnavailableError
from ziplog.segments.identity import IDENTITY_FILE, Identity, decode_identity, encode_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_LOCK: Final = "lock"
_CHECKPOINT: Final = "checkpoint"
#: Exists from the first start on.
_STARTED: Final = "started"
_LOCK_TRIES: Final = 5
_LOCK_PAUSE_S: Final = 0.02


class DataDirectory:
    """A locked data directory."""

    #: Whose it is.
    identity: Identity
    #: Whether a server started from it before.
    was_used: bool

    def __init__(self, path: Path, cluster: str, node: str) -> None:
        """Lock the directory of `node` of `cluster`, and make it if it does not exist.

        Raises:
            UnavailableError: another process has it.
            ConfigError: it is of another node or cluster, or it cannot be used at all.

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
        """Where the entries are."""
        return self.path / "segments"

    def consume_checkpoint(self) -> bytes | None:
        """Return the checkpoint of the last stop, and delete it; None if there is none.

        From now on the directory counts as used. A damaged checkpoint is none (and logged).
        """
        checkpoint = self.read_checkpoint()
        self.delete_checkpoint()
        return checkpoint

    def read_checkpoint(self) -> bytes | None:
        """Return the checkpoint of the last stop, and keep it; None if there is none."""
        return _read_checkpoint(self.path / _CHECKPOINT)

    def delete_checkpoint(self) -> None:
        """Delete the checkpoint, for good; from now on the directory counts as used."""
        with _names_of(self.path) as sync_names:
            (self.path / _STARTED).touch(mode=0o600)
            (self.path / _CHECKPOINT).unlink(missing_ok=True)
            sync_names()

    def write_checkpoint(self, checkpoint: bytes) -> None:
        """Leave a checkpoint for the next start: all of it, or none.

        Raises:
            OSError: it could not be written; there is none.

        """
        checksum = crc32c(checkpoint).to_bytes(4, "little")
        _write(self.path / _CHECKPOINT, checksum + checkpoint)

    def close(self) -> None:
        """Give the directory free. May be called twice."""
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
            f"data directory {path} is in use by process {holder}: stop that one first"
        ) from error
    with contextlib.suppress(OSError):  # on a full disk nobody is told who holds it
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def _lock_file(fd: int) -> None:
    """Lock a file; whoever only looks whether somebody has it is gone in a moment."""
    for _ in range(_LOCK_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_PAUSE_S)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _identify(path: Path, cluster: str, node: str) -> Identity:
    """Read whose directory it is, or make it ours if it is nobody's."""
    file = path / IDENTITY_FILE
    try:
        identity, is_checked = decode_identity(file.read_bytes())
    except FileNotFoundError:
        identity = Identity(cluster, node, uuid.uuid4().hex)
        _write(file, encode_identity(identity))
        _sync_directory(path.parent)
        return identity
    except ValueError as error:
        allowed = (
            f"what was written there ({error}): restore it, or move the directory away, and the"
            " server learns what the others of its shard hold"
        )
        raise ConfigError("identity file", str(file), allowed) from error
    if (identity.cluster, identity.node) != (cluster, node):
        raise ConfigError(
            "data directory",
            str(path),
            f"empty or that of node {node!r} of cluster {cluster!r}; it is that of"
            f" {identity.node!r} of {identity.cluster!r}: choose another data_dir, or move it away",
        )
    if not is_checked:  # an earlier release wrote it
        _write(file, encode_identity(identity))
    return identity


def _read_checkpoint(path: Path) -> bytes | None:
    try:
        contents = path.read_bytes()
    except FileNotFoundError:
        return None
    checkpoint = contents[4:]
    if len(contents) < 4 or crc32c(checkpoint) != int.from_bytes(contents[:4], "little"):
        structlog.get_logger().error("the checkpoint is damaged", file=str(path))
        return None
    return checkpoint


def _write(path: Path, contents: bytes) -> None:
    """Write a file so that after any crash it is there as a whole or as it was."""
    fresh = path.with_name(path.name + ".tmp")
    with _names_of(path.parent) as sync_names:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(contents)
                file.flush()
                os.fsync(fd)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        sync_names()


def _sync_directory(path: Path) -> None:
    with _names_of(path) as sync_names:
        sync_names()


@contextlib.contextmanager
def _names_of(path: Path) -> Iterator[Callable[[], None]]:
    """Give what syncs a directory's names.

    It is opened before the names change: a system that lacks descriptors then refuses the change.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield lambda: os.fsync(fd)
    finally:
        os.close(fd)
