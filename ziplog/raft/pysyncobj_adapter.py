"""Adapter for PySyncObj: our journal, snapshot file and state machine under the library's names.

Exactly release 0.3.17 is used. `raft_node` replaces its receive path, `connections` its
connections; the rest of ziplog uses `raft` only (docs/protocol.md, section 12).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pysyncobj.config
import pysyncobj.syncobj

from ziplog.core import distance
from ziplog.core.units import NS_PER_S
from ziplog.raft.journal import Entry, Journal, JournalError
from ziplog.raft.raft_node import RaftNode
from ziplog.raft.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.raft.state_machine import Consumer

#: Maximum number of commands proposed and not applied yet.
MAX_PROPOSALS: Final = 1000
#: So many of these places are for urgent commands only.
URGENT_PROPOSALS: Final = 100
#: Length of the journal, and age in seconds, from which on it is trimmed after a snapshot.
_COMPACT_ENTRIES: Final = 4096
_COMPACT_S: Final = 600


class _LibrarySnapshot:
    """Adapts our snapshot file to the library's serializer interface."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer: Final = consumer

    def write(self, path: str, entries: tuple[Any, ...]) -> None:
        """Write a snapshot that ends with `entries`: (last, the one before, _)."""
        last, previous = Entry(*entries[0]), Entry(*entries[1])
        Snapshot(previous, last, self._consumer.take_snapshot()).write(Path(path))


def _unused_deserializer(path: str) -> None:
    raise AssertionError(f"the library reads {path} by itself")


class _LibraryJournal:
    """Adapts our journal to the library's journal interface."""

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
        return (
            [_as_tuple(entry) for entry in found] if isinstance(found, list) else _as_tuple(found)
        )

    def __len__(self) -> int:
        return len(self._journal.entries)

    def _destroy(self) -> None:
        """Do nothing: the owner closes the journal."""

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
    """Replace the library's `createJournal`: the configured value is the journal itself."""
    return journal


pysyncobj.syncobj.createJournal = _given_journal


def join(
    nodes: Mapping[str, str],
    name: str,
    journal: Journal,
    consumer: Consumer,
    password: str | None,
    *,
    bind: str | None = None,
    rtt_ms: int = 0,
) -> RaftNode:
    """Create the library's node `name` of `nodes` (name to endpoint); it listens on return.

    `bind`: where it listens; None: at its endpoint. `rtt_ms`: the longest round trip to a node.

    Raises:
        JournalError: the snapshot is damaged, or does not belong to the journal.

    """
    path = journal.directory / "snapshot"
    if path.exists():  # complete the trim, if a crash interrupted it after the snapshot
        found = Snapshot.read(path)
        journal.begin_with(found.previous, found.last)
    elif journal.entries and journal.entries[0].index != 1:
        raise JournalError(
            f"{path} is missing: restore it, or empty this directory, and the node copies"
            " everything from the other nodes"
        )
    others = [endpoint for node, endpoint in nodes.items() if node != name]
    conf = configuration(
        bind or nodes[name],
        index=list(nodes).index(name),
        count=len(nodes),
        rtt_ms=rtt_ms,
        journalFile=_LibraryJournal(journal),
        fullDumpFile=str(path),
        serializer=_LibrarySnapshot(consumer).write,
        deserializer=_unused_deserializer,  # required; `RaftNode` reads the file itself
        password=password,
    )
    return RaftNode(nodes[name], others, conf, consumer, journal, path)


def configuration(
    bind: str, *, index: int, count: int, rtt_ms: int = 0, **given: Any
) -> pysyncobj.config.SyncObjConf:
    """Return the library's configuration; asserts that it knows all names, as it does not check.

    `index`: the node's place among so many nodes.
    """
    alone = count == 1
    first, last = _election_s(index, count, rtt_ms)
    options = {
        **given,
        "autoTick": False,  # our own thread ticks, so that its end is detected
        "bindAddress": bind,
        "maxBindRetries": 1,
        "bindRetryTime": 1.0,
        "dynamicMembershipChange": False,
        "useFork": False,
        "appendEntriesUseBatch": False,
        "connectionRetryTime": 0.2,
        "connectionTimeout": distance.connection_silence_ns(rtt_ms) / NS_PER_S,
        "leaderFallbackTimeout": distance.leader_fallback_ns(rtt_ms) / NS_PER_S,
        "logCompactionMinEntries": _COMPACT_ENTRIES,
        "logCompactionMinTime": _COMPACT_S,
        # A single node has no peers to wait for.
        "appendEntriesPeriod": 0.01 if alone else 0.1,
        "raftMinTimeout": first,
        "raftMaxTimeout": last,
    }
    conf = pysyncobj.config.SyncObjConf(**options)
    unknown = set(options) - set(vars(conf))
    assert not unknown, f"pysyncobj knows no {unknown}"
    return conf


def _election_s(index: int, count: int, rtt_ms: int) -> tuple[float, float]:
    """Return the range of a node's election timeout, in seconds.

    The ranges of the nodes are apart. Otherwise two nodes may stand at the same time and split the
    votes, and another timeout passes before the next election.
    """
    if count == 1:
        return 0.05, 0.06
    first, last = distance.min_election_ns(rtt_ms), distance.max_election_ns(rtt_ms)
    part_ns = (last - first) / count
    start_ns = first + index * part_ns
    return start_ns / NS_PER_S, (start_ns + part_ns / 2) / NS_PER_S


def _as_tuple(entry: Entry) -> tuple[bytes, int, int]:
    """Return an entry in the library's format."""
    return entry.command, entry.index, entry.term
