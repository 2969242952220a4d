"""Consensus as in production, in virtual time: the library, our receive path, our files.

Each node is a `ziplog.runtime.raft.Raft` whose thread is not started: the kernel gives it turns,
streams take the place of its connections, and `virtual` puts the kernel's clock and random numbers
where the library and we read them. It is used as `ziplog.sim.consensus.OrderedLog` is.

Rule: nodes run only inside of `virtual`. A turn takes as long as the node's disk does, and what it
sends leaves no earlier (docs/protocol.md, section 12).
"""

from __future__ import annotations

import contextlib
import io
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self

from crc32c import crc32c

from ziplog.node import Committed, LeaderChanged
from ziplog.runtime import journal, library, receive
from ziplog.runtime import raft as adapter
from ziplog.sim.kernel import MS, US, S
from ziplog.sim.streams import Streams, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from ziplog.node import Event
    from ziplog.runtime.raft import Machine, Raft, Status
    from ziplog.sim.kernel import Kernel
    from ziplog.sim.network import Network

#: What a turn takes beside the disk.
_TURN_NS: Final = 20 * US
#: The tick of the adapter's thread: how much later than it was due a turn may come.
_TICK_NS: Final = 50 * MS
#: How likely a process that dies takes its machine with it: then nobody is told.
_MACHINE_DIES: Final = 1 / 4
_FIRST_PORT: Final = 10_000
_ABSENT: Final = object()


# --- the library in virtual time ---


class _Stage:
    """What stands in the place of clocks, random numbers, files and sockets: the running node's."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel: Final = kernel
        self.running: Member | None = None

    @property
    def member(self) -> Member:
        """The node whose turn it is."""
        assert self.running is not None, "a node does something outside of its turn"
        return self.running

    def act(self, member: Member, action: Callable[[], Any]) -> Any:
        """Do something as that node."""
        former, self.running = self.running, member
        try:
            return action()
        finally:
            self.running = former

    # --- clocks ---

    def monotonic(self) -> float:
        """Return the running node's time, in seconds."""
        running = self.running
        assert running is not None, "a node reads the clock outside of its turn"
        return running.now_ns() / S

    def sleep(self, duration: float) -> None:
        """Let the running node's turn take longer by so many seconds."""
        self.member.spend(int(duration * S))

    # --- files ---

    def path(self, text: str) -> Any:
        """Return where a file of the running node is, on whatever disk that may be."""
        return self.member.directory / text.rpartition("/")[2]

    def exists(self, text: str) -> bool:
        """Whether a file of the running node exists."""
        return bool(self.path(text).exists())

    def replace(self, old: str, new: str) -> None:
        """Rename a file of the running node."""
        self.path(old).replace(self.path(new))

    def open(self, text: str, mode: str) -> io.BytesIO:
        """Open a file of the running node, as it is now."""
        path = self.path(text)
        return io.BytesIO(path.read_bytes()) if mode == "rb" else _Written(path)

    # --- what a node is made of ---

    def node(self, *given: Any) -> _Node:
        """Make the running node."""
        return _Node(self.member, *given)

    def wire(self, _node: Any, own: Any, others: Any) -> Wire:
        """Make its connections."""
        self.member.wire = Wire(self.member.streams, self.member, own, others)
        return self.member.wire


class _Written(io.BytesIO):
    """A file that is on the disk when it is closed."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            self._path.write_bytes(self.getvalue())
        super().close()


class _NoPoller:
    """There are no descriptors."""

    def poll(self, _timeout: float) -> None:
        """Return at once."""


_stage: _Stage | None = None


@contextlib.contextmanager
def virtual(kernel: Kernel) -> Iterator[None]:
    """Let the consensus library live in a kernel's time, and no other one, meanwhile."""
    global _stage  # noqa: PLW0603 - the library's modules are there once
    assert _stage is None, "one simulation at a time"
    _stage = stage = _Stage(kernel)
    syncobj, serializer = adapter.FOREIGN
    files = SimpleNamespace(path=SimpleNamespace(isfile=stage.exists))
    names = SimpleNamespace(token_hex=lambda count: kernel.random.randbytes(count).hex())
    stand_ins: list[tuple[ModuleType, str, Any]] = [
        (syncobj, "monotonicTime", stage.monotonic),
        (syncobj, "random", kernel.random),
        (syncobj, "os", files),
        (syncobj, "createPoller", lambda _kind: _NoPoller()),
        (syncobj, "PIPE_NOTIFIER_ENABLED", False),
        (serializer, "open", stage.open),
        (serializer, "atomicReplace", stage.replace),
        (journal, "secrets", names),
        (library, "Path", stage.path),
        (library, "Node", stage.node),
        (receive, "time", stage),
        (receive, "Transport", stage.wire),
        (adapter, "time", stage),
        (adapter, "_refuse_taken", lambda _endpoint: None),
    ]
    former = [(module, name, vars(module).get(name, _ABSENT)) for module, name, _ in stand_ins]
    try:
        for module, name, value in stand_ins:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in former:
            if value is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, value)
        _stage = None


