"""Recovery requests of the failure handler: shards leave the leases, and return."""

from typing import Any

import msgspec
import pytest

from mms.commands import RecordLoss
from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import World, config, state
from ziplog.core.node import LeaderChanged
from ziplog.core.view import fingerprint
from ziplog.wire import (
    HandlerHeartbeat,
    NotLeader,
    Refused,
    Reinsert,
    Reinserted,
    Remove,
    Removed,
    Trim,
    TrimReply,
)

HANDLER = b"handler"
PRINTS = [fingerprint(f"directory of shard-0-{index}") for index in range(2)]


def remove(world: World, recovery: int = 2, view: int = 1, shard: int = 0) -> None:
    world.send(Remove(CLUSTER, 9, shard, view, recovery), HANDLER)


def reinsert(world: World, view: int = 2, lost_from: int = 0, **changes: Any) -> None:
    message = Reinsert(CLUSTER, 8, 0, view, PRINTS, lost_from)
    world.send(msgspec.structs.replace(message, **changes), HANDLER)


def members(world: World) -> list[tuple[int, int]]:
    return [(member.shard, member.view) for member in world.lease.members]


def removed(shards: int = 2) -> World:
    world = World(config(shards=shards)).lead().run(5 * S)
    remove(world)
    world.run(10 * MS)
    return world


# --- out -------------------------------------------------------------------------------------


def test_a_removed_shard_gets_no_more_leases_and_its_limit_stays() -> None:
    world = World().lead().run(5 * S)
    limit = world.lease.stop
    remove(world)
    assert world.answers(Removed, HANDLER) == []  # nothing is committed yet
    world.run(3 * MS)
    (answer,) = world.answers(Removed, HANDLER)
    assert (answer.request, answer.shard, answer.recovery, answer.limit) == (9, 0, 2, limit)
    assert answer.runs[-1].last.stop == limit
    assert members(world) == [(1, 1)]  # at once
    assert state(world) == "recovering"
    world.run(60 * S)
    assert members(world) == [(1, 1)]
    assert state(world) == "recovering"  # neither parked nor live again, though all are fit
    remove(world, recovery=5)
    world.run(10 * MS)
    assert world.answers(Removed, HANDLER)[-1].limit == limit
    assert world.answers(Removed, HANDLER)[-1].recovery == 5


def test_a_pending_lease_with_the_shard_is_committed_before_the_limit_or_not_at_all() -> None:
    for delay in range(0, 180, 7):
        world = World(delay=30 * MS).lead().run(5 * S)
        world.set_active()
        world.run(S + delay * MS)
        remove(world)
        world.run(400 * MS)
        (answer,) = world.answers(Removed, HANDLER)
        owners = {
            lease.number: [member.shard for member in lease.members]
            for run in world.service.state.runs
            for lease in (run.first, run.last)
            if lease.base >= answer.limit
        }
        assert owners
        assert set(map(tuple, owners.values())) == {(1,)}


def test_every_repeated_remove_gets_a_reply() -> None:
    world = removed()
    before = len(world.log)
    for _ in range(3):
        remove(world)
    assert len(world.answers(Removed, HANDLER)) == 4
    assert len({answer.limit for answer in world.answers(Removed, HANDLER)}) == 1
    world.run(10 * MS)
    assert len(world.log) == before


def test_a_repeated_request_is_proposed_once() -> None:
    world = World(delay=50 * MS).lead().run(5 * S)
    for _ in range(4):
        remove(world)
        world.run(5 * MS)
    world.run(100 * MS)
    assert world.commands().count("RemoveShard") == 1


def test_a_parked_shard_can_be_removed() -> None:
    world = World().lead().run(5 * S)
    world.servers[0].alive = False
    world.run(5 * S)
    assert state(world) == "parked"
    remove(world)
    world.run(10 * MS)
    assert state(world) == "recovering"
    assert len(world.answers(Removed, HANDLER)) == 1


@pytest.mark.parametrize(("shard", "view", "recovery"), [(7, 1, 2), (0, 1, 1), (0, 0, 2)])
def test_a_request_that_does_not_match_the_shard_is_refused(
    shard: int, view: int, recovery: int
) -> None:
    world = World().lead().run(5 * S)
    remove(world, recovery, view, shard)
    world.run(10 * MS)
    (refused,) = world.answers(Refused, HANDLER)
    assert (refused.request, refused.code) == (9, "wrong-view")
    assert state(world) == "live"


def test_an_older_recovery_is_refused() -> None:
    world = removed()
    remove(world, recovery=4)
    world.run(10 * MS)
    remove(world, recovery=3)
    world.run(10 * MS)
    assert len(world.answers(Refused, HANDLER)) == 1
    assert world.service.state.recovering[0].recovery == 4


