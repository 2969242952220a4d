"""Values of present versions that a coordinator has at hand, the least recently used go first.

Rule: a value is given out for its version only, so an old one can never be taken for a new one.
See docs/logdb.md, section 5.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

#: What an entry costs besides its key and its value, about, in bytes.
CACHE_ENTRY_BYTES: Final = 200


class ValueCache:
    """Values by key, of one version each."""

    def __init__(self, max_bytes: int) -> None:
        """Begin with none.

        Args:
            max_bytes: of keys, values and what it costs to keep them; 0: keep nothing.

        """
        self._max_bytes: Final = max_bytes
        #: In the order of their last use.
        self._kept: Final[OrderedDict[bytes, tuple[int, bytes]]] = OrderedDict()
        #: Bytes in use.
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: bytes, version: int, value: bytes) -> None:
        """Keep a version's value, unless a later version's is there."""
        kept = self._kept
        former = kept.get(key)
        if former is not None:
            if former[0] > version:
                return
            self.drop(key)
        cost = len(key) + len(value) + CACHE_ENTRY_BYTES
        if cost > self._max_bytes:
            return
        kept[key] = (version, value)
        self.bytes += cost
        while self.bytes > self._max_bytes:
            self.drop(next(iter(kept)))

    def get(self, key: bytes, version: int) -> bytes | None:
        """Return the value of a key's version; None if it is not at hand."""
        found = self._kept.get(key)
        if found is None or found[0] != version:
            return None
        self._kept.move_to_end(key)
        return found[1]

    def drop(self, key: bytes) -> None:
        """Forget a key's value."""
        found = self._kept.pop(key, None)
        if found is not None:
            self.bytes -= len(key) + len(found[1]) + CACHE_ENTRY_BYTES