class _InOrder(frozenset[Any]):
    """The library's nodes, which it keeps in sets: here they have an order of their own."""

    _sorted: tuple[Any, ...]

    def __new__(cls, nodes: Any) -> Self:
        made = super().__new__(cls, nodes)
        made._sorted = tuple(sorted(frozenset.__iter__(made), key=lambda node: str(node.id)))
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sorted)

    def __or__(self, others: Any) -> _InOrder:
        return _InOrder([*self, *others]) if others else self

    def copy(self) -> _InOrder:
        return self


class _Node(receive.Node):
    """The library's node, ticked by the kernel."""

    def __init__(self, member: Member, *given: Any) -> None:
        self._member: Final = member
        super().__init__(*given)
        self._SyncObj__otherNodes: Any = _InOrder(self.otherNodes)
        self.conf.logCompactionMinEntries = member.compact_entries
        member.node = self

    def doTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803, ARG002
        """Take what arrived while the production node would have slept, then do what is due."""
        self._member.wire.read()
        super().doTick(0.0)

    def hand_over(self, command: bytes, done: Callable[[bytes | None, int], None]) -> None:
        super().hand_over(command, done)
        self.wake()

    def wake(self) -> None:
        self._member.wake()

    def close(self) -> None:
        self.destroy()

    def due(self) -> float:
        """Return when there is something to do though nothing arrives, in seconds."""
        due: float = self._SyncObj__startTime + self._SyncObj__numOneSecondDumps
        if self._SyncObj__commandsQueue._FastQueue__queue:  # noqa: SLF001 - they wait for a leader
            return 0.0
        if self.otherNodes:
            due = min(due, self._tell_at)
            if self._isLeader():
                return min(due, float(self._SyncObj__newAppendEntriesTime))
        elif self._isLeader():
            return due
        if self._SyncObj__connectedToAnyone():
            due = min(due, float(self._SyncObj__raftElectionDeadline))
        return due


# --- nodes and groups ---


class Member:
    """One node of a group, for as long as its process lives."""

    node: _Node
    wire: Wire

    def __init__(
        self, group: RaftGroup, name: str, machine: Machine, on_event: Callable[[Event], None]
    ) -> None:
        self.name: Final = name
        self.machine: Final = machine
        self.directory: Final = group.directories[name]
        self.streams: Final = group.streams
        self.compact_entries: Final = group.compact_entries
        self.is_paused = False
        self.is_gone = False
        self._group: Final = group
        self._kernel: Final = group.kernel
        self._on_event: Final = on_event
        self._due: int | None = None
        self._busy_until = self._spent_ns = 0
        self.raft: Final[Raft] = self._act(self._make)
        self.streams.enter(self.wire)
        self.wake()

    def _make(self) -> Raft:
        return adapter.Raft(
            self.name,
            self._group.endpoints,
            self.directory,
            self.machine,
            on_event=self._tell,
            on_fatal=self._die,
        )

    def propose(self, command: bytes) -> None:
        """Hand a command to the leader. `Committed` tells when it was applied, if it ever is."""
        if not self.is_gone:
            self.raft.propose(command)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._record(b"commits %d" % crc32c(event.command))
        elif isinstance(event, LeaderChanged) and event.is_self:
            self._record(b"leads")
        self._on_event(event)

    def _record(self, what: bytes) -> None:
        self._kernel.record(self.name.encode() + b" " + what)

    def _die(self, reason: str) -> None:
        self._kernel.tell(f"{self.name} ends: {reason}")
        self._group.lose(self)
        self._group.on_fatal(self.name, reason)

    def end(self) -> None:
        """Let go of everything, as the end of the process does."""
        self.is_gone = True
        if self._kernel.random.random() < _MACHINE_DIES:
            self.wire.vanish(tells=False)
        with contextlib.suppress(OSError):  # its machine's disk has closed the files already
            self._act(self.raft.stop)

    # --- time ---

    def now_ns(self) -> int:
        """Return its time, in the middle of what it does."""
        self._spent_ns += self._group.sync_ns(self.name)
        return self._kernel.now + self._spent_ns

    def spend(self, duration_ns: int) -> None:
        """Let what it does right now take longer."""
        self._spent_ns += duration_ns

    def wake(self) -> None:
        """Let it have a turn as soon as it can."""
        self._schedule(self._kernel.now)

    def _schedule(self, when: int) -> None:
        when = max(when, self._busy_until)
        if self._due is None or when < self._due:
            self._due = when
            self._kernel.at(when, partial(self._turn, when))

    def _turn(self, when: int) -> None:
        if self._due != when or self.is_gone:
            return
        self._due = None
        if when < self._busy_until:
            self._schedule(when)
        elif not self.is_paused and self._act(self.raft.turn):
            due_ns = max(int(self.node.due() * S), self._kernel.now)
            self._schedule(due_ns + int(self._kernel.random.random() * _TICK_NS))

    def _act(self, action: Callable[[], Any]) -> Any:
        """Do something, which takes a while."""
        assert _stage is not None, "nodes run only inside of `virtual`"
        assert _stage.kernel is self._kernel, "another kernel's time"
        self._spent_ns += _TURN_NS
        try:
            return _stage.act(self, action)
        finally:
            self._busy_until, self._spent_ns = self.now_ns(), 0


