"""Shards that joined later, or have left, are recovered like others, and keep their state."""

import pytest

from failure_handler.state import Begin, Finish
from tests.services import CLUSTER, S
from tests.unit.failure_handler.world import World, config
from ziplog.core.node import Received
from ziplog.wire import ChangeShard, Freeze, Suspect


def change(world: World, shard: int, what: str) -> None:
    replicas = world.add_servers(shard) if what == "add" else []
    asked = ChangeShard(CLUSTER, 5, shard, what, replicas)  # type: ignore[arg-type]
    world.step_mms(Received(b"operator", asked))
    world.until(lambda: any("Shard" in type(one).__name__ for one in world.mms_commands))


def state(world: World, shard: int) -> str:
    return world.mms.state.placements[shard].state


def retired(world: World, *, sealed: bool) -> World:
    """Shard 0 has left."""
    world.live()
    assert world.insert("one")
    change(world, 0, "remove")
    world.run(5 * S)
    assert world.mms.state.retired[0].limit
    for server in world.servers:
        server.sealed = sealed and server.shard == 0
    world.run(3 * S)
    assert state(world, 0) == ("finalized" if sealed else "leaving")
    return world


@pytest.mark.parametrize("f", [1, 2])
def test_a_shard_that_joined_later_is_recovered(f: int) -> None:
    world = World(config(f=f)).live()
    change(world, 3, "add")
    world.until_live(3)
    world.run(2 * S)
    assert world.insert("one", 3)
    world.kill(world.server(3, 0))
    world.until_live(3, view=2)
    assert "one" in [entry for _, entry in world.server(3, 0).log]


def test_a_shard_that_joins_is_not_recovered_before_it_has() -> None:
    world = World(config()).live()
    change(world, 3, "add")
    world.supervised = False
    world.kill(world.server(3, 1))
    world.server(3, 0).state, world.server(3, 0).view = "up", 1
    world.run(5 * S)
    assert world.messages(Suspect)
    assert (state(world, 3), world.commands) == ("joining", [])


@pytest.mark.parametrize("crashed", [(0,), (1,), (0, 1)])
def test_a_shard_that_joins_is_recovered_if_a_server_of_it_has_crashed(
    crashed: tuple[int, ...],
) -> None:
    """Such a server is in limbo, although it cannot have lost anything."""
    world = World(config()).live()
    change(world, 3, "add")
    assert state(world, 3) == "joining"
    for index in range(2):
        world.server(3, index).state, world.server(3, index).view = "up", 1
    world.kill(*[world.server(3, index) for index in crashed])
    world.until_live(3, view=2)
    assert {message.limit for message in world.messages(Freeze)} == {1}
    assert world.insert("one", 3)
    assert not world.mms.state.losses


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_that_has_left_is_recovered_and_stays_what_it_was(
    index: int, *, sealed: bool
) -> None:
    world = retired(World(config(shards=2)), sealed=sealed)
    limit = world.mms.state.retired[0].limit
    world.kill(world.server(0, index))
    before = state(world, 0)
    world.until(lambda: world.is_live(0, view=2, state=before))
    assert {message.limit for message in world.messages(Freeze)} == {limit}
    assert len(world.decided(Finish)) == 1
    assert all(server.log[0][1] == "one" for server in world.servers if server.shard == 0)
    world.run(10 * S)
    assert state(world, 0) == before
    last = world.mms.state.last
    assert last is not None
    assert [member.shard for member in last.members] == [1]
    # And again, with another handler leading.
    world.kill(*[server for server in world.servers if server.shard == 0])
    world.fail_over()
    world.until(lambda: world.is_live(0, view=3, state=before))
    assert len(world.decided(Finish)) == 2


def test_a_handler_that_leads_after_the_return_sees_that_it_is_back() -> None:
    world = retired(World(config(shards=2)), sealed=True)
    world.kill(world.server(0, 1))
    world.until(lambda: world.mms.state.placements[0].view == 2)
    assert not world.decided(Finish)
    world.fail_over()
    world.until(lambda: world.is_live(0, view=2, state="finalized"))
    world.run(5 * S)
    assert (len(world.decided(Begin)), len(world.decided(Finish))) == (1, 1)


def test_a_shard_that_is_recovered_while_it_leaves_is_out() -> None:
    world = World(config(shards=2)).live()
    change(world, 0, "remove")
    world.kill(world.server(0, 1))
    world.until(lambda: world.is_live(0, view=2, state="leaving"))
    last = world.mms.state.last
    assert last is not None
    assert [member.shard for member in last.members] == [1]
