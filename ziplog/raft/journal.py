"""The consensus journal: entries, term and vote on disk before anyone may hear of them.

One append-only file of records, each with its length and a CRC32C; a record is on stable storage
(fdatasync) when the call that wrote it returns. Because of that at most the last record can be
torn. The file's header and a note beside it (`flushed`) state how many bytes are on stable storage:
a torn record behind them is cut off on open, and logged; damage anywhere else is refused, for the
entry may be committed. No write waits for the note: after a power cut it may state too little, and
then a damaged last record counts as torn.
The front is trimmed by writing a new file and renaming it. A failed write or sync ends the journal:
what the kernel dropped cannot be written again (docs/protocol.md, sections 10 and 12).

Invariant: the file says what `entries`, `term`, `voted_for`, `commit_index`, `identity` and
`is_voter` say.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import structlog
from crc32c import crc32c

from ziplog.errors import ZiplogError
from ziplog.segments.entry import REFUSED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_MAGIC: Final = b"ZIPRAFT3"
#: Files of earlier releases have no more header than this, and no note.
_OLD_MAGIC: Final = b"ZIPRAFT2"
#: After the magic number, and in the note: the file's salt, bytes on stable storage, a CRC32C.
_FLUSHED: Final = struct.Struct("<QQI")
#: Where the first record starts.
HEADER_BYTES: Final = len(_MAGIC) + _FLUSHED.size
#: No record is longer, in bytes.
MAX_RECORD: Final = 64 * 1024 * 1024
#: Length and checksum, four bytes each, little endian.
_HEAD: Final = 8
_REMEDY: Final = (
    "do not use it; empty this directory, and the node learns everything from the other nodes"
    " (if there are none, restore a copy)"
)

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class JournalError(ZiplogError):
    """The journal cannot be trusted or written any more; the process must stop."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """A log entry, after all those before it."""

    command: bytes
    index: _Number
    term: _Number


class _Vote(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    term: _Number
    voted_for: str | None


class _Keep(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """Only the first `count` entries stay."""

    count: _Number


class _Commit(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    index: _Number


class _Entries(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """Several at once: as one record they are there together, or not at all."""

    entries: tuple[Entry, ...]


class _Identity(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    identity: str


class _Voter(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    founders: dict[str, str]


_Record = Entry | _Vote | _Keep | _Commit | _Entries | _Identity | _Voter
_decoder: Final[msgspec.msgpack.Decoder[_Record]] = msgspec.msgpack.Decoder(_Record)


class Journal:
    """The journal in a directory of its own, which no other process may use meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Open or create it.

        Raises:
            JournalError: another process uses it, it is damaged, or the disk refuses.

        """
        self.directory: Final = directory
        self._path: Final = directory / "journal"
        #: In order; indexes are consecutive.
        self.entries: list[Entry] = []
        self.term = 0
        self.voted_for: str | None = None
        #: A lower bound of what is committed; on disk after `flush_commit`.
        self.commit_index = 1
        self._flushed_commit = 1
        #: Random, made with the file: a node that lost its directory has another one.
        self.identity = ""
        #: Whether this node's votes and acknowledgements count.
        self.is_voter = False
        #: The identities with which the group began, by endpoint, if this node knows them.
        self.founders: dict[str, str] = {}
        self._file = self._directory = self._note = -1
        #: Another one with each file, so that a note about the file before does not count.
        self._salt = 0
        #: Bytes of the file; all of them are on stable storage.
        self._size = 0
        self._failed = False
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
            self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            _sync(directory.parent)  # or a power cut could take all of it away
        except OSError as error:
            raise self._error("cannot use its directory", error) from error
        try:
            self._lock()
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

    def _open(self) -> None:
        data, note = self._read("journal"), self._read("flushed")
        if len(data) <= len(_OLD_MAGIC) and not data.strip(b"\0" + _OLD_MAGIC):
            if note_of(note) is not None:
                raise self._error(f"is missing or empty, but `flushed` is beside it: {_REMEDY}")
            self.identity = secrets.token_hex(16)
            self._rewrite()  # new, or cut off by a crash before its first record
        elif data.startswith(_OLD_MAGIC):
            self._replay(data, len(_OLD_MAGIC), 0)
            self._rewrite()
        elif data.startswith(_MAGIC):
            self._resume(data, note)
        else:
            what = f"is no journal of this version, or damaged in its first {len(_MAGIC)} bytes"
            raise self._error(f"{what}: {_REMEDY}")
        self._start_note()

    def _read(self, name: str) -> bytes:
        try:
            return (self.directory / name).read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise self._error("cannot be read", error) from error

    def _resume(self, data: bytes, note: bytes) -> None:
        """Take the records of a file, cut off a torn end, and make ready to append."""
        header = note_of(data[len(_MAGIC) : HEADER_BYTES])
        if header is None:
            raise self._error(f"is damaged in its first {HEADER_BYTES} bytes: {_REMEDY}")
        self._salt, flushed = header
        noted = note_of(note)
        if noted is not None and noted[0] == self._salt:
            flushed = max(flushed, noted[1])
        elif noted is None and note:
            structlog.get_logger().warning(
                "the note beside the consensus journal is damaged, and is written again",
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
        """Take all records from byte `at` on; return where the last whole one ends.

        The first `flushed` bytes are known to have been on stable storage.
        """
        while (step := _record_at(data, at)) is not None:
            record, end = step
            self._replay_record(record, at)
            at = end
        if _any_record_after(data, at):
            raise self._error(f"is damaged at byte {at}, in front of whole records: {_REMEDY}")
        if at < flushed:
            raise self._error(
                f"is damaged at byte {at}, but its first {flushed} bytes were on stable storage:"
                f" {_REMEDY}"
            )
        if at < len(data):
            structlog.get_logger().warning(
                "a torn end of the consensus journal was cut off",
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
                raise self._error(f"has a gap in front of entry {entry.index}, byte {at}")
            self.entries.append(entry)

    def since(self, index: int | None, count: int) -> list[Entry]:
        """Return up to `count` entries from `index` on; none if that one is not held."""
        if index is None or not self.entries or index < self.entries[0].index:
            return []
        start = index - self.entries[0].index
        return self.entries[start : start + count]

    # --- writing ---

    def append(self, entry: Entry) -> None:
        """Add the next entry; it is on stable storage when this returns.

        Raises:
            JournalError: it may not be.

        """
        assert not self.entries or entry.index == self.entries[-1].index + 1, "a gap in the log"
        self._write(entry)
        self.entries.append(entry)

    def extend(self, entries: Sequence[Entry]) -> None:
        """Add the next entries; they are on stable storage, all of them, when this returns.

        Raises:
            JournalError: they may not be.

        """
        if entries:
            indexes = [entry.index for entry in (*self.entries[-1:], *entries)]
            assert indexes == list(range(indexes[0], indexes[-1] + 1)), "a gap in the log"
            self._write(_Entries(tuple(entries)))
            self.entries.extend(entries)

    def delete_from(self, index: int) -> None:
        """Delete the entry with this index, which is held, and all behind it, durably."""
        assert self.since(index, 1), "deletes what it does not hold"
        self.keep_first(index - self.entries[0].index)

    def keep_first(self, count: int) -> None:
        """Delete all entries but the first `count`, durably."""
        if count < len(self.entries):
            self._write(_Keep(count))
            del self.entries[count:]

    def drop_first(self, count: int) -> None:
        """Delete the first `count` entries, durably and at once or not at all."""
        if count > 0:
            self._sync_directory()  # the snapshot that stands for them was renamed into place
            held, self.entries = self.entries, self.entries[count:]
            if not self._rewrite(can_wait=True):
                self.entries = held  # a later trim takes them along

    def clear(self) -> None:
        """Delete all entries, durably and at once or not at all; the term and vote stay."""
        if self.entries:
            self._sync_directory()
            self.entries = []
            self._rewrite()

    def begin_with(self, previous: Entry, last: Entry) -> None:
        """Begin with the last two entries of a snapshot, durably and at once or not at all.

        What is held behind them stays, unless something else than they is held in their places.

        Raises:
            JournalError: there is a gap between the snapshot and the journal, or the disk refuses.

        """
        if self.entries and self.entries[0].index > previous.index:
            raise self._error(
                f"begins with entry {self.entries[0].index}, behind the snapshot beside it, which"
                f" ends with entry {last.index}: files of two copies of this directory were mixed"
            )
        if self.since(previous.index, 2) == [previous, last]:
            self.drop_first(previous.index - self.entries[0].index)
        else:
            self._sync_directory()
            self.entries = [previous, last]
            self._rewrite()

    def set_vote(self, term: int, voted_for: str | None) -> None:
        """Remember the term and whom this node voted for in it, durably."""
        if (term, voted_for) != (self.term, self.voted_for):
            self._write(_Vote(term, voted_for))
            self.term, self.voted_for = term, voted_for

    def set_voter(self, founders: Mapping[str, str]) -> None:
        """Remember that this node counts, and the identities of the founders, durably."""
        if not self.is_voter:
            self._write(_Voter(dict(founders)))
            self.is_voter, self.founders = True, dict(founders)

    def flush_commit(self) -> None:
        """Write the commit index, if it moved: a restart then need not wait for a leader."""
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
            raise self._error(f"took only {written} of {len(frame)} bytes: the disk is full")
        self._size += written
        self._write_note()

    def _rewrite(self, *, can_wait: bool = False) -> bool:
        """Write a new file and let it take the place of the old one.

        With `can_wait`, a system without space or descriptors is no error: return False, and the
        old file goes on as it was.
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
        fresh = self._path.with_suffix(".new")
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

    # --- the note of what is flushed ---

    def _start_note(self) -> None:
        """Open the note and make it durable; without one, a damaged last record counts as torn."""
        path = self.directory / "flushed"
        with contextlib.suppress(OSError):
            self._note = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._write_note()
            os.fsync(self._note)
            os.fsync(self._directory)

    def _write_note(self) -> None:
        """Note how much is on stable storage. No write waits for it: late, it states less."""
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
        """Close the files and give up the lock. Idempotent."""
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


