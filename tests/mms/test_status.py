"""The status document."""

from tests.mms.world import CLUSTER, S, World, config
from ziplog.node import (
    PeersChanged,
)
from ziplog.wire import (
    Trim,
)


def test_the_status_document() -> None:
    world = World(config(mms=3)).lead().run(5 * S)
    world.step(PeersChanged(("mms-2",)))
    for server in world.servers:
        server.rate, server.frontier = 1200, 2**24 + 1
    world.run(2 * S)
    document = world.status()
    assert document["cluster"] == "c"
    assert document["durability"] == "memory"
    assert document["epoch"] in range(5, 9)
    assert document["finalized_epoch"] == 0
    assert document["trimmed_before"] == "0@0"
    assert document["failure_handlers"] == []
    assert [(n["name"], n["leader"], n["state"], n["pid"]) for n in document["mms"]] == [
        ("mms-0", True, "up", 1), ("mms-1", False, "down", None), ("mms-2", False, "up", None)
    ]  # fmt: skip
    shard = document["shards"][0]
    assert {key: shard[key] for key in shard if key != "replicas"} == {
        "id": 0, "view": 1, "state": "live", "rate_per_s": 1200, "stable_gsn": 7, "durable_gsn": 5,
    }  # fmt: skip
    assert shard["replicas"][1] == {
        "name": "shard-0-1", "endpoint": "127.0.0.1:8001", "role": "backup", "pid": 99,
        "state": "up",
    }  # fmt: skip


def test_the_age_of_a_heartbeat_is_the_state_of_a_node() -> None:
    world = World().lead().run(5 * S)
    world.hear(world.servers[0])
    world.servers[0].alive = False
    states = []
    for _ in range(3):
        world.run(2 * S)
        states.append(world.status()["shards"][0]["replicas"][0]["state"])
    assert states == ["up", "suspect", "down"]


def test_the_trim_point_names_its_shard() -> None:
    world = World().lead().run(5 * S)
    world.ask(Trim(CLUSTER, 9, 1000))
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
