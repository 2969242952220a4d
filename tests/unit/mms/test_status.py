"""The status document."""

import msgspec

from mms.commands import FinalizeShard, RetireShard
from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import World, config
from ziplog.core.node import Committed, PeersChanged
from ziplog.monitor.health import readiness_problem
from ziplog.status_document import nodes_of
from ziplog.wire import (
    ChangeShard,
    HandlerHeartbeat,
    LeaseHistory,
    LeaseQuery,
    NodeInfo,
    Obstacle,
    Remove,
    Trim,
)
from ziplog.wire.service import Finalized


def test_a_connected_membership_node_is_up_while_it_replies() -> None:
    world = World(config(mms=3)).lead().run(5 * S)
    world.step(PeersChanged(("mms-1", "mms-2")))

    def states() -> list[str]:
        return [node["state"] for node in world.status()["mms"]]

    assert states() == ["up", "suspect", "suspect"]
    world.send(NodeInfo(CLUSTER, 0, "membership", "mms-1", "c", "0.2", 1, 2, [], 1), b"mms-1")
    assert states() == ["up", "up", "suspect"]
    world.run(3 * S)
    assert states() == ["up", "suspect", "suspect"]


def test_the_status_document() -> None:
    world = World(config(mms=3)).lead().run(5 * S)
    world.step(PeersChanged(("mms-2",)))
    for server in world.servers:
        server.rate, server.frontier = 1200, 2**24 + 1
    world.run(2 * S)
    document = world.status()
    assert document["cluster"] == "c"
    assert document["cluster_id"] == f"{CLUSTER:032x}"
    assert document["durability"] == "memory"
    assert document["epoch"] in range(5, 9)
    assert document["finalized_epoch"] == 0
    assert document["trimmed_before"] == "0@0"
    assert document["failure_handlers"] == []
    assert [(n["name"], n["leader"], n["state"], n["pid"]) for n in document["mms"]] == [
        ("mms-0", True, "up", 1), ("mms-1", False, "down", None), ("mms-2", False, "suspect", None)
    ]  # fmt: skip
    assert document["lease"] == world.lease.number
    assert document["blocked_by"] is None
    shard = document["shards"][0]
    assert {key: shard[key] for key in shard if key != "replicas"} == {
        "id": 0, "view": 1, "state": "live", "rate_per_s": 1200, "stable_gsn": 7, "durable_gsn": 5,
        "frontier": 2**24 + 1, "epoch": 1, "holes": 3, "is_watched": False, "refusing": False,
        "is_over": False,
        "weight": 1, "blocks": [], "obstacle": None, "regions": [""],
    }  # fmt: skip
    age_ms = shard["replicas"][1].pop("heartbeat_age_ms")
    assert 0 <= age_ms <= 1000
    assert shard["replicas"][1] == {
        "name": "shard-0-1", "endpoint": "127.0.0.1:8001", "role": "backup", "pid": 99,
        "region": "",
        "state": "up", "full": None, "version": "0.1", "wire_versions": [1, 1],
        "disk": {"free_bytes": 0, "reserve_bytes": 0, "full": False},
    }  # fmt: skip


def test_nothing_of_the_past_is_reported_as_present() -> None:
    world = World(config(handlers=1)).lead().run(5 * S)
    world.send(HandlerHeartbeat(CLUSTER, "fh-0", 5, leader=True, free_bytes=7), b"handler")
    for server in world.servers:
        server.rate = 1200
    world.run(S)
    before = world.status()
    assert before["shards"][0]["rate_per_s"] == 1200
    assert None not in [node["disk"] for node in nodes_of(before)]
    for server in world.servers:
        server.alive = False
    world.run(6 * S)
    after = world.status()
    assert after["shards"][0]["rate_per_s"] == 0
    reported = {node["name"] for node in nodes_of(after) if node["disk"] is not None}
    assert reported == {"mms-0"}
    states = {node["state"] for node in nodes_of(after) if node["name"] != "mms-0"}
    assert states == {"down"}
    pids = {node["name"]: node["pid"] for node in nodes_of(after) if node["pid"] is not None}
    assert pids == {"mms-0": 1}, "the number of a dead process may be another program's"


def test_live_shard_has_no_obstacle_of_an_older_heartbeat() -> None:
    world = World(config(handlers=1)).lead().run(5 * S)
    obstacle = Obstacle(0, "start shard-0-0")
    world.send(HandlerHeartbeat(CLUSTER, "fh-0", 5, leader=True, obstacles=[obstacle]), b"handler")
    server = next(one for one in world.servers if one.shard == 0)
    assert world.status()["shards"][0]["obstacle"] is None
    server.state = "limbo"
    world.send_heartbeat(server)
    assert world.status()["shards"][0]["obstacle"] == "start shard-0-0"


