"""The key index: each key's version and place (thesis 4.3), in key order.

The sorted index changes only when a key appears or disappears; an overwrite costs one dictionary
access. Invariant: the sorted index holds exactly the dictionary's keys. See docs/logdb.md, section
2.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import chain, islice
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from sortedcontainers import SortedList

from logdb.records import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Row = tuple[bytes, Entry]

DIGEST_BYTES: Final = 16
_pack: Final = Struct(">HQ").pack


def digest_of(rows: Iterable[Row]) -> bytes:
    """Return the 16-byte digest of a range's rows: each key and version, in order."""
    parts = ((_pack(len(key), entry.version), key) for key, entry in rows)
    return blake2b(b"".join(chain.from_iterable(parts)), digest_size=DIGEST_BYTES).digest()


def _compact(entry: Entry) -> Entry:
    """Return a decoded entry that shares one integer object for version and place."""
    version, place, size = entry.version, entry.place, entry.size
    return Entry(place.gsn, place, size) if version == place.gsn else entry


class Versions:
    """The keys and their entries."""

    def __init__(self) -> None:
        """Start without keys."""
        self._entries: Final[dict[bytes, Entry]] = {}
        self._order: Any = SortedList()
        #: Returns a key's entry; None: absent. The dictionary's own method, because it is called
        #: most.
        self.get: Final = self._entries.get
        #: Bytes of all keys and values.
        self.data_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def version(self, key: bytes) -> int:
        """Return a key's version; 0: it is absent."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.version

    def put(self, key: bytes, entry: Entry) -> None:
        """Set a key's entry."""
        entries = self._entries
        former = entries.get(key)
        if former is None:
            self._order.add(key)
            self.data_bytes += len(key) + entry.size
        else:
            self.data_bytes += entry.size - former.size
        entries[key] = entry

    def remove(self, key: bytes) -> None:
        """Remove a key, if it exists."""
        former = self._entries.pop(key, None)
        if former is not None:
            self._order.remove(key)
            self.data_bytes -= len(key) + former.size

    def keys(self, start: bytes, stop: bytes | None, *, after: bool = False) -> Iterator[bytes]:
        """Iterate over the keys from `start` on, before `stop`; `after`: without `start` itself.

        The keys must not change during the iteration.
        """
        keys: Iterator[bytes] = self._order.irange(start, stop, (not after, False))
        return keys

    def range(self, start: bytes, stop: bytes | None, limit: int) -> list[Row]:
        """Return the first `limit` entries from `start` on, before `stop` (None: all), in order."""
        entries = self._entries
        return [(key, entries[key]) for key in islice(self.keys(start, stop), limit)]

    def after(self, key: bytes | None, count: int) -> list[Row]:
        """Return the first `count` entries after a key (None: of all), in order."""
        entries = self._entries
        found = self.keys(key or b"", None, after=key is not None)
        return [(each, entries[each]) for each in islice(found, count)]

    def digest(self, start: bytes, stop: bytes | None) -> bytes:
        """Return the digest of a range's present entries."""
        entries = self._entries
        return digest_of((key, entries[key]) for key in self.keys(start, stop))

    def load(self, rows: Iterable[Row]) -> None:
        """Load entries into an empty index."""
        assert not self._entries, "a checkpoint is loaded into an empty state"
        self._entries.update((key, _compact(entry)) for key, entry in rows)
        self._order = SortedList(self._entries)
        self.data_bytes = sum(len(key) + entry.size for key, entry in self._entries.items())

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert list(self._order) == sorted(self._entries), (
            "the sorted index differs from the dictionary"
        )
        live = sum(len(key) + entry.size for key, entry in self._entries.items())
        assert live == self.data_bytes, (live, self.data_bytes)
