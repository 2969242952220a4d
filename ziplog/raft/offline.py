"""A Raft group's files while no node of the group runs: reads a state, founds a group with a state.

The new group starts from a snapshot, in a term and at an index above those of all former groups of
its nodes. So a node that still has a former directory cannot lead, and installs the snapshot
(docs/protocol.md, sections 12 and 16).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ziplog.raft.journal import Entry, Journal
from ziplog.raft.raft_node import NO_OP, REGULAR
from ziplog.raft.snapshot import Snapshot
from ziplog.segments.durable_files import sync_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ziplog.raft.state_machine import Machine


class LogEnd(NamedTuple):
    """The place of a log's last entry."""

    term: int
    #: Its number in the log.
    last: int


def read_state(directory: Path, machine: Machine) -> LogEnd:
    """Apply a node's whole log to an empty machine, uncommitted entries too; return its end.

    Raises:
        JournalError: a process uses the directory, or it is damaged.

    """
    journal = Journal(directory)
    try:
        end = LogEnd(0, 0)
        path = directory / "snapshot"
        if path.exists():
            found = Snapshot.read(path)
            machine.restore(found.state)
            end = LogEnd(found.last.term, found.last.index)
        for entry in journal.entries:
            if entry.index > end.last:
                end = LogEnd(entry.term, entry.index)
                if entry.command != NO_OP:
                    machine.apply(entry.command.removeprefix(REGULAR))
        return end
    finally:
        journal.close()


def found_group(directories: Mapping[str, Path], state: bytes, number: int) -> None:
    """Write the directories of a new group, all of whose nodes are voters, with a state.

    Args:
        directories: the nodes' Raft endpoints, and their directories, which do not exist.
        state: of the state machine.
        number: the term and index of its last entry; above those of former groups.

    Raises:
        JournalError: a directory cannot be written.
        OSError: likewise.

    """
    previous, last = Entry(NO_OP, number - 1, number), Entry(NO_OP, number, number)
    journals = {endpoint: Journal(path) for endpoint, path in directories.items()}
    founders = {endpoint: journal.identity for endpoint, journal in journals.items()}
    try:
        for journal in journals.values():
            fresh = journal.directory / "snapshot.new"
            Snapshot(previous, last, state).write(fresh)
            fresh.rename(journal.directory / "snapshot")
            journal.set_vote(number, None)
            journal.set_voter(founders)
            journal.commit_index = number
            journal.begin_with(previous, last)
            sync_directory(journal.directory)
    finally:
        for journal in journals.values():
            journal.close()
