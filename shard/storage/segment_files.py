"""The segment files of a directory: loading at a start, cutting the log, deleting files.

A segment file defines the end of the log before it. Entries of older files at or after its first
entry are void; if it is marked *first*, all older files are. So one new file, complete under its
name, cuts the log atomically. Deleting void entries is cleanup, and the next start repeats it if
needed. Rule: a torn write is cut off, an entry that was on stable storage is not
(docs/protocol.md, section 10).
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from shard.storage.store import FullError
from ziplog import event_log
from ziplog.segments.durable_files import replace_contents, sync_directory, synced_names
from ziplog.segments.entry import REFUSED, SCARCE
from ziplog.segments.entry_codec import DAMAGED, walk
from ziplog.segments.segment import Segment, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

#: File with the newest segment's salt, its last entry on stable storage, and a checksum.
_FLUSHED: Final = "flushed"
_NOTHING: Final = MappingProxyType[str, bytes]({})


def load(directory: Path) -> list[Segment]:
    """Return the segments of a directory, oldest first; the last one receives appends.

    All their entries are on stable storage afterwards.
    """
    segments = _find(directory)
    if not segments:
        return [new_segment_after(None, 1, 1)]
    before: Segment | None = None
    for segment, after in zip(segments, [*segments[1:], None], strict=True):
        if not segment.base_fseq and before is not None and segment.number == before.number + 1:
            segment.base_fseq = before.last_fseq + 1
            segment.clear()
        if after is None:
            _load_last(directory, segment)
        else:
            _load_sealed(directory, segment, after)
        before = segment
    return link_segments(remove_void(directory, segments))


def _find(directory: Path) -> list[Segment]:
    for leftover in directory.glob("*.tmp"):
        leftover.unlink()
    names = (path.name for path in directory.iterdir())
    segments = [segment for name in names if (segment := Segment.named(name)) is not None]
    return sorted(segments, key=lambda segment: segment.number)


def _load_sealed(directory: Path, segment: Segment, after: Segment) -> None:
    path = directory / segment.name
    try:
        index = read_file(directory / segment.index_name)
    except FileNotFoundError:
        index = b""
    if not segment.load_index(index, path.stat().st_size):
        segment.rebuild(read_file(path), max(after.base_fseq - 1, 0))


def _load_last(directory: Path, segment: Segment) -> None:
    path = directory / segment.name
    try:
        data = path.read_bytes()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # What cannot be read may have been flushed, so it is not cut off as a torn write.
        advice = "move the server's directory away, and it copies the log from the others"
        raise OSError(error.errno, f"{error.strerror}; {advice}", str(path)) from error
    flushed = read_flushed(directory, segment)
    segment.rebuild(data, flushed)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if segment.size < len(data):
            os.ftruncate(fd, segment.size)
            event_log.warning(
                "a torn end was cut off",
                file=str(path),
                cut_bytes=len(data) - segment.size,
                last_gsn=segment.last,
            )
        # The entries of the former process count as stored from now on.
        if flushed < segment.last_fseq:
            _write_again(fd, data, segment, flushed + 1)
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(directory)


def _write_again(fd: int, data: bytes, segment: Segment, fseq: int) -> None:
    """Write a segment's block with entry `fseq`, and all after it, in their place.

    The sync of the former process may have failed. Then the system has pages that are not on the
    disk, and counts them as written: a further sync would not write them.
    """
    start = segment.block_start(fseq)
    rest = memoryview(data)[: segment.size]
    while start < segment.size:
        start += os.pwrite(fd, rest[start:], start)


# --- cutting ---------------------------------------------------------------------------------


def new_segment_after(
    before: Segment | None, base: int, base_fseq: int, *, is_first: bool = False
) -> Segment:
    """Return a new segment after `before`."""
    # Not 0, so that zeros are never decoded as an entry.
    salt = int.from_bytes(os.urandom(4), "little") | 1
    number = before.number + 1 if before is not None else 1
    return Segment(number, base, base_fseq, salt, is_first=is_first)


def create(directory: Path, segment: Segment, contents: bytes) -> None:
    """Create or replace a segment's file, atomically and durably.

    Raises:
        FullError: there is no space for it; nothing has changed.
        OSError: another failure; it is unknown which file is present.

    """
    path = directory / segment.name
    with _synced_names(directory):
        try:
            replace_contents(path, contents)
        except OSError as error:
            if error.errno in REFUSED:
                raise FullError(f"no room for {path}: {error}") from error
            raise


@contextmanager
def _synced_names(directory: Path) -> Iterator[None]:
    """Sync a directory's names after the changes in the block.

    Raises:
        FullError: the system refuses to open it now; nothing has changed.

    """
    with ExitStack() as stack:
        try:
            stack.enter_context(synced_names(directory))
        except OSError as error:
            if error.errno in REFUSED:
                raise FullError(f"{directory} cannot be opened for a change: {error}") from error
            raise
        yield


def remove_void(
    directory: Path, segments: list[Segment], contents: Mapping[str, bytes] = _NOTHING
) -> list[Segment]:
    """Delete void entries and files durably; return the rest, which must still be linked.

    `contents`: of files that were read before, by name.
    """
    kept: list[Segment] = []
    limit = 0
    for segment in reversed(segments):
        is_void = bool(kept) and (kept[-1].is_first or segment.base_fseq > limit)
        if is_void or (
            limit
            and segment.last_fseq >= limit
            and not _cut(directory, segment, limit, contents.get(segment.name))
        ):
            _remove(directory, segment)
            continue
        kept.append(segment)
        limit = min(limit or segment.base_fseq, segment.base_fseq)
    return kept[::-1]


def _cut(directory: Path, segment: Segment, limit: int, contents: bytes | None) -> bool:
    """Cut entry `limit` and all after it from a file; False if no useful entry is left."""
    path = directory / segment.name
    data = read_file(path) if contents is None else contents
    size = 0
    for found in walk(data, segment.salt):
        if found.kind != DAMAGED and found.fseq >= limit:
            break
        size = size if found.kind == DAMAGED else found.stop
    if not size and not segment.is_first:
        return False
    with suppress(FullError):  # A block file of a longer segment does not count.
        delete_block_files(directory, [segment])
    # The old index no longer matches. If a crash undoes the cut, the next start repeats it.
    os.truncate(path, size)
    segment.rebuild(data[:size], limit - 1)
    return True


def _remove(directory: Path, segment: Segment) -> None:
    with suppress(FullError):  # It stays void, and the next start deletes it.
        delete(directory, file_names(segment))


def file_names(segment: Segment) -> list[str]:
    """Return the names of a segment's files, in the order in which they are deleted."""
    return [segment.block_file_name, segment.index_name, segment.name]


