"""What a storage server counts, and its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shard.metrics import StorageMetrics
from shard.replica import Replica
from shard.state.counters import SAMPLE_INTERVAL
from tests.unit.shard.logs import place
from tests.world import CLUSTER, MS, S, World, calm_world, insert, probe
from ziplog import wire
from ziplog.core.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.storage.segment_store import SegmentStore

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"


def replica_of(world: World, name: str = PRIMARY) -> Replica:
    replica = world.nodes[name]
    assert isinstance(replica, Replica)
    return replica


def insert_everywhere(world: World, seqs: range) -> None:
    for seq in seqs:
        for name in (PRIMARY, BACKUP):
            world.send("c", name, insert(seq, first_incomplete=seq))
        world.run(5 * MS)


def metrics(world: World, store: SegmentStore, name: str = PRIMARY) -> dict[object, object]:
    report = StorageMetrics(replica_of(world, name).state, store)
    values, durations = report.collect(Histogram(), world.now)
    found: dict[object, object] = {
        (value.name, *sorted(value.labels.items())): value.value for value in values
    }
    assert len(found) == len(values)
    assert {("shard", "0")} <= {item for value in values for item in value.labels.items()}
    return found | {one.name: sum(one.counts) for one in durations}


def test_one_insert_in_64_is_timed_until_its_ack() -> None:
    world = calm_world()
    for number in range(2 * SAMPLE_INTERVAL):  # The first insert of a client takes the full path.
        for name in (PRIMARY, BACKUP):
            world.send("c", name, insert(1, client=number.to_bytes(16)))
        world.run(5 * MS)
    for name in (PRIMARY, BACKUP):
        acks = replica_of(world, name).state.counters.acks
        assert (sum(acks.counts), acks.counts[0]) == (2, 2)


def test_an_ack_at_level_disk_waits_for_the_disk() -> None:
    world = calm_world(durability="disk")
    world.flush_ns = 3 * MS
    insert_everywhere(world, range(1, SAMPLE_INTERVAL + 1))
    acks = replica_of(world).state.counters.acks
    assert sum(acks.counts) == 1
    assert 3 * MS <= acks.sum_ns < 5 * MS


def test_an_insert_that_is_never_placed_does_not_stop_the_sampling() -> None:
    counters = replica_of(calm_world()).state.counters
    stream = replica_of(calm_world()).state.stream

    class Unit:
        has_slots = False

    for _ in range(SAMPLE_INTERVAL):
        counters.on_admitted(Unit(), 0)  # type: ignore[arg-type]
    counters.on_batch_end(stream, 0, S)
    assert counters._insert is not None
    counters.on_batch_end(stream, 0, 20 * S)
    assert counters._insert is None
    assert sum(counters.acks.counts) == 0


def test_decisions_are_timed_until_they_are_stable() -> None:
    world = calm_world()
    world.paused.add(BACKUP)
    world.send("c", PRIMARY, insert(1))
    world.run(40 * MS)
    waits = replica_of(world).state.counters.order_waits
    assert sum(waits.counts) == 0
    world.paused.discard(BACKUP)
    world.run(S)
    assert sum(waits.counts) >= 1
    assert waits.sum_ns >= 40 * MS


def test_the_metrics_of_a_primary_and_a_backup(opened: Callable[..., SegmentStore]) -> None:
    world, store = calm_world(), opened()
    insert_everywhere(world, range(1, 4))
    world.send("c", PRIMARY, insert(9, shard=5))
    world.send("c", PRIMARY, wire.Read(CLUSTER, 0, 1, 1, 10**6))
    world.send("c", PRIMARY, wire.Subscribe(CLUSTER, 0, 1, b"r" * 16, 1, 1, 10**6))
    world.run(20 * MS)
    insert_everywhere(world, range(4, 6))  # Delivered at once, not by catching up.
    world.run(20 * MS)
    shard = ("shard", "0")
    found = metrics(world, store)
    assert found["ziplog_records_total", ("role", "primary"), shard] == 5
    placed_bytes = sum(len(insert(seq).body) for seq in range(1, 6))
    assert found["ziplog_record_bytes_total", ("role", "primary"), shard] == placed_bytes
    assert found["ziplog_refused_total", ("reason", "wrong-shard"), shard] == 1
    assert found["ziplog_reads_total", ("result", "not-yet"), shard] == 1
    assert found["ziplog_subscriptions", shard] == 1
    assert found["ziplog_delivered_records_total", shard] == 5
    assert found["ziplog_delivered_records_total", shard] == sum(
        len(unit.gsns) for deliver in probe(world).of(wire.Deliver) for unit in deliver.units
    )
    assert found["ziplog_replica_lag_records", ("peer", BACKUP), shard] == 0
    assert int(str(found["ziplog_order_wait_seconds"])) >= 3
    found = metrics(world, store, BACKUP)
    paths = [
        found["ziplog_records_total", ("path", path), ("role", "backup"), shard]
        for path in ("fast", "slow")
    ]
    waited = [ack for ack in probe(world).of(wire.InsertAck) if ack.waited]
    assert paths == [5 - len(waited), len(waited)]
    assert found["ziplog_record_bytes_total", ("role", "backup"), shard] == placed_bytes
    assert waited  # Its epoch was closed for the reader before the insert came.
    assert "ziplog_order_wait_seconds" not in found


def test_the_lag_of_a_reader_without_credit_grows(opened: Callable[..., SegmentStore]) -> None:
    world = calm_world()
    report = StorageMetrics(replica_of(world).state, opened())

    def lag() -> tuple[float, float]:
        values, _ = report.collect(Histogram(), world.now)
        found = {value.name: value.value for value in values}
        return found["ziplog_subscriptions_behind"], found["ziplog_reader_lag_seconds"]

    def renew(credit: int) -> None:
        world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, b"r" * 16, 1, credit))
        world.run(20 * MS)

    assert lag() == (0, 0)
    world.send("c", PRIMARY, wire.Subscribe(CLUSTER, 0, 1, b"r" * 16, 1, 1, 1))
    insert_everywhere(world, range(1, 3))  # The first one uses up the credit.
    world.run(20 * MS)
    assert lag() == (1, 0)
    for _ in range(2):
        world.run(S // 4)
        renew(1)
    assert lag() == (1, pytest.approx(0.5, abs=0.1))
    renew(10**6)
    assert lag() == (0, 0)


def test_the_segments_that_wait_for_the_archive(opened: Callable[..., SegmentStore]) -> None:
    world, store = calm_world(), opened(segment_bytes=500)
    for fseq in range(1, 20):
        store.append(place(fseq, [fseq], bytes(100)))
    sealed = store._segments[:-1]
    assert len(sealed) >= 3
    archived = 0
    report = StorageMetrics(replica_of(world).state, store, lambda: archived)

    def lag() -> object:
        values = report.collect(Histogram(), world.now)[0]
        found: dict[str, object] = {value.name: value.value for value in values}
        return found.get("ziplog_archive_lag_bytes")

    stream = replica_of(world).state.stream
    assert lag() is None, "the archive has not reported yet"
    archived = 1
    assert stream.stable == 0
    assert lag() == 0, "nothing is stable"
    insert_everywhere(world, range(1, sealed[1].last_fseq + 1))
    assert sealed[1].last_fseq <= stream.stable < sealed[2].last_fseq
    assert lag() == sealed[0].size + sealed[1].size
    archived = sealed[1].base_fseq
    assert lag() == sealed[1].size


def test_the_lag_of_a_backup_grows_while_it_is_paused(
    opened: Callable[..., SegmentStore],
) -> None:
    world = calm_world()
    report = StorageMetrics(replica_of(world).state, opened())

    def lag() -> tuple[float, float]:
        values, _ = report.collect(Histogram(), world.now)
        found = {value.name: value.value for value in values}
        return found["ziplog_replica_lag_records"], found["ziplog_replica_lag_seconds"]

    assert lag() == (0, 0)
    world.paused.add(BACKUP)
    world.send("c", PRIMARY, insert(1, count=3))
    world.run(10 * MS)
    assert lag() == (3, 0)  # Since this snapshot, it is known to be behind.
    world.run(S // 2)
    assert lag() == (3, pytest.approx(0.5, abs=0.05))
