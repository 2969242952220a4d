"""Ordeals of all kinds: failures at random, and what clients were told must be true."""

from __future__ import annotations

import pytest

from tests.cluster import PureCluster
from tests.ordeal import Ordeal, Trial
from tests.world import MS, S, shard_names
from ziplog import policy
from ziplog.client.requests import SyncRequest
from ziplog.errors import NoSuchRecordError


@pytest.mark.parametrize("seed", range(6))
def test_nothing_acknowledged_is_lost(seed: int) -> None:
    Ordeal(seed, Trial(steps=80)).run()


@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_loses_nothing_at_level_disk(seed: int) -> None:
    kinds = ("kill", "kill_all", "kill_all", "pause")
    Ordeal(seed, Trial(steps=80, durability="disk", kinds=kinds)).run()


@pytest.mark.parametrize("seed", range(4))
def test_two_servers_of_a_shard_may_fail_with_f_2(seed: int) -> None:
    Ordeal(seed, Trial(steps=80, shards=1, f=2, failures=0.1)).run()


def test_sync_says_so_if_a_power_cut_took_what_it_should_cover() -> None:
    """At level `memory`, before the flush. The range is reported; the next sync is of the rest."""
    cluster = PureCluster(shards=1, f=1, handler=True)
    client = cluster.client("alice", policy.pin(0))
    kept = client.insert(b"kept")
    client.call(SyncRequest(client.deadline()))
    cluster.world.flush_ns = 1 * S
    cluster.run(2 * S)
    lost = client.insert(b"lost")
    cluster.run(10 * MS)
    for name in shard_names(0, 1):
        cluster.kill(name)
    cluster.world.flush_ns = 0
    assert cluster.run_until(cluster.is_whole, 30 * S)
    after = client.insert(b"after")
    with pytest.raises(NoSuchRecordError) as caught:
        client.call(SyncRequest(client.deadline()))
    assert caught.value.rid == lost
    assert client.call(SyncRequest(client.deadline())) == after
    (loss,) = cluster.groups["mms-0"].machine.losses
    assert kept.gsn < loss.start <= lost.gsn < loss.stop
    assert [record.payload for record in client.read_all()] == [b"kept", b"after"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_long_ordeals(seed: int) -> None:
    f = 1 + seed % 2
    Ordeal(seed, Trial(steps=250, shards=3 - f, f=f, failures=0.08, loss=0.05)).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 208))
def test_long_ordeals_with_power_cuts(seed: int) -> None:
    kinds = ("kill", "kill", "pause", "cut", "kill_all")
    Ordeal(seed, Trial(steps=200, durability="disk", kinds=kinds, failures=0.08)).run()
