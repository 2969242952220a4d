"""A plain model of the database, after docs/logdb.md, section 4.

It keeps every record that any coordinator applied, each once. Of LogDB it uses only the codec of
records and the digest of ranges. Invariant: records arrive in log order, from the first record on.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

from logdb import records
from logdb.records import CheckpointBegun, CheckpointDone, CheckpointPart, Commit, Moved
from logdb.versions import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.types import Record, RecordId

    #: A transaction's id.
    Id = tuple[bytes, int]


class Held(NamedTuple):
    """What is at a key."""

    version: int
    value: bytes


class Change(NamedTuple):
    """What a commit made of a key; None: it is absent."""

    gsn: int
    held: Held | None


class Model:
    """The database that is in a log."""

    def __init__(self, max_decisions: int) -> None:
        self._max_decisions: Final = max_decisions
        #: The log.
        self.records: Final[list[Record]] = []
        #: From a gsn to the record's place in it.
        self.index: Final[dict[int, int]] = {}
        #: Up to each record, and with it: those that are not a checkpoint's own.
        self.counts: Final[list[int]] = []
        #: What is there now.
        self.entries: Final[dict[bytes, Held]] = {}
        #: All that was ever there.
        self.changes: Final[dict[bytes, list[Change]]] = {}
        #: Every decision, in log order; of each id, the gsn of its commit.
        self._decided: Final[list[tuple[Id, int]]] = []
        self.committed: Final[dict[Id, int]] = {}
        #: The writer of each value: all values differ.
        self.writers: Final[dict[tuple[bytes, bytes], int]] = {}
        self._horizon = 0
        self.commits = self.aborts = 0
        self.done: Final[list[tuple[RecordId, CheckpointDone]]] = []

    # --- the log ---

    def take(self, record: Record, *, decides: bool = True) -> str:
        """Apply the next record; return the decision, "" if it is not a commit record.

        Args:
            record: of the log.
            decides: if false, the record is only kept.

        """
        assert not self.records or record.rid > self.records[-1].rid
        gsn = record.rid.gsn
        self.index[gsn] = len(self.records)
        self.records.append(record)
        ours = records.decode(record.payload)
        is_own = isinstance(ours, (CheckpointBegun, CheckpointPart, CheckpointDone))
        self.counts.append((self.counts[-1] if self.counts else 0) + (not is_own))
        if isinstance(ours, Commit) and decides:
            return self._commit(ours, gsn)
        if isinstance(ours, CheckpointBegun):
            self._horizon = max(self._horizon, min(ours.cut, gsn))
        elif isinstance(ours, CheckpointDone):
            self.done.append((record.rid, ours))
        elif isinstance(ours, Moved) and decides:
            for move in ours.moves:
                assert move.value == self.value_at(move.place.gsn, move.key), (
                    f"{record.rid} moves another value of {move.key!r} than stands at {move.place}"
                )
        return ""

    def value_at(self, gsn: int, key: bytes) -> bytes:
        """Return a key's value that stands in a record."""
        index = self.index.get(gsn)
        assert index is not None, f"{key!r} is to be found at {gsn}, where there is no record"
        value = records.value_at(records.decode(self.records[index].payload), key)
        assert value is not None, f"{key!r} is not in the record at {gsn}"
        return value

    def _commit(self, commit: Commit, gsn: int) -> str:
        name = commit.id.session, commit.id.number
        remembered = self._decided[-self._max_decisions :]
        if name in (other for other, _ in remembered):
            return "repeated"
        outcome = self._verdict(commit, gsn)
        self._decided.append((name, gsn))
        if outcome != "committed":
            self.aborts += 1
            return outcome
        self.commits += 1
        self.apply(commit, gsn)
        return outcome

    def _verdict(self, commit: Commit, gsn: int) -> str:
        forgotten = self._decided[: -self._max_decisions]
        places = [write.rid.gsn for write in commit.writes if write.rid is not None]
        if forgotten and commit.began < forgotten[-1][1]:
            return "expired"
        if any(place < self._horizon for place in places):
            return "expired"
        version = {key: held.version for key, held in self.entries.items()}
        if any(version.get(read.key, 0) != read.version for read in commit.reads):
            return "conflict"
        for part in commit.ranges:
            rows = sorted(
                row
                for row in self.entries.items()
                if part.start <= row[0] and (part.stop is None or row[0] < part.stop)
            )
            if digest_of(rows) != part.digest:  # type: ignore[arg-type]  # it looks at versions
                return "conflict"
        for write in commit.writes:
            if write.rid is not None and not version.get(write.key, 0) <= write.rid.gsn < gsn:
                return "conflict"
        return "committed"

    def apply(self, commit: Commit, gsn: int) -> None:
        """Let a commit take effect."""
        name = commit.id.session, commit.id.number
        assert name not in self.committed, (
            f"{name[0].hex()}:{name[1]} takes effect at {self.committed[name]}, and at {gsn} again"
        )
        self.committed[name] = gsn
        for write in commit.writes:
            held = None
            if write.rid is not None:
                held = Held(write.rid.gsn, self.value_at(write.rid.gsn, write.key))
            elif write.value is not None:
                held = Held(gsn, write.value)
            if held is None:
                self.entries.pop(write.key, None)
            else:
                self.entries[write.key] = held
                self.writers[write.key, held.value] = gsn
            self.changes.setdefault(write.key, []).append(Change(gsn, held))

    # --- what was ---

    def at(self, key: bytes, gsn: int) -> Held | None:
        """Return what was at a key when everything up to a position had been applied."""
        changes = self.changes.get(key, [])
        index = bisect_right(changes, gsn, key=lambda change: change.gsn)
        return changes[index - 1].held if index else None

    def when(self, key: bytes, value: bytes | None) -> Iterator[tuple[int, int]]:
        """Yield the spans [from, to) of positions after which a key had this value."""
        start, held = 0, None
        for change in [*self.changes.get(key, []), Change(2**63 - 1, None)]:
            if (held.value if held else None) == value:
                yield start, change.gsn
            start, held = change.gsn, change.held
