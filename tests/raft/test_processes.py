"""Three Raft processes are killed, paused, starved and wiped: no acknowledged command is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.raft.group import Group
from tests.raft.node import Settings
from tests.raft.torture import Plan, torture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)
QUICK = Settings(haste=4.0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(settings: Settings = QUICK) -> Group:
        groups.append(Group(tmp_path / str(len(groups)), settings))
        groups[-1].start_all()
        groups[-1].leader()
        return groups[-1]

    yield make
    for one in groups:
        one.close()


def more(group: Group, count: int) -> None:
    """Wait until `count` more commands were acknowledged."""
    enough = len(group.acknowledged) + count
    group.run_until(lambda: len(group.acknowledged) >= enough)


def others(group: Group, *names: str) -> list[str]:
    return [name for name in group.nodes if name not in names]


def check(group: Group) -> None:
    verdict = group.verdict()
    assert verdict.is_good, verdict


@pytest.mark.parametrize("wanted", [15, pytest.param(60, marks=pytest.mark.nightly)])
def test_torture(tmp_path: Path, wanted: int) -> None:
    kills, verdict = torture(tmp_path, Plan(kills=wanted))
    assert kills >= wanted
    assert verdict.acknowledged > 0
    assert verdict.is_good, verdict


def test_leader_is_killed_repeatedly(group: Callable[..., Group]) -> None:
    running = group()
    running.load(True)
    for _ in range(8):
        more(running, 50)
        leader = running.leader()
        running.kill(leader)
        more(running, 50)
        running.start(leader)
    check(running)


def test_paused_leader_acknowledges_only_committed_commands(
    group: Callable[..., Group],
) -> None:
    running = group()
    running.load(True)
    for _ in range(3):
        more(running, 50)
        leader = running.leader()
        running.pause(leader)
        more(running, 200)  # the others have another leader
        running.resume(leader)
        running.barrier(leader)
    check(running)


def test_all_three_are_killed_at_once(group: Callable[..., Group]) -> None:
    running = group(Settings(haste=4.0, compact_s=0.5))
    running.load(True)
    for _ in range(3):
        more(running, 100)
        for name in running.nodes:
            running.kill(name)
        running.start_all()
    more(running, 100)
    check(running)


@pytest.mark.nightly
def test_one_disk_is_slow(group: Callable[..., Group]) -> None:
    running = group()
    running.kill("c")
    running.settings["c"] = Settings(sync_s=0.03, haste=4.0)
    running.start("c")
    running.load(True)
    more(running, 300)
    running.kill("a")  # now every command needs the slow disk
    more(running, 100)
    running.start("a")
    check(running)


def test_a_lost_node_is_replaced(group: Callable[..., Group]) -> None:
    running = group(Settings(haste=4.0, compact_s=0.5))
    running.load(True)
    more(running, 100)
    for lost in running.nodes:
        running.kill(lost)
        running.wipe(lost)
        running.start(lost)
        running.run_until(lambda lost=lost: running.status(lost)["is_voter"])  # type: ignore[misc]
        more(running, 100)
    # Both vote: a group of two commits only if both do.
    running.kill("a")
    more(running, 100)
    check(running)


def test_wiped_node_does_not_lose_acknowledged_commands(
    group: Callable[..., Group],
) -> None:
    running = group()
    running.kill("b")
    running.load(True)
    more(running, 100)
    running.load(False)
    for name in ("a", "c"):
        running.kill(name)
    running.wipe("c")
    # Only a holds the acknowledged commands. b and the new c are a majority, and must not lead.
    running.start("b")
    running.start("c")
    term = running.status("b")["term"]
    running.run_until(lambda: running.status("b")["term"] > term + 2)  # it gets no votes
    assert not running.status("c")["is_voter"]
    assert not any(running.status(name)["leader"] for name in "bc")
    running.start("a")
    running.run_until(lambda: running.status("c")["is_voter"])
    check(running)


def test_group_recovers_from_a_lack_of_file_descriptors(group: Callable[..., Group]) -> None:
    running = group()
    # The node with the greater endpoint opens the connection.
    called, _, caller = sorted(running.nodes, key=running.nodes.__getitem__)
    running.ask(called, "take_files", "taken")
    running.kill(caller)
    running.start(caller)
    running.load(True)
    more(running, 100)  # the other two, or the other one and the caller, continue
    assert caller not in running.status(called)["connected"]
    running.tell(called, "free_files")
    running.run_until(lambda: caller in running.status(called)["connected"])
    check(running)
