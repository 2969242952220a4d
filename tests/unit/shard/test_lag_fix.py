"""Lag-fix: a shard that is ahead has the others give up positions."""

from __future__ import annotations

from operator import attrgetter
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
    """Return a world with epochs so long that none ends in a test."""
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
    """Add a reader that waits for each record."""
    for name in names:
        state = replica(world, name).state
        state.last_want, state.has_followers = world.now, True


def all_hints(world: World) -> list[tuple[str, str, int]]:
    return [(a, b, m.gsn) for a, b, m in world.sent if isinstance(m, wire.Ahead) and a != "c"]


def hints(world: World) -> list[tuple[str, str, int]]:
    """Return the hints to primaries."""
    return [(src, dst, gsn) for src, dst, gsn in all_hints(world) if dst.endswith("-0")]


def holes(world: World, name: str) -> int:
    return replica(world, name).state.holes


def skips(world: World, name: str) -> list[Skip]:
    return [e.decision for e in decided(world, name) if isinstance(e.decision, Skip)]


def waited(world: World, shard: int) -> list[int]:
    acks = [m for _, _, m in world.sent if isinstance(m, wire.InsertAck) and m.shard == shard]
    return [ack.seq for ack in acks if ack.waited]


def test_a_shard_that_only_receives_hints_is_in_one_epoch_at_all_replicas() -> None:
    world = world_of(shards=2, lease=first_lease(2, epochs=512))
    for turn in range(1, 41):
        watch(world, FIRST, SECOND)
        for hint in range(12):
            put(world, 12 * turn + hint)
            world.run(4 * MS + 100 * US)
        put(world, turn, shard=1)
    assert waited(world, 1) == []


def test_the_end_of_an_idle_epoch_does_not_count_as_activity() -> None:
    world = world_of(shards=2, lease=first_lease(2, epochs=1024))
    for turn in range(1, 41):
        watch(world, FIRST)
        world.run(93 * MS)
        watch(world, FIRST)
        put(world, turn)
    assert waited(world, 0) == []


# --- sending hints ---


def test_primary_ahead_of_all_sends_hints_at_once() -> None:
    world = calm_world(shards=3)
    watch(world, FIRST)
    put(world, 1, 2)
    assert hints(world) == [(FIRST, SECOND, 4), (FIRST, "shard-2-0", 4)]
    receivers = [dst for _, dst, _ in all_hints(world)]
    assert receivers == ["shard-1-0", "shard-1-1", "shard-2-0", "shard-2-1"]


def test_no_hints_are_sent_without_readers() -> None:
    world = calm_world()
    put(world, 1, 2)
    assert hints(world) == []


def test_hints_are_at_least_half_a_millisecond_apart() -> None:
    world = calm_world()
    watch(world, FIRST)
    put(world, 1)
    began = world.now
    put(world, 2)
    put(world, 3)
    assert [gsn for _, _, gsn in hints(world)] == [1]
    assert world.run_until(lambda: len(hints(world)) == 2, HINT_INTERVAL_NS)
    assert [gsn for _, _, gsn in hints(world)] == [1, 5], "the last hint is sent after a delay"
    assert world.now - began >= HINT_INTERVAL_NS - 100 * US
    world.run(5 * MS)
    assert len(hints(world)) == 2


def test_more_members_lengthen_the_interval_between_hints() -> None:
    world = calm_world(shards=4)
    watch(world, FIRST)
    put(world, 1)
    put(world, 2)
    began = world.now
    assert world.run_until(lambda: len(hints(world)) == 6)
    assert world.now - began >= 3 * HINT_INTERVAL_NS - 300 * US


def test_primary_that_received_a_higher_hint_sends_none() -> None:
    world = calm_world()
    watch(world, FIRST)
    world.send("c", FIRST, wire.Ahead(CLUSTER, 1, 1000))
    world.run(1 * MS)
    put(world, 1)
    assert hints(world) == [(FIRST, SECOND, 1001)]
    world.send("c", FIRST, wire.Ahead(CLUSTER, 1, 2000))
    replica(world, FIRST).state.last_want = -(2**62)  # without readers, it gives up nothing
    world.run(1 * MS)
    watch(world, FIRST)
    put(world, 2)
    assert len(hints(world)) == 1


def test_hint_beyond_all_leases_suppresses_no_hints() -> None:
    world = calm_world()
    watch(world, FIRST)
    world.send("c", FIRST, wire.Ahead(CLUSTER, 1, 2**62))
    world.run(1 * MS)
    put(world, 1)
    assert hints(world) == [(FIRST, SECOND, 1)]


def test_without_lag_fix_no_hints_are_sent() -> None:
    world = calm_world(lag_fix=False)
    watch(world, FIRST)
    put(world, 1, 2)
    assert hints(world) == []


def test_among_many_members_no_hints_are_sent() -> None:
    for members, expected in ((MAX_MEMBERS, MAX_MEMBERS - 1), (MAX_MEMBERS + 1, 0)):
        world = World()
        add_shard(world, 0)
        grant(world, first_lease(members), members)
        world.run(1 * MS)
        lag_fix = replica(world, FIRST)._lag_fix
        assert len(lag_fix._others) == 2 * expected


# --- connections ---


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


def test_primaries_connect_at_the_first_hint_and_disconnect_when_members_leave() -> None:
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
    # It is not a member any more.
    alone = lease.following((lease.members[0],))
    assert Disconnect(SECOND.encode()) in announced(world, alone, [])
    before = len(hints(world))
    put(world, 3)
    world.run(2 * MS)
    assert len(hints(world)) == before


# --- receiving hints ---


