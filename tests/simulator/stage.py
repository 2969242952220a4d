"""The consensus library in virtual time: the kernel's clock and chance, and files on any disk.

`virtual` puts stand-ins in the place of what the library and our part of it read by themselves: a
clock, random numbers, files, sockets. They ask the node whose turn it is (`Stage.act`).

Rule: attributes of the consensus modules are replaced, nothing else, and they are put back. Nothing
depends on the order in which Python keeps a set.
"""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from tests.simulator.kernel import S
from tests.simulator.streams import Host, Wire
from ziplog.raft import journal, pysyncobj_adapter, raft, raft_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from tests.simulator.kernel import Kernel
    from tests.simulator.streams import Streams

_ABSENT: Final = object()


class Actor(Host, Protocol):
    """The process of a node."""

    node: Node
    wire: Wire

    @property
    def directory(self) -> Any:
        """Where its files are."""
        ...

    @property
    def streams(self) -> Streams:
        """All connections of its group."""
        ...

    @property
    def compact_entries(self) -> int:
        """Its journal is trimmed behind a snapshot when it is longer."""
        ...


class Stage:
    """What stands in the place of clocks, random numbers, files and sockets: the running node's."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel: Final = kernel
        self.running: Actor | None = None

    @property
    def member(self) -> Actor:
        """The node whose turn it is."""
        assert self.running is not None, "a node does something outside of its turn"
        return self.running

    def act(self, member: Actor, action: Callable[[], Any]) -> Any:
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

    def node(self, *given: Any) -> Node:
        """Make the running node."""
        return Node(self.member, *given)

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


_stage: Stage | None = None


def stage(kernel: Kernel) -> Stage:
    """Return what is in place now, for nodes that live in this kernel's time."""
    assert _stage is not None, "nodes run only inside of `virtual`"
    assert _stage.kernel is kernel, "another kernel's time"
    return _stage


@contextlib.contextmanager
def virtual(kernel: Kernel) -> Iterator[None]:
    """Let the consensus library live in a kernel's time, and no other one, meanwhile."""
    global _stage  # noqa: PLW0603 - the library's modules are there once
    assert _stage is None, "one simulation at a time"
    _stage = found = Stage(kernel)
    syncobj, serializer = raft.FOREIGN
    files = SimpleNamespace(path=SimpleNamespace(isfile=found.exists))
    names = SimpleNamespace(token_hex=lambda count: kernel.random.randbytes(count).hex())
    stand_ins: list[tuple[ModuleType, str, Any]] = [
        (syncobj, "monotonicTime", found.monotonic),
        (syncobj, "random", kernel.random),
        (syncobj, "os", files),
        (syncobj, "createPoller", lambda _kind: _NoPoller()),
        (syncobj, "PIPE_NOTIFIER_ENABLED", False),
        (serializer, "open", found.open),
        (serializer, "atomicReplace", found.replace),
        (journal, "secrets", names),
        (pysyncobj_adapter, "Path", found.path),
        (pysyncobj_adapter, "RaftNode", found.node),
        (raft_node, "time", found),
        (raft_node, "Transport", found.wire),
        (raft, "time", found),
        (raft, "_check_port_free", lambda _endpoint: None),
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


class Node(raft_node.RaftNode):
    """The library's node, ticked by the kernel."""

    def __init__(self, member: Actor, *given: Any) -> None:
        self._member: Final = member
        super().__init__(*given)
        self._SyncObj__otherNodes: Any = _InOrder(self.otherNodes)
        self.conf.logCompactionMinEntries = member.compact_entries
        member.node = self

    def doTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803, ARG002
        """Take what arrived while the production node would have slept, then do what is due."""
        self._member.wire.read()
        super().doTick(0.0)

    def propose_command(self, command: bytes, done: Callable[[bytes | None, int], None]) -> None:
        """Propose a command, and have a turn soon."""
        super().propose_command(command, done)
        self.wake()

    def wake(self) -> None:
        """Have a turn soon."""
        self._member.wake()

    def close(self) -> None:
        """Close all connections; there is no pipe to be closed."""
        self.destroy()

    def due(self) -> float:
        """Return when there is something to do though nothing arrives, in seconds."""
        due: float = self._SyncObj__startTime + self._SyncObj__numOneSecondDumps
        if self.otherNodes:
            due = min(due, self._next_status_at)
            if self._isLeader():
                return min(due, float(self._SyncObj__newAppendEntriesTime))
        elif self._isLeader():
            return due
        if self._SyncObj__connectedToAnyone():
            due = min(due, float(self._SyncObj__raftElectionDeadline))
        return due
