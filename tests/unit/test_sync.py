"""`sync` after the loss of a whole shard's memory."""

from __future__ import annotations

import pytest

from tests.cluster import PureCluster
from tests.world import MS, S, shard_names
from ziplog import policy
from ziplog.client.common.requests import SyncRequest
from ziplog.errors import NoSuchRecordError


def test_sync_reports_records_lost_in_a_power_cut() -> None:
    """At level `memory`, before the flush. The range is reported; the next sync covers the rest."""
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