def test_primary_that_is_behind_skips_to_the_hint_in_one_range() -> None:
    world = calm_world()
    watch(world, FIRST, SECOND)
    put(world, 1, count=10)
    world.run(1 * MS)
    assert hints(world) == [(FIRST, SECOND, 19)]
    assert skips(world, SECOND) == [Skip(1, 19)]
    assert holes(world, SECOND) == 9
    put(world, 1, shard=1)
    assert [place.gsns for place in places(world, SECOND)] == [[20]]


def hinted(*watched: str) -> World:
    """Return a world whose second shard gets a hint and an insert before its backup's forward."""
    world = calm_world()
    watch(world, *watched)
    for seq in range(1, 4):
        put(world, seq, shard=1)
    for name in shard_names(1, 1):
        world.send("c", name, wire.Ahead(CLUSTER, 0, 99))
        world.send("c", name, insert(4, shard=1))
    world.run(1 * MS)
    return world


def test_backup_guesses_that_its_primary_skips_to_a_hint() -> None:
    world = hinted(SECOND, "shard-1-1")
    assert [place.gsns for place in places(world, SECOND)][3:] == [[100]]
    acks = [m for _, _, m in world.sent if isinstance(m, wire.InsertAck) and m.seq == 4]
    assert [
        (ack.server, ack.gsns, ack.waited) for ack in sorted(acks, key=attrgetter("server"))
    ] == [
        (0, [100], False),
        (1, [100], False),
    ]


def test_backup_ignores_hints_that_its_primary_does_not_follow() -> None:
    world = calm_world()
    watch(world, SECOND, "shard-1-1")
    for seq in range(1, 4):
        put(world, seq, shard=1)
    for seq in range(4, 204):
        end = replica(world, SECOND).state.stream.end
        world.send("c", "shard-1-1", wire.Ahead(CLUSTER, 0, end + 2000))
        put(world, seq, shard=1)
    assert 0 < len(waited(world, 1)) < 20


def test_backup_follows_hints_again_once_its_primary_does() -> None:
    world = calm_world()
    watch(world, SECOND, "shard-1-1")
    world.send("c", "shard-1-1", wire.Ahead(CLUSTER, 0, 999))
    for seq in range(1, 30):
        put(world, seq, shard=1)
    for gsn in (2001, 3001):  # It ignores the first one, which its primary follows.
        for name in shard_names(1, 1):
            world.send("c", name, wire.Ahead(CLUSTER, 0, gsn))
        world.run(MS)
    before = len(waited(world, 1))
    for name in shard_names(1, 1):
        world.send("c", name, wire.Ahead(CLUSTER, 0, 4001))
        world.send("c", name, insert(30, shard=1))
    world.run(MS)
    assert len(waited(world, 1)) == before


def test_backup_without_readers_ignores_hints() -> None:
    world = hinted()
    assert [place.gsns for place in places(world, SECOND)][3:] == [[8]]
    assert waited(world, 1) == []


def test_backup_ignores_hints_beyond_its_leases() -> None:
    world = calm_world()
    watch(world, SECOND, "shard-1-1")
    put(world, 1, shard=1)
    for name in shard_names(1, 1):
        world.send("c", name, wire.Ahead(CLUSTER, 0, 2**62))
    put(world, 2, shard=1)
    assert [place.gsns for place in places(world, SECOND)] == [[2], [4]]
    assert waited(world, 1) == []


def test_primary_without_readers_ignores_hints() -> None:
    world = calm_world()
    watch(world, FIRST)
    put(world, 1, count=10)
    world.run(1 * MS)
    assert skips(world, SECOND) == []
    assert holes(world, SECOND) == 0


def test_impossible_hints_are_ignored() -> None:
    world = calm_world()
    watch(world, SECOND)
    world.send("c", SECOND, wire.Ahead(CLUSTER + 1, 0, 19))
    world.send("c", SECOND, wire.Ahead(CLUSTER, 0, 2**62))
    world.send("c", "shard-1-1", wire.Ahead(CLUSTER, 0, 19))
    world.run(1 * MS)
    assert skips(world, SECOND) == []
    assert skips(world, "shard-1-1") == []


def test_a_hint_about_decided_positions_changes_nothing() -> None:
    world = calm_world()
    watch(world, SECOND)
    world.send("c", SECOND, wire.Ahead(CLUSTER, 0, 19))
    world.send("c", SECOND, wire.Ahead(CLUSTER, 0, 19))
    world.send("c", SECOND, wire.Ahead(CLUSTER, 0, 9))
    world.run(1 * MS)
    assert skips(world, SECOND) == [Skip(1, 19)]
    assert holes(world, SECOND) == 9


# --- holes, and readers without lag-fix ---


def test_the_rest_of_an_ended_epoch_does_not_count_as_holes() -> None:
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


def test_without_lag_fix_an_ended_epoch_is_decided_at_once() -> None:
    world = world_of(shards=2, lag_fix=False)
    world.run(35 * MS)
    world.send("c", SECOND, wire.Want(CLUSTER, 1, 0, 9))
    world.run(100 * US)
    assert skips(world, SECOND) == [Skip(1, (4 << 24) + 1)]


def test_without_lag_fix_a_want_with_a_request_number_is_answered() -> None:
    world = calm_world(lag_fix=False)
    world.send("c", SECOND, wire.Want(CLUSTER, 1, 5, 9))
    world.run(1 * MS)
    assert [answer.frontier for answer in probe(world).of(wire.Frontier)] == [10]


def test_a_lease_without_placements_keeps_the_known_ones() -> None:
    world = calm_world()
    watch(world, FIRST)
    lease = first_lease(2, epoch_ms=10_000)
    announced(world, lease.following(lease.members), [])
    grant(world, lease.following(lease.members), 2)
    put(world, 1)
    assert [(src, dst) for src, dst, _ in hints(world)] == [(FIRST, SECOND)]
