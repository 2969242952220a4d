"""Gated inserts in virtual time: their latency, and what they wait for when the leader dies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tests.sim.latency import Loop, run_load
from tests.sim.scalog import SimLayer, measure
from tests.simulator.kernel import MS

if TYPE_CHECKING:
    from tests.sim.cluster import SimCluster

#: Less than any timeout of an election.
ELECTION_NS = 100 * MS


def test_a_gated_insert_waits_for_an_interval_and_for_consensus() -> None:
    """With 1,500 inserts of 2 shards the ratios are 9.1 and 4.7."""
    found = measure(2, t_ord_ms=1, count=150)
    assert found["gate_p50_us"] >= 700
    assert found["gate_insert_ratio"] >= 4
    assert found["gate_append_ratio"] >= 4


class Both:
    """A plain client and a gated one; the leader dies after half of the gated inserts."""

    def __init__(self, cluster: SimCluster, count: int) -> None:
        self.kernel, self.cluster = cluster.kernel, cluster
        self.plain = Loop(cluster, "writer-0", ["insert"], 30 * count, 500)
        self.layer = SimLayer(cluster, 3, MS)
        self.gated = Loop(cluster, "writer-1", ["gate"], count, 500)
        self.half, self.killed = count // 2, ""

    @property
    def is_done(self) -> bool:
        if not self.killed and self.gated.left <= self.half:
            self.killed = self.layer.group.leader
            self.layer.processes[self.killed].kill()
        return self.gated.is_done


def test_gated_inserts_wait_for_the_next_leader_and_plain_ones_do_not() -> None:
    both = run_load(2, lambda cluster: Both(cluster, 100), seed=3, is_raft_real=True)
    cut = msgspec.msgpack.decode(both.layer.group.machine.snapshot(), type=dict[int, int])
    for shard in range(2):
        states = [both.cluster.state_of(f"shard-{shard}-{server}") for server in range(2)]
        assert 1 < cut[shard] <= max(state.frontier for state in states if state is not None)
    assert both.layer.group.leader not in {"", both.killed}
    assert max(both.gated.took["gate"]) >= ELECTION_NS
    assert max(both.plain.took["insert"]) < 5 * MS
