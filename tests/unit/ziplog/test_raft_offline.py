"""A Raft group's files while no node runs: the state of a log, and a new group with a state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ziplog.raft.journal import Entry, Journal, JournalError
from ziplog.raft.offline import LogEnd, found_group, read_state
from ziplog.raft.raft_node import NO_OP, REGULAR
from ziplog.raft.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path


class Words:
    """A state machine that keeps its commands."""

    def __init__(self) -> None:
        self.words: list[bytes] = []

    def apply(self, command: bytes) -> bytes:
        self.words.append(command)
        return b""

    def snapshot(self) -> bytes:
        return b" ".join(self.words)

    def restore(self, snapshot: bytes) -> None:
        self.words = snapshot.split()


def test_the_whole_log_is_applied_without_the_entries_that_begin_terms(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    commands = [NO_OP, REGULAR + b"a", NO_OP, REGULAR + b"b"]
    journal.extend([Entry(command, i + 1, 3) for i, command in enumerate(commands)])
    with pytest.raises(JournalError, match="another process uses it"):
        read_state(tmp_path, Words())
    journal.close()
    words = Words()
    assert read_state(tmp_path, words) == LogEnd(3, 4)
    assert words.words == [b"a", b"b"]


def test_entries_of_the_snapshot_are_applied_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    entries = [Entry(REGULAR + b"%d" % i, i, 1) for i in range(1, 5)]
    journal.extend(entries)
    journal.close()
    Snapshot(entries[1], entries[2], b"1 2 3").write(tmp_path / "snapshot")
    words = Words()
    assert read_state(tmp_path, words) == LogEnd(1, 4)
    assert words.words == [b"1", b"2", b"3", b"4"]


def test_all_nodes_of_a_new_group_are_voters_with_its_state(tmp_path: Path) -> None:
    directories = {f"127.0.0.1:{port}": tmp_path / f"mms-{port}" for port in (1, 2, 3)}
    found_group(directories, b"x y", 1000)
    founders = []
    for directory in directories.values():
        words = Words()
        assert read_state(directory, words) == LogEnd(1000, 1000)
        assert words.words == [b"x", b"y"]
        journal = Journal(directory)
        assert (journal.is_voter, journal.term, journal.commit_index) == (True, 1000, 1000)
        assert journal.founders["127.0.0.1:1"]
        assert journal.identity in journal.founders.values()
        founders.append(journal.founders)
        journal.close()
    assert founders[0] == founders[1] == founders[2]
