"""PySyncObj in our clothes: our journal, snapshot file and machine under the names that it knows.

Exactly release 0.3.17 is used. What a node takes from its peers is in `receive`, its connections in
`links`; the rest of ziplog sees only `raft` (docs/protocol.md, section 12).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pysyncobj.config
import pysyncobj.syncobj

from ziplog.raft.journal import Entry, Journal, JournalError
from ziplog.raft.raft_node import RaftNode
from ziplog.raft.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.raft.state_machine import Consumer

#: Commands handed over and not applied yet.
MAX_PROPOSALS: Final = 1000
#: The journal is trimmed behind a snapshot when it is that long, or so old (seconds).
_COMPACT_ENTRIES: Final = 4096
_COMPACT_S: Final = 600


class _LibrarySnapshot:
    """Our snapshot file under the library's names."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer: Final = consumer

    def write(self, path: str, entries: tuple[Any, ...]) -> None:
        """Write a snapshot that ends with `entries`: (last, the one before, _)."""
        last, previous = Entry(*entries[0]), Entry(*entries[1])
        Snapshot(previous, last, self._consumer.take_snapshot()).write(Path(path))


def _not_asked(path: str) -> None:
    raise AssertionError(f"the library reads {path} by itself")


class _LibraryJournal:
    """Our journal under the library's names."""

    def __init__(self, journal: Journal) -> None:
        self._journal: Final = journal

    def add(self, command: bytes, idx: int, term: int) -> None:
        self._journal.append(Entry(command, idx, term))

    def clear(self) -> None:
        self._journal.clear()

    def deleteEntriesFrom(self, entryFrom: int) -> None:  # noqa: N802, N803
        self._journal.keep_first(entryFrom)

    def deleteEntriesTo(self, entryTo: int) -> None:  # noqa: N802, N803
        self._journal.drop_first(entryTo)

    def __getitem__(self, item: int | slice) -> Any:
        found = self._journal.entries[item]
        return [_plain(entry) for entry in found] if isinstance(found, list) else _plain(found)

    def __len__(self) -> int:
        return len(self._journal.entries)

    def _destroy(self) -> None:
        """Nothing: its owner closes the journal."""

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:  # noqa: N802, N803
        self._journal.commit_index = raftCommitIndex

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        return self._journal.commit_index

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:  # noqa: N802, N803
        self._journal.set_vote(term, votedForNodeId)

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        return self._journal.voted_for

    def onOneSecondTimer(self) -> None:  # noqa: N802
        self._journal.flush_commit()


def _given_journal(journal: _LibraryJournal) -> _LibraryJournal:
    """Stand in for the library's `createJournal`: the configured journal is the journal."""
    return journal


pysyncobj.syncobj.createJournal = _given_journal


def join(
    nodes: Mapping[str, str],
    name: str,
    journal: Journal,
    consumer: Consumer,
    password: str | None,
) -> RaftNode:
    """Return the library's node `name` of `nodes` (name to endpoint); it listens already.

    Raises:
        JournalError: the snapshot is damaged, or does not belong to the journal.

    """
    path = journal.directory / "snapshot"
    if path.exists():  # finish what a crash between snapshot and trim left undone
        found = Snapshot.read(path)
        journal.begin_with(found.previous, found.last)
    elif journal.entries and journal.entries[0].index != 1:
        raise JournalError(
            f"{path} is missing: restore it, or empty this directory, and the node learns"
            " everything from the other nodes"
        )
    others = [endpoint for node, endpoint in nodes.items() if node != name]
    conf = configuration(
        nodes[name],
        alone=not others,
        journalFile=_LibraryJournal(journal),
        fullDumpFile=str(path),
        serializer=_LibrarySnapshot(consumer).write,
        deserializer=_not_asked,  # it wants both; `RaftNode` reads the file itself
        password=password,
    )
    return RaftNode(nodes[name], others, conf, consumer, journal, path)


def configuration(bind: str, *, alone: bool, **given: Any) -> pysyncobj.config.SyncObjConf:
    """Return the library's configuration, whose unknown names it would take in silence."""
    options = {
        **given,
        "autoTick": False,  # our own thread ticks, and its death is noticed
        "bindAddress": bind,
        "maxBindRetries": 1,
        "bindRetryTime": 1.0,
        "dynamicMembershipChange": False,
        "useFork": False,
        "appendEntriesUseBatch": False,
        "commandsQueueSize": MAX_PROPOSALS,
        "connectionRetryTime": 0.2,
        "leaderFallbackTimeout": 1.0,
        "logCompactionMinEntries": _COMPACT_ENTRIES,
        "logCompactionMinTime": _COMPACT_S,
        # Alone there is nobody to wait for.
        "appendEntriesPeriod": 0.01 if alone else 0.1,
        "raftMinTimeout": 0.05 if alone else 0.5,
        "raftMaxTimeout": 0.06 if alone else 1.2,
    }
    conf = pysyncobj.config.SyncObjConf(**options)
    unknown = set(options) - set(vars(conf))
    assert not unknown, f"pysyncobj knows no {unknown}"
    return conf


def _plain(entry: Entry) -> tuple[bytes, int, int]:
    """Return an entry as the library keeps them."""
    return entry.command, entry.index, entry.term
