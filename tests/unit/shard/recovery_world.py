"""One shard before, in and after a recovery, with a probe instead of the failure handler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shard.replica import Replica
from tests.world import (
    CLUSTER,
    MS,
    Probe,
    S,
    World,
    add_shard,
    address,
    first_lease,
    grant,
    placements,
    probe,
    shard_names,
)
from ziplog import wire
from ziplog.core.view import run_of

if TYPE_CHECKING:
    from ziplog.core.message import Message
    from ziplog.segments.entry import Entry

PRIMARY, BACKUP, THIRD = "shard-0-0", "shard-0-1", "shard-0-2"
LEASE = first_lease(1)


def start(f: int = 1, **config: Any) -> World:
    """Return a shard that is up, with failure detection and a handler that only listens."""
    world = World()
    world.add("fh-0", Probe())
    add_shard(world, 0, f, **{"handlers": (address("fh-0"),)} | config)
    world.add("c", Probe())
    grant(world, LEASE, 1, f)
    world.run(5 * MS)
    return world


def replica(world: World, name: str) -> Replica:
    node = world.nodes[name]
    assert isinstance(node, Replica)
    return node


def heard(world: World, kind: type, by: str = "fh-0") -> list[Any]:
    return probe(world, by).of(kind)


def acks(world: World, view: int = 1) -> list[tuple[int, int, list[int]]]:
    return [
        (ack.seq, ack.server, ack.gsns) for ack in heard(world, wire.InsertAck, "c")
        if ack.view == view
    ]  # fmt: skip


def send(world: World, message: Message, *names: str) -> None:
    for name in names:
        world.send("c", name, message)
    world.run(2 * MS)


def order(world: World, message: Message, *names: str) -> None:
    """Send a message as the handler does: over the server's own connection."""
    for name in names:
        world.send("fh-0", name, message, reply=True)
    world.run(2 * MS)


def freeze(recovery: int = 2, view: int = 1, limit: int = LEASE.stop) -> wire.Freeze:
    return wire.Freeze(CLUSTER, 0, view, recovery, limit, [run_of(LEASE)])


def decision(frozen: wire.Frozen, *, is_confirmed: bool = True) -> wire.ViewDecided:
    return wire.ViewDecided(
        CLUSTER, 0, frozen.recovery, frozen.server, frozen.incarnation, frozen.last,
        frozen.digest, is_confirmed,
    )  # fmt: skip


def promise(world: World, name: str, recovery: int = 2, view: int = 1) -> wire.Frozen:
    """Let a server freeze, and return its promise."""
    order(world, freeze(recovery, view), name)
    assert world.run_until(
        lambda: any(m.recovery == recovery for m in heard(world, wire.Frozen)), 1 * S
    )
    frozen = [m for m in heard(world, wire.Frozen) if m.recovery == recovery][-1]
    assert isinstance(frozen, wire.Frozen)
    return frozen


def joined(world: World, *names: str) -> bool:
    return all(replica(world, name).state.server_state == "joined" for name in names)


def begin(world: World, view: int, f: int = 1) -> None:
    """Announce the commit of the membership service after all servers have joined."""
    placed = replace(placements(1, f)[0], view=view)
    lease = LEASE.following((replace(LEASE.members[0], view=view),))
    message = wire.LeaseAnnounced(CLUSTER, [run_of(lease)], 0, [placed], 0)
    for name in shard_names(0, f):
        world.send("mms-0", name, message, reply=True)
    world.run(5 * MS)


def recover(world: World, survivor: str, *others: str, view: int = 2, f: int = 1) -> wire.Frozen:
    frozen = promise(world, survivor, view, view - 1)
    order(world, decision(frozen), survivor, *others)
    assert world.run_until(lambda: joined(world, survivor, *others), 2 * S)
    begin(world, view, f)
    return frozen


def crash(world: World, name: str, f: int = 1) -> None:
    """Restart a server without a checkpoint; the membership service sends it the leases."""
    world.restart(name, clean=False)
    message = wire.LeaseAnnounced(CLUSTER, [run_of(LEASE)], 0, placements(1, f), 0)
    world.send("mms-0", name, message, reply=True)
    world.run(1 * MS)


def log(world: World, name: str) -> list[Entry]:
    """Return a server's current log."""
    store = world.stores[name]
    return store.read_after(0, 1 << 40) if store.last_fseq else []
