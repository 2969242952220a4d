"""A group of nodes with the real consensus library in virtual time, and its faults.

Clients propose on all nodes. Nodes die, pause, and lose disks and connections. Every event of a
node is checked immediately against all earlier ones. A settled group agrees and makes progress.
"""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.sim.disks import sync
from tests.simulator.disk import Disk, installed
from tests.simulator.kernel import MS, Kernel, S
from tests.simulator.network import Conditions, Network
from tests.simulator.raft import RaftGroup, virtual
from ziplog.core.node import Committed, LeaderChanged, Restored
from ziplog.raft import journal, snapshot
from ziplog.segments import durable_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulator.filesystem import DiskPath
    from ziplog.core.node import Event

#: From the end of the last fault until all nodes vote and have applied everything.
SETTLED_WITHIN_NS = 20 * S
#: Time within which a settled group applies a command of every node on all nodes.
APPLIED_WITHIN_NS = 5 * S
LIFE_NS = 120 * S
#: Mean intervals between proposals, and between faults.
PROPOSAL_NS = 100 * MS
FAULT_NS = 1 * S
#: Files of a node with bit flips.
ROTTING = ("journal", "flushed", "snapshot")
#: Mean interval between bit flips, in runs that have them.
ROT_NS = 3 * S
FAIR = Conditions()
WEIGHTS = {
    "kill": 4,
    "cut_power": 4,
    "divide": 3,
    "cut_one_way": 2,
    "heal": 4,
    "pause": 3,
    "slow_down": 2,
    "sever": 3,
    "compact": 2,
    "change_weather": 2,
    "wipe": 1,
}


class Words:
    """A state machine that keeps the applied commands."""

    def __init__(self) -> None:
        self.words: list[bytes] = []

    def apply(self, command: bytes) -> bytes:
        self.words.append(command)
        return b"%d" % len(self.words)

    def snapshot(self) -> bytes:
        return b" ".join(self.words)

    def restore(self, state: bytes) -> None:
        self.words = state.split()


def made_directory(disk: Disk) -> DiskPath:
    """Return an empty directory with a synced name, which a power cut does not remove."""
    path = disk.path("raft")
    path.mkdir()
    sync(disk.path(""))
    return path


def flip_in(directory: DiskPath, chance: Random) -> tuple[DiskPath, bytes]:
    """Flip a bit in a file of a node, mostly near its end; return the former content."""
    files = [path for path in sorted(directory.iterdir()) if path.name in ROTTING]
    path = chance.choice([path for path in files if path.stat().st_size])
    before = path.read_bytes()
    least = len(before) - chance.choice((20, 60, len(before)))
    flipped = bytearray(before)
    flipped[chance.randrange(max(least, 0), len(before))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(flipped))
    sync(path)
    return path, before