def _sync(directory: Path) -> None:
    """Make the names in a directory survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def pack_note(salt: int, size: int) -> bytes:
    """Return a note: of the file with this salt, the first `size` bytes are on stable storage."""
    facts = _FLUSHED.pack(salt, size, 0)[:-4]
    return facts + crc32c(facts).to_bytes(4, "little")


def note_of(contents: bytes) -> tuple[int, int] | None:
    """Return the salt and size of a note; None if it is none, or damaged."""
    if len(contents) != _FLUSHED.size:
        return None
    salt, size, _ = _FLUSHED.unpack(contents)
    return (salt, size) if contents == pack_note(salt, size) else None


def _write_new(path: Path, data: bytes) -> int:
    """Return the descriptor of a new file, whose bytes are on stable storage.

    Raises:
        OSError: the system refuses it; its descriptor is closed.

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
        raise
    return file


def _frame(record: _Record) -> bytes:
    payload = msgspec.msgpack.encode(record)
    assert len(payload) <= MAX_RECORD, "a command is too long for the journal"
    return len(payload).to_bytes(4, "little") + crc32c(payload).to_bytes(4, "little") + payload


def _record_at(data: bytes, at: int) -> tuple[_Record, int] | None:
    """Return the record that starts at byte `at`, and where it ends; None if none does."""
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
    """Whether a whole record starts anywhere after byte `at`, where none does."""
    return any(_record_at(data, later) is not None for later in range(at + 1, len(data) - _HEAD))
