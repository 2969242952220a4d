"""The Raft journal: entries, term and vote are on disk before the node sends anything about them.

One append-only file of records, each with its length and a CRC32C. A record is on stable storage
(fdatasync) when the call that wrote it returns, so at most the last record can be torn. The file's
header and a note file beside it (`flushed`) have the number of bytes on stable storage. On open, a
torn record after them is cut off, and logged; damage anywhere else is refused, because the entry
may be committed. No write waits for the note: after a power cut its number may be too low, and then
a damaged last record counts as torn. The front is trimmed by writing and renaming a new file. A
failed write or sync ends the journal: the kernel may have dropped the data
(docs/protocol.md, sections 10 and 12).

Invariant: the file holds the values of `entries`, `term`, `voted_for`, `commit_index`, `identity`
and `is_voter`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from crc32c import crc32c

from ziplog import event_log
from ziplog.errors import ZiplogError
from ziplog.segments.durable_files import open_directory, sync_directory
from ziplog.segments.entry import REFUSED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_MAGIC: Final = b"ZIPRAFT3"
#: Of the form that a later release will write. It differs from `_MAGIC` in several bits.
_LATER_MAGIC: Final = b"ZIPRAFT4"
#: The whole header of files of earlier releases, which have no note.
_OLD_MAGIC: Final = b"ZIPRAFT2"
#: After the magic number, and in the note: the file's salt, bytes on stable storage, a CRC32C.
_FLUSHED: Final = struct.Struct("<QQI")
#: Offset of the first record.
HEADER_BYTES: Final = len(_MAGIC) + _FLUSHED.size
#: Maximum size of a record, in bytes.
MAX_RECORD: Final = 64 * 1024 * 1024
#: Size of length and checksum, four bytes each, little endian.
_HEAD: Final = 8
#: Files that are complete only once they are renamed: of the journal, and of the snapshot.
_UNFINISHED: Final = ("journal.new", "snapshot.tmp", "snapshot.received")
_REMEDY: Final = (
    "do not use it; empty this directory, and the node copies everything from the other nodes"
    " (without other nodes: `ziplog membership rebuild` writes a membership node's files again;"
    " use no old copy)"
)

#: What is wrong with a file of a later form, and what to do.
LATER: Final = "was written by a later release of Ziplog: start that release again"

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class JournalError(ZiplogError):
    """The journal is damaged or cannot be written; the process must stop."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """A log entry, which follows all entries before it."""

    command: bytes
    index: _Number
    term: _Number


class _Vote(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    term: _Number
    voted_for: str | None


class _Keep(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """All entries after the first `count` are deleted."""

    count: _Number


class _Commit(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    index: _Number


class _Entries(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """Several entries in one record, so that all of them are stored, or none."""

    entries: tuple[Entry, ...]


class _Identity(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    identity: str


class _Voter(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    founders: dict[str, str]


_Record = Entry | _Vote | _Keep | _Commit | _Entries | _Identity | _Voter
_decoder: Final[msgspec.msgpack.Decoder[_Record]] = msgspec.msgpack.Decoder(_Record)


class Journal:
    """The journal in a directory of its own, which is locked against other processes."""

    def __init__(self, directory: Path) -> None:
        """Open or create the journal.

        Raises:
            JournalError: another process uses it, it is damaged, or the disk refuses.

        """
        self.directory: Final = directory
        self._path: Final = directory / "journal"
        #: In order, with consecutive indexes.
        self.entries: list[Entry] = []
        self.term = 0
        self.voted_for: str | None = None
        #: A lower bound of the commit index; on disk after `flush_commit`.
        self.commit_index = 1
        self._flushed_commit = 1
        #: Random, created with the file: a node that lost its directory has a new one.
        self.identity = ""
        #: Whether this node's votes and acknowledgements count.
        self.is_voter = False
        #: The identities of the founders, by endpoint, if this node knows them.
        self.founders: dict[str, str] = {}
        self._file = self._directory = self._note = -1
        #: Changes with each file, so that a note about an earlier file does not count.
        self._salt = 0
        #: Size of the file in bytes; all of them are on stable storage.
        self._size = 0
        self._failed = False
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
            self._directory = open_directory(directory)
            sync_directory(directory.parent)  # otherwise a power cut could remove the directory
        except OSError as error:
            raise self._error("cannot use its directory", error) from error
        try:
            self._lock()
            self._remove_unfinished_files()
            self._open()
        except BaseException:
            self.close()
            raise

    # --- reading ---

    def _lock(self) -> None:
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._error("another process uses it", error) from error

    def _remove_unfinished_files(self) -> None:
        """Remove what a process that ended had not finished: a full disk needs its space."""
        for name in _UNFINISHED:
            with contextlib.suppress(OSError):
                (self.directory / name).unlink(missing_ok=True)

    def _open(self) -> None:
        data, note = self._read("journal"), self._read("flushed")
        if len(data) <= len(_OLD_MAGIC) and not data.strip(b"\0" + _OLD_MAGIC):
            if note_of(note) is not None:
                raise self._error(f"is missing or empty, but `flushed` exists: {_REMEDY}")
            self.identity = secrets.token_hex(16)
            self._rewrite()  # new, or truncated by a crash before its first record
        elif data.startswith(_OLD_MAGIC):
            self._replay(data, len(_OLD_MAGIC), 0)
            self._rewrite()
        elif data.startswith(_MAGIC):
            self._resume(data, note)
        elif data.startswith(_LATER_MAGIC):
            raise self._error(LATER)
        else:
            what = f"is not a journal of this version, or its first {len(_MAGIC)} bytes are damaged"
            raise self._error(f"{what}: {_REMEDY}")
        self._start_note()

    @property
    def size(self) -> int:
        """Size of the file, in bytes."""
        return self._size

    def _read(self, name: str) -> bytes:
        try:
            return (self.directory / name).read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise self._error("cannot be read", error) from error

    def _resume(self, data: bytes, note: bytes) -> None:
        """Load the records of a file, cut off a torn end, and open the file for appends."""
        header = note_of(data[len(_MAGIC) : HEADER_BYTES])
        if header is None:
            raise self._error(f"is damaged in its first {HEADER_BYTES} bytes: {_REMEDY}")
        self._salt, flushed = header
        noted = note_of(note)
        if noted is not None and noted[0] == self._salt:
            flushed = max(flushed, noted[1])
        elif noted is None and note:
            event_log.warning(
                "the note of the consensus journal is damaged and written again",
                file=str(self.directory / "flushed"),
            )
        end = self._replay(data, HEADER_BYTES, flushed)
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            if end < len(data):
                os.ftruncate(self._file, end)
            os.fsync(self._file)
        except OSError as error:
            raise self._error("cannot be opened for writing", error) from error
        self._size = end

    def _replay(self, data: bytes, at: int, flushed: int) -> int:
        """Load all records from byte `at` on; return the end of the last whole one.

        The first `flushed` bytes are known to have been on stable storage.
        """
        while (step := _record_at(data, at)) is not None:
            record, end = step
            self._replay_record(record, at)
            at = end
        if _any_record_after(data, at):
            raise self._error(f"is damaged at byte {at}, before intact records: {_REMEDY}")
        if at < flushed:
            raise self._error(
                f"is damaged at byte {at}, but its first {flushed} bytes were on stable storage:"
                f" {_REMEDY}"
            )
        if at < len(data):
            event_log.warning(
                "cut off a torn end of the consensus journal",
                file=str(self._path),
                at_byte=at,
                cut_bytes=len(data) - at,
                last_entry=self.entries[-1].index if self.entries else 0,
            )
        return at

    def _replay_record(self, record: _Record, at: int) -> None:
        match record:
            case Entry():
                self._replay_entries((record,), at)
            case _Entries():
                self._replay_entries(record.entries, at)
            case _Vote():
                self.term, self.voted_for = record.term, record.voted_for
            case _Keep():
                del self.entries[record.count :]
            case _Commit():
                self.commit_index = self._flushed_commit = record.index
            case _Identity():
                self.identity = record.identity
            case _Voter():
                self.is_voter, self.founders = True, record.founders

    def _replay_entries(self, entries: Sequence[Entry], at: int) -> None:
        for entry in entries:
            if self.entries and entry.index != self.entries[-1].index + 1:
                raise self._error(f"has a gap before entry {entry.index}, byte {at}")
            self.entries.append(entry)

    def since(self, index: int | None, count: int) -> list[Entry]:
        """Return up to `count` entries from `index` on; empty if that one is not held."""
        if index is None or not self.entries or index < self.entries[0].index:
            return []
        start = index - self.entries[0].index
        return self.entries[start : start + count]

    # --- writing ---

    def append(self, entry: Entry) -> None:
        """Append the next entry; it is on stable storage when this returns.

        Raises:
            JournalError: it may not be on stable storage.

        """
        assert not self.entries or entry.index == self.entries[-1].index + 1, "a gap in the log"
        self._write(entry)
        self.entries.append(entry)

    def extend(self, entries: Sequence[Entry]) -> None:
        """Append the next entries; all of them are on stable storage when this returns.

        Raises:
            JournalError: they may not be on stable storage.

        """
        if entries:
            indexes = [entry.index for entry in (*self.entries[-1:], *entries)]
            assert indexes == list(range(indexes[0], indexes[-1] + 1)), "a gap in the log"
            self._write(_Entries(tuple(entries)))
            self.entries.extend(entries)

    def delete_from(self, index: int) -> None:
        """Delete the entry with this index, which is held, and all after it, durably."""
        assert self.since(index, 1), "the entry is not held"
        self.keep_first(index - self.entries[0].index)

    def keep_first(self, count: int) -> None:
        """Delete all entries except the first `count`, durably."""
        if count < len(self.entries):
            self._write(_Keep(count))
            del self.entries[count:]

    def drop_first(self, count: int) -> None:
        """Delete the first `count` entries, durably and atomically."""
        if count > 0:
            self._sync_directory()  # the snapshot that replaces them was renamed into place
            held, self.entries = self.entries, self.entries[count:]
            if not self._rewrite(can_wait=True):
                self.entries = held  # a later trim deletes them

    def clear(self) -> None:
        """Delete all entries, durably and atomically; the term and vote stay."""
        if self.entries:
            self._sync_directory()
            self.entries = []
            self._rewrite()

    def begin_with(self, previous: Entry, last: Entry) -> None:
        """Start the log with the last two entries of a snapshot, durably and atomically.

        Entries after them are kept if the journal holds these two entries, else deleted.

        Raises:
            JournalError: there is a gap between the snapshot and the journal, or the disk refuses.

        """
        if self.entries and self.entries[0].index > previous.index:
            raise self._error(
                f"starts with entry {self.entries[0].index}, but its snapshot ends with entry"
                f" {last.index}: files of two copies of this directory were mixed"
            )
        if self.since(previous.index, 2) == [previous, last]:
            self.drop_first(previous.index - self.entries[0].index)
        else:
            self._sync_directory()
            self.entries = [previous, last]
            self._rewrite()

    def set_vote(self, term: int, voted_for: str | None) -> None:
        """Store the term, and the node that this node voted for in it, durably."""
        if (term, voted_for) != (self.term, self.voted_for):
            self._write(_Vote(term, voted_for))
            self.term, self.voted_for = term, voted_for

    def set_voter(self, founders: Mapping[str, str]) -> None:
        """Store that this node is a voter, and the identities of the founders, durably."""
        if not self.is_voter:
            self._write(_Voter(dict(founders)))
            self.is_voter, self.founders = True, dict(founders)

    def flush_commit(self) -> None:
        """Write the commit index, if it changed: a restart then need not wait for a leader."""
        if self.commit_index != self._flushed_commit:
            self._write(_Commit(self.commit_index))
            self._flushed_commit = self.commit_index

    def _write(self, record: _Record) -> None:
        frame = _frame(record)
        self._check_usable()
        try:
            written = os.write(self._file, frame)
            os.fdatasync(self._file)
        except OSError as error:
            self._failed = True
            raise self._error("cannot be written", error) from error
        if written != len(frame):
            self._failed = True
            raise self._error(f"wrote only {written} of {len(frame)} bytes: the disk is full")
        self._size += written
        self._write_note()

    def _rewrite(self, *, can_wait: bool = False) -> bool:
        """Write a new file, and replace the old one by it.

        With `can_wait`, a lack of space or descriptors is not an error: return False, and keep the
        old file.
        """
        self._check_usable()
        records: list[_Record] = [
            _Identity(self.identity),
            _Vote(self.term, self.voted_for),
            _Commit(self.commit_index),
            *self.entries,
        ]
        if self.is_voter:
            records.insert(1, _Voter(self.founders))
        frames = b"".join(map(_frame, records))
        salt = 1 + (self._salt or crc32c(self.identity.encode()) << 32)
        size = HEADER_BYTES + len(frames)
        data = _MAGIC + pack_note(salt, size) + frames
        fresh = self._path.with_suffix(".new")  # in `_UNFINISHED`
        try:
            file = _write_new(fresh, data)
        except OSError as error:
            if can_wait and error.errno in REFUSED:
                return False
            self._failed = True
            raise self._error("cannot be rewritten", error) from error
        if self._file >= 0:
            os.close(self._file)
        self._file = file
        try:
            fresh.rename(self._path)
            os.fsync(self._directory)
        except OSError as error:
            self._failed = True
            raise self._error("cannot be rewritten", error) from error
        self._flushed_commit = self.commit_index
        self._salt, self._size = salt, size
        self._write_note()
        return True

    # --- the note of the flushed size ---

    def _start_note(self) -> None:
        """Open the note and sync it; without a note, a damaged last record counts as torn."""
        path = self.directory / "flushed"
        with contextlib.suppress(OSError):
            self._note = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._write_note()
            os.fsync(self._note)
            os.fsync(self._directory)

    def _write_note(self) -> None:
        """Write the size on stable storage to the note, without a sync: the note may be too low."""
        if self._note >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._note, pack_note(self._salt, self._size), 0)

    def _sync_directory(self) -> None:
        try:
            os.fsync(self._directory)
        except OSError as error:
            self._failed = True
            raise self._error("cannot sync its directory", error) from error

    def _check_usable(self) -> None:
        if self._failed:
            raise self._error("failed before; the process must stop")

    def close(self) -> None:
        """Close the files and release the lock. Idempotent."""
        self._failed = True
        if self._note >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._note)
        for descriptor in (self._file, self._note, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._directory = self._note = -1

    def _error(self, what: str, error: OSError | None = None) -> JournalError:
        why = f" ({error.strerror or error})" if error is not None else ""
        return JournalError(f"consensus journal {self._path} {what}{why}")


def pack_note(salt: int, size: int) -> bytes:
    """Return a note: the first `size` bytes of the file with this salt are on stable storage."""
    facts = _FLUSHED.pack(salt, size, 0)[:-4]
    return facts + crc32c(facts).to_bytes(4, "little")


def note_of(contents: bytes) -> tuple[int, int] | None:
    """Return the salt and size of a note; None if it is missing or damaged."""
    if len(contents) != _FLUSHED.size:
        return None
    salt, size, _ = _FLUSHED.unpack(contents)
    return (salt, size) if contents == pack_note(salt, size) else None


def _write_new(path: Path, data: bytes) -> int:
    """Write and sync a new file, and return its descriptor.

    Raises:
        OSError: the system refuses it; the file is removed, because a full disk needs its space.

    """
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(path, flags, 0o600)
    try:
        with os.fdopen(file, "wb", closefd=False) as stream:
            stream.write(data)
        os.fsync(file)
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def _frame(record: _Record) -> bytes:
    payload = msgspec.msgpack.encode(record)
    assert len(payload) <= MAX_RECORD, "a command is too long for the journal"
    return len(payload).to_bytes(4, "little") + crc32c(payload).to_bytes(4, "little") + payload


def _record_at(data: bytes, at: int) -> tuple[_Record, int] | None:
    """Return the record that starts at byte `at`, and its end; None if no whole one does."""
    size = int.from_bytes(data[at : at + 4], "little")
    start, end = at + _HEAD, at + _HEAD + size
    if not 0 < size <= MAX_RECORD or end > len(data):
        return None
    payload = data[start:end]
    if crc32c(payload) != int.from_bytes(data[at + 4 : start], "little"):
        return None
    try:
        return _decoder.decode(payload), end
    except msgspec.MsgspecError:
        return None


def _any_record_after(data: bytes, at: int) -> bool:
    """Whether a whole record starts anywhere after byte `at`."""
    return any(_record_at(data, later) is not None for later in range(at + 1, len(data) - _HEAD))
