"""A consensus node without threads and connections: the test is its network and its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ziplog.deploy.new_shard import free_ports
from ziplog.raft import codec
from ziplog.raft.journal import HEADER_BYTES, Entry, Journal
from ziplog.raft.raft import Raft
from ziplog.raft.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path


#: The first entry of every log.
FIRST = (b"\1", 1, 0)
TERM = 5
#: The content of every later entry.
WORD = b"\0word"


class Words:
    """A state machine that keeps the applied commands."""

    def __init__(self) -> None:
        self.words: list[bytes] = []

    def apply(self, command: bytes) -> bytes:
        self.words.append(command)
        return b"%d" % len(self.words)

    def snapshot(self) -> bytes:
        return b"\n".join(self.words)

    def restore(self, snapshot: bytes) -> None:
        self.words = snapshot.split(b"\n")


def free_endpoints(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count, "127.0.0.1")]


def entries(first: int, *terms: int) -> list[tuple[bytes, int, int]]:
    return [(WORD, first + n, term) for n, term in enumerate(terms)]


def snapshot(last: int, term: int, *, words: bytes = b"from the leader") -> bytes:
    previous, final = (Entry(*entry) for entry in entries(last - 1, term, term))
    return Snapshot(previous, final, words).encode()


class Wire:
    """Fake connections: sent messages, with the disk state at that time."""

    ready = True

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.votes: list[tuple[int, str | None]] = []
        self.ends: list[int] = []

    def send(self, node: Any, message: dict[str, Any]) -> bool:
        again = self.journal._path.read_bytes()
        reader = Journal.__new__(Journal)
        reader.entries, reader.term, reader.voted_for = [], 0, None
        reader._path = self.journal._path  # type: ignore[misc]
        reader._replay(again, HEADER_BYTES, len(again))
        self.votes.append((reader.term, reader.voted_for))
        self.ends.append(reader.entries[-1].index)
        self.sent.append((node.id, message))
        return True

    def destroy(self) -> None:
        """Do nothing: the test closes the node's own connections."""


class Bench:
    """A node of three without threads and connections."""

    def __init__(
        self, directory: Path, held: list[tuple[bytes, int, int]], *, is_voter: bool = True
    ) -> None:
        self.directory = directory
        self.machine = Words()
        self.events: list[Any] = []
        if not directory.exists():
            journal = Journal(directory)
            for entry in (FIRST, *held):
                journal.append(Entry(*entry))
            if is_voter:
                journal.set_voter({})
            if held:
                journal.set_vote(held[-1][2], None)
            journal.close()
        names = dict(zip("abc", free_endpoints(3), strict=True))
        self.raft = Raft(
            "a", names, directory, self.machine,
            on_event=self.events.append, on_fatal=self.events.append,
        )  # fmt: skip
        self.node = self.raft._sync
        self.journal = self.raft._journal
        self.wire = Wire(self.journal)
        self._real_wire = self.node._SyncObj__transport
        self.node._SyncObj__transport = self.wire
        peers = {node.id: node for node in self.node.otherNodes}
        self.b, self.c = peers[names["b"]], peers[names["c"]]
        for peer in (self.b, self.c):
            self.node._SyncObj__onNodeConnected(peer)
        self.never_elected()

    def never_elected(self) -> None:
        self.node._SyncObj__raftElectionDeadline = float("inf")

    def hear(self, peer: Any, **message: Any) -> None:
        self.node._SyncObj__onMessageReceived(peer, codec.loads(codec.dumps(message)))

    def append(
        self, previous: int, previous_term: int, *terms: int, commit: int = 1, term: int = TERM,
        **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Deliver entries of the leader b; return the reply."""
        self.hear(
            self.b, type="append_entries", term=term, commit_index=commit, prevLogIdx=previous,
            prevLogTerm=previous_term, entries=entries(previous + 1, *terms), **more,
        )  # fmt: skip
        return self.answer()

    def snapshot(self, data: bytes, size: int = 50, commit: int = 1) -> dict[str, Any]:
        """Deliver a snapshot of b, in pieces; return the last reply."""
        pieces = [data[at : at + size] for at in range(0, len(data), size)] + [b""]
        for number, piece in enumerate(pieces):
            self.hear(
                self.b, type="append_entries", term=TERM, commit_index=commit,
                serialized=(piece, number == 0, number == len(pieces) - 1),
            )  # fmt: skip
        return self.answer()

    def answer(self) -> dict[str, Any]:
        _, message = self.wire.sent[-1]
        assert message["type"] == "next_node_idx"
        return message

    def lead(self, term: int = TERM) -> None:
        self.node._SyncObj__setCurrentTerm(term, self.node.selfNode.id)
        self.node._SyncObj__onBecomeLeader()

    def acknowledge(
        self, peer: Any, next_index: int, *, term: int = TERM, success: bool = True,
        reset: bool = False, joining: str | None = None,
    ) -> None:  # fmt: skip
        self.hear(
            peer, type="next_node_idx", term=term, next_node_idx=next_index,
            success=success, reset=reset, joining=joining,
        )  # fmt: skip

    def tick(self) -> None:
        self.node.doTick(0.0)

    def match(self, peer: Any) -> int:
        return int(self.node._SyncObj__raftMatchIndex[peer])

    def following(self, peer: Any) -> int:
        return int(self.node._SyncObj__raftNextIndex[peer])

    @property
    def terms(self) -> list[int]:
        return [entry.term for entry in self.journal.entries]

    @property
    def committed(self) -> int:
        return int(self.node.raftCommitIndex)

    def close(self) -> None:
        self.node._SyncObj__transport = self._real_wire
        self.raft.stop()
