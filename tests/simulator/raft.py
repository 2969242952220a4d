"""Production consensus in virtual time: the library, our receive path, our files.

Each node is a `ziplog.raft.raft.Raft` without its thread: the kernel schedules its turns, simulated
streams replace its connections, and `virtual` replaces clock and random numbers. The interface is
that of `tests.simulator.consensus.OrderedLog`.

Rule: nodes run only inside `virtual`. A turn takes as long as the node's disk needs, and its
messages leave no earlier (docs/protocol.md, section 12).
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from crc32c import crc32c

from tests.simulator.kernel import MS, US, S
from tests.simulator.stage import stage, virtual
from tests.simulator.streams import Streams
from ziplog.core.node import Committed, LeaderChanged
from ziplog.raft.raft import Raft

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.simulator.kernel import Kernel
    from tests.simulator.network import Network
    from tests.simulator.stage import Node
    from tests.simulator.streams import Wire
    from ziplog.core.node import Event
    from ziplog.raft.raft import Status
    from ziplog.raft.state_machine import Machine

__all__ = ["Member", "RaftGroup", "virtual"]

#: Duration of a turn without the disk.
_TURN_NS: Final = 20 * US
#: Maximum delay of a due turn: the tick of the adapter's thread.
_TICK_NS: Final = 50 * MS
#: Probability that a process dies with its machine: then no peer is notified.
_MACHINE_DIES: Final = 1 / 4
#: Journal length above which a snapshot is written and the journal trimmed.
_COMPACT_ENTRIES: Final = 64
_FIRST_PORT: Final = 10_000


class Member:
    """One node of a group, while its process lives."""

    node: Node
    wire: Wire

    def __init__(
        self, group: RaftGroup, name: str, machine: Machine, on_event: Callable[[Event], None]
    ) -> None:
        self.name: Final = name
        self.machine: Final = machine
        self.directory: Final = group.directories[name]
        self.streams: Final = group.streams
        self.compact_entries: Final = _COMPACT_ENTRIES
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
        return Raft(
            self.name,
            self._group.endpoints,
            self.directory,
            self.machine,
            on_event=self._report,
            on_fatal=self._fail,
        )

    def propose(self, command: bytes, term: int, *, is_urgent: bool = False) -> None:
        """Propose a command, if this node leads. The event `Committed` reports its application."""
        if not self.is_gone:
            self.raft.propose(command, term, is_urgent=is_urgent)

    def _report(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._record(b"commits %d" % crc32c(event.command))
        elif isinstance(event, LeaderChanged) and event.is_self:
            self._record(b"leads")
        self._on_event(event)
        self._group.on_applied()

    def _record(self, what: bytes) -> None:
        self._kernel.record(self.name.encode() + b" " + what)

    def _fail(self, reason: str) -> None:
        self._kernel.trace(f"{self.name} ends: {reason}")
        self._group.lose(self)
        self._group.on_fatal(self.name, reason)

    def end(self) -> None:
        """Close everything, as the end of the process does."""
        self.is_gone = True
        if self._kernel.random.random() < _MACHINE_DIES:
            self.wire.vanish(notifies=False)
        with contextlib.suppress(OSError):  # its machine's disk has closed the files already
            self._act(self.raft.stop)

    # --- time ---

    def now_ns(self) -> int:
        """Return its time within the current turn."""
        self._spent_ns += self._group.sync_ns(self.name)
        return self._kernel.now + self._spent_ns

    def spend(self, duration_ns: int) -> None:
        """Add time to the current turn."""
        self._spent_ns += duration_ns

    def wake(self) -> None:
        """Schedule a turn as soon as possible."""
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
        elif not self.is_paused and self._act(self.raft.run_once):
            due_ns = max(int(self.node.due() * S), self._kernel.now)
            self._schedule(due_ns + int(self._kernel.random.random() * _TICK_NS))

    def _act(self, action: Callable[[], Any]) -> Any:
        """Run an action as this node; it takes time."""
        found = stage(self._kernel)
        self._spent_ns += _TURN_NS
        try:
            return found.act(self, action)
        finally:
            self._busy_until, self._spent_ns = self.now_ns(), 0


class RaftGroup:
    """A consensus group.

    Args:
        network: the network of their streams; its cut links apply.
        names: all nodes, by their names in the network.
        build: creates an empty state machine.
        directories: the path of each node's files, on any disk. A path may be replaced while its
            node is down.
        sync_ns: returns the nanoseconds that a node's disk took since the last call.
        on_fatal: called with a node that must stop, and the reason; the node is dead then.

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
    ) -> None:
        self.kernel: Final[Kernel] = network.kernel
        self.names: Final = tuple(names)
        self.endpoints: Final = {n: f"127.0.0.1:{_FIRST_PORT + i}" for i, n in enumerate(names)}
        self.streams: Final = Streams(network, {e: name for name, e in self.endpoints.items()})
        self.directories: Final = dict(directories)
        self.sync_ns: Final = sync_ns
        #: May change at any time.
        self.on_fatal = on_fatal or _refuse
        #: Called after each event of a node: it has applied a command, for example.
        self.on_applied: Callable[[], object] = lambda: None
        #: The live nodes.
        self.members: Final[dict[str, Member]] = {}
        self._build: Final = build
        #: The number of applied commands and the machine of the most advanced dead node.
        self._left: tuple[int, Machine] = (0, build())

    # --- nodes ---

    def join(self, name: str, on_event: Callable[[Event], None]) -> Member:
        """Add a node after the start of its process, with the files in its directory.

        Raises:
            JournalError: the directory is in use, or damaged.

        """
        assert name in self.names, f"{name} is not one of {self.names}"
        assert name not in self.members, f"{name} is up already"
        self.members[name] = member = Member(self, name, self._build(), on_event)
        return member

    def leave(self, name: str) -> None:
        """Remove a node: its process is dead. Idempotent."""
        member = self.members.get(name)
        if member is not None:
            self.lose(member)
            member.end()

    def lose(self, member: Member) -> None:
        """Mark a node as dead."""
        member.is_gone = True
        if self.members.get(member.name) is member:
            del self.members[member.name]
            self._left = max(self._left, _advance(member), key=lambda left: left[0])

    def pause(self, name: str) -> None:
        """Pause a node; its connections stay, and messages to it wait."""
        if (member := self.members.get(name)) is not None:
            member.is_paused = True

    def resume(self, name: str) -> None:
        """Resume a node."""
        if (member := self.members.get(name)) is not None and member.is_paused:
            member.is_paused = False
            member.wake()

    def sever(self, one: str, other: str) -> None:
        """Break the connection between two nodes; they reconnect."""
        self.streams.sever(one, other)

    def compact(self, name: str) -> None:
        """Make a node write a snapshot and trim its journal soon."""
        if (member := self.members.get(name)) is not None:
            member.raft.snapshot()

    # --- questions ---

    def status(self, name: str) -> Status | None:
        """Return a node's consensus status; None if it is dead."""
        member = self.members.get(name)
        return member.raft.status() if member is not None else None

    @property
    def leader(self) -> str:
        """The leader of the newest term with one; "" if there is none."""
        found, term = "", -1
        for name, member in self.members.items():
            status = member.raft.status()
            if status.is_leader and status.term > term:
                found, term = name, status.term
        return found

    @property
    def machine(self) -> Machine:
        """The state machine of the most advanced node; read-only."""
        advances = [self._left, *map(_advance, self.members.values())]
        return max(advances, key=lambda advance: advance[0])[1]


def _advance(member: Member) -> tuple[int, Machine]:
    return member.node.raftLastApplied, member.machine


def _refuse(name: str, reason: str) -> None:
    raise AssertionError(f"{name} stopped itself: {reason}")
