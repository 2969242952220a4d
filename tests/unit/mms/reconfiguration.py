"""Operators' requests to the membership service, and the servers' reports meanwhile."""

from typing import Any

from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import FakeServer, World, config, state
from ziplog.core.view import Replica, fingerprint
from ziplog.wire import ChangeShard, Rate, Reinsert, ShardChanged

HANDLER = b"handler"


def change(
    world: World,
    shard: int,
    what: str,
    request: int = 7,
    replicas: list[Replica] | None = None,
    src: bytes = b"client",
) -> None:
    world.send(ChangeShard(CLUSTER, request, shard, what, replicas or []), src)  # type: ignore[arg-type]


def answers(world: World, src: bytes = b"client") -> list[tuple[int, int, str]]:
    return [(one.request, one.shard, one.error) for one in world.answers(ShardChanged, src)]


def limit(world: World, shard: int) -> int:
    return world.service.state.retired[shard].limit


def servers_of(world: World, shard: int) -> list[FakeServer]:
    return [server for server in world.servers if server.shard == shard]


def is_settled(world: World, shard: int) -> None:
    """Have a shard decide all its positions, and report so."""
    for server in servers_of(world, shard):
        server.frontier = limit(world, shard)
        world.send_heartbeat(server)


def is_sealed(world: World, shard: int) -> None:
    for server in servers_of(world, shard):
        server.sealed = True
        world.send_heartbeat(server)


def drained(world: World, shard: int, view: int = 1, route: bytes | None = None) -> None:
    route = servers_of(world, shard)[0].route if route is None else route
    world.send(Rate(CLUSTER, shard, view, 0), route)


def left(shards: int = 3, **options: Any) -> World:
    """Shard 1 is out of the leases; its last positions are not decided yet."""
    world = World(config(shards=shards), **options).lead().run(5 * S)
    change(world, 1, "remove")
    world.run(world.delay + 5 * MS)
    drained(world, 1)
    world.run(world.delay + 5 * MS)
    assert state(world, 1) == "leaving"
    assert limit(world, 1)
    return world


def recover(world: World, shard: int, view: int = 2) -> None:
    prints = [fingerprint(server.identity) for server in servers_of(world, shard)]
    for server in servers_of(world, shard):
        server.view = view
    world.send(Reinsert(CLUSTER, 8, shard, view, prints, 0), HANDLER)
    world.run(world.delay + 5 * MS)
