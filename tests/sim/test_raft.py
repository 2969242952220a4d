"""The real consensus library in virtual time: what was committed stays, whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.raft.node import put_back_shipped
from tests.sim.hashing import printed_under_any_hashes
from ziplog.node import Committed, LeaderChanged, Restored
from ziplog.runtime import journal, library, receive, snapshot
from ziplog.runtime import raft as adapter
from ziplog.runtime.journal import JournalError
from ziplog.sim import raft as simulated
from ziplog.sim.disk import Disk, installed
from ziplog.sim.kernel import MS, Kernel, S
from ziplog.sim.network import Conditions, Network
from ziplog.sim.raft import RaftGroup, virtual

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ziplog.node import Event
    from ziplog.sim.filesystem import DiskPath

#: From the end of the last fault until all nodes vote and have applied everything.
SETTLED_WITHIN_NS = 20 * S
#: In a settled group a command of every node is applied everywhere within so long.
APPLIED_WITHIN_NS = 5 * S
LIFE_NS = 120 * S
#: How often the clients propose something, and how often something is disturbed, on average.
PROPOSAL_NS = 100 * MS
FAULT_NS = 1 * S
FAIR = Conditions()
#: What the library's own receive path breaks is found within so many seeds.
SEEDS_UNTIL_CAUGHT = 12
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
    """A machine that keeps what it was told."""

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
    """Return an empty directory whose own name a power cut does not take away."""
    path, root = disk.path("raft"), disk.open(disk.path(""), os.O_RDONLY)
    path.mkdir()
    disk.sync(root)
    disk.close(root)
    return path


class World:
    """A group, its machines, clients on all nodes, and everything that was promised."""

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
        #: All that was committed anywhere, in order.
        self.committed: list[bytes] = []
        self.leaders: dict[int, str] = {}
        #: Nodes that forgot everything and do not vote yet.
        self.new: set[str] = set()
        self.done: dict[str, int] = dict.fromkeys(WEIGHTS, 0)
        self.restored = self.proposed = 0
        self.is_disturbed = False

    # --- what nodes say ---

    def on_event(self, name: str, event: Event) -> None:
        member = self.group.members[name]
        assert isinstance(member.machine, Words)
        words = member.machine.words
        if isinstance(event, Committed):
            position = len(words) - 1
            if position == len(self.committed):
                self.committed.append(event.command)
            assert self.committed[position] == event.command, f"{name} commits something else"
        elif isinstance(event, Restored):
            self.restored += 1
            assert self.committed[: len(words)] == words, f"{name} was told of something else"
        elif isinstance(event, LeaderChanged) and event.is_self:
            term = member.raft.status().term
            assert self.leaders.setdefault(term, name) == name, f"two leaders in term {term}"

    # --- what happens to nodes ---

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
        """Replace the machine of a node, if the others can bear that."""
        name = self.some()
        if len(self.new | {name}) <= (len(self.names) - 1) // 2:
            self.replace(name)

    def replace(self, name: str) -> None:
        self.new.add(name)
        self.group.leave(name)
        self.disks[name] = Disk(self.chance)
        self.group.directories[name] = made_directory(self.disks[name])
        self.start(name)

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

    # --- life ---

    def live(self, duration_ns: int) -> None:
        """Propose on all nodes and let everything happen to them."""
        self.is_disturbed = True
        self.propose_again()
        self.disturb_again()
        self.kernel.run(duration_ns)
        self.is_disturbed = False

    def propose_again(self) -> None:
        if self.is_disturbed:
            self.propose(self.some())
            self.kernel.after(self.chance.randint(0, 2 * PROPOSAL_NS), self.propose_again)

    def propose(self, name: str) -> bytes:
        self.proposed += 1
        command = b"%d" % self.proposed
        if name in self.group.members:
            self.group.members[name].propose(command)
        return command

    def disturb_again(self) -> None:
        if self.is_disturbed:
            for name in self.names:
                if (status := self.group.status(name)) is not None and status.is_voter:
                    self.new.discard(name)
            (fault,) = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
            self.done[fault] += 1
            getattr(self, fault)()
            self.kernel.after(self.chance.randint(0, 2 * FAULT_NS), self.disturb_again)

    def mend(self) -> None:
        self.network.heal_all()
        self.network.conditions = FAIR
        for name in self.names:
            self.disks[name].latency_ns = 0
            self.start(name)
            self.group.resume(name)

    def settle(self, within_ns: int = SETTLED_WITHIN_NS) -> None:
        """Mend everything; soon all agree, and what is proposed anywhere is applied everywhere."""
        self.mend()
        self.wait(self.is_settled, within_ns, "the group does not settle")
        begin = self.kernel.now
        for name in self.names:
            # What is sent on a connection of which nobody knows yet that it is broken is lost.
            command = self.propose(name)
            self.kernel.run(PROPOSAL_NS)
            while command not in self.committed:
                assert self.kernel.now - begin < APPLIED_WITHIN_NS, f"nothing comes of {name}'s"
                command = self.propose(name)
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
    """A group that has just settled."""
    made = World(seed, size)
    with virtual(made.kernel), installed([journal, snapshot], made.chance):
        made.start_all()
        made.settle()
        yield made
        made.end()


def live(seed: int, size: int = 3, duration_ns: int = LIFE_NS) -> World:
    """Let a group live through a seed's faults, and settle."""
    with world(seed, size) as made:
        made.live(duration_ns)
        made.settle()
    return made


