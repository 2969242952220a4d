"""Consensus as in production, in virtual time: the library, our receive path, our files.

Each node is a `ziplog.raft.raft.Raft` whose thread is not started: the kernel gives it turns,
streams take the place of its connections, and `virtual` puts the kernel's clock and random numbers
where the library and we read them. It is used as `tests.simulator.consensus.OrderedLog` is.

Rule: nodes run only inside of `virtual`. A turn takes as long as the node's disk does, and what it
sends leaves no earlier (docs/protocol.md, section 12).
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

#: What a turn takes beside the disk.
_TURN_NS: Final = 20 * US
#: The tick of the adapter's thread: how much later than it was due a turn may come.
_TICK_NS: Final = 50 * MS
#: How likely a process that dies takes its machine with it: then nobody is told.
_MACHINE_DIES: Final = 1 / 4
_FIRST_PORT: Final = 10_000


class Member:
    """One node of a group, for as long as its process lives."""

    node: Node
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
        return Raft(
            self.name,
            self._group.endpoints,
            self.directory,
            self.machine,
            on_event=self._tell,
            on_fatal=self._fail,
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

    def _fail(self, reason: str) -> None:
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
        elif not self.is_paused and self._act(self.raft.run_once):
            due_ns = max(int(self.node.due() * S), self._kernel.now)
            self._schedule(due_ns + int(self._kernel.random.random() * _TICK_NS))

    def _act(self, action: Callable[[], Any]) -> Any:
        """Do something, which takes a while."""
        found = stage(self._kernel)
        self._spent_ns += _TURN_NS
        try:
            return found.act(self, action)
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
