"""A shard between leases, step by step: probes stand for its clients and the membership service.

Shard 1 has no servers here: it only owns what shard 0 does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shard.replica import Replica
from tests.world import (
    CLUSTER,
    MS,
    Probe,
    World,
    add_shard,
    address,
    first_lease,
    placements,
    probe,
    shard_names,
)
from ziplog import wire
from ziplog.core.view import Member, run_of

if TYPE_CHECKING:
    from ziplog.core.message import Message
    from ziplog.core.view import Lease, ShardState

PRIMARY, BACKUP, THIRD = "shard-0-0", "shard-0-1", "shard-0-2"
LEASE = first_lease(2)
OTHER = (Member(1, 1, 1),)
BOTH = (Member(0, 1, 1), Member(1, 1, 1))
#: The shard is in the first of these, not in the second, and again in the third.
WITHOUT = LEASE.following(OTHER)
AGAIN = WITHOUT.following(BOTH)


def start(f: int = 1, **config: Any) -> World:
    """Return a world in which shard 0 is live in the first lease."""
    world = World()
    world.add("fh-0", Probe())
    add_shard(world, 0, f, handlers=(address("fh-0"),), **config)
    world.add("c", Probe())
    announce(world, "live", LEASE, f=f)
    return world


def announce(
    world: World,
    placed: ShardState,
    *leases: Lease,
    to: tuple[str, ...] = (),
    f: int = 1,
    starts_in_us: int = 0,
    view: int = 1,
    run: int = 5 * MS,
) -> None:
    """Announce leases and the shard's placement to servers (all, unless some are named)."""
    mine, other = placements(2, f)
    placed_now = [replace(mine, state=placed, view=view), other]
    runs = [run_of(lease) for lease in leases]
    message = wire.LeaseAnnounced(CLUSTER, runs, starts_in_us, placed_now, 0)
    for name in to or shard_names(0, f):
        world.send("mms-0", name, message, reply=True)
    world.run(run)


def replica(world: World, name: str) -> Replica:
    node = world.nodes[name]
    assert isinstance(node, Replica)
    return node


def received(world: World, kind: type, by: str = "c") -> list[Any]:
    return probe(world, by).of(kind)


def send(
    world: World, *messages: Message, to: tuple[str, ...] = (PRIMARY, BACKUP), run: int = MS
) -> None:
    for message in messages:
        for name in to:
            world.send("c", name, message)
    world.run(run)


def redirects(world: World, *, since: int = 0) -> list[tuple[int, int]]:
    """Return the seq and the server of every permanent refusal."""
    refused = received(world, wire.Refused)[since:]
    assert {message.code for message in refused} <= {"redirect"}
    return sorted((message.request, message.server) for message in refused)


def acks(world: World) -> list[tuple[int, int, list[int]]]:
    return sorted((ack.seq, ack.server, ack.gsns) for ack in received(world, wire.InsertAck))


def last_beat(world: World, name: str) -> wire.Heartbeat:
    beats = [beat for beat in received(world, wire.Heartbeat, "mms-0") if beat.node == name]
    return beats[-1]  # type: ignore[no-any-return]


def without_positions(world: World, placed: str = "leaving") -> None:
    announce(world, placed, WITHOUT)  # type: ignore[arg-type]


def sealed(world: World, *names: str) -> list[bool]:
    return [replica(world, name).state.is_sealed for name in names or (PRIMARY, BACKUP)]