# --- whole lives ---


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("seed", range(int(os.environ.get("ZIPLOG_SEEDS", "3"))))
def test_no_life_loses_what_was_committed(seed: int, size: int) -> None:
    lived = live(seed, size)
    assert lived.group.streams.garbage == 0
    assert len(lived.committed) > 100
    assert len(lived.leaders) > 2
    assert lived.done["cut_power"] > 3


def test_a_seed_is_a_history_whatever_the_hash_seed_is() -> None:
    program = (
        "from tests.sim.test_raft import live;"
        "print(*(live(seed, 5, 20 * 10**9).kernel.trace_hash() for seed in (1, 2)))"
    )
    hashes = printed_under_any_hashes(program)
    assert len(set(hashes.split())) == 2


def test_what_the_library_takes_by_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHTS, "wipe", 0)  # only what it loses with directories that stay
    put_back_shipped(monkeypatch.setattr)
    broken: list[str] = []
    for seed in range(SEEDS_UNTIL_CAUGHT):
        try:
            live(seed)
        except AssertionError as error:
            broken.append(str(error))
            break
    assert "commits something else" in broken[0]


# --- who is replaced ---


def followers(made: World) -> list[str]:
    return [name for name in made.names if name != made.group.leader]


def isolate(made: World, name: str) -> None:
    for other in made.names:
        made.network.cut(name, other)
        made.network.cut(other, name)


def test_a_node_with_a_new_directory_votes_again() -> None:
    with world(1) as made:
        lost, other = followers(made)
        made.replace(lost)
        status = made.group.status(lost)
        assert status is not None
        assert not status.is_voter
        made.settle()
        made.group.leave(other)  # nothing is committed without the new one now
        command = made.propose(made.group.leader)
        made.wait(lambda: command in made.committed, APPLIED_WITHIN_NS, "it does not count")


def test_a_node_whose_barrier_went_into_a_snapshot_votes_again() -> None:
    with world(2) as made:
        leader, lost = made.group.leader, followers(made)[0]
        barriers = made.group.members[leader].node._joiners
        made.replace(lost)
        made.wait(lambda: barriers, S, "the leader hears nothing of it")
        assert not made.group.members[lost].node.is_voter
        isolate(made, lost)
        made.wait(
            lambda: lost not in made.group.status(leader).connected,  # type: ignore[union-attr]
            10 * S,
            "what was sent to it still waits to arrive",
        )
        (barrier,) = [joiner.barrier for joiner in barriers.values()]
        held = made.group.members[leader].raft._journal.entries
        while held[0].index <= barrier:
            made.propose(leader)
            made.kernel.run(20 * MS)
            held = made.group.members[leader].raft._journal.entries
        assert not made.group.members[lost].node.is_voter
        restored = made.restored
        made.settle()
        assert made.group.leader == leader
        assert made.restored == restored + 1


# --- single faults ---


def test_a_paused_node_stands_still_and_keeps_its_connections() -> None:
    with world(3) as made:
        name = followers(made)[0]
        made.group.pause(name)
        turns = made.group.members[name]._busy_until
        command = made.propose(made.group.leader)
        made.kernel.run(2 * S)
        member = made.group.members[name]
        assert command in made.committed
        assert command not in member.machine.words  # type: ignore[attr-defined]
        assert member._busy_until == turns
        assert all(name in made.group.status(o).connected for o in made.names if o != name)  # type: ignore[union-attr]
        made.group.resume(name)
        made.wait(lambda: command in member.machine.words, S, "it does not go on")  # type: ignore[attr-defined]
        made.settle()


def test_a_leader_that_is_cut_off_leads_no_more_and_follows_when_it_is_back() -> None:
    with world(4) as made:
        former = made.group.leader
        isolate(made, former)
        lost = made.propose(former)
        made.wait(lambda: made.group.leader != former, 10 * S, "nobody else leads")
        made.wait(
            lambda: made.group.status(former).connected == (),  # type: ignore[union-attr]
            10 * S,
            "it believes in its connections",
        )
        assert not made.group.status(former).is_leader  # type: ignore[union-attr]
        made.settle()
        assert lost not in made.committed


