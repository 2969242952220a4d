"""Random histories of consensus nodes on a simulated network: all that Raft promises, each step.

Messages wait, connections break, nodes time out, crash, lose their directories (never a majority of
them) and trim their journals, as chance wills. At most one leader a term; what one node committed,
no other commits otherwise; a leader has all that was ever committed.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from ziplog.runtime import journal as journal_module
from ziplog.runtime import library, plain, receive, snapshot
from ziplog.runtime.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEVER = float("inf")


class Words:
    """A machine that keeps what it was told."""

    def __init__(self) -> None:
        self.words: list[bytes] = []

    def apply(self, command: bytes) -> bytes:
        self.words.append(command)
        return b""

    def snapshot(self) -> bytes:
        return b" ".join(self.words)

    def restore(self, state: bytes) -> None:
        self.words = state.split()


class Promise(NamedTuple):
    """An entry that was committed, and the term of the leader that did it."""

    term: int
    command: bytes
    committed_in: int


class Wire:
    """A node's connections, in place of the library's."""

    ready = True

    def __init__(self, world: World, sync: Any, own: Any, _others: Any) -> None:
        self.world, self.name = world, own.id
        self.receive: Callable[[Any, Any], None]
        sync.addOnTickCallback(lambda: None)

    def setOnMessageReceivedCallback(self, callback: Any) -> None:  # noqa: N802
        self.receive = callback

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("setOn")  # the world calls the node itself
        return lambda *_: None

    def send(self, node: Any, message: Any) -> bool:
        if (link := self.world.links.get((self.name, node.id))) is not None:
            link.append(plain.dumps(message))
        return link is not None

    def destroy(self) -> None:
        """Nothing is open."""


class World:
    """The nodes, what is under way between them, and what was promised."""

    def __init__(self, directory: Path, seed: int, size: int) -> None:
        self.chance = random.Random(seed)
        self.directory = directory
        self.names = [f"127.0.0.1:{port}" for port in range(1, size + 1)]
        self.up: dict[str, receive.Node] = {}
        self.journals: dict[str, Journal] = {}
        #: Messages from one node to another, in order; an entry means that they are connected.
        self.links: dict[tuple[str, str], deque[bytes]] = {}
        #: Nodes that do not count, because their directory is new.
        self.new: set[str] = set()
        self.leaders: dict[int, str] = {}
        self.committed: dict[int, Promise] = {}
        self.seen: dict[str, int] = {}
        self.number = 0
        self.wipes = 0

    # --- what may happen ---

    def start(self, name: str) -> None:
        path = self.directory / name.rpartition(":")[2]
        self.journals[name] = Journal(path)
        consumer = library.Consumer(Words(), lambda _event: None, self._die)
        nodes = {endpoint: endpoint for endpoint in self.names}
        self.up[name] = library.join(nodes, name, self.journals[name], consumer, None)
        self.up[name].conf.leaderFallbackTimeout = 1e9
        self.seen[name] = 0
        self.tick(name)

    def _die(self, reason: str) -> None:
        raise AssertionError(reason)

    def crash(self, name: str) -> None:
        self.up.pop(name).close()
        self.journals.pop(name).close()
        for other in self.names:
            if (other, name) in self.links:
                # The other end may have received some of it before it notices.
                self.break_link(name, other)

    def wipe(self, name: str) -> None:
        self.wipes += 1
        self.crash(name)
        shutil.rmtree(self.directory / name.rpartition(":")[2])
        self.new.add(name)
        self.start(name)

    def connect(self, one: str, other: str) -> None:
        for a, b in ((one, other), (other, one)):
            self.links[a, b] = deque()
            self.up[a]._SyncObj__onNodeConnected(self.peer(a, b))

    def break_link(self, one: str, other: str) -> None:
        for a, b in ((one, other), (other, one)):
            for _ in range(self.chance.randint(0, len(self.links[a, b]))):
                self.deliver(a, b)
        for a, b in ((one, other), (other, one)):
            del self.links[a, b]
            if a in self.up:
                self.up[a]._SyncObj__onNodeDisconnected(self.peer(a, b))

    def deliver(self, sender: str, receiver: str) -> None:
        waiting = self.links[sender, receiver]
        if waiting and receiver in self.up:
            node = self.up[receiver]
            message = plain.loads(waiting.popleft())
            node._SyncObj__transport.receive(self.peer(receiver, sender), message)

    def tick(self, name: str, *, times_out: bool = False, beats: bool = False) -> None:
        node = self.up[name]
        node._SyncObj__raftElectionDeadline = 0.0 if times_out else NEVER
        node._SyncObj__newAppendEntriesTime = 0.0 if beats else NEVER
        node._tell_at = 0.0 if beats else NEVER
        node.doTick(0.0)

    def propose(self, name: str) -> None:
        self.number += 1
        self.up[name].hand_over(b"%d" % self.number, lambda *_: None)

    def peer(self, name: str, other: str) -> Any:
        return next(node for node in self.up[name].otherNodes if node.id == other)

    def step(self) -> None:
        """Let something happen."""
        chance = self.chance
        name = chance.choice(self.names)
        other = chance.choice([one for one in self.names if one != name])
        is_up = name in self.up
        match chance.choices(range(10), (200, 20, 10, 1, 10, 2, 10, 1, 0.5, 1))[0]:
            case 0 if waiting := [link for link in self.links if self.links[link]]:
                self.deliver(*chance.choice(waiting))
            case 1 if is_up:
                self.tick(name)
            case 2 if is_up:
                self.tick(name, beats=True)
            case 3 if is_up:
                self.tick(name, times_out=True)
            case 4 if is_up:
                self.propose(name)
            case 5 if (name, other) in self.links:
                self.break_link(name, other)
            case 6 if is_up and other in self.up and (name, other) not in self.links:
                self.connect(name, other)
            case 7 if is_up:
                self.crash(name)
            case 8 if is_up and len(self.new | {name}) <= (len(self.names) - 1) // 2:
                self.wipe(name)
            case 9 if is_up:
                self.up[name].forceLogCompaction()
            case _ if not is_up and chance.random() < 0.2:
                self.start(name)
        self.check()

    # --- what was promised ---

    def check(self) -> None:
        for name, node in self.up.items():
            if node.is_voter:
                self.new.discard(name)
            self._check_commits(name, node)
            if node._isLeader():
                self._check_leader(name, node)

    def _check_commits(self, name: str, node: receive.Node) -> None:
        held = self.journals[name]
        first = max(self.seen[name] + 1, held.entries[0].index)
        for entry in held.since(first, max(0, node.raftCommitIndex + 1 - first)):
            # The first to know is the leader that committed it.
            promised = Promise(entry.term, entry.command, node.raftCurrentTerm)
            former = self.committed.setdefault(entry.index, promised)
            assert former[:2] == promised[:2], (name, entry)
        self.seen[name] = max(self.seen[name], node.raftCommitIndex)

    def _check_leader(self, name: str, node: receive.Node) -> None:
        term = node.raftCurrentTerm
        assert self.leaders.setdefault(term, name) == name, f"two leaders in term {term}"
        entries = self.journals[name].entries
        for index, promised in self.committed.items():
            if promised.committed_in < term and index >= entries[0].index:
                found = self.journals[name].since(index, 1)
                assert [(entry.term, entry.command) for entry in found] == [promised[:2]], (
                    name,
                    index,
                )

    def settle(self) -> None:
        """Heal everything; all must agree in the end."""
        for name in self.names:
            if name not in self.up:
                self.start(name)
        for round_ in range(400):
            for one, other in itertools.combinations(self.names, 2):
                if (one, other) not in self.links:
                    self.connect(one, other)
            for name in self.names:
                self.tick(name, beats=True)
            for link in list(self.links):
                while self.links[link]:
                    self.deliver(*link)
            self.check()
            if self.is_settled():
                return
            if round_ % 10 == 9 and not any(node.leads() for node in self.up.values()):
                self.tick(self.chance.choice(self.names), times_out=True)
        states = [
            (n.is_voter, n.leads(), n.raftCurrentTerm, n.raftLastApplied) for n in self.up.values()
        ]
        raise AssertionError(f"it does not settle: {states}")

    def is_settled(self) -> bool:
        nodes = list(self.up.values())
        applied = {node.raftLastApplied for node in nodes}
        all_vote = all(node.is_voter for node in nodes)
        return all_vote and len(applied) == 1 and any(node.leads() for node in nodes)

    def close(self) -> None:
        self.links.clear()
        for name in list(self.up):
            self.crash(name)


@pytest.fixture
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here: what was written stays."""
    for module in (journal_module, snapshot):
        monkeypatch.setattr(module.os, "fsync", lambda _descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: None)


# The library leaves the snapshot that it sends to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")
@pytest.mark.usefixtures("_quick_disk")
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("seed", range(int(os.environ.get("ZIPLOG_SEEDS", "3"))))
def test_no_history_loses_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, size: int
) -> None:
    world = World(tmp_path, seed, size)
    monkeypatch.setattr(receive, "Transport", lambda *given: Wire(world, *given))
    try:
        for name in world.names:
            world.new.add(name)
            world.start(name)
        world.settle()
        for _ in range(8000):
            world.step()
        world.settle()
        assert len(world.committed) > 20
        assert len(world.leaders) > 1
        assert world.wipes > 0
    finally:
        world.close()
