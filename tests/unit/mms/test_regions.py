"""Regions of servers: committed in placements, and required of new shards."""

import dataclasses
from typing import Any

import pytest

from tests.services import CLUSTER, MS, S
from tests.unit.mms.reconfiguration import HANDLER, change, servers_of
from tests.unit.mms.world import World, config, state
from ziplog.config import ClusterConfig
from ziplog.core.view import Replica, fingerprint
from ziplog.regions import layout_of_status
from ziplog.wire import ChangeShard, ClusterInfo, Hello, Reinsert, Remove, ShardChanged

TRIANGLE = (("a", "b"), ("b", "c"), ("c", "a"))


def labelled(*regions: tuple[str, ...], mms: int = 1, **changes: Any) -> ClusterConfig:
    plain = config(shards=len(regions), mms=mms)
    shards = tuple(
        dataclasses.replace(
            shard,
            replicas=tuple(
                dataclasses.replace(node, region=region)
                for node, region in zip(shard.replicas, found, strict=True)
            ),
        )
        for shard, found in zip(plain.shards, regions, strict=True)
    )
    return dataclasses.replace(plain, shards=shards, **changes)


def regions(world: World) -> list[tuple[str, ...]]:
    placements = world.service.state.placements.values()
    return [tuple(replica.region for replica in placement.replicas) for placement in placements]


def hello(world: World) -> ClusterInfo:
    world.sent.clear()
    world.send(Hello(CLUSTER, 9))
    info: ClusterInfo = world.answers(ClusterInfo)[0]
    return info


def add(world: World, *found: str, request: int = 7) -> list[tuple[str, str]]:
    replicas = world.add_servers(3) if world.servers[-1].shard != 3 else []
    replicas = replicas or [Replica(f"shard-3-{i}", f"127.0.0.1:{9030 + i}") for i in range(2)]
    for server, region in zip(world.servers[-2:], found, strict=True):
        server.region = region
    named = [
        Replica(one.name, one.endpoint, region=region)
        for one, region in zip(replicas, found, strict=True)
    ]
    world.sent.clear()
    world.send(ChangeShard(CLUSTER, request, 3, "add", named))
    world.run(3 * S)
    return [(reply.error, reply.detail) for reply in world.answers(ShardChanged)]


def reinsert(world: World, found: list[str]) -> None:
    world.send(Remove(CLUSTER, 5, 1, 1, 2), HANDLER)
    world.run(10 * MS)
    servers = servers_of(world, 1)
    for server in servers:
        server.view = 2
    prints = [fingerprint(server.identity) for server in servers]
    world.send(Reinsert(CLUSTER, 6, 1, 2, prints, 0, found), HANDLER)
    world.run(10 * MS)


def test_placements_have_the_regions_of_their_servers() -> None:
    world = World(labelled(*TRIANGLE)).lead().run(S)
    assert regions(world) == list(TRIANGLE)
    assert [sorted(one.regions) for one in hello(world).placements] == [
        ["a", "b"], ["b", "c"], ["a", "c"]
    ]  # fmt: skip


def test_without_labels_the_same_is_committed() -> None:
    plain, other = (World(one).lead().run(3 * S) for one in (config(), labelled(*TRIANGLE)))
    assert plain.commands() == other.commands()
    assert {region for placed in regions(plain) for region in placed} == {""}
    assert hello(plain).limits.min_regions == 1


def test_another_region_is_committed_with_the_next_lease() -> None:
    world = World(labelled(*TRIANGLE)).lead().run(S)
    view = world.service.state.placements[1].view
    world.servers[3].region = "d"
    world.run(2 * S)
    assert regions(world) == [("a", "b"), ("b", "d"), ("c", "a")]
    assert world.service.state.placements[1].view == view
    count = len(world.log)
    world.run(S)
    assert "d" in regions(world)[1]
    assert len(world.log) - count < 5


def test_a_recovery_ends_with_the_regions_that_servers_reported() -> None:
    world = World(labelled(*TRIANGLE)).lead().run(S)
    reinsert(world, ["d", "e"])
    assert (state(world, 1), regions(world)[1]) == ("live", ("d", "e"))
    world.run(2 * S)
    assert regions(world)[1] == ("b", "c")  # what they report now


def test_a_handler_that_reports_no_regions_keeps_them() -> None:
    world = World(labelled(*TRIANGLE)).lead().run(S)
    reinsert(world, [])
    assert (state(world, 1), regions(world)[1]) == ("live", ("b", "c"))


def test_a_shard_of_too_few_regions_is_not_added() -> None:
    world = World(labelled(*TRIANGLE)).lead().run(S)
    error, detail = add(world, "a", "a")[0]
    assert error == "wrong-size"
    assert detail.startswith("its servers are in 1 of the 2 regions that min_regions")
    assert 3 not in world.service.state.placements
    assert add(world, "a", "b", request=8) == [("", "")]
    assert regions(world)[3] == ("a", "b")


@pytest.mark.parametrize("count", [0, 1])
def test_without_labels_or_with_one_region_every_shard_is_added(count: int) -> None:
    plain = dataclasses.replace(config(), min_regions=count)
    world = World(plain).lead().run(S)
    assert add(world, "", "") == [("", "")]


def test_clients_get_the_number_of_regions_once_all_servers_have_theirs() -> None:
    world = World(labelled(*TRIANGLE)).lead().run(S)
    assert hello(world).limits.min_regions == 2
    world.servers[0].region = ""
    world.run(2 * S)
    assert hello(world).limits.min_regions == 1
    world.servers[0].region = "a"
    world.run(2 * S)
    assert hello(world).limits.min_regions == 2


def test_a_removed_shard_with_a_lost_server_keeps_no_client_in_one_region() -> None:
    """The lost server had no label; it never gets the one of the file."""
    world = World(labelled(*TRIANGLE)).lead().run(S)
    world.may_warn = True
    lost = world.servers[0]
    lost.region = ""
    world.run(2 * S)
    lost.alive = False
    world.send(Remove(CLUSTER, 5, 0, 1, 2), HANDLER)
    world.run(S)
    assert hello(world).limits.min_regions == 1
    change(world, 0, "remove")
    world.run(S)
    assert state(world, 0) == "recovering"
    assert hello(world).limits.min_regions == 2


def test_the_status_document_shows_regions() -> None:
    world = World(labelled(*TRIANGLE)).lead().run(S)
    for server in world.servers:
        server.alive = server.region != "a" and server is not world.servers[2]
    world.run(20 * S)
    document = world.status()
    assert document["min_regions"] == 2
    assert [shard["regions"] for shard in document["shards"]] == [
        ["a", "b"],
        ["b", "c"],
        ["a", "c"],
    ]
    assert [one["region"] for one in document["shards"][0]["replicas"]] == ["a", "b"]
    assert document["regions"] == {
        "": {"state": "up", "servers_up": 1, "servers": 1},
        "a": {"state": "away", "servers_up": 0, "servers": 2},
        "b": {"state": "degraded", "servers_up": 1, "servers": 2},
        "c": {"state": "up", "servers_up": 2, "servers": 2},
    }
    assert layout_of_status(document).shards == dict(enumerate(TRIANGLE))
