"""Coordinator cache of small values of present versions, with least-recently-used eviction.

A lookup names the version, so an old value is never returned for a new version. See docs/logdb.md,
section 5.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

#: Approximate bytes of a cache entry, without its key and its value.
CACHE_ENTRY_BYTES: Final = 200


class ValueCache:
    """Values by key, of one version each."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty.

        Args:
            max_bytes: limit of keys, values and overhead; 0: cache nothing.

        """
        self._max_bytes: Final = max_bytes
        #: In the order of the last use.
        self._kept: Final[OrderedDict[bytes, tuple[int, bytes]]] = OrderedDict()
        #: Bytes in use.
        self.bytes = 0
        #: Number of lookups that found the version, and that did not.
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: bytes, version: int, value: bytes) -> None:
        """Store a version's value, unless a later version is cached."""
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
        """Return the value of a key's version; None if it is not cached."""
        found = self._kept.get(key)
        if found is None or found[0] != version:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return found[1]

    def drop(self, key: bytes) -> None:
        """Remove a key's value."""
        found = self._kept.pop(key, None)
        if found is not None:
            self.bytes -= len(key) + len(found[1]) + CACHE_ENTRY_BYTES
