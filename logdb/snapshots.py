"""States of former moments, for as long as somebody reads them.

Rule: what replaces a key's entry leaves the former one with the newest snapshot, which serves all
that are older; a value that was only moved is read where it is now. Invariant: a snapshot's version
of a key is that of its moment. Bounded by entries: the oldest expires. docs/logdb.md, section 9.
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

#: A snapshot that nobody reads for so long, in nanoseconds, ends.
IDLE_NS: Final = 60 * 10**9
#: Entries that are kept for all snapshots together.
MAX_ENTRIES: Final = 1_000_000
#: Moments that are told apart.
MAX_VERSIONS: Final = 1_000


class _SnapshotVersion:
    """What has changed between a moment and the next newer one that is kept (or the present)."""

    def __init__(self, older: _SnapshotVersion | None) -> None:
        self.former: dict[bytes, Entry | None] = {}
        self.older = older
        self.newer: _SnapshotVersion | None = None
        #: The numbers under which it is read.
        self.numbers: Final[set[int]] = set()


class Snapshots:
    """The snapshots of one coordinator."""

    def __init__(
        self,
        state: State,
        *,
        idle_ns: int = IDLE_NS,
        max_entries: int = MAX_ENTRIES,
        max_versions: int = MAX_VERSIONS,
    ) -> None:
        """Begin with none.

        Args:
            state: what they are of.
            idle_ns: nanoseconds without a read that end one.
            max_entries: of all together; beyond, the oldest expires.
            max_moments: at most so many are told apart; beyond, the oldest expires.

        """
        self._state: Final = state
        self._idle_ns: Final = idle_ns
        self._max_entries: Final = max_entries
        self._max_versions: Final = max_versions
        #: Each snapshot's moment and last use, in the order of use.
        self._held: Final[OrderedDict[int, tuple[_SnapshotVersion, int]]] = OrderedDict()
        self._oldest: _SnapshotVersion | None = None
        self._newest: _SnapshotVersion | None = None
        self._version_count = 0
        #: Keys that may be absent now and were there in a snapshot.
        self._deleted_keys: Any = SortedList()
        self._last = 0
        #: Former entries that are kept.
        self.entries = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, now: int) -> int:
        """Keep the present state; returns its number. `now` is in monotonic nanoseconds."""
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
            SnapshotExpired: it is not kept, or the value is no longer in the log.

        """
        return self._entry(self._touch(number, now), key)

    def range(
        self, number: int, start: bytes, stop: bytes | None, limit: int, now: int
    ) -> list[Row]:
        """Return the first `limit` entries from `start` on, before `stop`, in a snapshot.

        Raises:
            SnapshotExpired: it is not kept, or a value is no longer in the log.

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
        """End a snapshot, if it is still kept."""
        held = self._held.pop(number, None)
        if held is None:
            return
        version, _ = held
        version.numbers.discard(number)
        if not version.numbers:
            self._remove_version(version)

    def expire(self, now: int) -> None:
        """End those that nobody has read for long."""
        while self._held:
            number, (_, used) = next(iter(self._held.items()))
            if used + self._idle_ns > now:
                break
            self.drop(number)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        versions = []
        version = self._oldest
        while version is not None:
            assert version.numbers, "a moment that nobody reads"
            assert version.newer is not None or version is self._newest
            versions.append(version)
            version = version.newer
        assert len(versions) == self._version_count <= self._max_versions
        assert sum(len(version.former) for version in versions) == self.entries <= self._max_entries
        assert bool(versions) == (self._on_change in self._state.on_change)
        assert versions or not len(self._deleted_keys), "absent keys that nobody needs"
        get = self._state.versions.get
        for version in versions:
            for key, former in version.former.items():
                assert former is None or get(key) is not None or key in self._deleted_keys, key

    def _touch(self, number: int, now: int) -> _SnapshotVersion:
        held = self._held.get(number)
        if held is None:
            raise SnapshotExpired("its coordinator does not keep it (any more)")
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
                    raise SnapshotExpired("a value that was replaced was cleared out of the log")
                return former
            newer = newer.newer
        return self._state.versions.get(key)

    def _add_version(self) -> _SnapshotVersion:
        """Tell apart another moment: the present one."""
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
        """Keep what a key was; observes the state."""
        newest = self._newest
        assert newest is not None, "nobody observes without a snapshot"
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
        self.entries += 1
        while self.entries > self._max_entries:
            self._expire_oldest()

    def _expire_oldest(self) -> None:
        assert self._oldest is not None
        for number in list(self._oldest.numbers):
            self.drop(number)

    def _remove_version(self, version: _SnapshotVersion) -> None:
        """Forget a moment; an older one needs what it kept."""
        older, newer = version.older, version.newer
        self.entries -= len(version.former)
        if older is None:
            self._oldest = newer
        else:
            self.entries -= len(older.former)
            older.former = _merge(older.former, version.former)
            self.entries += len(older.former)
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
        """Forget the absent keys that no snapshot has."""
        get = self._state.versions.get
        existing: set[bytes] = set()
        version = self._oldest
        while version is not None:
            existing.update(key for key, former in version.former.items() if former is not None)
            version = version.newer
        self._deleted_keys = SortedList(key for key in existing if get(key) is None)


class SnapshotCursor:
    """A walk that has begun. It must be closed."""

    def __init__(self, state: State, max_entries: int = MAX_ENTRIES) -> None:
        """Begin at the present moment.

        Args:
            state: what to walk through.
            max_entries: if more change ahead of it, the walk fails.

        """
        self._state: Final = state
        self._max_entries: Final = max_entries
        self._former: Final[dict[bytes, Entry | None]] = {}
        #: The keys of `_former` that were there and are absent now.
        self._deleted_keys: Final[Any] = SortedList()
        #: The last key that was passed; None: at the beginning.
        self._passed: bytes | None = None
        self._failed = False
        self.is_done = False
        #: The rest of the checkpoint, of the same moment.
        self.image: Final = state.image()
        state.on_change.append(self._on_change)

    def rows(self, count: int) -> list[Row]:
        """Pass at most `count` keys; returns those entries that were there. May be empty.

        Raises:
            UnavailableError: too much has changed ahead of the walk; begin another one.

        """
        if self._failed:
            raise UnavailableError(
                f"more than {self._max_entries:,} keys changed while a checkpoint was written"
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
            entry = former.pop(key) if key in former else versions.get(key)
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
        """End the walk; any number of times."""
        if self._on_change in self._state.on_change:
            self._state.on_change.remove(self._on_change)
        self._former.clear()
        self._deleted_keys.clear()

    def _on_change(self, key: bytes, former: Entry | None, entry: Entry | None) -> None:
        """Keep what a key ahead was; observes the state."""
        if self._passed is not None and key <= self._passed:
            return
        if key not in self._former:
            if len(self._former) == self._max_entries:
                self._failed = True
                self.close()
                return
            self._former[key] = former
        if entry is not None:
            self._deleted_keys.discard(key)
        elif former is not None and self._former[key] is not None:
            self._deleted_keys.add(key)


def merge_sorted(first: Iterator[bytes], second: Iterator[bytes]) -> Iterator[bytes]:
    """Iterate over the keys of two iterators that are each in order, once each."""
    return (key for key, _ in groupby(heapq.merge(first, second)))


def _merge(
    older: dict[bytes, Entry | None], newer: dict[bytes, Entry | None]
) -> dict[bytes, Entry | None]:
    """Return what both kept, the older one's word first; costs what the smaller one has."""
    if len(older) < len(newer):
        newer.update(older)
        return newer
    for key, former in newer.items():
        older.setdefault(key, former)
    return older
