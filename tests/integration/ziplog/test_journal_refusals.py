"""Each system call of a Raft journal fails once: no entry is lost."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests import refusing
from tests.refusing import System
from ziplog.raft.journal import Entry, Journal, JournalError
from ziplog.raft.snapshot import store

if TYPE_CHECKING:
    from pathlib import Path

ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO)
CALLS = (*refusing.OPENS, *refusing.WRITES, *refusing.SYNCS, *refusing.NAMES)


class Run:
    """Writes entries, a trim after a snapshot, a vote, and further entries."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.acknowledged: list[Entry] = []
        #: Entries before this one may be trimmed.
        self.trimmed = 1
        self.voted = 0
        self.outcome = "goes on"

    def all(self) -> None:
        try:
            journal = Journal(self._directory)
        except JournalError:
            self.outcome = "does not start"
            return
        try:
            self._write(journal)
        except JournalError:
            self.outcome = "ends"
        finally:
            journal.close()

    def _write(self, journal: Journal) -> None:
        for index in range(1, 6):
            self._append(journal, index)
        self.trimmed = 4
        journal.drop_first(3)
        if journal.entries[0].index != self.trimmed:
            self.outcome = "trims later"
        journal.set_vote(7, "node:1")
        self.voted = 7
        for index in range(6, 9):
            self._append(journal, index)
        self.trimmed = 5
        journal.drop_first(5 - journal.entries[0].index)

    def _append(self, journal: Journal, index: int) -> None:
        entry = Entry(b"command %d" % index, index, 1)
        journal.append(entry)
        self.acknowledged.append(entry)


def check(directory: Path, run: Run) -> None:
    journal = Journal(directory)
    journal.close()
    first = journal.entries[0].index if journal.entries else 1
    assert first <= run.trimmed
    held = {entry.index: entry for entry in journal.entries}
    for entry in run.acknowledged:
        assert entry.index < first or held[entry.index] == entry
    assert journal.term >= run.voted


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_no_entry_is_lost_when_a_system_call_is_refused(tmp_path: Path, error: int) -> None:
    outcomes: Counter[tuple[str, str]] = Counter()
    for number in range(1, 1000):
        directory = tmp_path / str(number)
        system, run = System(number, error), Run(directory)
        with system.installed(CALLS):
            run.all()
        check(directory, run)
        if not system.refused:
            break
        outcomes[system.refused, run.outcome] += 1
    assert outcomes["fdatasync", "ends"] > 5
    # The first trim's file, and its bytes, are refused; the journal continues with the old file.
    waits = outcomes["open", "trims later"] + outcomes["unlink", "trims later"]
    assert waits == (0 if error == errno.EIO else 2)
    assert (outcomes["open", "ends"] > 0) == (error == errno.EIO)


def test_a_trim_without_descriptors_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    entries = [Entry(b"command", index, 1) for index in range(1, 7)]
    for entry in entries[:5]:
        journal.append(entry)

    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        journal.drop_first(2)
    assert journal.entries == entries[:5]
    journal.append(entries[5])
    journal.drop_first(3)
    assert journal.entries == entries[3:]
    journal.close()
    again = Journal(tmp_path)
    again.close()
    assert again.entries == entries[3:]


def test_a_start_removes_what_another_process_had_not_finished(tmp_path: Path) -> None:
    """On a full disk, it has the space that the node needs."""
    Journal(tmp_path).close()
    unfinished = [tmp_path / name for name in ("journal.new", "snapshot.tmp", "snapshot.received")]
    for path in unfinished:
        path.write_bytes(b"a part")
    Journal(tmp_path).close()
    assert not any(path.exists() for path in unfinished)


def without_space(descriptor: int) -> None:
    """Refuse to sync a file; directories need no space."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_trim_that_the_disk_refuses_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    entries = [Entry(b"command", index, 1) for index in range(1, 6)]
    for entry in entries:
        journal.append(entry)
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", without_space)
        journal.drop_first(2)
    assert journal.entries == entries
    assert sorted(tmp_path.iterdir()) == before
    journal.close()


def test_a_snapshot_that_the_disk_refuses_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", without_space)
    with pytest.raises(OSError, match="No space left"):
        store(b"a snapshot", tmp_path / "snapshot.tmp")
    assert not list(tmp_path.iterdir())
