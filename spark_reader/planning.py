"""Planning: divides a range into pieces of shards, and packs them into tasks of about equal size.

Rule: a piece belongs to one shard, and ends where a server reported the end of a block or entry. It
ends elsewhere only if the caller requests more tasks than there are such pieces. Invariant: the
pieces of a plan cover each shard's positions of the range once, in order (docs/spark.md, 1.3).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Maximum stored bytes of a task; a larger one costs too much when it is repeated.
MAX_TASK_BYTES: Final = 256 * 1024 * 1024
#: Minimum stored bytes of a task, unless the caller requests more tasks; less is not worth a start.
MIN_TASK_BYTES: Final = 8 * 1024 * 1024
#: From two tasks of this size per core on, a plan has two tasks per core: run times differ.
EVEN_TASK_BYTES: Final = 64 * 1024 * 1024


class Piece(msgspec.Struct, frozen=True):
    """Positions [start, stop) of one shard, with an estimate of their stored bytes."""

    shard: int
    start: int
    stop: int
    size: int


def cut(shard: int, start: int, stop: int, steps: Iterable[tuple[int, int]]) -> list[Piece]:
    """Return [start, stop) of a shard cut at the steps of its outline; the last piece ends at stop.

    Args:
        shard: the shard id.
        start: the first position.
        stop: the end (exclusive).
        steps: the end and size of each step of an outline; steps may lie outside the range, and
            there may be none.

    """
    pieces: list[Piece] = []
    if start >= stop:
        return pieces
    at = start
    for end, size in steps:
        if end <= at:
            continue
        pieces.append(Piece(shard, at, min(end, stop), size))
        if end >= stop:
            return pieces
        at = end
    if pieces:
        # There is no entry after the last step yet.
        last = pieces.pop()
        pieces.append(Piece(shard, last.start, stop, last.size))
    else:
        pieces.append(Piece(shard, at, stop, 0))
    return pieces


def pack(pieces: Sequence[Piece], at_least: int | None, cores: int) -> list[list[Piece]]:
    """Return tasks of about equal size, in the order of the pieces.

    Args:
        pieces: all pieces, shard by shard, in order within a shard.
        at_least: minimum number of tasks, as far as there are positions; None: one or two per
            core, fewer for a small range, because each wave of tasks costs time.
        cores: estimate of the number of concurrent tasks.

    """
    if at_least is not None and 0 < len(pieces) < at_least:
        pieces = _split(pieces, at_least)
    total = sum(piece.size for piece in pieces)
    wanted = at_least or max(min(_waves(total, cores) * cores, total // MIN_TASK_BYTES), 1)
    count = min(max(wanted, -(-total // MAX_TASK_BYTES)), len(pieces))
    tasks: list[list[Piece]] = []
    at = 0
    for left in range(count, 0, -1):
        # Each later task needs at least one piece.
        end = len(pieces) - left + 1
        task, size, share = [pieces[at]], pieces[at].size, total / left
        at += 1
        while at < end and (left == 1 or size + pieces[at].size / 2 <= share):
            task.append(pieces[at])
            size += pieces[at].size
            at += 1
        total -= size
        tasks.append(joined(task))
    return tasks


def _waves(total: int, cores: int) -> int:
    """Return the number of tasks per core for `total` bytes."""
    is_much = total >= 2 * cores * EVEN_TASK_BYTES
    return max(2 if is_much else 1, -(-total // (cores * MAX_TASK_BYTES)))


def _split(pieces: Sequence[Piece], at_least: int) -> list[Piece]:
    """Split the pieces into at least `at_least`, each into parts of equal length."""
    lengths = [piece.stop - piece.start for piece in pieces]
    parts = 2
    while sum(min(parts, length) for length in lengths) < at_least and parts < max(lengths):
        parts *= 2
    found: list[Piece] = []
    for piece, length in zip(pieces, lengths, strict=True):
        count = min(parts, length)
        ends = [piece.start + length * part // count for part in range(count + 1)]
        found += [
            Piece(piece.shard, start, stop, piece.size // count) for start, stop in pairwise(ends)
        ]
    return found


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces, with adjacent ones merged."""
    whole: list[Piece] = []
    for piece in pieces:
        if whole and (whole[-1].shard, whole[-1].stop) == (piece.shard, piece.start):
            last = whole[-1]
            whole[-1] = Piece(last.shard, last.start, piece.stop, last.size + piece.size)
        else:
            whole.append(piece)
    return whole
