"""The two steps in which a storage server uses up the checkpoint of its last stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard.storage.data_directory import DataDirectory


def consume(directory: DataDirectory) -> bytes | None:
    """Return the checkpoint of a directory, and delete it, as a server does when it starts."""
    checkpoint = directory.read_checkpoint()
    directory.delete_checkpoint()
    return checkpoint
