"""The durability level in force: `disk` while every storage server keeps to it."""

from __future__ import annotations

import msgspec
import pytest

from mms.commands import GrantLease, RetireShard, SetDurability, decode_command
from mms.state import ClusterState
from tests.services import CLUSTER, MS, S
from tests.unit.mms.reconfiguration import HANDLER, is_settled, limit, servers_of
from tests.unit.mms.reconfiguration import change as change_shard
from tests.unit.mms.world import World, config, state
from ziplog.core.node import Committed, LeaderChanged, LevelRequested
from ziplog.wire import Remove


def change(world: World, *levels: str) -> None:
    """Have the first servers report these levels, each of them one."""
    for server, level in zip(world.servers, levels, strict=False):
        server.level = level
    world.run(5 * S)


def committed(world: World) -> list[tuple[str, int]]:
    commands = [decode_command(command) for command in world.log]
    return [(one.level, one.epoch) for one in commands if isinstance(one, SetDurability)]


def test_level_rises_once_all_servers_report_it() -> None:
    world = World(config(2)).lead().run(5 * S)
    names = [server.name for server in world.servers]
    world.service.step(LevelRequested("disk"), world.now)
    change(world, "memory", "memory", "memory", "memory")
    assert world.status()["durability"] == "memory"
    assert world.status()["durability_change"] == {"to": "disk", "waits_for": sorted(names)}
    change(world, "disk", "disk", "", "disk")
    assert committed(world) == []
    assert world.status()["durability_change"]["waits_for"] == [names[2]]
    before = world.status()["epoch"]
    change(world, "disk", "disk", "disk", "disk")
    ((level, epoch),) = committed(world)
    assert level == "disk"
    assert epoch > before
    document = world.status()
    assert (document["durability"], document["durability_since_epoch"]) == ("disk", epoch)
    assert document["durability_change"] is None


def test_level_falls_with_the_first_server() -> None:
    world = World(config(2, durability="disk")).lead().run(5 * S)
    change(world, "disk", "disk", "disk", "disk")
    assert committed(world) == []
    change(world, "disk", "", "disk", "disk")
    assert committed(world) == [], "a server that changes still acks from its disk"
    change(world, "disk", "memory", "disk", "disk")
    assert [level for level, _ in committed(world)] == ["memory"]
    assert world.status()["durability"] == "memory"


def test_level_rises_without_a_removed_shard_whose_servers_are_lost() -> None:
    """Its servers in a lost region never report the level."""
    world = World(config(2)).lead().run(5 * S)
    world.may_warn = True
    world.service.step(LevelRequested("disk"), world.now)
    lost = servers_of(world, 1)[1]
    change(world, "memory", "memory", "memory", "memory")
    lost.alive = False
    world.send(Remove(CLUSTER, 5, 1, 1, 2), HANDLER)
    world.run(S)
    change_shard(world, 1, "remove")
    change(world, "disk", "disk", "disk")
    assert state(world, 1) == "recovering"
    assert [level for level, _ in committed(world)] == ["disk"]
    assert world.status()["durability_change"] is None


def test_level_rises_once_a_leaving_shard_has_settled_its_positions() -> None:
    world = World(config(2)).lead().run(5 * S)
    command = RetireShard(1, 0).encode()
    world.log.append(command)
    world.step(Committed(command, world.consensus.apply(command)))
    change(world, "disk", "disk", "memory", "memory")
    assert limit(world, 1)
    assert committed(world) == [], "it may still ack records"
    is_settled(world, 1)
    world.run(S)
    assert [level for level, _ in committed(world)] == ["disk"]


@pytest.mark.parametrize("level", ["disk", "memory"])
def test_level_that_is_committed_slowly_begins_once(level: str) -> None:
    other = "memory" if level == "disk" else "disk"
    world = World(config(2, durability=other)).lead().run(5 * S)  # type: ignore[arg-type]
    change(world, other, other, other, other)
    world.delay = 3 * S
    begins = world.status()["epoch"]
    change(world, level, level, level, level)
    since = world.status()["durability_since_epoch"]
    world.delay = MS
    world.run(5 * S)
    assert set(committed(world)) == {(level, since)}
    assert begins <= since <= begins + 3
    assert world.status()["durability_since_epoch"] == since
    assert len([text for *_, text in world.events() if "durability" in text]) == 1


def test_next_leader_dates_a_level_anew() -> None:
    world = World(config(2, mms=3)).lead().run(5 * S)
    world.is_cut_off = True
    change(world, "disk", "disk", "disk", "disk")
    world.step(LeaderChanged("mms-1", is_self=False))
    world.proposed.clear()
    world.is_cut_off = False
    for _ in range(3):
        command = GrantLease(world.lease.following(), []).encode()
        world.log.append(command)
        world.step(Committed(command, world.consensus.apply(command)))
    epoch = world.service.plan.epoch(world.now)
    world.lead().run(5 * S)
    ((level, since),) = set(committed(world))
    assert level == "disk"
    assert since > epoch


@pytest.mark.parametrize("level", ["memory", "disk"])
def test_snapshot_keeps_the_level_and_its_epoch(level: str) -> None:
    world = World(config(2)).lead().run(S)
    state = world.service.state
    state.apply(SetDurability(level, 7).encode())  # type: ignore[arg-type]
    other = ClusterState()
    other.restore(state.snapshot())
    assert (other.durability, other.durability_epoch) == (level, 7)
    assert other.snapshot() == state.snapshot()


def test_snapshot_of_an_earlier_release_is_read() -> None:
    world = World(config(2)).lead().run(S)
    fields = msgspec.msgpack.decode(world.service.state.snapshot())
    other = ClusterState()
    other.restore(msgspec.msgpack.encode(fields[:-1]))
    assert other.durability_epoch == 0
