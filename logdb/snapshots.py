"""Snapshots of former states for readers, and the cursor over one state for a checkpoint.

When a key's entry is replaced, the newest snapshot keeps the former entry, which serves all older
snapshots too. A value that was only moved is read at its new place. Invariant: a snapshot returns
each key's version of its own state. Entries are bounded: the oldest snapshot expires first. See
docs/logdb.md, sections 8 and 9.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final

from sortedcontainers import SortedList

from logdb.errors import SnapshotExpired
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logdb.records import Entry
    from logdb.state import State
    from logdb.versions import Row

#: Time without a read after which a snapshot expires, in nanoseconds.
IDLE_NS: Final = 60 * 10**9
#: Maximum former entries of all snapshots, and of a cursor.
MAX_ENTRIES: Final = 1_000_000
#: Maximum bytes of these entries with their keys, and the approximate bytes of one without its key.
MAX_BYTES: Final = 256 * 1024 * 1024
_ENTRY_BYTES: Final = 200
#: Maximum distinct states.
MAX_VERSIONS: Final = 1_000


class _SnapshotVersion:
    """The entries that changed between one state and the next newer kept one (or the present)."""

    def __init__(self, older: _SnapshotVersion | None) -> None:
        self.former: dict[bytes, Entry | None] = {}
        #: Approximate bytes of `former`.
        self.bytes = 0
        self.older = older
        self.newer: _SnapshotVersion | None = None
        #: The numbers of the snapshots of this state.
        self.numbers: Final[set[int]] = set()


class Snapshots:
    """The snapshots of one coordinator."""

    def __init__(
        self,
        state: State,
        *,
        idle_ns: int = IDLE_NS,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        max_versions: int = MAX_VERSIONS,
    ) -> None:
        """Start without snapshots.

        Args:
            state: the present state.
            idle_ns: time without a read after which a snapshot expires, in nanoseconds.
            max_entries: former entries kept; beyond it, the oldest snapshot expires.
            max_bytes: approximate bytes of former entries kept; likewise.
            max_versions: distinct states kept; beyond it, the oldest snapshot expires.

        """
        self._state: Final = state
        self._idle_ns: Final = idle_ns
        self._max_entries: Final = max_entries
        self._max_bytes: Final = max_bytes
        self._max_versions: Final = max_versions
        #: Each snapshot's state and last use, in the order of use.
        self._held: Final[OrderedDict[int, tuple[_SnapshotVersion, int]]] = OrderedDict()
        self._oldest: _SnapshotVersion | None = None
        self._newest: _SnapshotVersion | None = None
        self._version_count = 0
        #: Keys of snapshots that may be absent in the present state.
        self._deleted_keys: Any = SortedList()
        self._last = 0
        #: Number of former entries, and their approximate bytes.
        self.entries = self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, now: int) -> int:
        """Keep the present state (`now`: monotonic nanoseconds); return the snapshot's number."""
        newest = self._newest
        if newest is None or newest.former:
            newest = self._add_version()
        self._last += 1
        newest.numbers.add(self._last)
        self._held[self._last] = (newest, now)
        return self._last

    def get(self, number: int, key: bytes, now: int) -> Entry | None:
        """Return a key's entry in a snapshot.

        Raises:
            SnapshotExpired: the snapshot is unknown, or the value was trimmed.

        """
        return self._entry(self._touch(number, now), key)

    def range(
        self, number: int, start: bytes, stop: bytes | None, limit: int, now: int
    ) -> list[Row]:
        """Return the first `limit` entries from `start` on, before `stop`, in a snapshot.

        Raises:
            SnapshotExpired: the snapshot is unknown, or a value was trimmed.

        """
        version = self._touch(number, now)
        rows: list[Row] = []
        if limit < 1:
            return rows
        for key in merge_sorted(
            self._state.versions.keys(start, stop),
            self._deleted_keys.irange(start, stop, (True, False)),
        ):
            entry = self._entry(version, key)
            if entry is not None:
                rows.append((key, entry))
                if len(rows) == limit:
                    break
        return rows

    def drop(self, number: int) -> None:
        """End a snapshot, if it exists."""
        held = self._held.pop(number, None)
        if held is None:
            return
        version, _ = held
        version.numbers.discard(number)
        if not version.numbers:
            self._remove_version(version)

    def expire(self, now: int) -> None:
        """End the snapshots that were not read recently."""
        while self._held:
            number, (_, used) = next(iter(self._held.items()))
            if used + self._idle_ns > now:
                break
            self.drop(number)

    def check(self) -> None:
        """Assert the invariants."""
        versions = []
        version = self._oldest
        while version is not None:
            assert version.numbers, "a state without a snapshot is kept"
            assert version.newer is not None or version is self._newest
            versions.append(version)
            version = version.newer
        assert len(versions) == self._version_count <= self._max_versions
        assert sum(len(version.former) for version in versions) == self.entries <= self._max_entries
        for version in versions:
            assert version.bytes == sum(map(_bytes_of, version.former))
        assert sum(version.bytes for version in versions) == self.bytes <= self._max_bytes
        assert bool(versions) == (self._on_change in self._state.on_change)
        assert versions or not len(self._deleted_keys), "deleted keys are kept without a snapshot"
        get = self._state.versions.get
        for version in versions:
            for key, former in version.former.items():
                assert former is None or get(key) is not None or key in self._deleted_keys, key

    def _touch(self, number: int, now: int) -> _SnapshotVersion:
        held = self._held.get(number)
        if held is None:
            raise SnapshotExpired("its coordinator no longer keeps it")
        version, _ = held
        self._held[number] = (version, now)
        self._held.move_to_end(number)
        return version

    def _entry(self, version: _SnapshotVersion, key: bytes) -> Entry | None:
        newer: _SnapshotVersion | None = version
        while newer is not None:
            if key in newer.former:
                former = newer.former[key]
                if former is not None and former.place.gsn < self._state.trimmed:
                    raise SnapshotExpired("a former value was trimmed from the log")
                return former
            newer = newer.newer
        return self._state.versions.get(key)

    def _add_version(self) -> _SnapshotVersion:
        """Add the present state as a new version."""
        if self._version_count == self._max_versions:
            self._expire_oldest()
        former = self._newest
        self._newest = version = _SnapshotVersion(former)
        if former is None:
            self._oldest = version
            self._state.on_change.append(self._on_change)
        else:
            former.newer = version
        self._version_count += 1
        return version

    def _on_change(self, key: bytes, former: Entry | None, entry: Entry | None) -> None:
        """Keep a key's former entry; observes the state."""
        newest = self._newest
        assert newest is not None, "the state is observed without a snapshot"
        if entry is None:
            if former is not None:
                self._deleted_keys.add(key)
        elif former is None:
            self._deleted_keys.discard(key)
        elif former.version == entry.version:
            return
        if key in newest.former:
            return
        newest.former[key] = former
        size = _bytes_of(key)
        newest.bytes += size
        self.bytes += size
        self.entries += 1
        while self.entries > self._max_entries or self.bytes > self._max_bytes:
            self._expire_oldest()

    def _expire_oldest(self) -> None:
        assert self._oldest is not None
        for number in list(self._oldest.numbers):
            self.drop(number)

    def _remove_version(self, version: _SnapshotVersion) -> None:
        """Remove a state; the next older one takes over its entries."""
        older, newer = version.older, version.newer
        self.entries -= len(version.former)
        self.bytes -= version.bytes
        if older is None:
            self._oldest = newer
        else:
            self.entries -= len(older.former)
            older.former, dropped = _merge(older.former, version.former)
            self.entries += len(older.former)
            kept = version.bytes - dropped
            older.bytes += kept
            self.bytes += kept
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        self._version_count -= 1
        if not self._version_count:
            self._state.on_change.remove(self._on_change)
            self._deleted_keys.clear()
        elif len(self._deleted_keys) > 2 * self.entries + 1000:
            self._rebuild_deleted_keys()

    def _rebuild_deleted_keys(self) -> None:
        """Forget the absent keys that no snapshot holds."""
        get = self._state.versions.get
        existing: set[bytes] = set()
        version = self._oldest
        while version is not None:
            existing.update(key for key, former in version.former.items() if former is not None)
            version = version.newer
        self._deleted_keys = SortedList(key for key in existing if get(key) is None)


