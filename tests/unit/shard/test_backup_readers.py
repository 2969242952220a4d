"""Readers at the only backup, and how the primary learns of them."""

from __future__ import annotations

import pytest

from shard.ordering.reports import SUBSCRIBERS_EXPIRY_NS, SUBSCRIBERS_REPORT_NS
from shard.replica import Replica
from tests.actors import Reader
from tests.checkers import decided
from tests.world import CLUSTER, MS, US, Link, S, World, calm_world, first_lease, insert
from ziplog import wire

PRIMARY, BACKUP, OTHER = "shard-0-0", "shard-0-1", "shard-0-2"


def replica(world: World, name: str) -> Replica:
    node = world.nodes[name]
    assert isinstance(node, Replica)
    return node


def has_readers(world: World) -> bool:
    return replica(world, PRIMARY).state.has_readers(world.now)


def follow(world: World, server: str = BACKUP) -> Reader:
    reader = Reader("reader", server, 0)
    reader.grant, reader.renew_at = 1 << 20, world.now
    world.add(reader.name, reader)
    world.run(2 * MS)
    return reader


def unsubscribe(world: World, reader: Reader) -> None:
    """Remove the reader silently: otherwise it would subscribe again."""
    world.paused.add(reader.name)
    (key,) = replica(world, BACKUP)._readers.subscriptions
    world.send("c", BACKUP, wire.Unsubscribe(CLUSTER, 0, *key))


def put(world: World, seq: int, f: int = 1) -> None:
    for server in range(f + 1):
        world.send("c", f"shard-0-{server}", insert(seq))


def long_epochs(f: int = 1, durability: str = "memory") -> World:
    return calm_world(f=f, lease=first_lease(1, epoch_ms=10_000), durability=durability)


# --- stable entries ---


def test_entries_applied_by_the_only_backup_are_stable_there() -> None:
    world = long_epochs()
    reader = follow(world)
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    put(world, 1)
    world.run(2 * MS)
    assert [gsn for gsn, _ in reader.delivered] == [1]
    assert replica(world, BACKUP).state.stream.stable == 1
    assert replica(world, PRIMARY).state.stream.stable == 0, "no report came"


def test_a_guess_is_not_stable() -> None:
    world = long_epochs()
    reader = follow(world)
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    put(world, 1)
    world.run(2 * MS)
    assert not reader.delivered
    assert replica(world, BACKUP).state.stream.stable == 0


def test_a_body_that_arrives_after_its_decision_makes_it_stable() -> None:
    world = long_epochs()
    reader = follow(world)
    world.send("c", PRIMARY, insert(1))
    world.run(500 * US)
    assert not reader.delivered
    world.send("c", BACKUP, insert(1))
    world.run(500 * US)
    assert [gsn for gsn, _ in reader.delivered] == [1]


def test_the_backup_of_three_waits_for_the_stable_watermark() -> None:
    world = long_epochs(f=2)
    reader = follow(world)
    world.links[OTHER, PRIMARY] = Link(lose=lambda: True)
    put(world, 1, f=2)
    world.run(20 * MS)
    assert replica(world, BACKUP).state.stream.last == 1
    assert not reader.delivered
    world.links.clear()
    world.run(2 * S)
    assert [gsn for gsn, _ in reader.delivered] == [1]


@pytest.mark.parametrize("slow", [PRIMARY, BACKUP])
def test_at_level_disk_it_is_stable_once_it_is_on_both_disks(slow: str) -> None:
    """The reports of the backup are lost: its readers do not wait for them."""
    world = long_epochs(durability="disk")
    reader = follow(world)
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    world.flush_ns, world.slow_flushes[slow] = 3 * MS, 6 * MS
    put(world, 1)
    world.run(5 * MS)
    assert replica(world, BACKUP).state.stream.last == 1
    assert not reader.delivered, f"the disk of {slow} is not done"
    world.run(2 * MS)
    assert [gsn for gsn, _ in reader.delivered] == [1]


def test_at_level_disk_both_disks_write_at_the_same_time() -> None:
    world = long_epochs(durability="disk")
    world.flush_ns = 3 * MS
    put(world, 1)
    world.run(4 * MS)
    assert replica(world, PRIMARY).state.stream.durable == 1


def test_at_level_disk_the_primary_counts_its_own_disk() -> None:
    world = long_epochs(durability="disk")
    world.flush_ns, world.slow_flushes[PRIMARY] = 1 * MS, 6 * MS
    put(world, 1)
    world.run(5 * MS)
    primary = replica(world, PRIMARY).state.stream
    assert (primary.last, primary.stable) == (1, 0)
    world.run(2 * MS)
    assert primary.stable == 1


@pytest.mark.parametrize("clean", [True, False])
def test_stable_entries_of_the_backup_stay_stable_over_a_restart(clean: bool) -> None:
    world = long_epochs()
    follow(world)
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    put(world, 1)
    world.run(200 * MS)  # a watermark record is written
    again = world.restart(BACKUP, clean=clean)
    assert again.state.stream.stable == 1
    found = again._readers._find(1)
    assert (found.answer, found.stable) == ("record", True)


# --- subscribers ---


def test_a_subscriber_at_the_backup_has_the_primary_end_its_epochs() -> None:
    world = calm_world()
    assert not has_readers(world)
    follow(world)
    assert has_readers(world)
    before = len(decided(world, PRIMARY))
    world.run(110 * MS)
    assert len(decided(world, PRIMARY)) == before + 3


def test_the_primary_hears_at_once_that_the_last_subscriber_is_gone() -> None:
    world = long_epochs()
    reader = follow(world)
    unsubscribe(world, reader)
    world.run(1 * MS)
    assert not has_readers(world)


def test_a_report_that_was_lost_is_repeated() -> None:
    world = long_epochs()
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    follow(world)
    world.run(20 * MS)
    assert not has_readers(world)
    world.links.clear()
    world.run(SUBSCRIBERS_REPORT_NS)
    assert has_readers(world)
    world.run(5 * SUBSCRIBERS_EXPIRY_NS)
    assert has_readers(world), "the report is repeated"


def test_subscribers_of_a_silent_backup_expire() -> None:
    world = long_epochs()
    reader = follow(world)
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    unsubscribe(world, reader)
    world.run(SUBSCRIBERS_REPORT_NS)
    assert has_readers(world)
    world.run(SUBSCRIBERS_EXPIRY_NS)
    assert not has_readers(world)


def test_subscribers_at_one_of_two_backups_are_enough() -> None:
    world = long_epochs(f=2)
    reader = follow(world)
    put(world, 1, f=2)  # the other backup reports too
    world.run(5 * MS)
    assert has_readers(world)
    unsubscribe(world, reader)
    world.run(1 * MS)
    assert not has_readers(world)


def test_subscribers_at_the_other_backup_keep_the_shard_read() -> None:
    world = long_epochs(f=2)
    reader = follow(world)
    other = Reader("other", OTHER, 0)
    other.grant, other.renew_at = 1 << 20, world.now
    world.add(other.name, other)
    world.run(2 * MS)
    unsubscribe(world, reader)
    world.run(1 * MS)
    assert not replica(world, BACKUP).state.has_subscribers
    assert has_readers(world)


def test_backups_repeat_no_reports_without_subscribers() -> None:
    world = long_epochs()
    reader = follow(world)
    unsubscribe(world, reader)
    put(world, 1)
    world.run(2 * S)
    world.sent.clear()
    world.run(10 * S)
    assert {type(message) for _, _, message in world.sent} <= {wire.Heartbeat, wire.Beat}