class World:
    """A group, its machines, clients on all nodes, and all committed commands."""

    def __init__(self, seed: int, size: int = 3) -> None:
        self.kernel = Kernel(seed)
        self.chance = self.kernel.random
        self.network = Network(self.kernel)
        self.names = [f"node-{number}" for number in range(size)]
        self.disks = {name: Disk(self.chance) for name in self.names}
        self.group = RaftGroup(
            self.network,
            self.names,
            Words,
            {name: made_directory(disk) for name, disk in self.disks.items()},
            sync_ns=lambda name: self.disks[name].sync_ns(),
        )
        #: All committed commands, in order.
        self.committed: list[bytes] = []
        self.leaders: dict[int, str] = {}
        #: Nodes that lost their disk and do not vote yet.
        self.new: set[str] = set()
        self.done: dict[str, int] = dict.fromkeys(WEIGHTS, 0)
        self.restored = self.proposed = 0
        self.is_disturbed = False
        #: Selects flipped bits; a separate generator, so that other runs do not change.
        self.rot_chance = Random(f"rot {seed}")
        #: Number of starts after a flip, by result.
        self.rotten = {"refused": 0, "harmless": 0}

    # --- events of nodes ---

    def on_event(self, name: str, event: Event) -> None:
        member = self.group.members[name]
        assert isinstance(member.machine, Words)
        words = member.machine.words
        if isinstance(event, Committed):
            position = len(words) - 1
            if position == len(self.committed):
                self.committed.append(event.command)
            assert self.committed[position] == event.command, f"{name} commits another command"
        elif isinstance(event, Restored):
            self.restored += 1
            assert self.committed[: len(words)] == words, f"{name} received another command"
        elif isinstance(event, LeaderChanged) and event.is_self:
            term = member.raft.status().term
            assert self.leaders.setdefault(term, name) == name, f"two leaders in term {term}"

    # --- faults ---

    def start(self, name: str) -> None:
        if name not in self.group.members:
            self.group.join(name, partial(self.on_event, name))

    def start_all(self) -> None:
        for name in self.names:
            self.start(name)

    def some(self) -> str:
        return self.chance.choice(self.names)

    def within(self, seconds: int) -> int:
        return self.chance.randint(0, seconds * S)

    def kill(self) -> None:
        name = self.some()
        self.group.leave(name)
        self.disks[name].kill()
        self.kernel.after(self.within(6), partial(self.start, name))

    def cut_power(self) -> None:
        name = self.some()
        self.group.leave(name)
        self.disks[name].power_cut()
        self.kernel.after(self.within(6), partial(self.start, name))

    def wipe(self) -> None:
        """Replace the machine of a node, if the others tolerate that."""
        name = self.some()
        if len(self.new | {name}) <= (len(self.names) - 1) // 2:
            self.replace(name)

    def replace(self, name: str) -> None:
        self.new.add(name)
        self.group.leave(name)
        self.disks[name] = Disk(self.chance)
        self.group.directories[name] = made_directory(self.disks[name])
        self.start(name)

    def rot(self) -> None:
        """Kill a node and flip a bit in its files; if it refuses to start, replace its directory.

        A group of one gets a copy back. A power cut at the same time is another fault: the note of
        the flushed end may then be late, and a damaged last record counts as torn.
        """
        name = self.rot_chance.choice(self.names)
        is_alone = len(self.names) == 1
        if name not in self.group.members or (
            not is_alone and len(self.new | {name}) > (len(self.names) - 1) // 2
        ):
            return
        self.group.leave(name)
        self.disks[name].kill()
        path, before = flip_in(self.group.directories[name], self.rot_chance)
        try:
            self.start(name)
            self.rotten["harmless"] += 1
        except journal.JournalError:
            self.rotten["refused"] += 1
            if is_alone:
                path.write_bytes(before)
                self.start(name)
            else:
                self.replace(name)

    def pause(self) -> None:
        name = self.some()
        self.group.pause(name)
        self.kernel.after(self.within(6), partial(self.group.resume, name))

    def divide(self) -> None:
        sides = {name: self.chance.randrange(2) for name in self.names}
        for one, other in itertools.permutations(self.names, 2):
            if sides[one] != sides[other]:
                self.network.cut(one, other)

    def cut_one_way(self) -> None:
        self.network.cut(self.some(), self.some())

    def heal(self) -> None:
        self.network.heal_all()

    def sever(self) -> None:
        self.group.sever(self.some(), self.some())

    def compact(self) -> None:
        self.group.compact(self.some())

    def slow_down(self) -> None:
        self.disks[self.some()].latency_ns = self.chance.choice((0, 5 * MS, 80 * MS))

    def change_weather(self) -> None:
        self.network.conditions = self.chance.choice(
            (FAIR, Conditions(loss=0.05), Conditions(delay_ns=(MS, 60 * MS), stalls=0.05))
        )

    # --- runs ---

    def live(self, duration_ns: int, *, rots: bool = False) -> None:
        """Propose on all nodes and inject faults; with `rots`, also bit flips."""
        self.is_disturbed = True
        if rots:
            self.rot_again()
        self.propose_again()
        self.disturb_again()
        self.kernel.run(duration_ns)
        self.is_disturbed = False

    def propose_again(self) -> None:
        if self.is_disturbed:
            for name in self.names:  # those that lead, or consider themselves leaders, take it
                self.propose(name)
            self.kernel.after(self.chance.randint(0, 2 * PROPOSAL_NS), self.propose_again)

    def propose(self, name: str) -> bytes:
        self.proposed += 1
        command = b"%d" % self.proposed
        if name in self.group.members:
            status = self.group.status(name)
            self.group.members[name].propose(command, status.term if status is not None else 0)
        return command

    def disturb_again(self) -> None:
        if self.is_disturbed:
            self.update_new()
            (fault,) = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
            self.done[fault] += 1
            getattr(self, fault)()
            self.kernel.after(self.chance.randint(0, 2 * FAULT_NS), self.disturb_again)

    def rot_again(self) -> None:
        if self.is_disturbed:
            self.update_new()
            self.rot()
            self.kernel.after(self.rot_chance.randint(0, 2 * ROT_NS), self.rot_again)

    def update_new(self) -> None:
        for name in self.names:
            if (status := self.group.status(name)) is not None and status.is_voter:
                self.new.discard(name)

    def mend(self) -> None:
        self.network.heal_all()
        self.network.conditions = FAIR
        for name in self.names:
            self.disks[name].latency_ns = 0
            self.start(name)
            self.group.resume(name)

    def settle(self, within_ns: int = SETTLED_WITHIN_NS) -> None:
        """End all faults; check that all nodes agree and apply every proposal soon."""
        self.mend()
        self.wait(self.is_settled, within_ns, "the group does not settle")
        begin = self.kernel.now
        command = self.propose(self.group.leader)
        self.kernel.run(PROPOSAL_NS)
        while command not in self.committed:
            # A frame on a broken connection is lost until both ends notice.
            assert self.kernel.now - begin < APPLIED_WITHIN_NS, "no result"
            command = self.propose(self.group.leader)
            self.kernel.run(PROPOSAL_NS)
        self.wait(
            lambda: self.words() == [self.committed] * len(self.names),
            APPLIED_WITHIN_NS,
            "commands are not applied",
        )
        assert self.machine_words() == self.committed

    def wait(self, condition: object, within_ns: int, complaint: str) -> None:
        end = self.kernel.now + within_ns
        while not condition():  # type: ignore[operator]
            assert self.kernel.now < end, f"{complaint}: {self.states()}"
            self.kernel.run(20 * MS)

    def words(self) -> list[list[bytes]]:
        members = self.group.members
        return [members[name].machine.words for name in self.names if name in members]  # type: ignore[attr-defined]

    def machine_words(self) -> list[bytes]:
        assert isinstance(self.group.machine, Words)
        return self.group.machine.words

    def states(self) -> list[object]:
        return [(name, self.group.status(name)) for name in self.names]

    def is_settled(self) -> bool:
        statuses = [self.group.status(name) for name in self.names]
        return (
            all(s is not None and s.is_voter and s.leader for s in statuses)
            and len({(s.leader, s.term, s.applied) for s in statuses if s is not None}) == 1
            and all(len(s.connected) == len(self.names) - 1 for s in statuses if s is not None)
        )

    def end(self) -> None:
        for name in self.names:
            self.group.leave(name)


@contextlib.contextmanager
def world(seed: int, size: int = 3) -> Iterator[World]:
    """Yield a group that has just settled."""
    made = World(seed, size)
    with virtual(made.kernel), installed([journal, snapshot, durable_files], made.chance):
        made.start_all()
        made.settle()
        yield made
        made.end()


def live(seed: int, size: int = 3, duration_ns: int = LIFE_NS, *, rots: bool = False) -> World:
    """Run a group through a seed's faults, and settle it."""
    with world(seed, size) as made:
        made.live(duration_ns, rots=rots)
        made.settle()
    return made