def delete_block_files(directory: Path, segments: list[Segment]) -> None:
    """Delete the block files of segments that are about to change (docs/protocol.md, section 14.1).

    Raises:
        FullError: the system refuses to change the directory now; nothing has changed.

    """
    delete(directory, [segment.block_file_name for segment in segments])


def delete(directory: Path, names: list[str]) -> None:
    """Delete the files of these names that exist, durably.

    Raises:
        FullError: the system refuses to change the directory now; nothing has changed.

    """
    present = [path for path in (directory / name for name in names) if path.exists()]
    if not present:
        return
    with _synced_names(directory):
        for path in present:
            path.unlink(missing_ok=True)


def link_segments(segments: list[Segment]) -> list[Segment]:
    """Set each segment's values that depend on the segment before it; return the segments."""
    for before, segment in pairwise(segments):
        segment.record_before = before.last_record or before.record_before
        before.is_torn = before.is_torn or segment.base_fseq > before.last_fseq + 1
        segment.is_torn_before = before.is_torn and segment.base == before.last + 1
        has_positions = segment.last >= segment.base
        # The end of a damaged segment is known after its repair.
        segment.base = max(segment.base, before.last + 1)
        if not has_positions:
            segment.last = segment.base - 1
            segment.is_torn = segment.is_torn_before or bool(segment.holes)
    return segments


def holes(segments: list[Segment]) -> list[tuple[int, int]]:
    """Return the known missing ranges of entry numbers, in and between segments."""
    found = [hole for segment in segments for hole in segment.holes]
    for before, segment in pairwise(segments):
        if segment.base_fseq > before.last_fseq + 1:
            found.append((before.last_fseq + 1, segment.base_fseq - 1))
    return sorted(found)


# --- how far the newest segment is flushed ---------------------------------------------------


def open_flushed(directory: Path) -> int:
    """Return an open file for `pack_flushed`; -1 if there is no space for one."""
    with suppress(OSError):
        return os.open(directory / _FLUSHED, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return -1


def pack_flushed(segment: Segment, fseq: int) -> bytes:
    """Return the file's content: this segment is on stable storage up to entry `fseq`."""
    facts = segment.salt.to_bytes(4, "little") + fseq.to_bytes(8, "little")
    return facts + crc32c(facts).to_bytes(4, "little")


def read_flushed(directory: Path, segment: Segment) -> int:
    """Return the last entry known to have been on stable storage in the newest segment, or 0."""
    try:
        contents = (directory / _FLUSHED).read_bytes()
    except OSError as error:
        if error.errno in SCARCE:
            raise  # without the note, a damaged end would count as a torn one
        return 0
    facts = contents[:12]
    is_valid = crc32c(facts) == int.from_bytes(contents[12:16], "little")
    if not is_valid or int.from_bytes(facts[:4], "little") != segment.salt:
        return 0
    return int.from_bytes(facts[4:], "little")
