"""Lag-fix: who is ahead has the others give up their positions."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shard.ordering.lag_fix import HINT_INTERVAL_NS, MAX_MEMBERS
from shard.replica import Replica
from tests.checkers import decided, places
from tests.world import (
    CLUSTER,
    MS,
    US,
    World,
    add_shard,
    address,
    first_lease,
    grant,
    insert,
    placements,
    probe,
    shard_names,
)
from tests.world import calm_world as world_of
from ziplog import wire
from ziplog.core.entries import Skip
from ziplog.core.node import BatchEnd, Connect, Disconnect, Effect, Event, Received
from ziplog.core.view import Lease, Placement, run_of

FIRST, SECOND = "shard-0-0", "shard-1-0"


def calm_world(**config: Any) -> World:
    """Return a world whose epochs are so long that none ends in a test."""
    config.setdefault("shards", 2)
    config.setdefault("lease", first_lease(config["shards"], epoch_ms=10_000))
    return world_of(**config)


def replica(world: World, name: str) -> Replica:
    node = world.nodes[name]
    assert isinstance(node, Replica)
    return node


def put(world: World, *seqs: int, shard: int = 0, count: int = 1) -> None:
    for seq in seqs:
        for name in shard_names(shard, 1):
            world.send("c", name, insert(seq, shard=shard, count=count))
    world.run(100 * US)


def watch(world: World, *names: str) -> None:
    """Let somebody read along, who waits for what is decided already."""
    for name in names:
        replica(world, name)._state.last_want = world.now


def told(world: World) -> list[tuple[str, str, int]]:
    return [(a, b, m.gsn) for a, b, m in world.sent if isinstance(m, wire.Ahead) and a != "c"]


def holes(world: World, name: str) -> int:
    return replica(world, name)._state.holes


def skips(world: World, name: str) -> list[Skip]:
    return [e.decision for e in decided(world, name) if isinstance(e.decision, Skip)]


def waited(world: World, shard: int) -> list[int]:
    acks = [m for _, _, m in world.sent if isinstance(m, wire.InsertAck) and m.shard == shard]
    return [ack.seq for ack in acks if ack.waited]


def test_a_shard_that_only_hears_hints_is_in_the_same_epoch_at_all_replicas() -> None:
    world = world_of(shards=2, lease=first_lease(2, epochs=512))
    for turn in range(1, 41):
        watch(world, FIRST, SECOND)
        for hint in range(12):
            put(world, 12 * turn + hint)
            world.run(4 * MS + 100 * US)
        put(world, turn, shard=1)
    assert waited(world, 1) == []


def test_the_quiet_end_of_an_epoch_is_not_taken_for_a_stream_that_flows() -> None:
    world = world_of(shards=2, lease=first_lease(2, epochs=1024))
    for turn in range(1, 41):
        watch(world, FIRST)
        world.run(93 * MS)
        watch(world, FIRST)
        put(world, turn)
    assert waited(world, 0) == []


# --- telling ---


def test_who_places_a_record_ahead_of_all_tells_the_other_primaries_at_once() -> None:
    world = calm_world(shards=3)
    watch(world, FIRST)
    put(world, 1, 2)
    assert told(world) == [(FIRST, SECOND, 4), (FIRST, "shard-2-0", 4)]


def test_nobody_is_told_while_nobody_reads_along() -> None:
    world = calm_world()
    put(world, 1, 2)
    assert told(world) == []


def test_a_primary_tells_again_after_half_a_millisecond_at_the_earliest() -> None:
    world = calm_world()
    watch(world, FIRST)
    put(world, 1)
    began = world.now
    put(world, 2)
    put(world, 3)
    assert [gsn for _, _, gsn in told(world)] == [1]
    assert world.run_until(lambda: len(told(world)) == 2, HINT_INTERVAL_NS)
    assert [gsn for _, _, gsn in told(world)] == [1, 5], "the last one is told, though late"
    assert world.now - began >= HINT_INTERVAL_NS - 100 * US
    world.run(5 * MS)
    assert len(told(world)) == 2


def test_with_more_members_it_takes_longer() -> None:
    world = calm_world(shards=4)
    watch(world, FIRST)
    put(world, 1)
    put(world, 2)
    began = world.now
    assert world.run_until(lambda: len(told(world)) == 6)
    assert world.now - began >= 3 * HINT_INTERVAL_NS - 300 * US


def test_who_heard_of_a_record_further_ahead_tells_nothing() -> None:
    world = calm_world()
    watch(world, FIRST)
    world.send("c", FIRST, wire.Ahead(CLUSTER, 1, 1000))
    world.run(1 * MS)
    put(world, 1)
    assert told(world) == [(FIRST, SECOND, 1001)]
    world.send("c", FIRST, wire.Ahead(CLUSTER, 1, 2000))
    replica(world, FIRST)._state.last_want = -(2**62)  # nobody reads along: it gives up nothing
    world.run(1 * MS)
    watch(world, FIRST)
    put(world, 2)
    assert len(told(world)) == 1


def test_who_names_a_position_beyond_all_leases_silences_nobody() -> None:
    world = calm_world()
    watch(world, FIRST)
    world.send("c", FIRST, wire.Ahead(CLUSTER, 1, 2**62))
    world.run(1 * MS)
    put(world, 1)
    assert told(world) == [(FIRST, SECOND, 1)]


def test_without_lag_fix_nobody_tells() -> None:
    world = calm_world(lag_fix=False)
    watch(world, FIRST)
    put(world, 1, 2)
    assert told(world) == []


def test_among_many_members_nobody_tells() -> None:
    for members, expected in ((MAX_MEMBERS, MAX_MEMBERS - 1), (MAX_MEMBERS + 1, 0)):
        world = World()
        add_shard(world, 0)
        grant(world, first_lease(members), members)
        world.run(1 * MS)
        lag_fix = replica(world, FIRST)._lag_fix
        assert len(lag_fix._others) == expected


# --- who is connected ---


def step(world: World, *events: Event) -> list[Effect]:
    effects = [
        effect for event in events for effect in replica(world, FIRST).step(event, world.now)
    ]
    for effect in effects:
        world._carry_out(FIRST, effect)
    return effects


def announced(world: World, lease: Lease, placed: list[Placement]) -> list[Effect]:
    message = wire.LeaseAnnounced(CLUSTER, [run_of(lease)], 0, placed, 0)
    return step(world, Received(b"mms-0", message))


def test_primaries_of_others_are_connected_to_when_they_are_told_and_left_when_they_go() -> None:
    world = calm_world(shards=2)
    second = address(SECOND)
    assert (FIRST, SECOND.encode()) not in world._names
    watch(world, FIRST)
    put(world, 1)
    assert (FIRST, SECOND.encode()) in world._names
    lease = first_lease(2, epoch_ms=10_000)
    # It listens elsewhere.
    moved = replace(second, endpoint="127.0.0.1:9")
    placed = [replace(p, replicas=(moved, *p.replicas[1:])) for p in placements(2, 1)[1:]]
    assert Disconnect(SECOND.encode()) in announced(world, lease, placed)
    watch(world, FIRST)
    world.now += HINT_INTERVAL_NS
    out = step(world, Received(b"c", insert(2)), BatchEnd())
    assert Connect(SECOND.encode(), "127.0.0.1:9") in out
    # It is no member any more.
    alone = lease.following((lease.members[0],))
    assert Disconnect(SECOND.encode()) in announced(world, alone, [])
    before = len(told(world))
    put(world, 3)
    world.run(2 * MS)
    assert len(told(world)) == before


# --- hearing ---


def test_who_is_behind_gives_up_what_is_below_in_one_range() -> None:
    world = calm_world()
    watch(world, FIRST, SECOND)
    put(world, 1, count=10)
    world.run(1 * MS)
    assert told(world) == [(FIRST, SECOND, 19)]
    assert skips(world, SECOND) == [Skip(1, 19)]
    assert holes(world, SECOND) == 9
    put(world, 1, shard=1)
    assert [place.gsns for place in places(world, SECOND)] == [[20]]


def test_who_is_not_read_along_gives_up_nothing() -> None:
    world = calm_world()
    watch(world, FIRST)
    put(world, 1, count=10)
    world.run(1 * MS)
    assert skips(world, SECOND) == []
    assert holes(world, SECOND) == 0


def test_hints_that_cannot_be_are_ignored() -> None:
    world = calm_world()
    watch(world, SECOND)
    world.send("c", SECOND, wire.Ahead(CLUSTER + 1, 0, 19))
    world.send("c", SECOND, wire.Ahead(CLUSTER, 0, 2**62))
    world.send("c", "shard-1-1", wire.Ahead(CLUSTER, 0, 19))
    world.run(1 * MS)
    assert skips(world, SECOND) == []
    assert skips(world, "shard-1-1") == []


def test_a_hint_of_what_is_decided_already_changes_nothing() -> None:
    world = calm_world()
    watch(world, SECOND)
    world.send("c", SECOND, wire.Ahead(CLUSTER, 0, 19))
    world.send("c", SECOND, wire.Ahead(CLUSTER, 0, 19))
    world.send("c", SECOND, wire.Ahead(CLUSTER, 0, 9))
    world.run(1 * MS)
    assert skips(world, SECOND) == [Skip(1, 19)]
    assert holes(world, SECOND) == 9


# --- holes, and readers without lag-fix ---


def test_what_is_left_of_an_epoch_that_is_over_is_no_hole() -> None:
    lease = first_lease(2, epoch_size=1000, epoch_ms=10_000)
    world = calm_world(lease=lease)
    world.send("c", SECOND, wire.Want(CLUSTER, 1, 0, 1010))
    world.run(1 * MS)
    assert skips(world, SECOND) == [Skip(1, 1011)]
    assert holes(world, SECOND) == 5, "2 to 1000 are the first epoch's"


def test_without_lag_fix_a_reader_waits_for_the_end_of_the_epoch() -> None:
    world = world_of(shards=2, lag_fix=False)
    world.send("c", SECOND, wire.Want(CLUSTER, 1, 0, 9))
    world.run(1 * MS)
    assert skips(world, SECOND) == []
    assert world.run_until(lambda: bool(skips(world, SECOND)), 20 * MS)
    assert skips(world, SECOND)[0].stop > 9
    assert holes(world, SECOND) == 0


def test_without_lag_fix_an_epoch_that_is_over_is_decided_at_once() -> None:
    world = world_of(shards=2, lag_fix=False)
    world.run(35 * MS)
    world.send("c", SECOND, wire.Want(CLUSTER, 1, 0, 9))
    world.run(100 * US)
    assert skips(world, SECOND) == [Skip(1, (4 << 24) + 1)]


def test_without_lag_fix_who_asks_for_an_answer_gets_it() -> None:
    world = calm_world(lag_fix=False)
    world.send("c", SECOND, wire.Want(CLUSTER, 1, 5, 9))
    world.run(1 * MS)
    assert [answer.frontier for answer in probe(world).of(wire.Frontier)] == [10]


def test_a_lease_without_placements_keeps_those_that_are_known() -> None:
    world = calm_world()
    watch(world, FIRST)
    lease = first_lease(2, epoch_ms=10_000)
    announced(world, lease.following(lease.members), [])
    grant(world, lease.following(lease.members), 2)
    put(world, 1)
    assert [(src, dst) for src, dst, _ in told(world)] == [(FIRST, SECOND)]
