"""Consensus as a replicated service sees it, without Raft: one ordered log that all nodes follow.

Everything that Raft may do to its user is done, and nothing that it may not: commands wait, are
lost, are committed after their proposer died or lost its lead; nodes lag, learn late that they lead
no more, begin with a snapshot. Two nodes may believe that they lead; only one can commit.

Invariant: every node applies the same commands in the same order, from its last snapshot on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.simulator.kernel import MS
from ziplog.core.node import Committed, LeaderChanged, PeersChanged, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.simulator.kernel import Kernel
    from ziplog.core.node import Event
    from ziplog.raft.state_machine import Machine


class Timing(NamedTuple):
    """How fast consensus is: shortest and longest times, in nanoseconds."""

    #: From a proposal to its commit.
    commit_ns: tuple[int, int] = (MS // 2, 4 * MS)
    #: From a commit to its application at a node.
    apply_ns: tuple[int, int] = (0, 2 * MS)
    #: From the loss of a leader to the next one.
    election_ns: tuple[int, int] = (50 * MS, 1200 * MS)
    #: How long a leader that was cut off believes that it leads.
    belief_ns: tuple[int, int] = (200 * MS, 1500 * MS)


class Member:
    """One node of a group, for as long as its process lives."""

    def __init__(
        self, group: OrderedLog, name: str, machine: Machine, on_event: Callable[[Event], None]
    ) -> None:
        self.name: Final = name
        self.machine: Final = machine
        self.on_event: Final = on_event
        #: So many commands were applied here.
        self.applied = 0
        self._group: Final = group

    def propose(self, command: bytes) -> None:
        """Hand a command to the leader. `Committed` tells when it was applied, if it ever is."""
        self._group.propose(self, command)


class OrderedLog:
    """A group of nodes.

    Args:
        kernel: virtual time.
        names: of all nodes; a majority of them must be there for anything to be committed.
        build: makes an empty machine.
        timing: how fast it is.

    """

    def __init__(
        self,
        kernel: Kernel,
        names: Sequence[str],
        build: Callable[[], Machine],
        timing: Timing | None = None,
    ) -> None:
        self.kernel: Final = kernel
        self.names: Final = tuple(names)
        self.timing: Final = timing or Timing()
        #: What the committed commands make; for whoever wants to look.
        self.machine: Final = build()
        #: Who leads; "" while nobody does.
        self.leader = ""
        self._build: Final = build
        self._members: dict[str, Member] = {}
        #: Nodes that neither hear nor are heard.
        self._isolated: set[str] = set()
        self._commands: list[bytes] = []
        self._results: list[bytes] = []
        #: A snapshot, and how many commands are in it.
        self._snapshot = (self.machine.snapshot(), 0)
        #: Proposals of this leader that are not committed yet, and when the last of them is.
        self._under_way: list[bytes] = []
        self._commit_at = 0
        self._term = 0
        self._is_electing = False

    # --- nodes ---

    def join(self, name: str, on_event: Callable[[Event], None]) -> Member:
        """Let a node take part, from its snapshot on; its process has just started."""
        assert name in self.names, f"{name} is none of {self.names}"
        member = Member(self, name, self._build(), on_event)
        self._members[name] = member
        state, applied = self._snapshot
        member.machine.restore(state)
        member.applied = applied
        on_event(Restored(state))
        self._schedule_apply(member)
        if self.leader and name not in self._isolated:
            on_event(LeaderChanged(self.leader, is_self=False))
        self._tell_peers()
        self._elect_soon()
        return member

    def leave(self, name: str) -> None:
        """A node's process is dead."""
        self._members.pop(name, None)
        self._tell_peers()
        if self.leader == name:
            self._lose_leader()

    def isolate(self, name: str) -> None:
        """A node and the others lose sight of each other. A leader believes in itself a while."""
        self._isolated.add(name)
        self._tell_peers()
        if self.leader == name:
            self._lose_leader()
            if member := self._members.get(name):
                belief = self.kernel.random.randint(*self.timing.belief_ns)
                self.kernel.after(belief, partial(self._disillusion, member))

    def rejoin(self, name: str) -> None:
        """A node sees the others again."""
        self._isolated.discard(name)
        self._tell_peers()
        if member := self._members.get(name):
            member.on_event(LeaderChanged(self.leader, is_self=self.leader == name))
            self._schedule_apply(member)
        self._elect_soon()

    def _reachable(self) -> list[str]:
        return [n for n in self.names if n in self._members and n not in self._isolated]

    def _has_majority(self) -> bool:
        return len(self._reachable()) > len(self.names) // 2

    def _tell_peers(self) -> None:
        reachable = self._reachable()
        for name, member in self._members.items():
            others = tuple(n for n in reachable if n != name) if name in reachable else ()
            member.on_event(PeersChanged(tuple(sorted(others))))

    # --- who leads ---

    def _lose_leader(self) -> None:
        """What the leader had under way is committed by the next one, or is lost."""
        chance = self.kernel.random.random
        survives = int(chance() * (len(self._under_way) + 1))
        self._under_way, kept = [], self._under_way[:survives]
        former, self.leader = self.leader, ""
        self._term += 1
        for name in self._reachable():
            if name != former:
                self._members[name].on_event(LeaderChanged("", is_self=False))
        for command in kept:  # the next leader has them, and commits them when it begins
            self._under_way.append(command)
        self._elect_soon()

    def _disillusion(self, member: Member) -> None:
        if self._members.get(member.name) is member and self.leader != member.name:
            member.on_event(LeaderChanged(self.leader, is_self=False))

    def _elect_soon(self) -> None:
        if not self.leader and not self._is_electing and self._has_majority():
            self._is_electing = True
            delay = self.kernel.random.randint(*self.timing.election_ns)
            self.kernel.after(delay if len(self.names) > 1 else MS, self._elect)

    def _elect(self) -> None:
        self._is_electing = False
        if self.leader or not self._has_majority():
            return
        self.leader = self.kernel.random.choice(self._reachable())
        self.kernel.record(b"leads " + self.leader.encode())
        inherited, self._under_way = self._under_way, []
        for command in inherited:
            self._commit(command)
        leader = self._members[self.leader]
        self._apply(leader, len(self._commands))
        leader.on_event(LeaderChanged(self.leader, is_self=True))
        for name in self._reachable():
            if name != self.leader:
                self._members[name].on_event(LeaderChanged(self.leader, is_self=False))

    # --- commands ---

    def propose(self, member: Member, command: bytes) -> None:
        """Take a command from a node; it is lost if the node reaches no leader."""
        is_there = self._members.get(member.name) is member and member.name not in self._isolated
        if not self.leader or not is_there or not self._has_majority():
            return
        self._under_way.append(command)
        delay = self.kernel.random.randint(*self.timing.commit_ns)
        self._commit_at = max(self.kernel.now + delay, self._commit_at + 1)
        self.kernel.at(self._commit_at, partial(self._commit_next, self._term))

    def _commit_next(self, term: int) -> None:
        if term == self._term and self._under_way and self._has_majority():
            self._commit(self._under_way.pop(0))

    def _commit(self, command: bytes) -> None:
        self.kernel.record(b"commit " + command)
        self._commands.append(command)
        self._results.append(self.machine.apply(command))
        if self.kernel.random.random() < 1 / 16:
            self._snapshot = (self.machine.snapshot(), len(self._commands))
        for name in self._reachable():
            self._schedule_apply(self._members[name])

    def commit_unseen(self, commands: Iterable[bytes]) -> None:
        """Commit what no node sees: all of them are dead, and start with it in a snapshot."""
        assert not self._members, "a node would see it"
        for command in commands:
            self._commands.append(command)
            self._results.append(self.machine.apply(command))
        self._snapshot = (self.machine.snapshot(), len(self._commands))
        self.kernel.record(b"unseen %d" % len(self._commands))

    def _schedule_apply(self, member: Member) -> None:
        delay = self.kernel.random.randint(*self.timing.apply_ns)
        self.kernel.after(delay, partial(self._apply, member, len(self._commands)))

    def _apply(self, member: Member, upto: int) -> None:
        """Let a node apply what was committed, if it is still there."""
        if self._members.get(member.name) is not member or member.name in self._isolated:
            return
        while member.applied < upto:
            command = self._commands[member.applied]
            result = member.machine.apply(command)
            assert result == self._results[member.applied], "the machine is not deterministic"
            member.applied += 1
            member.on_event(Committed(command, result))