def test_both_ends_learn_of_a_broken_connection_at_different_times() -> None:
    with world(5) as made:
        one, other = followers(made)
        near = made.group.members[one].wire.ends[other]
        far = near.other
        made.group.sever(one, other)
        told: dict[str, int] = {}

        def look() -> bool:
            for name, end in ((one, near), (other, far)):
                if end.is_closed:
                    told.setdefault(name, made.kernel.now)
            return len(told) == 2

        assert made.kernel.run_until(look, 5 * S)
        assert len(set(told.values())) == 2
        made.settle()


def test_who_dies_without_a_word_is_missed_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for chance, least_ns, most_ns in ((0.0, 0, S), (1.0, 3 * S, 8 * S)):
        monkeypatch.setattr(simulated, "_MACHINE_DIES", chance)
        with world(6) as made:
            name, other = followers(made)
            begin = made.kernel.now
            made.group.leave(name)
            assert made.kernel.run_until(
                lambda other=other, name=name: name not in made.group.status(other).connected,
                10 * S,
            )
            assert least_ns < made.kernel.now - begin < most_ns


def test_a_commit_waits_for_the_disks() -> None:
    with world(7) as made:
        for disk in made.disks.values():
            disk.latency_ns = 100 * MS
        begin, command = made.kernel.now, made.propose(made.group.leader)
        made.wait(lambda: command in made.committed, 5 * S, "it is not committed")
        # The leader's sync, then a follower's.
        assert made.kernel.now - begin >= 200 * MS
        made.settle()


def test_a_node_that_must_not_go_on_is_reported_and_gone() -> None:
    with world(8) as made:
        reported: list[tuple[str, str]] = []
        made.group.on_fatal = lambda name, reason: reported.append((name, reason))  # type: ignore[misc]
        name = followers(made)[0]
        made.disks[name].fail_on(1)
        made.propose(made.group.leader)
        made.wait(lambda: reported, 2 * S, "nobody is told")
        assert [who for who, _ in reported] == [name]
        assert "cannot be written" in reported[0][1]
        assert name not in made.group.members
        made.disks[name].kill()
        made.settle()


def test_without_anybody_to_tell_a_node_that_stops_itself_fails_the_run() -> None:
    with world(9) as made:
        made.disks[made.group.leader].fail_on(1)
        made.propose(made.group.leader)
        with pytest.raises(AssertionError, match="stopped itself: consensus journal"):
            made.kernel.run(S)


def test_a_damaged_journal_is_refused_at_the_start() -> None:
    with world(10) as made:
        name = followers(made)[0]
        made.group.leave(name)
        path = made.group.directories[name] / "journal"
        path.write_bytes(b"ZIPRAFT1" + path.read_bytes()[8:])
        with pytest.raises(JournalError, match="no journal of this version"):
            made.start(name)
        assert name not in made.group.members
        made.replace(name)
        made.settle()


# --- the group itself ---


def test_an_idle_group_has_few_turns() -> None:
    for size, most in ((1, 2), (3, 160)):
        with world(11, size) as made:
            begin = made.kernel.steps
            made.kernel.run(10 * S)
            assert (made.kernel.steps - begin) / 10 <= most


def test_the_most_advanced_machine_is_there_after_all_nodes_left() -> None:
    with world(12) as made:
        assert made.group.leader in made.names
        command = made.propose(made.group.leader)
        made.kernel.run(2 * S)
        for name in made.names:
            made.group.leave(name)
            made.group.leave(name)
        assert made.machine_words()[-1] == command
        assert made.group.leader == ""
        assert made.group.status(made.names[0]) is None
        made.settle()


def test_the_library_is_as_it_was_after_a_simulation() -> None:
    modules = (*adapter.FOREIGN, journal, snapshot, library, receive, adapter)
    before = [dict(vars(module)) for module in modules]
    with contextlib.suppress(ZeroDivisionError), virtual(Kernel(0)):
        assert [dict(vars(module)) for module in modules] != before
        raise ZeroDivisionError
    assert [dict(vars(module)) for module in modules] == before


def test_real_directories_give_the_same_history(tmp_path: Path) -> None:
    hashes = set()
    for turn in ("first", "second"):
        made = World(13)
        made.group.directories.update({name: tmp_path / turn / name for name in made.names})
        with virtual(made.kernel):
            made.start_all()
            made.settle()
            made.group.compact(made.group.leader)
            made.kernel.run(S)
            made.end()
        assert (tmp_path / turn / made.names[0] / "journal").is_file()
        assert len(list((tmp_path / turn).glob("*/snapshot"))) == 1
        hashes.add(made.kernel.trace_hash())
    assert len(hashes) == 1


def test_nodes_live_in_one_simulation_only() -> None:
    made = World(0)
    with pytest.raises(AssertionError, match="only inside of"):
        made.start_all()
    with virtual(Kernel(0)):
        with pytest.raises(AssertionError, match="another kernel"):
            made.start_all()
        with pytest.raises(AssertionError, match="one simulation at a time"), virtual(Kernel(1)):
            pass
