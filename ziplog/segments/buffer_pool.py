"""Memory for large reads that is used again: what is new costs more than to read into it.

Rule: memory is given out again only when nobody looks into what was given out before, which it
tells itself: a bytearray that is looked into refuses to change its size. So a forgotten view costs
time, and never shows something else. Invariant: no more than `_KEPT` pieces are kept, of `_LARGE`
bytes at most.
"""

from __future__ import annotations

import threading
from typing import Final

#: Columns and data of three blocks: one is read, one waits, one is being sent.
_KEPT: Final = 6
#: Pieces have multiples of this, so that blocks of about one size find one that fits.
_STEP: Final = 1024 * 1024
#: Less is not worth a piece, and more is rare, and too much to keep.
_SMALL: Final = 64 * 1024
_LARGE: Final = 16 * 1024 * 1024


class BufferPool:
    """Gives out memory to read into. For any thread."""

    def __init__(self) -> None:
        self._pieces: list[bytearray] = []
        self._choosing: Final = threading.Lock()

    def view(self, size: int) -> memoryview:
        """Return memory of so many bytes with anything in it; it is held by holding the view."""
        if not _SMALL <= size <= _LARGE:
            return memoryview(bytearray(size))
        with self._choosing:
            for piece in self._pieces:
                if len(piece) >= size and _is_free(piece):
                    return memoryview(piece)[:size]
            piece = bytearray(-(-size // _STEP) * _STEP)
            # Those that nobody looks into are too small.
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
