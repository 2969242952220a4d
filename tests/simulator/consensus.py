"""Consensus as seen by a replicated service, without Raft: one ordered log for all nodes.

The model does everything that Raft may do to its user, and nothing else. Commands wait, are lost,
or are committed after their proposer died or lost its leadership. Nodes lag, learn late that they
lost their leadership, and start from a snapshot. Two nodes may believe that they lead; only one can
commit.

Invariant: every node applies the same commands in the same order, from its last snapshot on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from tests.simulator.kernel import MS
from ziplog.core.node import Committed, LeaderChanged, PeersChanged, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.simulator.kernel import Kernel
    from ziplog.core.node import Event
    from ziplog.raft.state_machine import Machine


#: Minimum and maximum time from a proposal to its commit, in nanoseconds.
_COMMIT_NS: Final = (MS // 2, 4 * MS)
#: The same from a commit to its application at a node.
_APPLY_NS: Final = (0, 2 * MS)
#: The same from the loss of a leader to the next one.
_ELECTION_NS: Final = (50 * MS, 1200 * MS)
#: The same until an isolated leader steps down.
_BELIEF_NS: Final = (200 * MS, 1500 * MS)


class Member:
    """One node of a group, while its process lives."""

    def __init__(
        self, group: OrderedLog, name: str, machine: Machine, on_event: Callable[[Event], None]
    ) -> None:
        self.name: Final = name
        self.machine: Final = machine
        self.on_event: Final = on_event
        #: Number of commands applied here.
        self.applied = 0
        self._group: Final = group

    def propose(self, command: bytes, term: int, **_how: bool) -> None:
        """Propose a command, if this node leads in `term`. `Committed` reports its application."""
        self._group.propose(self, command, term)


class OrderedLog:
    """A consensus group.

    Args:
        kernel: virtual time.
        names: all nodes; commits need a majority of them.
        build: creates an empty state machine.

    """

    def __init__(
        self,
        kernel: Kernel,
        names: Sequence[str],
        build: Callable[[], Machine],
    ) -> None:
        self.kernel: Final = kernel
        self.names: Final = tuple(names)
        #: The state machine after all committed commands; read-only.
        self.machine: Final = build()
        #: Called after each command that a leader proposed.
        self.on_applied: Callable[[], object] = lambda: None
        #: The leader; "" if there is none.
        self.leader = ""
        self._build: Final = build
        self._members: dict[str, Member] = {}
        #: Nodes that can neither send nor receive.
        self._isolated: set[str] = set()
        self._commands: list[bytes] = []
        self._results: list[bytes] = []
        #: A snapshot, and the number of commands in it.
        self._snapshot = (self.machine.snapshot(), 0)
        #: Uncommitted proposals of this leader, and the commit time of the last one.
        self._open_proposals: list[bytes] = []
        self._commit_at = 0
        self._term = 0
        self._is_electing = False

    # --- nodes ---

    def join(self, name: str, on_event: Callable[[Event], None]) -> Member:
        """Add a node after the start of its process; it starts from the snapshot."""
        assert name in self.names, f"{name} is not one of {self.names}"
        member = Member(self, name, self._build(), on_event)
        self._members[name] = member
        state, applied = self._snapshot
        member.machine.restore(state)
        member.applied = applied
        on_event(Restored(state))
        self._schedule_apply(member)
        if self.leader and name not in self._isolated:
            on_event(LeaderChanged(self.leader, is_self=False))
        self._notify_peers()
        self._elect_soon()
        return member

    def leave(self, name: str) -> None:
        """Remove a node: its process is dead."""
        self._members.pop(name, None)
        self._notify_peers()
        if self.leader == name:
            self._lose_leader()

    def isolate(self, name: str) -> None:
        """Isolate a node from the others. A leader steps down after a while."""
        self._isolated.add(name)
        self._notify_peers()
        if self.leader == name:
            self._lose_leader()
            if member := self._members.get(name):
                belief = self.kernel.random.randint(*_BELIEF_NS)
                self.kernel.after(belief, partial(self._step_down, member))

    def rejoin(self, name: str) -> None:
        """End the isolation of a node."""
        self._isolated.discard(name)
        self._notify_peers()
        if member := self._members.get(name):
            member.on_event(LeaderChanged(self.leader, self.leader == name, self._term))
            self._schedule_apply(member)
        self._elect_soon()

    def _reachable(self) -> list[str]:
        return [n for n in self.names if n in self._members and n not in self._isolated]

    def _has_majority(self) -> bool:
        return len(self._reachable()) > len(self.names) // 2

    def _notify_peers(self) -> None:
        reachable = self._reachable()
        for name, member in self._members.items():
            others = tuple(n for n in reachable if n != name) if name in reachable else ()
            member.on_event(PeersChanged(tuple(sorted(others))))

    # --- leadership ---

    def _lose_leader(self) -> None:
        """Remove the leader; the next one commits its open proposals, or they are lost."""
        chance = self.kernel.random.random
        survives = int(chance() * (len(self._open_proposals) + 1))
        # The next leader has the first ones, and commits them when it starts.
        del self._open_proposals[survives:]
        former, self.leader = self.leader, ""
        self._term += 1
        for name in self._reachable():
            if name != former:
                self._members[name].on_event(LeaderChanged("", is_self=False))
        self._elect_soon()

    def _step_down(self, member: Member) -> None:
        if self._members.get(member.name) is member and self.leader != member.name:
            member.on_event(LeaderChanged(self.leader, is_self=False))

    def _elect_soon(self) -> None:
        if not self.leader and not self._is_electing and self._has_majority():
            self._is_electing = True
            delay = self.kernel.random.randint(*_ELECTION_NS)
            self.kernel.after(delay if len(self.names) > 1 else MS, self._elect)

    def _elect(self) -> None:
        self._is_electing = False
        if self.leader or not self._has_majority():
            return
        self.leader = self.kernel.random.choice(self._reachable())
        self.kernel.record(b"leads " + self.leader.encode())
        inherited, self._open_proposals = self._open_proposals, []
        for command in inherited:
            self._commit(command)
        leader = self._members[self.leader]
        self._apply(leader, len(self._commands))
        leader.on_event(LeaderChanged(self.leader, is_self=True, term=self._term))
        for name in self._reachable():
            if name != self.leader:
                self._members[name].on_event(LeaderChanged(self.leader, is_self=False))

    # --- commands ---

    def propose(self, member: Member, command: bytes, term: int) -> None:
        """Accept a command from the leader of a term; a former leader's is lost."""
        leads = self.leader == member.name and self._members.get(member.name) is member
        if not leads or term != self._term or not self._has_majority():
            return
        self._open_proposals.append(command)
        delay = self.kernel.random.randint(*_COMMIT_NS)
        self._commit_at = max(self.kernel.now + delay, self._commit_at + 1)
        self.kernel.at(self._commit_at, partial(self._commit_next, self._term))

    def _commit_next(self, term: int) -> None:
        if term == self._term and self._open_proposals and self._has_majority():
            self._commit(self._open_proposals.pop(0))

    def _commit(self, command: bytes) -> None:
        self.kernel.record(b"commit " + command)
        self._commands.append(command)
        self._results.append(self.machine.apply(command))
        self.on_applied()
        if self.kernel.random.random() < 1 / 16:
            self._snapshot = (self.machine.snapshot(), len(self._commands))
        for name in self._reachable():
            self._schedule_apply(self._members[name])

    def commit_unseen(self, commands: Iterable[bytes]) -> None:
        """Commit while all nodes are dead; they start with the commands in a snapshot."""
        assert not self._members, "a node would see it"
        for command in commands:
            self._commands.append(command)
            self._results.append(self.machine.apply(command))
        self._snapshot = (self.machine.snapshot(), len(self._commands))
        self.kernel.record(b"unseen %d" % len(self._commands))

    def refound(self, state: bytes) -> None:
        """Begin a new group with this state, while all nodes are dead."""
        assert not self._members, "a node would see it"
        self.machine.restore(state)
        self._commands, self._results = [], []
        self._snapshot = (state, 0)
        self._open_proposals = []
        self.kernel.record(b"refounded")

    def _schedule_apply(self, member: Member) -> None:
        delay = self.kernel.random.randint(*_APPLY_NS)
        self.kernel.after(delay, partial(self._apply, member, len(self._commands)))

    def _apply(self, member: Member, upto: int) -> None:
        """Apply committed commands at a node, if it still lives."""
        if self._members.get(member.name) is not member or member.name in self._isolated:
            return
        while member.applied < upto:
            command = self._commands[member.applied]
            result = member.machine.apply(command)
            assert result == self._results[member.applied], "the machine is not deterministic"
            member.applied += 1
            member.on_event(Committed(command, result))
