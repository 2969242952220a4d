"""BookKeeper's proposal BP-14, *Relax Durability*: levels, confirmations and sync.

One test for each claim, with the real state machines in virtual time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.cluster import Client, PureCluster
from tests.world import MS, S, shard_names
from ziplog import policy
from ziplog.client.common.requests import SyncRequest

if TYPE_CHECKING:
    from ziplog.types import Durability


def flushing(after: int, durability: Durability) -> tuple[PureCluster, Client]:
    """Return a cluster with a late flush of its files, and a client."""
    cluster = PureCluster(shards=1, f=1, durability=durability)
    client = cluster.client("alice", policy.pin(0))
    cluster.run(1 * S)
    cluster.world.flush_ns = after
    return cluster, client


def test_bp_14_the_level_controls_when_an_insert_is_acknowledged() -> None:
    """'The durability level only controls when an addEntry request is acknowledged.'

    Volatile: from the memory of all; persistent: after the fsync on all.
    """
    took = {}
    for durability in ("memory", "disk"):
        cluster, alice = flushing(30 * MS, durability)  # type: ignore[arg-type]
        start = cluster.world.now
        alice.insert(b"record")
        took[durability] = cluster.world.now - start
    assert took["memory"] < 1 * MS
    assert took["disk"] >= 30 * MS


def test_bp_14_a_persistent_entry_survives_the_loss_of_all_memory() -> None:
    """'PD: the acknowledgement happens after an entry is replicated and committed to storage'"""
    cluster = PureCluster(shards=1, f=1, handler=True, durability="disk")
    cluster.world.flush_ns = 10 * MS
    alice = cluster.client("alice", policy.pin(0))
    rids = [alice.insert(b"%d" % n) for n in range(20)]
    for name in shard_names(0, 1):
        cluster.kill(name)
    assert cluster.run_until(cluster.is_whole, 30 * S)
    assert [(r.rid, r.payload) for r in alice.read_all()] == [
        (rid, b"%d" % n) for n, rid in enumerate(rids)
    ]


def test_bp_14_confirmed_means_replicated_and_persistent_on_all() -> None:
    """'LAC is only advanced when all entries before LAC have been replicated and stored'

    That watermark is `durable`; readers use `stable`, another one (D16).
    """
    cluster, alice = flushing(50 * MS, "memory")
    rid = alice.insert(b"record")
    cluster.run(20 * MS)
    streams = [cluster.state(name).stream for name in shard_names(0, 1)]
    assert all(stream.stable_end > rid.gsn for stream in streams)
    assert all(stream.durable_end <= rid.gsn for stream in streams)
    cluster.run(200 * MS)
    assert streams[0].durable_end > rid.gsn


def test_bp_14_sync_returns_the_last_entry_that_is_persistent_on_all() -> None:
    """'It will return the last entry id that has been successfully replicated and committed to
    persistent storage.' Inserts in flight when sync is called need not be included.
    """
    cluster = PureCluster(shards=1, f=1, handler=True)
    cluster.world.flush_ns = 40 * MS
    alice = cluster.client("alice", policy.pin(0))
    rids = [alice.insert(b"%d" % n) for n in range(5)]
    synced = alice.call(SyncRequest(alice.deadline()))
    assert synced == rids[-1]
    stores = [cluster.world.stores[name] for name in shard_names(0, 1)]
    assert all(
        cluster.state(n).persisted >= s.last_fseq
        for n, s in zip(shard_names(0, 1), stores, strict=True)
    )
    for name in shard_names(0, 1):
        cluster.kill(name)
    assert cluster.run_until(cluster.is_whole, 30 * S)
    assert [r.payload for r in alice.read_all()] == [b"%d" % n for n in range(5)]


def test_bp_14_the_level_is_a_property_of_the_log() -> None:
    """'The ledger type will be persisted as part of ledger metadata and remaining unchanged.'

    Here it is persisted, too; it changes once the servers have changed, not with a node's file.
    """
    cluster = PureCluster(shards=1, f=1, durability="disk")
    group = cluster.groups["mms-0"]
    cluster.config = replace(cluster.config, durability="memory")
    group.lead()
    cluster.run(5 * S)
    assert cluster.world.halts == []
    assert group.machine.durability == "disk"
