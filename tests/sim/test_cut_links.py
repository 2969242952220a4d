"""One link of the cluster is cut, and both ends reach all other nodes: readers continue."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import pytest

from tests.sim.cluster import SimCluster
from tests.sim.mutation import LAN, busy
from tests.sim.simulated import simulated
from tests.sim.test_parted_regions import insert_from_now_on, read_from_now_on
from tests.simulator.kernel import Kernel, S

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Time of the cut, and the longest pause of a reader in it.
CUT_NS: Final = 12 * S
PAUSE_NS: Final = 4 * S


def longest_pause(links: Sequence[tuple[str, str]]) -> int:
    """Cut links; return the longest time without a record at a reader of the log."""
    kernel = Kernel(1)
    plan = busy(1, shards=2, mms=3, handlers=3, conditions=LAN)._replace(is_raft_real=True)
    with simulated(kernel, is_raft_real=True):
        cluster = SimCluster(kernel, plan)
        cluster.begin()
        kernel.run(3 * S)
        times = read_from_now_on(cluster, "reader-0")
        insert_from_now_on(cluster, 400, "writer-0")
        kernel.run(1 * S)
        leaders = {"service": cluster.mms.leader, "handler": cluster.handlers.leader}
        for link in links:
            one, other = (leaders.get(end, end) for end in link)
            cluster.network.cut(one, other)
            cluster.network.cut(other, one)
        start = kernel.now
        kernel.run(CUT_NS)
        points = [start, *(at for at in times if at > start), kernel.now]
        cluster.network.heal_all()
        return max(later - earlier for earlier, later in pairwise(points))


@pytest.mark.parametrize(
    "links",
    [
        [("service", "shard-0-0")],
        [("service", "shard-0-1")],
        [("service", "shard-0-0"), ("service", "shard-0-1")],
        [("handler", "shard-0-0")],
        [("service", "handler")],
        [("shard-0-0", "shard-0-1")],
        [("shard-0-0", "shard-1-0")],
        [("service", "reader-0")],
    ],
    ids=str,
)
def test_readers_continue(links: list[tuple[str, str]]) -> None:
    assert longest_pause(links) < PAUSE_NS
