"""What the status document says of a shard that cannot be recovered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from failure_handler.members import Member
from failure_handler.obstacles import obstacle as what_it_waits_for
from failure_handler.state import Attempt, Decision, Recovered
from tests.services import CLUSTER, MS, S
from tests.unit.failure_handler.test_lost_regions import change, spread
from tests.unit.failure_handler.world import World, config
from ziplog.core.view import Placement, Replica
from ziplog.wire import Suspect

if TYPE_CHECKING:
    from collections.abc import Sequence


def obstacle(world: World, shard: int = 0) -> str | None:
    found: str | None = world.status()["shards"][shard]["obstacle"]
    return found


def test_a_shard_that_works_or_is_recovered_has_no_obstacle() -> None:
    world = World().live()
    assert obstacle(world) is None
    world.kill(world.server(0, 1))
    while world.mms.state.placements[0].view == 1:
        world.run(50 * MS)
        assert obstacle(world) is None
    world.until_live(view=2)
    assert obstacle(world) is None


def test_a_shard_waits_for_a_server_that_must_copy_the_log() -> None:
    world = World().live()
    world.supervised = False
    world.kill(world.server(0, 0))
    world.run(10 * S)
    assert obstacle(world) == (
        "shard-0-0 must copy the log of the new view first; start shard-0-0, with an empty"
        " directory if its own is lost"
    )
    world.server(0, 0).restart(wiped=True)
    world.until_live(view=2)
    world.run(2 * S)
    assert obstacle(world) is None


@pytest.mark.parametrize(
    ("regions", "killed", "advice"),
    [
        (
            ("ap", "eu", "us"), (1, 2),
            "eu, us are lost for good, `ziplog region lost eu` and `ziplog region lost us` let",
        ),
        (
            ("ap", "eu", "eu"), (1, 2),
            "eu is lost for good, `ziplog region lost eu` lets",
        ),
        (("ap", "eu", "us"), (2,), ""),
        (("ap", "ap", "eu"), (1, 2), ""),
        (("ap", "", "eu"), (1, 2), ""),
        (("", "", ""), (1, 2), ""),
    ],
)  # fmt: skip
def test_a_shard_that_lost_whole_regions_names_the_command(
    regions: Sequence[str], killed: Sequence[int], advice: str
) -> None:
    world = spread(*regions)
    world.kill(*(world.server(0, index) for index in killed))
    world.run(10 * S)
    names = " and ".join(f"shard-0-{index}" for index in killed)
    advice = f"; readers wait, too: if {advice} them continue" if advice else ""
    assert obstacle(world) == (
        f"{names} must copy the log of the new view first; start {names}, with an empty directory"
        f" if its own is lost{advice}"
    )
    for region in dict.fromkeys(regions[index] for index in killed if advice):
        world.run(3 * S)
        assert change(world, region) == ""
    world.run(3 * S)
    assert "region lost" not in str(obstacle(world))


@pytest.mark.parametrize("silent", [1, 2])
def test_the_command_is_not_named_while_enough_servers_may_join(silent: int) -> None:
    members = [Member(f"shard-0-{index}", index) for index in range(3)]
    for member in members[silent:]:
        member.heard_at = 10 * S
    replicas = tuple(Replica(one.name, "h:1", region=f"r{one.index}") for one in members)
    placement = Placement(0, 1, "recovering", replicas)
    attempt, decision = Attempt(2, 2, 1, False, 1), Decision(2, 1, 5, b"d" * 16, 0)
    known = Recovered(0, 2, 1, attempt, decision, is_finished=False)
    found = what_it_waits_for(members, placement, known, 0, 10 * S)
    assert ("region lost" in found) == (silent == 2)


def test_a_shard_without_a_certain_log_waits_for_all_servers() -> None:
    world = World(config(f=2)).live()
    world.supervised = False
    world.kill(*world.servers)
    world.server(0, 1).restart()
    world.run(10 * S)
    names = "shard-0-0 and shard-0-2"
    assert obstacle(world) == (
        f"no server that reports certainly has all records, so the shard waits for {names}; start"
        f" {names} with the former data directory"
    )
    world.server(0, 0).restart()
    world.server(0, 2).restart()
    world.until_live(view=2)


def test_a_shard_whose_servers_are_all_down() -> None:
    world = World().live()
    world.supervised = False
    world.kill(*world.servers)
    world.run(10 * S)
    assert obstacle(world) == ("no server of the shard is up; start shard-0-0 and shard-0-1")


def test_a_shard_whose_directories_are_all_lost() -> None:
    world = World().live()
    world.supervised = False
    world.kill(*world.servers)
    for server in world.servers:
        server.restart(wiped=True)
    world.run(10 * S)
    assert obstacle(world) == (
        "none of its servers has its data directory. Restore one, and start its server"
    )


@pytest.mark.parametrize("is_dead", [True, False])
def test_without_a_leading_failure_handler_a_shard_is_not_recovered(is_dead: bool) -> None:
    world = World().live()
    world.supervised = False
    if is_dead:
        del world.handlers["fh-0"]
    else:
        world.fail_over()
        world.cut.add("fh-0")
    world.run(4 * S)
    assert obstacle(world) is None
    world.kill(world.server(0, 1))
    world.server(0, 1).restart()
    world.run(2 * S)
    assert (obstacle(world) or "").startswith("no failure handler leads, and only its leader")


def test_a_damaged_log_that_no_other_server_can_repair() -> None:
    members = [Member(f"shard-0-{index}", index) for index in range(2)]
    for member in members:
        member.heard_at = 10 * S
        member.suspect = Suspect(
            CLUSTER, member.name, 0, 1, member.index, 1, "limbo", [], 5, 1, 0, "",
            is_damaged=member.index == 1,
        )  # fmt: skip
    placement = Placement(0, 1, "recovering", ())
    assert what_it_waits_for(members, placement, None, 0, 10 * S) == (
        "shard-0-1 cannot read a part of the log that no other server has; restore its segment"
        " files from a copy, or another server's former data directory, and start it again"
    )
