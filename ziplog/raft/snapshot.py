"""The snapshot file of a consensus node: the whole state, and where in the log it stands.

Rule: it is on stable storage, and its checksum is right, before it gets its name; also if it came
from the leader (docs/protocol.md, sections 10 and 12).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec
from crc32c import crc32c

from ziplog.raft.journal import Entry, JournalError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC: Final = b"ZIPSNAP1"
_START: Final = len(_MAGIC) + 4


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state after `last` was applied; the entry before it tells whether a journal fits."""

    previous: Entry
    last: Entry
    state: bytes

    def encode(self) -> bytes:
        """Return it as a file has it."""
        body = msgspec.msgpack.encode(self)
        return _head(body) + body

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        """Return the snapshot that a file's content is.

        Raises:
            ValueError: it is none, or is damaged.

        """
        body = data[_START:]
        if data[:_START] != _head(body):
            raise ValueError("the checksum is wrong")
        return msgspec.msgpack.decode(body, type=cls)

    def write(self, path: Path) -> None:
        """Put it into a file, durably; the caller renames that.

        Raises:
            OSError: the disk refuses.

        """
        store(self.encode(), path)

    @classmethod
    def read(cls, path: Path) -> Snapshot:
        """Return the snapshot of a file, which is on stable storage then.

        Raises:
            JournalError: it cannot be read, or is damaged.

        """
        try:
            with path.open("rb") as file:
                data = file.read()
                os.fsync(file.fileno())
        except OSError as error:
            raise JournalError(f"snapshot {path} cannot be read ({error.strerror})") from error
        try:
            return cls.decode(data)
        except ValueError as error:
            raise JournalError(
                f"snapshot {path} is damaged: empty its directory, and the node learns everything"
                " from the other nodes (if there are none, restore a copy)"
            ) from error


def store(encoded: bytes, path: Path) -> None:
    """Put an encoded snapshot into a file, durably; the caller renames that.

    Raises:
        OSError: the disk refuses.

    """
    with open(path, "wb", opener=_private) as file:
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())


def _head(body: bytes) -> bytes:
    return _MAGIC + crc32c(body).to_bytes(4, "little")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
