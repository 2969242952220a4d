"""What a coordinator answers from its state: keys, ranges, conflicts, snapshots' states.

Rule: whoever asks here was made to wait before, for the position that the question needs.
Everything is bounded: rows by `MAX_ROWS`, values at hand by `MAX_VALUE_BYTES` an answer (the
client reads the rest from the log). See docs/logdb.md, sections 5, 9 and 11.
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

#: Rows of one answer.
MAX_ROWS: Final = 1_000
#: Bytes of values in one answer.
MAX_VALUE_BYTES: Final = 1024 * 1024
_NO_DIGEST: Final = bytes(16)
_ABSENT: Final = KeyResult(None)


class Queries:
    """Answers from one state and its snapshots."""

    def __init__(self, state: State, snapshots: Snapshots, cache: ValueCache, base: int) -> None:
        """Answer from a state.

        Args:
            state: the present one.
            snapshots: of it.
            cache: values of present versions.
            base: what a snapshot's number is above the one that clients know. No two coordinators,
                and no two states of one, have the same: a number outlives what it named.

        """
        self._state: Final = state
        self._snapshots: Final = snapshots
        self._cache: Final = cache
        self._base: Final = base

    def read(self, cluster: int, message: Get | Scan, now: int) -> Got | Scanned | Invalid:
        """Answer a read, from the present state or the snapshot that it names."""
        try:
            if isinstance(message, Get):
                return self._get(cluster, message, now)
            return self._scan(cluster, message, now)
        except SnapshotExpired as error:
            return Invalid(cluster, message.request, "snapshot-expired", error.reason)

    def _get(self, cluster: int, get: Get, now: int) -> Got:
        """Answer with keys' states."""
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
        return Got(cluster, get.request, state.position, found, [])

    def _scan(self, cluster: int, scan: Scan, now: int) -> Scanned:
        """Answer with the first rows of a range."""
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
        """Answer with what has changed."""
        conflicting = self._conflicts(validate.reads, validate.ranges)
        return Validated(cluster, validate.request, self._state.position, conflicting)

    def watch(self, cluster: int, watch: Watch) -> Got:
        """Answer with a key's state, whatever it is."""
        found = self._found([watch.key], [self._state.versions.get(watch.key)])
        return Got(cluster, watch.request, self._state.position, found, [])

    def take_snapshot(self, cluster: int, take: TakeSnapshot, now: int) -> SnapshotTaken:
        """Keep the present state, and answer with its number."""
        number = self._base + self._snapshots.take(now)
        return SnapshotTaken(cluster, take.request, number, self._state.position)

    def drop_snapshot(self, number: int) -> None:
        """Keep a snapshot no longer."""
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
