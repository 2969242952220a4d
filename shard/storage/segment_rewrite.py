"""Finds unreadable entries in segment files, and rewrites a file with copies of them.

A file is never changed in place: a new one, with all readable entries and the given copies,
atomically replaces it. Rules: the copies must fit between the readable entries by number, position
and view; readable entries stay unchanged. A read error may pass: what it hides is left out only if
a former attempt could not read it either (docs/protocol.md, section 10).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ziplog.core.entries import Place
from ziplog.segments.entry import BusyError, unreadable
from ziplog.segments.entry_codec import (
    DAMAGED,
    EXPIRE,
    HEADER_BYTES,
    MARK,
    decode,
    encode,
    positions,
    view_of,
    walk,
)
from ziplog.segments.segment import read_with_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ziplog.segments.entry import Entry
    from ziplog.segments.entry_codec import DecodedHeader
    from ziplog.segments.segment import Segment


def missing_around(
    directory: Path, segments: Iterable[Segment], gsn: int, last_fseq: int
) -> tuple[int, int] | None:
    """Return the first and last number of the unreadable entries that may hold `gsn`.

    None: the entry at `gsn` is readable. `segments` begin at or before the position's segment.
    """
    expected = 0
    hole: tuple[int, int] | None = None
    for segment in segments:
        expected = expected or segment.base_fseq
        for _, found in readable_entries(directory, segment):
            if found.fseq > expected:
                hole = (hole[0] if hole else expected, found.fseq - 1)
            expected = found.fseq + 1
            if found.kind == EXPIRE:
                continue
            if found.last >= gsn:
                return hole if found.first > gsn else None
            hole = None
    if expected <= last_fseq:
        hole = (hole[0] if hole else expected, last_fseq)
    return hole


def missing_from(directory: Path, segment: Segment, fseq: int, end: int) -> tuple[int, int] | None:
    """Return the first and last number of the unreadable entries that begin with `fseq`, if any.

    `end`: the number of the first entry of the next segment.
    """
    following = (f.fseq for _, f in readable_entries(directory, segment) if f.fseq >= fseq)
    last = next(following, end) - 1
    return (fseq, last) if fseq <= last else None


def readable_entries(directory: Path, segment: Segment) -> Iterator[tuple[bytes, DecodedHeader]]:
    """Yield the readable entries of a segment, each with the bytes that contain it."""
    data = _contents(directory, segment)
    for found in walk(data, segment.salt):
        if found.is_numbered and found.is_whole:
            yield data, found


def rewrite_segment(
    directory: Path,
    segment: Segment,
    entries: list[Entry],
    end: int,
    limit: int,
    hidden: set[int],
) -> bytes | None:
    """Return a segment's contents with the missing `entries` added; None if they do not fit.

    Args:
        directory: the segment's directory.
        segment: a segment that is completely written.
        entries: `Place` with its body, `Skip` or `Expire`, numbered without a gap.
        end: the number of the first entry of the next segment.
        limit: all positions of the segment are below this one.
        hidden: the other entries that read errors hid in former attempts; it is updated.

    Raises:
        BusyError: a read error hides further entries now; nothing has changed.
        UnreadableError: the file cannot be read.

    """
    numbers = [entry.fseq for entry in entries]
    is_a_run = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    if not is_a_run or numbers[0] < segment.base_fseq or numbers[-1] >= end:
        return None
    data, has_errors = _read(directory, segment)
    readable = {
        found.fseq: found
        for found in walk(data, segment.salt)
        if found.is_numbered and found.is_whole
    }
    if has_errors:
        lost = set(range(segment.base_fseq, end)) - readable.keys() - set(numbers)
        further = lost - hidden
        hidden |= lost
        if further:
            raise BusyError(
                f"{segment.name}: the disk cannot read entry {min(further)} now, either"
            )
    added = {entry.fseq: entry for entry in entries if entry.fseq not in readable}
    same = (
        decode(data, readable[e.fseq], segment.name) == e for e in entries if e.fseq in readable
    )
    if not all(same) or not all(map(_is_complete, added.values())):
        return None
    contents = b"".join(_merged(data, segment, added))
    return contents if _fits(contents, segment, limit) else None


def _is_complete(entry: Entry) -> bool:
    kind = positions(entry)[0]
    return kind < MARK and not (isinstance(entry.decision, Place) and entry.decision.body is None)


def _merged(data: bytes, segment: Segment, added: dict[int, Entry]) -> Iterator[bytes]:
    """Yield the readable entries merged with the added ones, by number."""
    left = sorted(added)[::-1]
    for found in walk(data, segment.salt):
        if found.kind == DAMAGED or (found.is_numbered and found.fseq in added):
            continue
        while left and left[-1] <= found.fseq:
            yield _encoded(added[left.pop()], segment)
        yield data[found.start - HEADER_BYTES : found.stop]
    while left:
        yield _encoded(added[left.pop()], segment)


def _encoded(entry: Entry, segment: Segment) -> bytes:
    return encode(entry, segment.salt, entry.fseq, 0)


def _fits(contents: bytes, segment: Segment, limit: int) -> bool:
    """Whether positions, numbers and views increase."""
    numbered = [found for found in walk(contents, segment.salt) if found.is_numbered]
    spans = [(found.first, found.last) for found in numbered if found.kind < EXPIRE]
    spans = [(0, segment.base - 1), *spans, (limit, limit)]
    views = [view_of(contents, found) for found in numbered if found.is_whole]
    return (
        all(before.fseq < after.fseq for before, after in pairwise(numbered))
        and all(before[1] < after[0] <= after[1] for before, after in pairwise(spans))
        and views == sorted(views)
    )


def _contents(directory: Path, segment: Segment) -> bytes:
    return _read(directory, segment)[0]


def _read(directory: Path, segment: Segment) -> tuple[bytes, bool]:
    """Return a segment's bytes, empty if its file is missing; and whether some cannot be read."""
    try:
        return read_with_errors(directory / segment.name)
    except FileNotFoundError:
        return b"", False
    except OSError as error:
        raise unreadable(segment.name, error) from error
