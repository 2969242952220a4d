"""A replica forwards a repeated tail query to its peers, for a client that does not reach them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from shard.serving.tail_forwarding import MAX_FORWARDED
from tests.world import CLUSTER, MS, Probe, calm_world, first_lease, insert, probe
from ziplog import wire

if TYPE_CHECKING:
    from tests.world import World

PRIMARY = "shard-0-0"
TAIL = wire.Tail(CLUSTER, 0, 1, 5, 0)


def world_of(f: int = 1) -> World:
    """Return a shard with one record."""
    world = calm_world(f=f, lease=first_lease(1, epoch_ms=10_000))
    world.add("d", Probe())
    for server in range(f + 1):
        world.send("c", f"shard-0-{server}", insert(1))
    world.run(2 * MS)
    return world


def ask(world: World, tail: wire.Tail = TAIL, client: str = "c", server: str = PRIMARY) -> None:
    world.send(client, server, tail)
    world.run(2 * MS)


def replies(world: World, client: str = "c") -> list[tuple[int, int, int]]:
    """Return the number of each reply's request, its server, and the end of its log."""
    found = probe(world, client).of(wire.TailReply)
    return [(one.request, one.server, one.filled) for one in found]


@pytest.mark.parametrize("f", [1, 2])
def test_the_peers_are_asked_if_a_query_comes_twice(f: int) -> None:
    world = world_of(f)
    ask(world)
    assert replies(world) == [(5, 0, 1)]
    ask(world)
    assert sorted(replies(world)) == sorted(
        [(5, 0, 1)] * 2 + [(5, peer, 1) for peer in range(1, f + 1)]
    )


def test_a_backup_asks_the_primary() -> None:
    world = world_of()
    ask(world, server="shard-0-1")
    ask(world, server="shard-0-1")
    assert sorted(replies(world)) == [(5, 0, 1), (5, 1, 1), (5, 1, 1)]


def test_clients_with_equal_numbers_get_their_own_replies() -> None:
    world = world_of()
    for client in ("c", "d", "c"):
        ask(world, client=client)
    assert replies(world, "d") == [(5, 0, 1)]
    ask(world, client="d")
    assert sorted(replies(world, "c")) == sorted(replies(world, "d")) == [
        (5, 0, 1), (5, 0, 1), (5, 1, 1),
    ]  # fmt: skip


def test_a_peer_forwards_no_forwarded_query() -> None:
    world = world_of(2)
    for _ in range(5):
        ask(world)
    assert len(replies(world)) == 5 + 4 * 2


def test_only_a_peers_reply_counts() -> None:
    world = world_of()
    ask(world)
    ask(world)
    numbers = {
        one.request for src, _, one in world.sent if src == PRIMARY and type(one) is wire.Tail
    }
    (number,) = numbers
    before = replies(world)
    world.send("d", PRIMARY, wire.TailReply(CLUSTER, 0, 1, 1, number, 0, 1))
    world.run(2 * MS)
    assert replies(world) == before


def test_the_queries_that_came_last_are_remembered() -> None:
    world = world_of()
    for request in range(5, 5 + MAX_FORWARDED + 1):
        ask(world, replace(TAIL, request=request))
    ask(world)
    ask(world, replace(TAIL, request=5 + MAX_FORWARDED))
    forwarded = [request for request, server, _ in replies(world) if server == 1]
    assert forwarded == [5 + MAX_FORWARDED]
