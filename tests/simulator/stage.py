"""Environment of the consensus library in virtual time: clock, random numbers, files, sockets.

`virtual` replaces them in the library and in our part of it. Each replacement acts for the node
that has its turn (`Stage.act`).

Rule: only attributes of the consensus modules are replaced, and they are restored. Nothing depends
on the order of a Python set.
"""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from pysyncobj import serializer, syncobj

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
        """The directory of its files."""
        ...

    @property
    def streams(self) -> Streams:
        """All connections of its group."""
        ...

    @property
    def compact_entries(self) -> int:
        """Journal length above which a snapshot is written and the journal trimmed."""
        ...


class Stage:
    """Clock, random numbers, files and sockets of the running node."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel: Final = kernel
        self.running: Actor | None = None

    @property
    def member(self) -> Actor:
        """The running node."""
        assert self.running is not None, "a node acts outside of its turn"
        return self.running

    def act(self, member: Actor, action: Callable[[], Any]) -> Any:
        """Run an action as that node."""
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
        """Add seconds to the running node's turn."""
        self.member.spend(int(duration * S))

    # --- files ---

    def path(self, text: str) -> Any:
        """Return the path of a file of the running node, on any disk."""
        return self.member.directory / text.rpartition("/")[2]

    def exists(self, text: str) -> bool:
        """Whether a file of the running node exists."""
        return bool(self.path(text).exists())

    def replace(self, old: str, new: str) -> None:
        """Rename a file of the running node."""
        self.path(old).replace(self.path(new))

    def open(self, text: str, mode: str) -> io.BytesIO:
        """Open a file of the running node with its current content."""
        path = self.path(text)
        return io.BytesIO(path.read_bytes()) if mode == "rb" else _Written(path)

    # --- parts of a node ---

    def node(self, *given: Any) -> Node:
        """Create the running node."""
        return Node(self.member, *given)

    def wire(self, _node: Any, own: Any, others: Any) -> Wire:
        """Create its connections."""
        self.member.wire = Wire(self.member.streams, self.member, own, others)
        return self.member.wire


class _Written(io.BytesIO):
    """A file that is written to the disk when it is closed."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            self._path.write_bytes(self.getvalue())
        super().close()


class _NoPoller:
    """A poller without descriptors."""

    def poll(self, _timeout: float) -> None:
        """Return at once."""


_stage: Stage | None = None


def stage(kernel: Kernel) -> Stage:
    """Return the active stage of this kernel."""
    assert _stage is not None, "nodes run only inside of `virtual`"
    assert _stage.kernel is kernel, "the active stage belongs to another kernel"
    return _stage


@contextlib.contextmanager
def virtual(kernel: Kernel) -> Iterator[None]:
    """Run the consensus library in a kernel's time, within the context."""
    global _stage  # noqa: PLW0603 - the library's modules are there once
    assert _stage is None, "one simulation at a time"
    _stage = found = Stage(kernel)
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
    """A set of the library's nodes with a defined order."""

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
        """Handle arrived messages, while a production node would sleep; then do due work."""
        self._member.wire.read()
        super().doTick(0.0)

    def wake(self) -> None:
        """Schedule a turn."""
        self._member.wake()

    def close(self) -> None:
        """Close all connections; there is no pipe to be closed."""
        self.destroy()

    def due(self) -> float:
        """Return the time of the next timer, in seconds."""
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
