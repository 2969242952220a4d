"""The consensus journal: entries, term and vote on disk before anyone may hear of them.

One append-only file of records, each with its length and a CRC32C; a record is on stable storage
(fdatasync) when the call that wrote it returns. Because of that at most the last record can be
torn, and it is cut off on open; damage anywhere else is refused, for the entry may be committed.
The front is trimmed by writing a new file and renaming it. A failed write or sync ends the journal:
what the kernel dropped cannot be written again (docs/protocol.md, sections 10 and 12).

Invariant: the file says what `entries`, `term`, `voted_for`, `commit_index`, `identity` and
`is_voter` say.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from crc32c import crc32c

from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_MAGIC: Final = b"ZIPRAFT2"
#: No record is longer, in bytes.
MAX_RECORD: Final = 64 * 1024 * 1024
#: Length and checksum, four bytes each, little endian.
_HEAD: Final = 8

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
        self._file = self._directory = -1
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
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
        except OSError as error:
            raise self._error("cannot be read", error) from error
        if len(data) <= len(_MAGIC) and not data.strip(b"\0" + _MAGIC):
            self.identity = secrets.token_hex(16)
            self._rewrite()  # new, or cut off by a crash before its first record
            return
        if not data.startswith(_MAGIC):
            raise self._error("is no journal of this version: move it away or restore it")
        end = self._replay(data)
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            if end < len(data):
                os.ftruncate(self._file, end)
            os.fsync(self._file)
        except OSError as error:
            raise self._error("cannot be opened for writing", error) from error

    def _replay(self, data: bytes) -> int:
        """Take all records of the file; return where the last whole one ends."""
        at = len(_MAGIC)
        while (step := _record_at(data, at)) is not None:
            record, end = step
            self._take(record, at)
            at = end
        if _any_record_after(data, at):
            raise self._error(
                f"is damaged at byte {at}, in front of whole records: do not use it;"
                " empty this directory, and the node learns everything from the other nodes"
                " (if there are none, restore a copy)"
            )
        return at

    def _take(self, record: _Record, at: int) -> None:
        match record:
            case Entry():
                self._take_entries((record,), at)
            case _Entries():
                self._take_entries(record.entries, at)
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

    def _take_entries(self, entries: Sequence[Entry], at: int) -> None:
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
            self.entries = self.entries[count:]
            self._rewrite()

    def clear(self) -> None:
        """Delete all entries, durably and at once or not at all; the term and vote stay."""
        self.drop_first(len(self.entries))

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
        self._refuse_failed()
        try:
            written = os.write(self._file, frame)
            os.fdatasync(self._file)
        except OSError as error:
            self._failed = True
            raise self._error("cannot be written", error) from error
        if written != len(frame):
            self._failed = True
            raise self._error(f"took only {written} of {len(frame)} bytes: the disk is full")

    def _rewrite(self) -> None:
        self._refuse_failed()
        records: list[_Record] = [
            _Identity(self.identity),
            _Vote(self.term, self.voted_for),
            _Commit(self.commit_index),
            *self.entries,
        ]
        if self.is_voter:
            records.insert(1, _Voter(self.founders))
        data = b"".join([_MAGIC, *map(_frame, records)])
        fresh = self._path.with_suffix(".new")
        try:
            fresh.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            file = os.open(fresh, flags, 0o600)
            if self._file >= 0:
                os.close(self._file)
            self._file = file
            with os.fdopen(file, "wb", closefd=False) as stream:
                stream.write(data)
            os.fsync(file)
            fresh.rename(self._path)
            os.fsync(self._directory)
        except OSError as error:
            self._failed = True
            raise self._error("cannot be rewritten", error) from error
        self._flushed_commit = self.commit_index

    def _sync_directory(self) -> None:
        try:
            os.fsync(self._directory)
        except OSError as error:
            self._failed = True
            raise self._error("cannot sync its directory", error) from error

    def _refuse_failed(self) -> None:
        if self._failed:
            raise self._error("failed before; the process must stop")

    def close(self) -> None:
        """Close the files and give up the lock. Idempotent."""
        self._failed = True
        for descriptor in (self._file, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._directory = -1

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