class RaftGroup:
    """A group of nodes.

    Args:
        network: carries what they send, as streams; cut links are cut for them.
        names: of all nodes, as the network knows them.
        build: makes an empty machine.
        directories: where each node's files are: a path, on whatever disk. One may be replaced
            while its node is down.
        sync_ns: told a name, returns what the node's disk has taken since it was last asked.
        on_fatal: told the name of a node that must not go on, and why; it is dead then.
        compact_entries: a journal is trimmed behind a snapshot when it is longer.

    """

    def __init__(
        self,
        network: Network,
        names: Sequence[str],
        build: Callable[[], Machine],
        directories: Mapping[str, Any],
        *,
        sync_ns: Callable[[str], int] = lambda _name: 0,
        on_fatal: Callable[[str, str], object] | None = None,
        compact_entries: int = 64,
    ) -> None:
        self.kernel: Final[Kernel] = network.kernel
        self.names: Final = tuple(names)
        self.endpoints: Final = {n: f"127.0.0.1:{_FIRST_PORT + i}" for i, n in enumerate(names)}
        self.streams: Final = Streams(network, {e: name for name, e in self.endpoints.items()})
        self.directories: Final = dict(directories)
        self.sync_ns: Final = sync_ns
        #: May be changed at any time.
        self.on_fatal = on_fatal or _refuse
        self.compact_entries: Final = compact_entries
        #: The nodes that live.
        self.members: Final[dict[str, Member]] = {}
        self._build: Final = build
        #: How much the most advanced of the nodes that left had applied, and its machine.
        self._left: tuple[int, Machine] = (0, build())

    # --- nodes ---

    def join(self, name: str, on_event: Callable[[Event], None]) -> Member:
        """Let a node take part, with what is in its directory; its process has just started.

        Raises:
            JournalError: the directory is in use, or damaged.

        """
        assert name in self.names, f"{name} is none of {self.names}"
        assert name not in self.members, f"{name} is there already"
        self.members[name] = member = Member(self, name, self._build(), on_event)
        return member

    def leave(self, name: str) -> None:
        """A node's process is dead. Idempotent."""
        member = self.members.get(name)
        if member is not None:
            self.lose(member)
            member.end()

    def lose(self, member: Member) -> None:
        """Count a node as dead."""
        member.is_gone = True
        if self.members.get(member.name) is member:
            del self.members[member.name]
            self._left = max(self._left, _advance(member), key=lambda left: left[0])

    def pause(self, name: str) -> None:
        """Let a node stand still; its connections stay, and what it is sent waits."""
        if (member := self.members.get(name)) is not None:
            member.is_paused = True

    def resume(self, name: str) -> None:
        """Let a node go on."""
        if (member := self.members.get(name)) is not None and member.is_paused:
            member.is_paused = False
            member.wake()

    def sever(self, one: str, other: str) -> None:
        """Break the connection between two nodes; they connect again."""
        self.streams.sever(one, other)

    def compact(self, name: str) -> None:
        """Let a node write a snapshot and trim its journal behind it soon."""
        if (member := self.members.get(name)) is not None:
            member.raft.snapshot()

    # --- questions ---

    def status(self, name: str) -> Status | None:
        """Return how consensus stands as a node sees it; None if it is dead."""
        member = self.members.get(name)
        return member.raft.status() if member is not None else None

    @property
    def leader(self) -> str:
        """Who leads, in the newest term in which somebody does; "" while nobody does."""
        found, term = "", -1
        for name, member in self.members.items():
            status = member.raft.status()
            if status.is_leader and status.term > term:
                found, term = name, status.term
        return found

    @property
    def machine(self) -> Machine:
        """What the most advanced node has applied; only to be looked at."""
        advances = [self._left, *map(_advance, self.members.values())]
        return max(advances, key=lambda advance: advance[0])[1]


def _advance(member: Member) -> tuple[int, Machine]:
    return member.node.raftLastApplied, member.machine


def _refuse(name: str, reason: str) -> None:
    raise AssertionError(f"{name} stopped itself: {reason}")
