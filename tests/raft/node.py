"""One Raft node in a process of its own, controlled through a pipe.

Its machine is a ledger: the ids of commands in the order of their first arrival. Changes for a test
(a slow disk, short time-outs, the library's own receive path) apply to this process only.
"""

from __future__ import annotations

import hashlib
import os
import queue
import resource
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pysyncobj.syncobj

from ziplog.core.node import Committed
from ziplog.raft import journal, pysyncobj_adapter, raft, raft_node
from ziplog.raft.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from ziplog.core.node import Event

#: Exit code of a node that could not continue safely.
FATAL = 70
#: In place of a command's padding.
BARRIER = None
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class Settings(msgspec.Struct, frozen=True):
    """Changes of the node in this process. Times are in seconds."""

    #: Extra time of every sync of the journal.
    sync_s: float = 0.0
    #: Interval between snapshots with a trim of the journal; 0: when they are due.
    compact_s: float = 0.0
    #: Factor by which all time-outs are shorter.
    haste: float = 1.0
    #: Use the library's own code for entries, snapshots and acknowledgements.
    shipped: bool = False


class Ledger:
    """The machine: the distinct ids in order, and a digest of all applied commands.

    A barrier is a command that changes nothing.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.position: dict[int, int] = {}
        self.digest = b""

    def apply(self, command: bytes) -> bytes:
        number, padding = decode(command)
        if padding is BARRIER:
            return b""
        self.digest = hashlib.blake2b(self.digest + command, digest_size=16).digest()
        if number not in self.position:
            self.position[number] = len(self.ids)
            self.ids.append(number)
        return encode(self.position[number])

    def snapshot(self) -> bytes:
        return encode((self.digest, self.ids))

    def restore(self, snapshot: bytes) -> None:
        self.digest, self.ids = decode(snapshot)
        self.position = {number: index for index, number in enumerate(self.ids)}


class NodeProcess:
    """Runs the node, and executes the commands from the pipe."""

    def __init__(
        self, name: str, nodes: Mapping[str, str], directory: Path, pipe: Connection
    ) -> None:
        self.pipe = pipe
        self.ledger = Ledger()
        self.mine: set[int] = set()
        #: The barriers that this process proposed.
        self.barriers: set[int] = set()
        self.takes_files = False
        self.has_taken = threading.Event()
        self.outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()
        self.raft = raft.Raft(
            name, nodes, directory, self.ledger, on_event=self._report, on_fatal=self._fail
        )

    def _report(self, event: Event) -> None:
        if isinstance(event, Committed):
            number, padding = decode(event.command)
            if padding is BARRIER:
                if number in self.barriers:
                    self.outbox.put(encode(("barrier", number)))
            elif number in self.mine:
                self.mine.discard(number)
                self.outbox.put(encode(("acknowledged", number, decode(event.result))))

    def _fail(self, reason: str) -> None:
        self.pipe.send_bytes(encode(("fatal", reason)))
        os._exit(FATAL)

    def _write(self) -> None:
        while True:
            self.pipe.send_bytes(self.outbox.get())

    def run(self) -> None:
        self.raft.start()
        self.outbox.put(encode(("started",)))
        while True:
            try:
                order = decode(self.pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the parent process has ended
            getattr(self, order[0])(*order[1:])

    # --- orders ---

    def propose(self, number: int, size: int) -> None:
        self.mine.add(number)
        self._propose(encode((number, bytes(size))))

    def barrier(self, token: int) -> None:
        self.barriers.add(token)
        self._propose(encode((token, BARRIER)))

    def _propose(self, command: bytes) -> None:
        self.raft.propose(command, self.raft.status().term)

    def status(self) -> None:
        self.outbox.put(encode(("status", self.raft.status()._asdict())))

    def ledger_now(self) -> None:
        """Report the applied commands; requested when none is pending."""
        self.outbox.put(encode(("ledger", self.ledger.ids, self.ledger.digest)))

    def take_files(self) -> None:
        """Use up all file descriptors of the process, and each one that becomes free."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
        self.takes_files = True
        threading.Thread(target=self._take_files, daemon=True).start()

    def _take_files(self) -> None:
        taken: list[int] = []
        while self.takes_files:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                if not self.has_taken.is_set():
                    self.has_taken.set()
                    self.outbox.put(encode(("taken",)))
                time.sleep(0.001)
        for descriptor in taken:
            os.close(descriptor)

    def free_files(self) -> None:
        """Close the descriptors that `take_files` opened."""
        self.takes_files = False


def main(
    name: str, nodes: dict[str, str], directory: str, settings: Settings, pipe: Connection
) -> None:
    """Run a node until it is killed, or the other end of the pipe is closed."""
    _slow_down(settings.sync_s)
    _hurry(settings.haste)
    if settings.shipped:
        put_back_shipped()
    node = NodeProcess(name, nodes, Path(directory), pipe)
    if settings.compact_s:
        threading.Thread(target=_compact, args=(node.raft, settings.compact_s), daemon=True).start()
    node.run()


def _compact(node: raft.Raft, interval: float) -> None:
    while True:
        time.sleep(interval)
        node.snapshot()


def _slow_down(seconds: float) -> None:
    real = os.fdatasync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        real(descriptor)

    if seconds:
        journal.os.fdatasync = slow  # type: ignore[attr-defined]


def _hurry(haste: float) -> None:
    real = pysyncobj_adapter.configuration
    timed = ("raftMinTimeout", "raftMaxTimeout", "appendEntriesPeriod", "connectionRetryTime")

    def faster(bind: str, **given: Any) -> Any:
        conf = real(bind, **given)
        for option in timed:
            setattr(conf, option, getattr(conf, option) / haste)
        return conf

    if haste != 1.0:
        pysyncobj_adapter.configuration = faster
        raft._TICK_S /= haste  # type: ignore[misc]


def put_back_shipped(replace: Callable[[Any, str, Any], object] = setattr) -> None:
    """Restore the library's own receive path; only the voting rights stay ours."""
    hook = "_SyncObj__onMessageReceived"
    ours, shipped = getattr(raft_node.RaftNode, hook), getattr(pysyncobj.syncobj.SyncObj, hook)

    def take(node: raft_node.RaftNode, peer: Any, message: dict[str, Any]) -> None:
        (ours if message["type"] == "standing" else shipped)(node, peer, message)

    def load(node: raft_node.RaftNode, clearJournal: bool) -> None:  # noqa: N803
        found = Snapshot.read(node._snapshot)
        if clearJournal:
            node._journal.clear()
        node._journal.begin_with(found.previous, found.last)
        node._consumer.restore(found.state)
        node._SyncObj__raftLastApplied = found.last.index

    replace(raft_node.RaftNode, hook, take)
    replace(raft_node.RaftNode, "_SyncObj__loadDumpFile", load)
