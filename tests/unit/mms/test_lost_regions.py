"""Regions that an operator gives up: refusals, repetitions, the end, and what shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from mms.commands import FinalizeShard, RetireShard, SetRegionLost, decode_command
from mms.state import ClusterState
from mms.waiting_requests import MAX_WAITING
from tests.services import CLUSTER, MS, S
from tests.unit.mms.reconfiguration import HANDLER
from tests.unit.mms.test_regions import TRIANGLE, hello, labelled, reinsert
from tests.unit.mms.test_state import apply, with_leases
from tests.unit.mms.world import FakeServer, World, state
from ziplog.core.node import Committed, LeaderChanged
from ziplog.wire import ChangeRegion, NotLeader, RegionChanged, Remove

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The servers of region a: the first of shard 0, and the last of shard 2.
IN_A = ("shard-0-0", "shard-2-1")


def started(mms: int = 1) -> World:
    world = World(labelled(*TRIANGLE, mms=mms))
    world.may_warn = True
    return world.lead().run(5 * S)


def servers_in_a(world: World) -> list[FakeServer]:
    return [server for server in world.servers if server.name in IN_A]


def lose_a(world: World, silence: int = 11 * S) -> World:
    """Kill the servers of region a, and let this time pass since the last heartbeat of both."""
    for server in servers_in_a(world):
        world.send_heartbeat(server)
        server.alive = False
    return world.run(silence)


def change(world: World, region: str = "a", request: int = 9, *, is_lost: bool = True) -> list[str]:
    """Request a change; return the obstacles in its answers."""
    world.sent.clear()
    world.send(ChangeRegion(CLUSTER, request, region, is_lost))
    world.run(100 * MS)
    replies = world.answers(RegionChanged)
    assert all((reply.request, reply.region) == (request, region) for reply in replies)
    return [reply.obstacle for reply in replies]


def changes(commands: Iterable[bytes]) -> list[SetRegionLost]:
    """Return the changes of regions among encoded commands, without their turns."""
    decoded = [decode_command(command) for command in commands]
    return [
        msgspec.structs.replace(command, turn=None)
        for command in decoded
        if isinstance(command, SetRegionLost)
    ]


def committed(world: World) -> list[SetRegionLost]:
    return changes(world.log)


def lost(world: World) -> list[str]:
    return world.service.state.lost_regions


# --- the state ---


def test_lost_regions_are_sorted_and_have_servers() -> None:
    regions = started().service.state
    assert apply(regions, SetRegionLost("x", is_lost=True)) == "no-such-region"
    for region in ("c", "a", "c"):
        assert apply(regions, SetRegionLost(region, is_lost=True)) == ""
    assert regions.lost_regions == ["a", "c"]
    for region in ("a", "a", "x"):
        assert apply(regions, SetRegionLost(region, is_lost=False)) == ""
    assert regions.lost_regions == ["c"]


def test_a_snapshot_keeps_lost_regions() -> None:
    regions = started().service.state
    assert apply(regions, SetRegionLost("a", is_lost=True)) == ""
    copy = ClusterState()
    copy.restore(regions.snapshot())
    copy.check()
    assert copy.lost_regions == ["a"]
    assert copy.snapshot() == regions.snapshot()


def test_an_earlier_snapshot_has_no_lost_regions() -> None:
    former = with_leases(2)
    copy = ClusterState()
    copy.restore(msgspec.msgpack.encode(msgspec.msgpack.decode(former.snapshot())[:-3]))
    assert copy.lost_regions == []
    assert copy.snapshot() == former.snapshot()


# --- refusals ---


def test_a_region_without_servers_is_refused() -> None:
    world = started()
    assert change(world, "x") == ["no storage server is there; name a region with servers: a, b, c"]
    assert change(world, "") == ["no storage server is there; name a region with servers: a, b, c"]
    assert committed(world) == []


@pytest.mark.parametrize(("silence", "is_done"), [(9_900 * MS, False), (10 * S, True)])
def test_a_region_is_given_up_after_ten_seconds_of_silence(silence: int, is_done: bool) -> None:
    world = lose_a(started(), silence)
    obstacles = change(world)
    if is_done:
        assert obstacles == [""]
    else:
        (obstacle,) = obstacles
        assert obstacle == (
            "shard-0-0, shard-2-1 may run: the membership leader counts less than 10 s of silence."
            " Stop the servers there, or wait, and try again"
        )
    assert lost(world) == ["a"] * is_done


def test_one_server_that_is_heard_prevents_it() -> None:
    world = started()
    servers_in_a(world)[0].alive = False
    world.run(11 * S)
    (obstacle,) = change(world)
    assert obstacle.startswith("shard-2-1 may run: ")
    assert committed(world) == []


def test_of_many_servers_that_are_heard_some_are_named() -> None:
    world = World(labelled(*(("a", "b"),) * 22)).lead().run(5 * S)
    (obstacle,) = change(world)
    assert obstacle.count("shard-") == 20
    assert "shard-19-0, and 2 more may run" in obstacle


@pytest.mark.parametrize(("since", "is_done"), [(9_800 * MS, False), (10 * S, True)])
def test_a_new_leader_counts_the_silence_from_its_start_on(since: int, is_done: bool) -> None:
    world = lose_a(started(mms=3), 20 * S)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.run(S)
    world.lead().run(since)
    assert (change(world) == [""]) == is_done
    assert lost(world) == ["a"] * is_done


def test_silence_during_a_pause_of_the_leader_does_not_count() -> None:
    world = lose_a(started(), 2 * S)
    world.now += 60 * S
    world.run(5 * S)
    assert "may run" in change(world)[0]
    world.run(5 * S)
    assert change(world, request=10) == [""]


# --- repetitions and leaders ---


def test_a_repetition_changes_nothing() -> None:
    world = lose_a(started())
    assert change(world) == [""]
    assert change(world) == [""]
    assert change(world, request=10) == [""]
    assert committed(world) == [SetRegionLost("a", is_lost=True)]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_refused_request_gives_nothing_up_later(is_late: bool) -> None:
    """Its client repeated it during a slow commit; the last copy may come after the refusal."""
    world = lose_a(started(), 5 * S)
    world.sent.clear()
    world.delay = 3 * S
    for _ in range(3):
        world.send(ChangeRegion(CLUSTER, 9, "a", is_lost=True))
        world.run(S)
    world.run(100 * MS)
    (refusal,) = world.answers(RegionChanged)
    assert "may run" in refusal.obstacle
    world.run(10 * S)
    if is_late:
        world.send(ChangeRegion(CLUSTER, 9, "a", is_lost=True))
        world.run(10 * S)
    assert {reply.obstacle for reply in world.answers(RegionChanged)} == {refusal.obstacle}
    assert lost(world) == []


def test_a_late_copy_undoes_no_later_request() -> None:
    world = lose_a(started())
    assert change(world, request=9) == [""]
    assert change(world, request=10, is_lost=False) == [""]
    assert change(world, request=9) == [""]
    assert lost(world) == []


def test_a_request_waits_for_the_commit_and_moves_with_the_leader() -> None:
    world = lose_a(started(mms=3))
    world.is_cut_off = True
    assert change(world) == []
    world.send(ChangeRegion(CLUSTER, 9, "a", is_lost=True))  # a repetition
    proposed = changes(command for _, command in world.proposed)
    assert proposed.count(SetRegionLost("a", is_lost=True)) == 1
    for request in range(10, 10 + MAX_WAITING):
        world.send(ChangeRegion(CLUSTER, request, "a", is_lost=True))
    world.sent.clear()
    world.step(LeaderChanged("mms-1", is_self=False))
    redirected = [message.request for message in world.answers(NotLeader)]
    assert redirected == list(range(10, 10 + MAX_WAITING))  # the oldest gave way


def test_a_request_to_the_next_leader_repeats_the_committed_one() -> None:
    world = lose_a(started(mms=3))
    assert change(world) == [""]
    world.step(LeaderChanged("mms-1", is_self=False))
    world.sent.clear()
    world.send(ChangeRegion(CLUSTER, 9, "a", is_lost=True))
    assert len(world.answers(NotLeader)) == 1
    world.lead()
    assert change(world) == [""], "no silence has to pass again"
    assert committed(world) == [SetRegionLost("a", is_lost=True)]


# --- the end ---


def test_an_operator_ends_it() -> None:
    world = lose_a(started())
    assert change(world) == [""]
    assert change(world, is_lost=False) == [""]
    assert lost(world) == []
    assert change(world, is_lost=False) == [""]
    assert change(world, "x", is_lost=False) == [""]
    assert lost(world) == []


def test_the_end_comes_after_a_request_that_is_not_decided() -> None:
    world = lose_a(started())
    world.is_cut_off = True
    assert change(world) == []
    assert change(world, request=10, is_lost=False) == []
    world.is_cut_off = False
    world.run(100 * MS)
    replies = world.answers(RegionChanged)
    assert [(reply.request, reply.obstacle) for reply in replies] == [(9, ""), (10, "")]
    assert lost(world) == []


def test_it_ends_once_all_servers_are_up() -> None:
    world = lose_a(started())
    assert change(world) == [""]
    first, second = servers_in_a(world)
    first.alive = True
    world.run(5 * S)
    assert lost(world) == ["a"]
    second.alive = True
    second.state = "limbo"
    world.run(5 * S)
    assert lost(world) == ["a"]
    second.state = "up"
    world.run(2 * S)
    assert lost(world) == []
    assert committed(world)[1:] == [SetRegionLost("a", is_lost=False)]


def test_it_does_not_end_while_a_shard_with_a_server_there_recovers() -> None:
    world = lose_a(started())
    assert change(world) == [""]
    world.send(Remove(CLUSTER, 5, 2, 1, 2), HANDLER)
    for server in servers_in_a(world):
        server.alive = True
    world.run(5 * S)
    assert state(world, 2) == "recovering"
    assert lost(world) == ["a"]
    for server in world.servers:
        server.view = 2 if server.shard == 1 else server.view
    reinsert(world, ["b", "c"])  # shard 1, which has no server there
    world.run(3 * S)
    assert lost(world) == ["a"]


def test_a_shard_that_is_over_does_not_count() -> None:
    """Its servers may be stopped for good."""
    world = lose_a(started())
    assert change(world) == [""]
    first, _ = servers_in_a(world)
    first.alive = True
    world.run(5 * S)
    for command in (RetireShard(2, 0), FinalizeShard(2)):
        encoded = command.encode()
        world.log.append(encoded)
        world.step(Committed(encoded, world.consensus.apply(encoded)))
        world.run(3 * S)
    assert lost(world) == ["a"], "its positions are not trimmed"
    world.is_checked = False
    world.service.state.trim = world.service.state.retired[2].limit
    world.run(3 * S)
    assert SetRegionLost("a", is_lost=False) in committed(world)


# --- what shows them ---


def test_clients_and_operators_see_lost_regions() -> None:
    world = lose_a(started())
    assert hello(world).lost_regions == world.status()["lost_regions"] == []
    assert world.status()["regions"]["a"]["state"] == "away"
    change(world)
    assert hello(world).lost_regions == world.status()["lost_regions"] == ["a"]
    assert world.status()["regions"]["a"] == {"state": "lost", "servers_up": 0, "servers": 2}
    assert world.status()["regions"]["b"]["state"] == "up"


def test_the_history_has_each_change_once() -> None:
    world = lose_a(started())
    change(world, is_lost=False)
    for request in (10, 20):
        change(world, request=request)
        world.run(2 * S)
        change(world, request=request + 1, is_lost=False)
        change(world, request=request + 2, is_lost=False)
        world.run(2 * S)
    found = [text for kind, _, _, text in world.events() if kind == "region"]
    assert found == ["region a was given up", "region a is back"] * 2


# --- late proposals ---


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_late_proposal_of_a_former_leader_reverts_no_newer_decision(is_lost: bool) -> None:
    """It may be in the log of a former leader, and of the next one."""
    world = lose_a(started(mms=3))
    if not is_lost:
        assert change(world) == [""]
    world.is_cut_off = True
    assert change(world, is_lost=is_lost) == []
    late = next(c for _, c in world.proposed if isinstance(decode_command(c), SetRegionLost))
    world.step(LeaderChanged("mms-1", is_self=False))
    world.proposed.clear()
    world.is_cut_off = False

    world.lead().run(12 * S)
    assert change(world, request=11, is_lost=True) == [""]
    assert change(world, request=12, is_lost=False) == [""]
    if not is_lost:
        assert change(world, request=10, is_lost=True) == [""]
    decided = lost(world)
    assert decided == ([] if is_lost else ["a"])
    world.step(Committed(late, world.consensus.apply(late)))
    assert lost(world) == decided


def test_an_operator_is_answered_only_once_earlier_proposals_are_out_of_turn() -> None:
    """Two requests to end a loss, and between them one that its operator has abandoned."""
    world = lose_a(started())
    world.is_cut_off = True
    for request, is_lost in ((9, False), (10, True), (11, False)):
        assert change(world, request=request, is_lost=is_lost) == []
    first, second, *_ = [
        c for _, c in world.proposed if isinstance(decode_command(c), SetRegionLost)
    ]
    world.proposed.clear()
    world.step(Committed(first, world.consensus.apply(first)))
    assert {reply.request for reply in world.answers(RegionChanged)} == {9, 11}
    world.step(Committed(second, world.consensus.apply(second)))
    assert lost(world) == []


def test_a_repetition_is_not_refused_while_its_proposal_may_be_committed() -> None:
    world = lose_a(started())
    world.is_cut_off = True
    assert change(world) == []
    world.send_heartbeat(servers_in_a(world)[0])
    assert change(world) == [], "the region may be given up all the same"
    world.is_cut_off = False
    world.run(100 * MS)
    assert lost(world) == ["a"]
    assert {reply.obstacle for reply in world.answers(RegionChanged)} == {""}


def test_a_former_leader_does_not_answer_that_a_region_is_lost() -> None:
    world = lose_a(started(mms=3))
    assert change(world) == [""]
    world.is_cut_off = True  # another node leads: the region came back there, and counts again
    assert change(world, request=10) == []
    world.step(LeaderChanged("mms-1", is_self=False))
    assert [reply.request for reply in world.answers(NotLeader)] == [10]