def test_a_removal_is_announced_to_the_servers_of_the_shard() -> None:
    world = World(config(shards=1)).lead().run(5 * S)
    for server in world.servers:
        server.announced.clear()
    remove(world)
    world.run(5 * MS)
    for server in world.servers:
        assert [p.state for p in server.announced[-1].placements] == ["recovering"]
    world.servers[0].announced.clear()
    world.run(2 * S)  # and again, until it is in the view
    assert world.servers[0].announced[-1].placements[0].state == "recovering"


def test_a_follower_redirects_the_failure_handler() -> None:
    world = World(config(mms=3)).lead().run(5 * S)
    world.step(LeaderChanged("mms-1", is_self=False))
    remove(world)
    reinsert(world)
    assert [m.leader for m in world.answers(NotLeader, HANDLER)] == ["127.0.0.1:7001"] * 2


# --- back --------------------------------------------------------------------------------------


def test_a_shard_comes_back_with_its_view_and_its_directories_at_once() -> None:
    world = removed()
    number = world.lease.number
    reinsert(world, fingerprints=["new", PRINTS[1]])
    assert world.answers(Reinserted, HANDLER) == []
    world.run(3 * MS)
    (answer,) = world.answers(Reinserted, HANDLER)
    assert (answer.request, answer.shard, answer.view) == (8, 0, 2)
    assert members(world) == [(0, 2), (1, 1)]
    assert world.lease.number == number + 1
    placement = world.service.state.placements[0]
    assert (placement.state, placement.view) == ("live", 2)
    assert [replica.fingerprint for replica in placement.replicas] == ["new", PRINTS[1]]
    assert world.service.state.recovering == {}
    for server in world.servers[:2]:
        assert server.announced[-1].placements[0] == placement
        assert server.announced[-1].starts_in_us == 0
    reinsert(world)
    assert len(world.answers(Reinserted, HANDLER)) == 2  # a repeated request


def test_a_return_that_came_too_late_for_a_lease_comes_with_another_one_at_once() -> None:
    world = removed()
    world.delay = 60 * MS
    for _ in range(3000):
        if world.proposed:
            break
        world.run(5 * MS)
    assert world.proposed  # the next lease is under way, without the shard
    reinsert(world)
    world.run(300 * MS)
    assert members(world) == [(0, 2), (1, 1)]


def test_the_only_shard_leaves_no_lease_until_it_is_back() -> None:
    world = removed(shards=1)
    number, stop = world.lease.number, world.lease.stop
    before = len(world.log)
    world.run(100 * S)
    assert world.lease.number == number
    assert len(world.log) - before <= 2
    reinsert(world)
    world.run(3 * MS)
    assert members(world) == [(0, 2)]
    assert world.lease.base == stop
    assert len(world.answers(Reinserted, HANDLER)) == 1
    assert len(world.service.state.runs) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"view": 3},
        {"view": 1},
        {"shard": 7},
        {"shard": 1},
        {"fingerprints": PRINTS[:1]},
        {"fingerprints": ["", PRINTS[1]]},
        {"fingerprints": ["x" * 65, PRINTS[1]]},
    ],
    ids=str,
)
def test_nothing_else_returns(changes: dict[str, Any]) -> None:
    world = removed()
    shard1_is_in_view = changes.get("shard") == 1
    reinsert(world, **changes)
    world.run(2 * S)
    assert state(world) == "recovering"
    assert members(world) == [(1, 1)]
    assert len(world.answers(Refused, HANDLER)) == 1
    assert not shard1_is_in_view or state(world, 1) == "live"


def test_a_later_attempt_makes_an_older_return_void() -> None:
    world = removed()
    world.delay = 20 * MS
    remove(world, recovery=3)
    reinsert(world)  # before it is committed
    world.run(S)
    assert state(world) == "recovering"
    assert world.answers(Reinserted, HANDLER) == []
    assert world.service.state.recovering[0].recovery == 3
    reinsert(world, view=3)
    world.run(50 * MS)
    assert members(world) == [(0, 3), (1, 1)]


def test_servers_have_a_while_to_come_up_in_a_new_view() -> None:
    world = removed()
    for server in world.servers[:2]:
        server.state = "limbo"
        world.send_heartbeat(server)
    reinsert(world)
    world.run(2500 * MS)
    assert state(world) == "live"  # earlier heartbeats do not count
    world.run(S)
    assert state(world) == "parked"


def test_a_server_in_an_older_view_is_not_fit_and_gets_its_placement() -> None:
    world = removed()
    reinsert(world)
    world.run(5 * S)  # these servers never leave view 1
    assert state(world) == "parked"
    assert {p.view for p in world.servers[0].announced[-1].placements} == {1, 2}


