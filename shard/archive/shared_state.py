"""Shared memory between a storage server and its archive: numbers of both.

Rule: each number has one writer, which stores its 8 bytes at once, so reads are atomic. The
server publishes a trim point here before it refuses any read below it (docs/protocol.md, sections
8 and 14.2).
"""

from __future__ import annotations

import mmap
import os
from typing import Final

_BYTES: Final = 4096
_TRIM, _STABLE, _CLUSTER, _ARCHIVE_NEXT = range(4)


class SharedState:
    """The shared numbers. The server creates them; its archive opens the file descriptor."""

    def __init__(self, fd: int | None = None) -> None:
        """Map a file descriptor, or create new shared memory with zeros."""
        if fd is None:
            fd = os.memfd_create("archive")
            os.ftruncate(fd, _BYTES)
        #: For the archive's process.
        self.fd: Final = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._numbers = memoryview(self._memory).cast("Q")

    @property
    def trim(self) -> int:
        """The trim point: all positions below were trimmed."""
        return self._numbers[_TRIM]

    @trim.setter
    def trim(self, gsn: int) -> None:
        self._numbers[_TRIM] = max(gsn, self._numbers[_TRIM])

    @property
    def stable(self) -> int:
        """The last entry that is known to be stable."""
        return self._numbers[_STABLE]

    @stable.setter
    def stable(self, fseq: int) -> None:
        self._numbers[_STABLE] = fseq

    @property
    def cluster(self) -> int:
        """The cluster's number; 0 if unknown."""
        return self._numbers[_CLUSTER]

    @cluster.setter
    def cluster(self, number: int) -> None:
        self._numbers[_CLUSTER] = number

    @property
    def archive_next(self) -> int:
        """The first entry that has no block file, of those that can have one; 0: unknown.

        Only the archive writes it.
        """
        return self._numbers[_ARCHIVE_NEXT]

    @archive_next.setter
    def archive_next(self, fseq: int) -> None:
        self._numbers[_ARCHIVE_NEXT] = fseq

    def close(self) -> None:
        """Release the memory. Call once."""
        self._numbers.release()
        self._memory.close()
        os.close(self.fd)
