"""Leases that a server receives as publications (docs/protocol.md, section 13.3)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shard.replica import Replica
from tests.world import (
    CLUSTER,
    MS,
    World,
    add_shard,
    calm_world,
    first_lease,
    grant,
    insert,
    placements,
    probe,
)
from ziplog import wire
from ziplog.core.node import Received, ReceivePublications
from ziplog.core.view import Lease, LeaseStep, run_of

SERVER = "shard-0-0"
SERVICE = b"mms-0"
HERE = "127.0.0.1:5555"
LEASE_MS = 16 * 10


@pytest.fixture
def world() -> World:
    return calm_world(lease=first_lease(1, epoch_size=1 << 12))


def server(world: World) -> Replica:
    node = world.nodes[SERVER]
    assert isinstance(node, Replica)
    return node


def held(world: World) -> Lease:
    last = server(world).state.clock.last
    assert last is not None
    return last


def message_of(before: Lease, lease: Lease, starts_ms: int = 0) -> wire.LeaseAnnounced:
    """Return the announcement of a lease that only extends the one before it."""
    step = LeaseStep(
        lease.number - before.number, lease.epochs, lease.epoch_size, lease.epoch_ms, (), ()
    )
    return wire.LeaseAnnounced(
        CLUSTER, [], starts_ms * 1000, [], 0, before.number, [step], lease.digest, publisher=HERE
    )


def announce(world: World, message: wire.LeaseAnnounced) -> None:
    world.send("mms-0", SERVER, message, reply=True)
    world.run(2 * MS)


def publish(world: World, message: wire.LeaseAnnounced) -> None:
    announce(world, replace(message, is_publication=True))


def next_message(world: World, starts_ms: int = 0) -> wire.LeaseAnnounced:
    last = held(world)
    return message_of(last, last.following(), starts_ms)


def heartbeats(world: World) -> list[wire.Heartbeat]:
    return [m for m in probe(world, "mms-0").of(wire.Heartbeat) if m.node == SERVER]


def test_a_server_receives_publications_once_it_knows_the_endpoint(world: World) -> None:
    message = next_message(world)
    orders = [
        effect
        for _ in range(2)
        for effect in server(world).step(Received(SERVICE, message), world.now)
        if isinstance(effect, ReceivePublications)
    ]
    assert orders == [ReceivePublications(SERVICE, HERE)]
    moved = replace(message, publisher="127.0.0.1:6666")
    effects = server(world).step(Received(SERVICE, moved), world.now)
    assert ReceivePublications(SERVICE, "127.0.0.1:6666") in effects


def test_a_server_without_publications_begins_to_receive_them_again(world: World) -> None:
    """The system may have refused a thread."""

    def orders(message: wire.LeaseAnnounced, now: int) -> list[ReceivePublications]:
        effects = server(world).step(Received(SERVICE, message), now)
        return [effect for effect in effects if isinstance(effect, ReceivePublications)]

    start = world.now
    assert orders(next_message(world), start)
    publication = replace(next_message(world), is_publication=True)
    assert not orders(publication, start + 60_000 * MS)
    assert not orders(publication, start + 60_000 * MS)
    for later_ms, number in ((59_999, 0), (60_000, 1), (60_001, 0), (120_000, 1)):
        assert len(orders(next_message(world), start + later_ms * MS)) == number


def test_a_server_ignores_the_endpoint_of_another_process(world: World) -> None:
    effects = server(world).step(Received(b"mallory", next_message(world)), world.now)
    assert not any(isinstance(effect, ReceivePublications) for effect in effects)


def test_a_heartbeat_reports_the_publisher_of_the_last_lease(world: World) -> None:
    announce(world, next_message(world))
    world.run(1100 * MS)
    assert heartbeats(world)[-1].publisher == ""
    publish(world, next_message(world, starts_ms=5_000))
    world.run(1100 * MS)
    assert heartbeats(world)[-1].publisher == HERE
    announce(world, next_message(world))
    world.run(1100 * MS)
    assert heartbeats(world)[-1].publisher == ""


@pytest.mark.parametrize("is_first", [True, False])
def test_a_publication_counts_whichever_copy_of_the_lease_comes_first(
    world: World, is_first: bool
) -> None:
    message = next_message(world, starts_ms=5_000)
    publication = replace(message, is_publication=True)
    for copy in (publication, message) if is_first else (message, publication):
        announce(world, copy)
    assert server(world).state.publisher == HERE


def test_a_publication_of_older_leases_does_not_count(world: World) -> None:
    old = next_message(world)
    announce(world, old)
    announce(world, next_message(world))
    publish(world, old)
    assert server(world).state.publisher == ""


def test_a_gap_after_a_lost_publication_is_reported_at_once(world: World) -> None:
    publish(world, next_message(world, starts_ms=50))
    last = held(world)
    missed = last.following()
    count = len(heartbeats(world))
    publish(world, message_of(missed, missed.following()))
    assert held(world) == last
    (heartbeat,) = heartbeats(world)[count:]
    assert heartbeat.has_gap
    assert heartbeat.lease == last.number


def test_a_lost_publication_is_reported_when_the_lease_ends(world: World) -> None:
    publish(world, next_message(world, starts_ms=50))
    assert server(world).state.publisher == HERE
    count = len(heartbeats(world))
    world.run((50 + LEASE_MS - 10) * MS)
    assert len(heartbeats(world)) == count
    world.run(15 * MS)
    (heartbeat,) = heartbeats(world)[count:]
    assert heartbeat.publisher == ""
    assert heartbeat.lease == held(world).number
    world.run(500 * MS)
    assert len(heartbeats(world)) == count + 1


def test_a_server_without_publications_reports_no_end_of_a_lease(world: World) -> None:
    announce(world, next_message(world))
    count = len(heartbeats(world))
    world.run((LEASE_MS + 50) * MS)
    assert len(heartbeats(world)) == count


def test_a_publication_does_not_start_a_server() -> None:
    world = World()
    add_shard(world, 0)
    world.run(5 * MS)
    late = first_lease(1).following()
    message = wire.LeaseAnnounced(
        CLUSTER, [run_of(late)], 0, [], 0, publisher=HERE, is_publication=True
    )
    publish(world, message)
    assert server(world).state.clock.last is None
    assert not world.halts
    grant(world, first_lease(1), 1)
    world.run(5 * MS)
    assert held(world) == first_lease(1)


def test_a_late_publication_hardly_shifts_the_lease(world: World) -> None:
    announce(world, next_message(world))  # at once
    clock = server(world).state.clock
    ends = clock.ends_at
    assert ends is not None
    publish(world, next_message(world, starts_ms=(ends - world.now) // MS + 40))
    assert clock.next_lease_at == ends + LEASE_MS * MS // 128
    world.run((LEASE_MS + 120) * MS)
    announce(world, next_message(world))  # at once, 30 ms before the end
    assert clock.next_lease_at is None
    assert clock.lease == held(world)


def test_placements_alone_leave_a_gap_reported(world: World) -> None:
    publish(world, next_message(world, starts_ms=50))
    missed = held(world).following()
    publish(world, message_of(missed, missed.following()))
    assert server(world).state.has_gap
    announce(world, wire.LeaseAnnounced(CLUSTER, [], 0, placements(1, 1), 0, publisher=HERE))
    assert server(world).state.has_gap
    announce(world, message_of(held(world), missed.following()))
    assert not server(world).state.has_gap


def test_inserts_go_on_through_publications(world: World) -> None:
    for seq in range(1, 21):
        for name in (SERVER, "shard-0-1"):
            world.send("c", name, insert(seq))
        message = replace(next_message(world, starts_ms=20), is_publication=True)
        for name in (SERVER, "shard-0-1"):
            world.send("mms-0", name, message, reply=True)
        world.run(30 * MS)
    assert len({ack.seq for ack in probe(world).of(wire.InsertAck)}) == 20
    assert not world.halts
