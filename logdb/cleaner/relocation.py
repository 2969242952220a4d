"""The values that must be inserted anew before the log's beginning can go.

Rule: a value is moved if it is some key's present state at this very place; that it was changed
meanwhile is found when the `Moved` record is applied. A record that is not ours, or does not fit
into a `Moved` record, is never passed. See docs/logdb.md, section 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logdb.records import (
    MOVE_BYTES,
    OVERHEAD_BYTES,
    Commit,
    Move,
    Moved,
    Value,
    decode,
    encode,
    is_part,
)

if TYPE_CHECKING:
    from logdb.versions import Versions
    from ziplog.types import Record, RecordId


#: A record has no more moves, so that to apply it takes a millisecond at most.
MAX_MOVES: Final = 250


class UnmovableRecord(Exception):  # noqa: N818 - no failure: the cut ends here
    """A record that must stay where it is."""


def moves_from(record: Record, versions: Versions, limit: int) -> list[Move]:
    """Return the moves of what is needed of a record.

    Args:
        record: any record of the log.
        versions: the present state.
        limit: bytes that a payload may have.

    Raises:
        Unmoved: it must stay.

    """
    if is_part(record.payload):
        return []
    ours = decode(record.payload)
    if ours is None:
        raise UnmovableRecord
    values: list[tuple[bytes, bytes | None]] = []
    if isinstance(ours, Value):
        values = [(ours.key, ours.value)]
    elif isinstance(ours, Commit):
        values = [(write.key, write.value) for write in ours.writes]
    elif isinstance(ours, Moved):
        values = [(move.key, move.value) for move in ours.moves]
    moves: dict[bytes, Move] = {}
    for key, value in values:
        entry = versions.get(key)
        # Of a key that is there twice, readers see the first.
        if entry is None or entry.place != record.rid or value is None or key in moves:
            continue
        if len(key) + len(value) + OVERHEAD_BYTES > limit:
            raise UnmovableRecord
        moves[key] = Move(key, record.rid, value)
    return list(moves.values())


class Relocation:
    """Gathers moves for records of a good size."""

    def __init__(self, part_bytes: int) -> None:
        """Begin.

        Args:
            part_bytes: a record has more only if one value has.

        """
        self._part_bytes: Final = part_bytes
        #: The last record that was looked at.
        self.passed = 0
        self._moves: list[Move] = []
        self._bytes = 0
        self._full: list[bytes] = []

    def take(self, rid: RecordId, moves: list[Move]) -> None:
        """Take what is needed of the next record."""
        self.passed = rid.gsn
        for move in moves:
            size = len(move.key) + len(move.value) + MOVE_BYTES
            is_full = self._bytes + size > self._part_bytes or len(self._moves) == MAX_MOVES
            if self._moves and is_full:
                self._flush()
            self._moves.append(move)
            self._bytes += size

    def _flush(self) -> None:
        self._full.append(encode(Moved(self._moves)))
        self._moves, self._bytes = [], 0

    def pop_full(self) -> list[bytes]:
        """Return the payloads of the records that are full, once."""
        full, self._full = self._full, []
        return full

    def finish(self) -> list[bytes]:
        """Return the last payloads."""
        if self._moves:
            self._flush()
        return self.pop_full()