def test_a_new_leader_continues_with_the_committed_state() -> None:
    world = removed()
    limit = world.answers(Removed, HANDLER)[0].limit
    world.start()
    world.lead().run(S)
    assert state(world) == "recovering"
    assert members(world) == [(1, 1)]
    remove(world)
    assert world.answers(Removed, HANDLER)[-1].limit == limit
    reinsert(world)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.step(LeaderChanged("mms-0", is_self=True))
    world.run(S)
    reinsert(world)
    world.run(50 * MS)
    assert members(world) == [(0, 2), (1, 1)]


def test_a_trim_waits_for_a_shard_that_is_recovered() -> None:
    world = removed()
    world.servers[0].is_disconnected = world.servers[1].is_disconnected = True
    world.send(Trim(CLUSTER, 3, 1000))
    world.run(5 * S)
    assert world.service.state.trim == 0
    world.servers[0].frontier = 1001
    world.send_heartbeat(world.servers[0])
    world.servers[0].is_disconnected = world.servers[1].is_disconnected = False
    world.run(5 * S)
    assert [m.trim for m in world.answers(TrimReply)] == [1000]


# --- losses ------------------------------------------------------------------------------------


def test_a_possible_loss_is_committed_before_the_shard_is_back_and_is_shown() -> None:
    world = removed()
    limit = world.answers(Removed, HANDLER)[0].limit
    reinsert(world, lost_from=limit - 2**24 - 5)
    world.run(2 * MS)
    assert world.service.state.losses == [RecordLoss(0, 2, limit - 2**24 - 5, limit)]
    assert state(world) == "recovering"
    world.run(3 * MS)
    assert state(world) == "live"
    (loss,) = world.status()["losses"]
    last = (limit - 2) // 2**24
    assert loss == {
        "shard": 0, "start": limit - 2**24 - 5, "stop": limit, "epochs": [last - 1, last],
    }  # fmt: skip
    reinsert(world, lost_from=limit - 2**24 - 5)
    world.run(S)
    assert len(world.service.state.losses) == 1


def test_a_loss_that_got_lost_is_proposed_again_and_nothing_is_back_without_it() -> None:
    world = removed()
    world.is_cut_off = True
    reinsert(world, lost_from=5)
    world.run(10 * MS)
    assert [command for _, command in world.proposed] == [
        RecordLoss(0, 2, 5, world.answers(Removed, HANDLER)[0].limit).encode()
    ]
    world.proposed.clear()
    world.is_cut_off = False
    for _ in range(20):
        reinsert(world, lost_from=5)
        world.run(100 * MS)
    assert world.commands().count("RecordLoss") == 1
    assert state(world) in {"live", "parked"}
    assert [loss.start for loss in world.service.state.losses] == [5]


def test_a_loss_beyond_the_limit_is_none() -> None:
    world = removed()
    limit = world.answers(Removed, HANDLER)[0].limit
    reinsert(world, lost_from=limit)
    world.run(10 * MS)
    assert world.service.state.losses == []
    assert state(world) == "live"


# --- failure handlers in the status ------------------------------------------------------------


def test_an_unknown_failure_handler_is_ignored() -> None:
    world = World().lead().run(S)
    world.send(HandlerHeartbeat(CLUSTER, "fh-7", 5, leader=True))
    assert len(world.complaints) == 1
    assert world.status()["failure_handlers"] == []


# --- a service that has forgotten its cluster ----------------------------------------------------


def test_a_service_that_lost_its_directory_makes_no_second_cluster() -> None:
    world = World().lead().run(5 * S)
    old = [server.lease for server in world.servers]
    world.log.clear()
    world.consensus = type(world.consensus)()
    world.start()
    world.service._creation._new_cluster = CLUSTER + 1  # type: ignore[misc]
    world.may_warn = True
    world.lead().run(10 * S)
    assert world.log == []
    assert [server.lease for server in world.servers] == old
    (text,) = world.warnings
    assert f"cluster {CLUSTER:032x}" in text
    assert "data directories" in text
    # The operator decides to start again.
    for server in world.servers:
        server.lease, server.state = None, "starting"
    world.run(3 * S)
    assert world.service.state.cluster == CLUSTER + 1


def test_a_cluster_file_with_an_id_makes_no_second_cluster() -> None:
    world = World(config(id=f"{CLUSTER:032x}"))
    world.may_warn = True
    world.lead().run(10 * S)
    assert world.log == []
    (text,) = world.warnings
    assert f"the cluster file belongs to cluster {CLUSTER:032x}, which had data" in text


def test_it_creates_a_cluster_without_the_servers_only_after_a_while() -> None:
    world = World()
    for server in world.servers:
        server.alive = False
    world.lead().run(1400 * MS)
    assert world.log == []
    world.run(S)
    assert world.commands()[0] == "CreateCluster"
