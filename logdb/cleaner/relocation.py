"""Relocation of live values: what must be inserted again before the log's beginning is trimmed.

A value is moved if it is a key's present value at exactly this place; a concurrent change is
detected when the `Moved` record is applied. The round never passes an unreadable record, or a value
that does not fit into a `Moved` record. See docs/logdb.md, section 8.
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


#: Maximum moves of one record, so that applying it takes at most a millisecond.
MAX_MOVES: Final = 250


class UnmovableRecord(Exception):  # noqa: N818 - no failure: the cut ends here
    """A record that must stay where it is: it is unreadable, or too large."""


def moves_from(record: Record, versions: Versions, limit: int) -> list[Move]:
    """Return the moves of the live values of a record.

    Args:
        record: any record of the log that is not foreign.
        versions: the present state.
        limit: maximum bytes of a payload.

    Raises:
        UnmovableRecord: the record must stay.

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
        # If a record holds a key twice, readers use the first value.
        if entry is None or entry.place != record.rid or value is None or key in moves:
            continue
        if len(key) + len(value) + OVERHEAD_BYTES > limit:
            raise UnmovableRecord
        moves[key] = Move(key, record.rid, value)
    return list(moves.values())


class Relocation:
    """Collects moves into records of about the same size."""

    def __init__(self, part_bytes: int) -> None:
        """Start without moves.

        Args:
            part_bytes: maximum bytes of a record, unless a single value is larger.

        """
        self._part_bytes: Final = part_bytes
        #: The gsn of the last processed record.
        self.passed = 0
        self._moves: list[Move] = []
        self._bytes = 0
        self._full: list[bytes] = []

    def add(self, rid: RecordId, moves: list[Move]) -> None:
        """Add the moves of the next record."""
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
        """Return the payloads of full records, and forget them."""
        full, self._full = self._full, []
        return full

    def finish(self) -> list[bytes]:
        """Return the payloads of the last records."""
        if self._moves:
            self._flush()
        return self.pop_full()