def test_a_full_primary_makes_its_shard_refuse_and_a_full_backup_does_not() -> None:
    world = World().lead().run(5 * S)
    primary, backup = (s for s in world.servers if s.shard == 0)
    backup.full = "no space"
    world.send_heartbeat(backup)
    shard = world.status()["shards"][0]
    assert [(r["state"], r["full"], r["disk"]["full"]) for r in shard["replicas"]] == [
        ("up", None, False),
        ("full", "no space", True),
    ]
    assert not shard["refusing"]
    primary.full = "no space either"
    world.send_heartbeat(primary)
    assert world.status()["shards"][0]["refusing"]
    primary.full = ""
    world.send_heartbeat(primary)
    assert not world.status()["shards"][0]["refusing"]


def test_the_age_of_a_heartbeat_is_the_state_of_a_node() -> None:
    world = World().lead().run(5 * S)
    world.send_heartbeat(world.servers[0])
    world.servers[0].alive = False
    found = []
    for _ in range(3):
        world.run(2 * S)
        replica = world.status()["shards"][0]["replicas"][0]
        found.append((replica["state"], replica["heartbeat_age_ms"]))
    assert found == [("up", 2000), ("suspect", 4000), ("down", 6000)]


def test_a_server_without_a_heartbeat_has_no_age() -> None:
    world = World().lead()
    for server in world.servers:
        server.alive = False
    world.run(2 * S)
    replica = world.status()["shards"][0]["replicas"][0]
    assert (replica["state"], replica["heartbeat_age_ms"]) == ("starting", None)


def test_the_trim_point_names_its_shard() -> None:
    world = World().lead().run(5 * S)
    world.send(Trim(CLUSTER, 9, 1000))
    world.run(3 * S)
    assert world.status()["trimmed_before"] == "1000@1"


def test_finalized_epochs_follow_the_slowest_frontier_at_most_once_a_second() -> None:
    world = World().lead().run(S)
    world.set_active()
    for second in range(1, 6):
        for server in world.servers:
            server.frontier = 1 + second * 2**24 + (5 * 2**24 if server.shard else 0)
        world.run(S)
    assert world.service.state.finalized in (3, 4)
    assert world.commands().count("SetFinalized") <= 5
    world.run(2 * S)
    assert world.status()["finalized_epoch"] == 4


# --- who holds back whom ---------------------------------------------------------------------


def blocking(world: World) -> tuple[object, dict[int, list[int]]]:
    """Return `blocked_by`, and the shards that block others."""
    document = world.status()
    blocks = {shard["id"]: shard["blocks"] for shard in document["shards"] if shard["blocks"]}
    return document["blocked_by"], blocks


def report(world: World, shard: int, frontier: int, stable: int, *, watched: bool = False) -> None:
    """Send a heartbeat of a shard's primary with these positions."""
    primary = world.servers[2 * shard]
    primary.frontier, primary.stable_gsn = frontier, stable
    world.run(1000)
    heartbeat = msgspec.structs.replace(primary.heartbeat(), has_readers=watched)
    world.send(heartbeat, primary.route)


def test_a_slow_shard_holds_back_shards_that_reported_before_it() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    report(world, 1, frontier=10, stable=5)
    report(world, 0, frontier=1000, stable=990, watched=True)
    assert blocking(world) == (None, {})  # shard 1 may be further by now
    report(world, 1, frontier=990, stable=500)
    assert blocking(world) == (1, {1: [0]})
    report(world, 2, frontier=400, stable=300)
    assert blocking(world) == (2, {1: [0], 2: [0]})  # 1 and 2 have no readers
    report(world, 2, frontier=400, stable=300, watched=True)
    assert blocking(world) == (2, {1: [0], 2: [0, 1]})
    report(world, 2, frontier=2000, stable=300, watched=True)
    assert blocking(world) == (1, {1: [0]})
    report(world, 1, frontier=991, stable=500)
    assert blocking(world) == (None, {})


def test_no_shard_is_held_back_without_readers() -> None:
    world = World().lead().run(5 * S)
    report(world, 0, frontier=1000, stable=990)
    report(world, 1, frontier=10, stable=9)
    assert blocking(world) == (None, {})
    assert not world.status()["shards"][0]["is_watched"]


def test_a_shard_that_is_recovered_holds_others_back_though_it_is_silent() -> None:
    world = World().lead().run(5 * S)
    report(world, 1, frontier=10, stable=9, watched=True)
    world.servers[2].alive = world.servers[3].alive = False
    world.send(Remove(CLUSTER, 9, 1, 1, 2))
    world.run(10 * S)
    report(world, 0, frontier=1000, stable=990)
    world.run(1000)
    assert blocking(world) == (1, {1: [0]})


