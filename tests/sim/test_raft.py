"""The real consensus library in virtual time: committed commands survive all faults."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
from pysyncobj import serializer, syncobj

from tests.raft.node import put_back_shipped
from tests.sim.hashing import printed_under_any_hashes
from tests.sim.raft_world import APPLIED_WITHIN_NS, WEIGHTS, World, live, world
from tests.simulator import raft as simulated
from tests.simulator.kernel import MS, Kernel, S
from tests.simulator.raft import virtual
from ziplog.raft import journal, pysyncobj_adapter, raft_node, snapshot
from ziplog.raft import raft as adapter
from ziplog.raft.journal import JournalError

if TYPE_CHECKING:
    from pathlib import Path

#: Seeds within which violations of the library's own receive path are found.
SEEDS_UNTIL_CAUGHT = 40


# --- complete runs ---


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("seed", range(int(os.environ.get("ZIPLOG_SEEDS", "3"))))
def test_no_run_loses_a_committed_command(seed: int, size: int) -> None:
    lived = live(seed, size)
    assert lived.group.streams.garbage == 0
    assert len(lived.committed) > 100
    assert len(lived.leaders) > 2
    assert lived.done["cut_power"] > 3


def test_a_seed_is_a_history_whatever_the_hash_seed_is() -> None:
    program = (
        "from tests.sim.raft_world import live;"
        "print(*(live(seed, 5, 20 * 10**9).kernel.trace_hash() for seed in (1, 2)))"
    )
    hashes = printed_under_any_hashes(program)
    assert len(set(hashes.split())) == 2


def test_what_the_library_takes_by_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHTS, "wipe", 0)  # only losses with permanent directories
    put_back_shipped(monkeypatch.setattr)
    broken: list[str] = []
    for seed in range(SEEDS_UNTIL_CAUGHT):
        try:
            live(seed)
        except AssertionError as error:
            broken.append(str(error))
            break
    assert "commits another command" in broken[0]


# --- bit flips ---


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("seed", range(int(os.environ.get("ZIPLOG_SEEDS", "3"))))
def test_no_run_with_bit_flips_loses_a_committed_command(seed: int, size: int) -> None:
    lived = live(seed, size, rots=True)
    assert len(lived.committed) > 100
    assert lived.rotten["refused"] > 3


@pytest.mark.parametrize("size", [1, 3])
def test_a_damaged_last_record_that_is_taken_for_a_torn_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    real = journal.Journal._replay
    monkeypatch.setattr(
        journal.Journal, "_replay", lambda self, data, at, _flushed: real(self, data, at, 0)
    )
    broken: list[str] = []
    for seed in range(SEEDS_UNTIL_CAUGHT):
        try:
            live(seed, size, rots=True)
        except AssertionError as error:
            broken.append(str(error))
            break
    found = ("commits another command", "which is committed here")
    assert any(text in broken[0] for text in found), broken[0]


# --- replaced nodes ---


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
        made.group.leave(other)  # no commit without the new node now
        command = made.propose(made.group.leader)
        made.wait(lambda: command in made.committed, APPLIED_WITHIN_NS, "its vote does not count")


def test_a_node_with_its_barrier_in_a_snapshot_votes_again() -> None:
    with world(2) as made:
        leader, lost = made.group.leader, followers(made)[0]
        barriers = made.group.members[leader].node._pending_voters
        made.replace(lost)
        made.wait(lambda: barriers, S, "the leader receives nothing from it")
        assert not made.group.members[lost].node.is_voter
        isolate(made, lost)
        made.wait(
            lambda: lost not in made.group.status(leader).connected,  # type: ignore[union-attr]
            10 * S,
            "messages to it are still in flight",
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
        made.wait(lambda: command in member.machine.words, S, "it does not continue")  # type: ignore[attr-defined]
        made.settle()


def test_a_leader_that_is_cut_off_leads_no_more_and_follows_when_it_is_back() -> None:
    with world(4) as made:
        former = made.group.leader
        isolate(made, former)
        lost = made.propose(former)
        made.wait(lambda: made.group.leader != former, 10 * S, "no other node leads")
        made.wait(
            lambda: made.group.status(former).connected == (),  # type: ignore[union-attr]
            10 * S,
            "it still considers its connections open",
        )
        assert not made.group.status(former).is_leader  # type: ignore[union-attr]
        made.settle()
        assert lost not in made.committed


@pytest.mark.parametrize(("size", "cut_off"), [(3, 1), (3, 2), (5, 1), (5, 4)])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_node_that_reaches_both_leads_while_one_link_is_cut(
    seed: int, size: int, cut_off: int
) -> None:
    """Otherwise the nodes of the link replace each other, or one of them never hears a leader."""
    with world(seed, size) as made:
        leader, lost = made.group.leader, made.names[cut_off]
        assert leader == "node-0"
        elections = len(made.leaders)
        made.network.cut(leader, lost)
        made.network.cut(lost, leader)
        for _ in range(200):
            for name in made.names:
                made.propose(name)
            made.kernel.run(100 * MS)
        assert made.group.leader not in {leader, lost}
        assert len(made.leaders) <= elections + 2
        command = made.propose(made.group.leader)
        made.wait(
            lambda: all(words[-1:] == [command] for words in made.words()),
            APPLIED_WITHIN_NS,
            "a node does not hear the leader",
        )


def test_both_ends_learn_of_a_broken_connection_at_different_times() -> None:
    with world(5) as made:
        one, other = followers(made)
        near = made.group.members[one].wire.ends[other]
        far = near.other
        made.group.sever(one, other)
        noticed_at: dict[str, int] = {}

        def look() -> bool:
            for name, end in ((one, near), (other, far)):
                if end.is_closed:
                    noticed_at.setdefault(name, made.kernel.now)
            return len(noticed_at) == 2

        assert made.kernel.run_until(look, 5 * S)
        assert len(set(noticed_at.values())) == 2
        made.settle()


def test_a_machine_that_dies_silently_is_detected_by_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_commands_that_wait_share_one_sync() -> None:
    """Otherwise each waits for all syncs before it, and ever longer on a slow disk."""
    with world(8) as made:
        for disk in made.disks.values():
            disk.latency_ns = 50 * MS
        begin = made.kernel.now
        commands = [made.propose(made.group.leader) for _ in range(100)]
        made.wait(lambda: commands[-1] in made.committed, S, "each command waits for its own sync")
        assert made.committed[-100:] == commands
        assert made.kernel.now - begin > 2 * 50 * MS


def test_a_node_that_must_not_go_on_is_reported_and_gone() -> None:
    with world(8) as made:
        reported: list[tuple[str, str]] = []
        made.group.on_fatal = lambda name, reason: reported.append((name, reason))  # type: ignore[misc]
        name = followers(made)[0]
        made.disks[name].fail_on(1)
        made.propose(made.group.leader)
        made.wait(lambda: reported, 2 * S, "no peer is notified")
        assert [node for node, _ in reported] == [name]
        assert "cannot be written" in reported[0][1]
        assert name not in made.group.members
        made.disks[name].kill()
        made.settle()


def test_a_node_that_stops_itself_fails_the_run_without_a_handler() -> None:
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
        with pytest.raises(JournalError, match="not a journal of this version"):
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
    modules = (serializer, syncobj, journal, snapshot, pysyncobj_adapter, raft_node, adapter)
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
