"""Leases that the service publishes to all servers at once (docs/protocol.md, section 13.3)."""

import pytest

from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import World, config, working
from ziplog.core.node import (
    Broadcast,
    Effect,
    Event,
    LeaderChanged,
    Publish,
    Received,
    Send,
)
from ziplog.core.view import MANY_MEMBERS
from ziplog.wire import LeaseAnnounced, Rate, Trim

HERE = "127.0.0.1:5555"
LEASE_MS = 160


def publishing(shards: int = MANY_MEMBERS) -> World:
    world = working(shards, rate=1000, publisher=HERE)
    assert all(server.publisher == HERE for server in world.servers)
    return world


def counts(world: World) -> list[int]:
    """Return the number of announcements that each server received."""
    return [len(server.announced) for server in world.servers]


def sent_alone(world: World) -> int:
    return len([message for _, message in world.sent if type(message) is LeaseAnnounced])


def test_leases_of_few_members_are_not_published() -> None:
    world = working(MANY_MEMBERS - 1, rate=1000, publisher=HERE)
    assert not world.published
    assert not any(
        message.publisher for _, message in world.sent if type(message) is LeaseAnnounced
    )


def test_a_node_without_a_publisher_publishes_nothing() -> None:
    world = working(MANY_MEMBERS, rate=1000)
    assert not world.published
    assert all(server.lease == world.lease for server in world.servers)


def test_a_lease_is_published_once_and_sent_to_no_receiver() -> None:
    world = publishing()
    world.sent.clear()
    published, granted = len(world.published), world.lease.number
    world.run(2 * S)
    assert world.lease.number - granted >= 10
    assert len(world.published) - published == world.lease.number - granted
    assert sent_alone(world) == 0
    assert all(server.lease == world.lease for server in world.servers)
    assert all(message.is_publication for message in world.published)
    assert all(not message.placements for message in world.published)


def test_changed_weights_are_published() -> None:
    world = publishing()
    world.sent.clear()
    primary = world.servers[10]
    primary.rate = 3000
    world.step(Received(primary.route, Rate(CLUSTER, 5, 1, 3000)))
    world.run(10 * MS)
    assert world.lease.members[5].weight == 3
    assert sent_alone(world) == 0
    assert all(server.lease == world.lease for server in world.servers)


def test_a_trim_is_published() -> None:
    world = publishing()
    for server in world.servers:
        server.frontier = world.lease.base
    world.run(S)
    world.sent.clear()
    world.send(Trim(CLUSTER, 7, 2))
    world.run(5 * MS)
    assert {server.trim for server in world.servers} == {2}
    assert sent_alone(world) == 0


def test_a_lost_publication_is_replaced_by_a_message() -> None:
    world = publishing()
    loser = world.servers[3]
    loser.loses_publications = True
    granted = world.lease.number
    while world.lease.number == granted:
        world.run(10 * MS)
    loser.loses_publications = False
    world.sent.clear()
    loser.publisher = ""  # Its lease has ended, and no publication came.
    heartbeat = loser.heartbeat()
    for _ in range(2):  # The second one crosses the answer.
        world.step(Received(loser.route, heartbeat))
    assert [route for route, _ in world.sent] == [loser.route]
    assert loser.lease == world.lease
    world.sent.clear()
    world.run(S)
    assert loser.publisher == HERE
    world.sent.clear()
    world.run(S)
    assert sent_alone(world) == 0


def test_a_heartbeat_that_crosses_a_publication_is_not_answered() -> None:
    world = publishing()
    crossing = world.servers[3]
    heartbeat = crossing.heartbeat()
    granted = world.lease.number
    while world.lease.number == granted:
        world.run(10 * MS)
    world.sent.clear()
    world.step(Received(crossing.route, heartbeat))
    assert not world.sent


def test_a_server_with_a_gap_gets_the_missing_leases() -> None:
    world = publishing()
    loser = world.servers[3]
    loser.loses_publications = True
    world.run(LEASE_MS * MS)
    loser.loses_publications = False
    world.sent.clear()
    world.run(2 * LEASE_MS * MS)
    assert loser.lease == world.lease
    assert 1 <= sent_alone(world) <= 3


def test_a_server_without_publications_gets_messages() -> None:
    world = publishing()
    deaf = world.servers[3]
    deaf.loses_publications, deaf.publisher = True, ""
    world.send_heartbeat(deaf)
    world.sent.clear()
    granted = world.lease.number
    world.run(2 * S)
    assert {route for route, _ in world.sent} == {deaf.route}
    assert sent_alone(world) == world.lease.number - granted
    assert deaf.lease == world.lease


def test_a_server_without_publications_gets_no_second_message_for_a_crossing_heartbeat() -> None:
    world = publishing()
    deaf = world.servers[3]
    deaf.loses_publications, deaf.publisher = True, ""
    world.send_heartbeat(deaf)
    world.run(2 * LEASE_MS * MS)
    before = deaf.heartbeat()
    granted = world.lease.number
    while world.lease.number == granted:
        world.run(10 * MS)
    world.sent.clear()
    world.step(Received(deaf.route, before))
    assert not world.sent


def test_a_receiver_of_another_node_gets_messages() -> None:
    world = publishing()
    other = world.servers[3]
    other.publisher, other.loses_publications = "127.0.0.1:6666", True
    world.send_heartbeat(other)
    world.sent.clear()
    world.run(S)
    assert {route for route, _ in world.sent} == {other.route}
    assert other.lease == world.lease


def test_a_new_leader_does_not_publish_the_history() -> None:
    world = publishing()
    world.run(2 * S)
    world.start()
    world.published.clear()
    world.step(LeaderChanged("mms-0", is_self=True))
    for server in world.servers:
        world.send_heartbeat(server)
    world.run(S)
    assert world.published
    assert all(message.after > 0 and len(message.steps) == 1 for message in world.published)
    assert all(server.lease == world.lease for server in world.servers)


def test_first_leases_are_encoded_once() -> None:
    world = World(config(shards=40), publisher=HERE).lead()
    effects: list[Effect] = []
    step = world.service.step

    def record(event: Event, now: int) -> list[Effect]:
        done = step(event, now)
        effects.extend(done)
        return done

    world.service.step = record  # type: ignore[method-assign]
    world.run(S)
    leases = [
        effect for effect in effects
        if isinstance(effect, Send | Broadcast | Publish)
        and isinstance(effect.message, LeaseAnnounced) and effect.message.runs
    ]  # fmt: skip
    assert len(leases) < len(world.servers) / 4
    assert all(server.state == "up" and server.lease is not None for server in world.servers)


@pytest.mark.parametrize(
    ("shards", "expected"),
    [(MANY_MEMBERS, 10), pytest.param(1000, 5, marks=pytest.mark.nightly)],
)
def test_large_clusters_repeat_whole_leases_less_often(shards: int, expected: int) -> None:
    world = World(config(shards=shards), publisher=HERE).lead().run(3 * S)
    starting = world.servers[3]
    starting.lease, starting.is_disconnected, starting.has_gap = None, True, True
    world.sent.clear()
    for _ in range(50):
        world.step(Received(starting.route, starting.heartbeat()))
        world.now += 100 * MS
    whole = [message for route, message in world.sent if route == starting.route]
    assert len(whole) == expected


@pytest.mark.parametrize("shards", [MANY_MEMBERS, 40])
def test_publications_are_small(shards: int) -> None:
    world = publishing(shards)
    since = len(world.published)
    world.run(S)
    assert all(len(message.steps) == 1 for message in world.published[since:])