def test_a_shard_in_recovery_holds_back_no_shard_in_leases_without_it() -> None:
    world = World().lead().run(5 * S)
    report(world, 1, frontier=10, stable=9, watched=True)
    world.send(Remove(CLUSTER, 9, 1, 1, 2))
    world.run(10 * S)
    last = world.service.state.last
    assert last is not None
    assert 1 not in last.schedule.weights
    report(world, 1, frontier=last.base, stable=9, watched=True)
    report(world, 0, frontier=last.base + 1000, stable=last.base + 990)
    world.run(1000)
    assert blocking(world) == (None, {})


def test_a_shard_past_its_end_holds_back_no_shard() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    world.send(ChangeShard(CLUSTER, 3, 1, "remove"))
    world.run(5 * S)
    limit = world.service.state.retired[1].limit
    report(world, 0, frontier=limit + 1000, stable=limit + 990, watched=True)
    report(world, 2, frontier=limit - 1, stable=5)
    report(world, 1, frontier=limit - 1, stable=5)
    assert blocking(world) == (2, {2: [0]})
    shard = world.status()["shards"][1]
    assert (shard["state"], shard["weight"], shard["frontier"]) == ("leaving", 0, limit)


def test_a_backup_speaks_for_its_shard_only_while_the_primary_is_silent() -> None:
    world = World().lead().run(5 * S)
    report(world, 1, frontier=10, stable=9)
    report(world, 0, frontier=1000, stable=990, watched=True)
    world.run(1000)
    world.send_heartbeat(world.servers[3])  # its report is one message older
    assert blocking(world) == (None, {})
    world.servers[2].alive = False
    world.run(3 * S)
    report(world, 0, frontier=1000, stable=990, watched=True)
    world.run(1000)
    world.send_heartbeat(world.servers[3])
    assert blocking(world) == (1, {1: [0]})


def test_of_many_that_are_held_back_some_are_named() -> None:
    world = World(config(shards=20)).lead().run(5 * S)
    for shard in range(19):
        report(world, shard, frontier=1000 + shard, stable=990)
    report(world, 19, frontier=10, stable=9, watched=True)
    blocked_by, blocks = blocking(world)
    assert (blocked_by, list(blocks), len(blocks[19])) == (19, [19], 16)


def test_the_epoch_of_any_frontier_is_shown() -> None:
    world = World().lead().run(5 * S)

    def epoch() -> int:
        return int(world.status()["shards"][0]["epoch"])

    assert epoch() == 0
    last = world.lease
    for frontier, expected in ((5 * 2**24 + 1, 5), (last.stop, last.first_epoch + last.epochs)):
        report(world, 0, frontier=frontier, stable=7)
        assert epoch() == expected


def test_a_shard_that_is_over_needs_no_servers() -> None:
    """Its servers may be stopped for good."""
    world = World().lead().run(5 * S)
    world.may_warn = True
    for server in (one for one in world.servers if one.shard == 1):
        server.alive = False
    for command in (RetireShard(1, 0), FinalizeShard(1)):
        encoded = command.encode()
        world.log.append(encoded)
        world.step(Committed(encoded, world.consensus.apply(encoded)))
        world.run(6 * S)
    found = world.status()
    assert not found["shards"][1]["is_over"], "its positions are not trimmed"
    assert found["shards"][1]["obstacle"]
    assert found["regions"][""] == {"state": "degraded", "servers_up": 3, "servers": 5}
    limit = world.service.state.retired[1].limit
    world.send(LeaseQuery(CLUSTER, 8, 5))
    world.run(100 * MS)
    assert world.answers(LeaseHistory)[-1].finalized == [Finalized(1, limit)]
    world.is_checked = False
    world.service.state.trim = limit
    found = world.status()
    assert [shard["is_over"] for shard in found["shards"]] == [False, True]
    assert found["shards"][1]["obstacle"] is None
    assert found["regions"][""] == {"state": "up", "servers_up": 3, "servers": 3}
    world.send(LeaseQuery(CLUSTER, 9, 5))
    world.run(100 * MS)
    history = world.answers(LeaseHistory)[-1]
    assert (history.over, history.finalized) == ([1], []), "clients do not ask its servers"


def test_a_recovery_of_a_shard_that_is_over_is_not_reported() -> None:
    """It begins when the first of its servers stops, and ends never if the others stop, too."""
    world = World().lead().run(5 * S)
    for command in (RetireShard(1, 0), FinalizeShard(1)):
        encoded = command.encode()
        world.log.append(encoded)
        world.step(Committed(encoded, world.consensus.apply(encoded)))
        world.run(6 * S)
    world.send(Remove(CLUSTER, 9, 1, 1, 2), b"handler")
    world.run(100 * MS)
    assert world.status()["shards"][1]["state"] == "recovering", "its records can be read"
    world.is_checked = False
    world.service.state.trim = world.service.state.retired[1].limit
    found = world.status()
    assert (found["shards"][1]["state"], found["shards"][1]["is_over"]) == ("finalized", True)
    assert readiness_problem(found) == ""
