"""Regions that an operator gave up: views are confirmed without them, and no record is given up."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from failure_handler.members import Members
from failure_handler.state import Begin
from tests.services import CLUSTER, MS, S
from tests.unit.failure_handler.servers import HOP
from tests.unit.failure_handler.world import World, config
from ziplog.core.node import Received
from ziplog.core.view import Placement, Replica
from ziplog.wire import ChangeRegion, ClusterInfo, RegionChanged, ViewDecided

if TYPE_CHECKING:
    from collections.abc import Sequence

REGIONS = ("ap", "eu", "us")


def spread(*regions: str, handlers: int = 1, shards: int = 1) -> World:
    """Return a cluster of shards with a server in each of these regions."""
    plain = config(shards, f=len(regions) - 1, handlers=handlers)
    labelled = tuple(
        dataclasses.replace(
            shard,
            replicas=tuple(
                dataclasses.replace(node, region=region or None)
                for node, region in zip(shard.replicas, regions, strict=True)
            ),
        )
        for shard in plain.shards
    )
    world = World(dataclasses.replace(plain, shards=labelled)).live()
    world.supervised = False
    return world


def change(world: World, region: str, *, is_lost: bool = True) -> str:
    """Have an operator change a region; return the obstacle."""
    world.sent = []
    event = Received(b"client", ChangeRegion(CLUSTER, 5, region, is_lost))
    world.step_mms(event)
    world.until(lambda: bool(world.messages(RegionChanged)), S)
    (reply,) = world.messages(RegionChanged)
    assert isinstance(reply, RegionChanged)
    return reply.obstacle


def lose(world: World, *regions: str) -> World:
    """Kill the servers of some regions, and wait until these may be given up."""
    world.kill(*(server for server in world.servers if server.region in regions))
    return world.run(12 * S)


def confirmed(world: World) -> int:
    """Return the last view that is confirmed."""
    known = world.consensus.shards.get(0)
    return known.confirmed if known is not None else 1


@pytest.mark.parametrize(
    ("regions", "lost", "copies"),
    [
        (("ap", "eu", "us"), [], 2),
        (("ap", "eu", "us"), ["eu"], 2),
        (("ap", "eu", "us"), ["eu", "us"], 1),
        (("ap", "eu", "us"), ["ap", "eu", "us"], 1),
        (("ap", "eu", "us"), ["elsewhere"], 2),
        (("ap", "ap", "eu"), ["ap"], 1),
        (("ap", "ap", "eu"), ["eu"], 2),
        (("ap", "eu", "us", "us"), ["ap", "eu"], 2),
        (("ap", "eu", "us", "us"), ["ap"], 3),
        (("ap", "eu"), ["eu"], 1),
        (("ap",), ["ap"], 1),
        (("", "", ""), [""], 1),
    ],
)
def test_a_view_needs_f_copies_or_those_that_are_left(
    regions: Sequence[str], lost: list[str], copies: int
) -> None:
    members = Members()
    replicas = tuple(Replica(f"s-{i}", f"h:{i}", region=r) for i, r in enumerate(regions))
    members.on_cluster_info([Placement(0, 1, "live", replicas)], lost, 10 * S)
    assert members.copies_needed(0, 0, 10 * S) == copies


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_server_of_three_confirms_a_view_if_the_others_are_given_up(index: int) -> None:
    world = spread(*REGIONS)
    assert world.insert("one")
    gone = [region for region in REGIONS if region != REGIONS[index]]
    lose(world, *gone)
    assert confirmed(world) == 1
    assert change(world, gone[0]) == ""
    world.run(5 * S)
    assert confirmed(world) == 1, "two servers are needed, as one region of two is given up"
    assert change(world, gone[1]) == ""
    world.until(lambda: confirmed(world) == 2, 3 * S)
    world.run(S)
    assert any(message.is_confirmed for message in world.messages(ViewDecided))
    assert world.mms.state.placements[0].state == "recovering", "inserts need all servers"


def test_without_the_word_of_the_operator_no_view_is_confirmed() -> None:
    world = lose(spread(*REGIONS), "eu", "us")
    world.run(60 * S)
    assert confirmed(world) == 1
    assert world.server(0, 0).state == "joined"


def test_a_lost_region_with_one_server_changes_nothing_for_the_others() -> None:
    world = lose(spread(*REGIONS), "us")
    assert change(world, "us") == ""
    assert confirmed(world) == 2, "two of three servers are left"
    world.kill(world.server(0, 0))
    world.server(0, 0).restart()
    world.until(lambda: confirmed(world) > 2 or len(world.decided(Begin)) > 1, 10 * S)
    world.kill(world.server(0, 1))
    world.run(20 * S)
    assert confirmed(world) < world.consensus.shards[0].attempt.recovery


def test_a_recovery_that_begins_later_needs_one_copy() -> None:
    """The region is given up while the shard still has a confirmed view."""
    world = lose(spread("ap", "ap", "eu"), "ap")
    assert change(world, "ap") == ""
    world.until(lambda: confirmed(world) == 2, 3 * S)
    world.kill(world.server(0, 2))
    world.server(0, 2).restart()
    world.run(10 * S)
    assert confirmed(world) == 2, "the others may hold more until they report"
    for server in world.servers[:2]:
        server.restart()
    world.until_live()
    world.run(3 * S)
    assert world.mms.state.lost_regions == []


@pytest.mark.parametrize("hears", [True, False])
def test_a_server_of_a_lost_region_that_runs_has_to_join(hears: bool) -> None:
    """The regions are still given up, because a server of the other shard is missing.

    One that does not hear the survivor cannot join, so it does not count.
    """
    world = lose(spread(*REGIONS, shards=2), "eu", "us")
    for region in ("eu", "us"):
        assert change(world, region) == ""
    world.run(3 * S)
    for server in world.servers:
        if server.region != "ap" and server.name != "shard-0-2":
            server.restart()
    world.until(lambda: world.mms.state.placements[1].state == "live")
    world.run(3 * S)
    assert world.mms.state.lost_regions == ["eu", "us"]
    view = world.consensus.shards[1].view

    other = world.server(1, 1)
    world.network = lambda _src, dst, message: (
        [] if type(message) is ViewDecided and dst == other.name else [HOP]
    )
    world.kill(world.server(1, 2))
    world.until(lambda: world.consensus.shards[1].view > view, 10 * S)
    if not hears:
        other.always_suspects.add(0)
    world.run(3 * S)
    assert (world.consensus.shards[1].confirmed > view) is not hears
    world.network = lambda _src, _dst, _message: [HOP]
    world.until(lambda: world.consensus.shards[1].confirmed > view, 5 * S)


def test_inserts_continue_once_all_servers_have_joined_and_the_region_counts_again() -> None:
    world = spread(*REGIONS)
    assert world.insert("one")
    lose(world, "eu", "us")
    for region in ("eu", "us"):
        assert change(world, region) == ""
    world.until(lambda: confirmed(world) == 2, 3 * S)
    for server in world.servers[1:]:
        server.restart(wiped=server.index == 1)
    world.until_live(view=2)
    world.run(3 * S)
    assert world.mms.state.lost_regions == []
    assert world.insert("two")
    lose(world, "eu", "us")
    world.run(20 * S)
    assert confirmed(world) == 2, "the former word does not count any more"


def test_after_the_end_as_many_copies_are_needed_as_before() -> None:
    world = lose(spread(*REGIONS), "eu", "us")
    for region in ("eu", "us"):
        assert change(world, region) == ""
    world.until(lambda: confirmed(world) == 2, 3 * S)
    for region in ("eu", "us"):
        assert change(world, region, is_lost=False) == ""
    world.run(2 * S)
    assert confirmed(world) == 2, "a confirmed view stays confirmed"
    world.kill(world.server(0, 0))
    for server in world.servers:
        server.restart()
    world.until(lambda: world.consensus.shards[0].view == 3)
    world.kill(*world.servers[1:])
    world.run(20 * S)
    assert confirmed(world) == 2


def test_a_server_that_returns_in_its_old_view_is_no_candidate() -> None:
    """The survivor alone holds the confirmed view; the shard waits for it."""
    world = spread(*REGIONS)
    assert world.insert("one")
    world.insert("of the survivor", but=1)
    world.cut = {"shard-0-1", "shard-0-2"}
    world.run(12 * S)
    for region in ("eu", "us"):
        assert change(world, region) == ""
    world.until(lambda: confirmed(world) == 2, 3 * S)
    begun = len(world.decided(Begin))
    held = list(world.server(0, 0).log)
    world.kill(world.server(0, 0))
    world.cut = set()
    world.run(20 * S)
    assert {server.view for server in world.servers[1:]} == {1}
    assert len(world.decided(Begin)) == begun
    world.server(0, 0).restart()
    world.until_live()
    for server in world.servers:
        assert server.log[: len(held)] == held


@pytest.mark.parametrize("is_leader", [True, False])
def test_only_the_leader_of_the_membership_service_is_believed(is_leader: bool) -> None:
    world = spread(*REGIONS)
    handler = world.handlers["fh-0"]
    info = world.messages(ClusterInfo)[-1]
    leader = info.mms if is_leader else ["127.0.0.1:9", *info.mms]
    information = ClusterInfo(
        CLUSTER, info.request, info.name, info.durability, leader, info.placements, [], 0,
        info.limits, lost_regions=["eu", "us"],
    )  # fmt: skip
    world.step_handler("fh-0", Received(b"mms-0", information))
    assert handler.members.lost_regions == (frozenset({"eu", "us"}) if is_leader else frozenset())


def test_every_node_of_the_failure_handler_knows_lost_regions() -> None:
    world = lose(spread(*REGIONS, handlers=3), "eu", "us")
    world.network = lambda src, _dst, message: (
        [] if type(message) is ViewDecided and src == "fh-0" else [HOP]
    )
    for region in ("eu", "us"):
        assert change(world, region) == ""
    world.fail_over()
    world.until(lambda: confirmed(world) > 1, 5 * S)
    world.run(100 * MS)
    assert world.server(0, 0).state == "joined"


def after_an_isolation(world: World, name: str) -> None:
    """Isolate a node of the handler from the end of a loss until another recovery is decided."""
    lose(world, "eu", "us")
    for region in ("eu", "us"):
        assert change(world, region) == ""
    world.until(lambda: confirmed(world) == 2, 3 * S)
    world.run(2 * S)
    world.cut = {name}
    for server in world.servers[1:]:
        server.restart()
    world.until_live(view=2)
    world.run(3 * S)
    assert world.mms.state.lost_regions == []
    assert world.handlers[name].members.lost_regions == {"eu", "us"}
    world.kill(*world.servers[1:])
    world.until(lambda: world.consensus.shards[0].view == 3, 10 * S)
    world.run(3 * S)
    assert confirmed(world) == 2


def test_a_handler_that_was_isolated_does_not_act_on_the_regions_that_were_lost_before() -> None:
    """It leads before the membership service has answered it."""
    world = spread(*REGIONS, handlers=3)
    after_an_isolation(world, "fh-1")
    world.cut = set()
    world.network = lambda src, dst, _: [] if (src, dst) == ("mms-0", "fh-1") else [HOP]
    world.run(200 * MS)
    world.elect("fh-1")
    world.run(5 * S)
    assert confirmed(world) == 2, "the regions are back, so two servers are needed"


def test_a_late_answer_does_not_bring_lost_regions_back() -> None:
    world = spread(*REGIONS, handlers=3)
    lose(world, "eu", "us")
    for region in ("eu", "us"):
        assert change(world, region) == ""
    world.run(2 * S)
    handler = world.handlers["fh-0"]
    late = next(message for message in reversed(world.messages(ClusterInfo)))
    assert late.lost_regions == ["eu", "us"]
    for region in ("eu", "us"):
        assert change(world, region, is_lost=False) == ""
    world.run(2 * S)
    world.step_handler("fh-0", Received(b"mms-0", late))
    assert handler.members.lost_regions == frozenset()
