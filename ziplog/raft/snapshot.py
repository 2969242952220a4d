"""The snapshot file of a Raft node: the whole state, and its place in the log.

Rule: a snapshot is on stable storage, with a valid checksum, before the file gets its name; this
includes snapshots from the leader (docs/protocol.md, sections 10 and 12).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec
from crc32c import crc32c

from ziplog.raft.journal import LATER, Entry, JournalError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC: Final = b"ZIPSNAP1"
#: Of the form that a later release will write. It differs from `_MAGIC` in several bits.
_LATER_MAGIC: Final = b"ZIPSNAP2"
_START: Final = len(_MAGIC) + 4


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state after `last` was applied; `previous` serves to check that a journal matches."""

    previous: Entry
    last: Entry
    state: bytes

    def encode(self) -> bytes:
        """Return the contents of the snapshot file."""
        body = msgspec.msgpack.encode(self)
        return _head(body) + body

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        """Decode the contents of a snapshot file.

        Raises:
            ValueError: the contents are not a snapshot, or damaged.

        """
        body = data[_START:]
        if data[:_START] != _head(body):
            raise ValueError("the checksum is wrong")
        return msgspec.msgpack.decode(body, type=cls)

    def write(self, path: Path) -> None:
        """Write it to a file and sync it; the caller renames the file.

        Raises:
            OSError: the write failed.

        """
        store(self.encode(), path)

    @classmethod
    def read(cls, path: Path) -> Snapshot:
        """Read a snapshot file, and sync it.

        Raises:
            JournalError: the file cannot be read, or is damaged.

        """
        try:
            with path.open("rb") as file:
                data = file.read()
                os.fsync(file.fileno())
        except OSError as error:
            raise JournalError(f"snapshot {path} cannot be read ({error.strerror})") from error
        if data.startswith(_LATER_MAGIC):
            raise JournalError(f"snapshot {path} {LATER}")
        try:
            return cls.decode(data)
        except ValueError as error:
            raise JournalError(
                f"snapshot {path} is damaged: empty its directory, and the node copies everything"
                " from the other nodes (without other nodes: `ziplog membership rebuild` writes a"
                " membership node's files again; use no old copy)"
            ) from error


def store(encoded: bytes, path: Path) -> None:
    """Write an encoded snapshot to a file and sync it; the caller renames the file.

    Raises:
        OSError: the write failed; the file is removed, because a full disk needs its space.

    """
    try:
        with open(path, "wb", opener=_private) as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _head(body: bytes) -> bytes:
    return _MAGIC + crc32c(body).to_bytes(4, "little")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
