"""A pool of reusable buffers for large reads; a new buffer costs more than the read into it.

Rule: a buffer is reused only when no memoryview of it is alive. The pool detects that by a resize:
a `bytearray` with exported views raises BufferError. So a leaked view prevents reuse, and its
contents never change. Invariant: the pool keeps at most `_KEPT` buffers of at most `_LARGE` bytes.
"""

from __future__ import annotations

import threading
from typing import Final

#: Number of buffers kept: columns and data of three blocks (one is read, one waits, one is sent).
_KEPT: Final = 6
#: Buffer sizes are multiples of this, so that a block of similar size fits.
_STEP: Final = 1024 * 1024
#: Limits of the sizes that are pooled: smaller buffers are cheap, larger ones are rare.
_SMALL: Final = 64 * 1024
_LARGE: Final = 16 * 1024 * 1024


class BufferPool:
    """A pool of read buffers. For any thread."""

    def __init__(self) -> None:
        self._pieces: list[bytearray] = []
        self._lock: Final = threading.Lock()

    def view(self, size: int) -> memoryview:
        """Return a buffer of `size` bytes with arbitrary contents, in use while the view lives."""
        if not _SMALL <= size <= _LARGE:
            return memoryview(bytearray(size))
        with self._lock:
            for piece in self._pieces:
                if len(piece) >= size and _is_free(piece):
                    return memoryview(piece)[:size]
            piece = bytearray(-(-size // _STEP) * _STEP)
            # The free buffers are too small: drop them.
            held = [each for each in self._pieces if not _is_free(each)]
            self._pieces = [piece, *held[: _KEPT - 1]]
            return memoryview(piece)[:size]


def _is_free(piece: bytearray) -> bool:
    try:
        piece.pop()
    except BufferError:
        return False
    piece.append(0)
    return True
