"""How a range is shared out: pieces of shards' positions, packed into tasks of about equal size.

Rule: a piece is one shard's, and cut where a server said that an entry ends; elsewhere only if more
tasks were asked for than that gives. Invariant: the pieces of a plan cover each shard's positions
of the range once, in order (docs/spark.md, section 1.3).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: A task of more stored bytes than this costs too much when it is run again.
MAX_TASK_BYTES: Final = 256 * 1024 * 1024
#: A task of fewer is not worth its start, unless more tasks were asked for.
MIN_TASK_BYTES: Final = 8 * 1024 * 1024
#: Of so many bytes, two a core are better than one: equal tasks do not take equal times.
EVEN_TASK_BYTES: Final = 64 * 1024 * 1024


class Piece(msgspec.Struct, frozen=True):
    """One shard's positions of [start, stop), and how much is stored of them, in bytes, about."""

    shard: int
    start: int
    stop: int
    size: int


def cut(shard: int, start: int, stop: int, steps: Iterable[tuple[int, int]]) -> list[Piece]:
    """Return [start, stop) of a shard cut as its outline says; the last reaches to the end.

    Args:
        shard: whose they are.
        start: the first position.
        stop: behind the last one.
        steps: of an outline, each with where it ends and its size; they may begin before and end
            behind the range, or tell nothing.

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
        # No entry is about what is behind the last step yet.
        last = pieces.pop()
        pieces.append(Piece(shard, last.start, stop, last.size))
    else:
        pieces.append(Piece(shard, at, stop, 0))
    return pieces


def pack(pieces: Sequence[Piece], at_least: int | None, cores: int) -> list[list[Piece]]:
    """Return tasks of about equal size, in the order of the pieces.

    Args:
        pieces: all of them, shard by shard, each shard's in order.
        at_least: make so many tasks, if there are so many positions; None: one or two a core, if
            they are worth it, as each wave of tasks costs time.
        cores: how many tasks run at a time, about.

    """
    if at_least is not None and 0 < len(pieces) < at_least:
        pieces = _split(pieces, at_least)
    total = sum(piece.size for piece in pieces)
    projection_of = at_least or max(min(_waves(total, cores) * cores, total // MIN_TASK_BYTES), 1)
    count = min(max(projection_of, -(-total // MAX_TASK_BYTES)), len(pieces))
    tasks: list[list[Piece]] = []
    at = 0
    for left in range(count, 0, -1):
        # Each later task needs one piece at least.
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
    """Return how often all cores take a task, to read so many bytes."""
    is_much = total >= 2 * cores * EVEN_TASK_BYTES
    return max(2 if is_much else 1, -(-total // (cores * MAX_TASK_BYTES)))


def _split(pieces: Sequence[Piece], at_least: int) -> list[Piece]:
    """Return the pieces in so many, each in parts that are about equal in positions."""
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
    """Return pieces that follow each other as one."""
    whole: list[Piece] = []
    for piece in pieces:
        if whole and (whole[-1].shard, whole[-1].stop) == (piece.shard, piece.start):
            last = whole[-1]
            whole[-1] = Piece(last.shard, last.start, piece.stop, last.size + piece.size)
        else:
            whole.append(piece)
    return whole
