"""Answers read requests from a coordinator's state: keys, ranges, conflicts, snapshots.

The caller waits for the position that a request needs. One reply holds at most `MAX_ROWS` rows and
`MAX_VALUE_BYTES` of cached values; the client reads other values from the log. See docs/logdb.md,
sections 5, 9 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logdb.errors import SnapshotExpired
from logdb.validation import conflicts
from logdb.versions import digest_of
from logdb.wire import MAX_KEYS, Get, Got, Invalid, KeyResult, Scanned, SnapshotTaken, Validated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logdb.coordinator.cache import ValueCache
    from logdb.records import Entry, KeyRead, RangeRead
    from logdb.snapshots import Snapshots
    from logdb.state import State
    from logdb.wire import Scan, TakeSnapshot, Validate, Watch

#: Maximum rows of one reply.
MAX_ROWS: Final = 1_000
#: Maximum bytes of values in one reply.
MAX_VALUE_BYTES: Final = 1024 * 1024
_NO_DIGEST: Final = bytes(16)
_ABSENT: Final = KeyResult(None)


class Queries:
    """Answers read requests from one state and its snapshots."""

    def __init__(self, state: State, snapshots: Snapshots, cache: ValueCache, base: int) -> None:
        """Serve a state.

        Args:
            state: the present state.
            snapshots: the state's snapshots.
            cache: values of present versions.
            base: added to the numbers of snapshots that clients see. It differs between
                coordinators and between states of one coordinator, because a number may outlive
                its snapshot.

        """
        self._state: Final = state
        self._snapshots: Final = snapshots
        self._cache: Final = cache
        self._base: Final = base

    def read(self, cluster: int, message: Get | Scan, now: int) -> Got | Scanned | Invalid:
        """Answer a read from the present state, or from the snapshot that it names."""
        try:
            if isinstance(message, Get):
                return self._get(cluster, message, now)
            return self._scan(cluster, message, now)
        except SnapshotExpired as error:
            return Invalid(cluster, message.request, "snapshot-expired", error.reason)

    def _get(self, cluster: int, get: Get, now: int) -> Got:
        """Return the states of keys."""
        state = self._state
        if get.snapshot:
            number = get.snapshot - self._base
            entries = [self._snapshots.get(number, key, now) for key in get.keys]
        else:
            conflicting = self._conflicts(get.reads, get.ranges)
            if conflicting:
                return Got(cluster, get.request, state.position, [], conflicting)
            entries = [state.versions.get(key) for key in get.keys]
        found = self._found(get.keys, entries)
        return Got(cluster, get.request, state.position, found, [], state.changed_at)

    def _scan(self, cluster: int, scan: Scan, now: int) -> Scanned:
        """Return the first rows of a range."""
        state, limit = self._state, min(scan.limit, MAX_ROWS)
        if scan.snapshot:
            number = scan.snapshot - self._base
            rows = self._snapshots.range(number, scan.start, scan.stop, limit + 1, now)
        else:
            conflicting = self._conflicts(scan.reads, scan.ranges)
            if conflicting:
                return Scanned(
                    cluster, scan.request, state.position, [], scan.stop, True, _NO_DIGEST,
                    conflicting,
                )  # fmt: skip
            rows = state.versions.range(scan.start, scan.stop, limit + 1)
        stop, is_end = scan.stop, len(rows) <= limit
        if not is_end:
            stop = rows.pop()[0]
        digest = _NO_DIGEST if scan.snapshot else digest_of(rows)
        keys = [key for key, _ in rows]
        found = self._found(keys, [entry for _, entry in rows])
        found_rows = list(zip(keys, found, strict=True))
        return Scanned(cluster, scan.request, state.position, found_rows, stop, is_end, digest, [])

    def validate(self, cluster: int, validate: Validate) -> Validated:
        """Return the conflicts of earlier reads."""
        conflicting = self._conflicts(validate.reads, validate.ranges)
        return Validated(cluster, validate.request, self._state.position, conflicting)

    def watch(self, cluster: int, watch: Watch) -> Got:
        """Return a key's present state."""
        found = self._found([watch.key], [self._state.versions.get(watch.key)])
        return Got(cluster, watch.request, self._state.position, found, [])

    def take_snapshot(self, cluster: int, take: TakeSnapshot, now: int) -> SnapshotTaken:
        """Keep the present state; return the snapshot's number."""
        number = self._base + self._snapshots.take(now)
        return SnapshotTaken(cluster, take.request, number, self._state.position)

    def drop_snapshot(self, number: int) -> None:
        """End a snapshot."""
        self._snapshots.drop(number - self._base)

    def version(self, key: bytes) -> int:
        """Return a key's version; 0: it is absent."""
        return self._state.versions.version(key)

    def _conflicts(self, reads: Sequence[KeyRead], ranges: Sequence[RangeRead]) -> list[bytes]:
        if not reads and not ranges:
            return []
        return conflicts(self._state.versions, reads, ranges)[:MAX_KEYS]

    def _found(self, keys: Sequence[bytes], entries: Sequence[Entry | None]) -> list[KeyResult]:
        cached, room = self._cache.get, MAX_VALUE_BYTES
        found = []
        for key, entry in zip(keys, entries, strict=True):
            if entry is None:
                found.append(_ABSENT)
                continue
            value = cached(key, entry.version) if entry.size <= room else None
            if value is not None:
                room -= len(value)
            found.append(KeyResult(entry, value))
        return found
