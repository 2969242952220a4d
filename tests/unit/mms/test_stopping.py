"""Servers that are stopping: their shards are parked before they are gone."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from mms import membership_rules
from mms.stragglers import Stragglers
from tests.unit.mms.world import World, config, members, state
from tests.world import MS, S
from ziplog.core.units import NS_PER_S

#: Longest time until a change of the members: two changes keep a distance.
_NEXT_LEASE = NS_PER_S


def working(shards: int = 3) -> World:
    return World(config(shards=shards)).lead().run(5 * S)


def stop(world: World, shard: int) -> None:
    """Have the first server of a shard report that it is stopping."""
    server = next(server for server in world.servers if server.shard == shard)
    server.is_stopping = True
    world.send_heartbeat(server)


def test_the_shard_is_left_out_of_the_next_lease() -> None:
    world = working()
    stop(world, 1)
    world.run(_NEXT_LEASE)
    assert (state(world, 1), members(world)) == ("parked", [0, 2])


def test_each_report_is_answered() -> None:
    world = working()
    stop(world, 1)
    server = next(server for server in world.servers if server.shard == 1)
    for _ in range(3):
        world.run(_NEXT_LEASE)
        before = len(server.announced)
        world.send_heartbeat(server)
        world.run(5 * MS)
        assert len(server.announced) > before


def restart(world: World, shard: int) -> None:
    """Have the first server of a shard report as a new process."""
    server = next(server for server in world.servers if server.shard == shard)
    server.incarnation, server.is_stopping = server.incarnation + 1, False
    world.send_heartbeat(server)


def test_the_shard_is_live_again_once_the_server_has_restarted() -> None:
    world = working()
    stop(world, 1)
    world.run(_NEXT_LEASE + 10 * MS)
    restart(world, 1)
    world.run(5 * MS)
    assert (state(world, 1), members(world)) == ("live", [0, 1, 2])


def test_the_last_shard_stays() -> None:
    world = working(shards=2)
    stop(world, 0)
    world.run(_NEXT_LEASE)
    stop(world, 1)
    world.run(_NEXT_LEASE)
    assert members(world) != []
    assert state(world, 1) == "live", "no member would be left"


def test_all_shards_at_once_stay() -> None:
    world = working(shards=2)
    for server in world.servers:
        server.is_stopping = True
        world.send_heartbeat(server)
    world.run(5 * MS)
    before = len(world.lease.members)
    world.run(_NEXT_LEASE)
    assert len(world.lease.members) == before > 0


def changes() -> Any:
    """Count how often the service looks at all shards for changes of the members."""
    return patch.object(membership_rules, "member_changes", wraps=membership_rules.member_changes)


def test_reports_of_many_servers_are_one_change() -> None:
    world = working(shards=8)
    with changes() as counted:
        for shard in range(1, 8):
            stop(world, shard)
    assert counted.call_count == 1
    world.run(2 * _NEXT_LEASE)
    assert members(world) == [0]


def test_repeated_reports_of_all_servers_are_one_change() -> None:
    world = working(shards=8)
    with changes() as counted:
        for server in world.servers * 5:
            server.is_stopping = True
            world.send_heartbeat(server)
    assert counted.call_count == 1


def test_only_reports_that_change_something_are_changes() -> None:
    world = working(shards=8).run(100 * MS)  # The next regular check is far.
    with changes() as counted:
        world.send_heartbeat(world.servers[0])
        assert counted.call_count == 0, "it is not stopping"
        stop(world, 1)
        assert counted.call_count == 1
        world.run(5 * MS)
        assert state(world, 1) == "parked"
        stop(world, 2)
        assert counted.call_count == 2
        world.run(5 * MS)
        stop(world, 2)
        assert counted.call_count == 2, "the next lease parks it"
        with patch.object(Stragglers, "is_parked", return_value=True):
            restart(world, 1)
        assert counted.call_count == 2, "it is a straggler, too"
