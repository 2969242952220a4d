"""A new cluster whose servers crash before the first lease."""

from __future__ import annotations

import pytest

from tests.cluster import PureCluster
from tests.world import S, shard_names


@pytest.mark.parametrize(
    ("shards", "limbo", "is_loss_possible"),
    [
        (1, ["shard-0-0"], False),
        (1, shard_names(0, 1), True),
        (2, shard_names(0, 1), False),
        (2, ["shard-0-1", "shard-1-0"], False),
    ],
)
def test_a_cluster_starts_although_servers_crashed_before_the_first_lease(
    shards: int, limbo: list[str], *, is_loss_possible: bool
) -> None:
    """Without a lease, no shard can be recovered, and without a shard there is no lease."""
    cluster = PureCluster(shards, handler=True, limbo=limbo)
    assert cluster.run_until(cluster.is_whole, 10 * S)
    assert bool(cluster.groups["mms-0"].machine.losses) == is_loss_possible
    client = cluster.client("alice")
    assert client.read(client.insert(b"first")).payload == b"first"
