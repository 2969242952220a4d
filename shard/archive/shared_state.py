"""What a storage server tells its archive: a few numbers in memory that both have.

Rule: only the server writes, and each number with one store of 8 bytes, so that it is read as a
whole. The trim point is there before anybody is told that the server refuses what is below it
(docs/protocol.md, sections 8 and 14.2).
"""

from __future__ import annotations

import mmap
import os
from typing import Final

_BYTES: Final = 4096
_TRIM, _STABLE, _CLUSTER = range(3)


class SharedState:
    """The numbers. One process makes it, another one opens its file descriptor."""

    def __init__(self, fd: int | None = None) -> None:
        """Open the board of a descriptor, or make one that begins with zeros."""
        if fd is None:
            fd = os.memfd_create("archive")
            os.ftruncate(fd, _BYTES)
        #: To be handed to the other process.
        self.fd: Final = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._numbers = memoryview(self._memory).cast("Q")

    @property
    def trim(self) -> int:
        """All below this was trimmed."""
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
        """The cluster's number; 0: not known yet."""
        return self._numbers[_CLUSTER]

    @cluster.setter
    def cluster(self, number: int) -> None:
        self._numbers[_CLUSTER] = number

    def close(self) -> None:
        """Give it back. May be called once."""
        self._numbers.release()
        self._memory.close()
        os.close(self.fd)
