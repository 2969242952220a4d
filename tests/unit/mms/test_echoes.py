"""A node of the service answers heartbeats at once, so that servers measure the way to it."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unit.mms.world import World, config
from ziplog.core.node import LeaderChanged, Received
from ziplog.wire import Echo


def echoes(rtt_ms: int, sent_us: int, *, is_leader: bool = True) -> list[Echo]:
    """Return the answers to a heartbeat sent then."""
    world = World(config(rtt_ms=rtt_ms, suspicion_ms=1000)).lead().run(3 * 10**9)
    if not is_leader:
        world.step(LeaderChanged("mms-1", is_self=False))
    server = world.servers[0]
    world.step(Received(server.route, replace(server.heartbeat(), sent_us=sent_us)))
    return world.answers(Echo, server.route)


def test_the_answer_has_the_time_of_the_heartbeat() -> None:
    found = echoes(100, 77_000)
    assert [one.sent_us for one in found] == [77_000]
    assert found[0].cluster


def test_a_follower_answers_too_for_the_time_when_it_leads() -> None:
    assert len(echoes(100, 77_000, is_leader=False)) == 1


def test_nothing_is_sent_without_a_round_trip_in_the_cluster_file() -> None:
    assert echoes(0, 77_000) == []


def test_nothing_is_sent_to_an_earlier_release() -> None:
    assert echoes(100, 0) == []


def test_a_server_of_no_shard_gets_no_answer() -> None:
    world = World(config(rtt_ms=100)).lead().run(3 * 10**9)
    heartbeat = replace(world.servers[0].heartbeat(), node="shard-9-9", sent_us=1)
    world.step(Received(b"stranger", heartbeat))
    assert world.answers(Echo, b"stranger") == []