class SnapshotCursor:
    """A cursor over all entries of one state, in key order, while the state changes.

    It keeps former entries only of keys after the cursor. Invariant: its rows are exactly the
    entries of its state, with the places of that moment. It must be closed.
    """

    def __init__(
        self, state: State, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES
    ) -> None:
        """Start at the present state.

        Args:
            state: the state to read.
            max_entries: the cursor fails if more keys change after its position.
            max_bytes: the cursor fails if the former entries of these keys have more bytes.

        """
        self._state: Final = state
        self._max_entries: Final = max_entries
        self._max_bytes: Final = max_bytes
        self._former: Final[dict[bytes, Entry | None]] = {}
        #: Approximate bytes of `_former`.
        self._bytes = 0
        #: The keys of `_former` that existed and are absent now.
        self._deleted_keys: Final[Any] = SortedList()
        #: The last key that was returned; None: at the beginning.
        self._passed: bytes | None = None
        self._failed = False
        self.is_done = False
        #: The rest of the checkpoint, of the same state.
        self.image: Final = state.image()
        state.on_change.append(self._on_change)

    def rows(self, count: int) -> list[Row]:
        """Read at most `count` keys; return the entries that existed. May be empty.

        Raises:
            UnavailableError: too many keys changed after the cursor; start a new one.

        """
        if self._failed:
            raise UnavailableError(
                f"more than {self._max_entries:,} keys changed while a checkpoint was written, or"
                f" their former entries take more than {self._max_bytes:,} bytes"
            )
        versions, former, passed = self._state.versions, self._former, self._passed
        start, is_inside = passed or b"", passed is None
        found = merge_sorted(
            versions.keys(start, None, after=not is_inside),
            self._deleted_keys.irange(start, None, (is_inside, True)),
        )
        keys = list(islice(found, count))
        rows = []
        for key in keys:
            if key in former:
                self._bytes -= _bytes_of(key)
                entry = former.pop(key)
            else:
                entry = versions.get(key)
            if entry is not None:
                rows.append((key, entry))
        if keys:
            self._passed = keys[-1]
            del self._deleted_keys[: self._deleted_keys.bisect_right(keys[-1])]
        if len(keys) < count:
            self.is_done = True
            self.close()
        return rows

    def close(self) -> None:
        """Close the cursor. Idempotent."""
        if self._on_change in self._state.on_change:
            self._state.on_change.remove(self._on_change)
        self._former.clear()
        self._deleted_keys.clear()

    def _on_change(self, key: bytes, former: Entry | None, entry: Entry | None) -> None:
        """Keep a former entry after the cursor; observes the state."""
        if self._passed is not None and key <= self._passed:
            return
        if key not in self._former:
            self._bytes += _bytes_of(key)
            if len(self._former) == self._max_entries or self._bytes > self._max_bytes:
                self._failed = True
                self.close()
                return
            self._former[key] = former
        if entry is not None:
            self._deleted_keys.discard(key)
        elif former is not None and self._former[key] is not None:
            self._deleted_keys.add(key)


def merge_sorted(first: Iterator[bytes], second: Iterator[bytes]) -> Iterator[bytes]:
    """Merge two sorted iterators of keys, without duplicates."""
    return (key for key, _ in groupby(heapq.merge(first, second)))


def _merge(
    older: dict[bytes, Entry | None], newer: dict[bytes, Entry | None]
) -> tuple[dict[bytes, Entry | None], int]:
    """Merge former entries, the older ones take precedence; return also the bytes of the others.

    It costs the size of the smaller one.
    """
    dropped = sum(map(_bytes_of, older.keys() & newer.keys()))
    if len(older) < len(newer):
        newer.update(older)
        return newer, dropped
    for key, former in newer.items():
        older.setdefault(key, former)
    return older, dropped


def _bytes_of(key: bytes) -> int:
    """Return the approximate bytes of a key's former entry."""
    return len(key) + _ENTRY_BYTES
