"""The ordering layer with real processes: the bench of the gate, and a gated subscription."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from log_bench import gate
from scalog import gated
from scalog.layer import Layer

import ziplog
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)


@pytest.mark.nightly
def test_the_bench_measures_gated_inserts_and_the_death_of_the_leader() -> None:
    found = gate.measure(0.1, t_ord_ms=[1.0], nodes=[3])
    latency, failure = found["latency"], found["failure"]
    assert list(latency) == ["insert", "append", "gate, 3 nodes, 1 ms"]
    assert {row["count"] for row in latency.values()} == {80}
    for kind in ("plain", "gate"):
        assert failure[kind]["answers"] == sum(failure[kind]["windows"]) == 200


def test_a_gated_client_gets_the_records_that_it_inserted(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, shards=2) as cluster,
        Layer(cluster.endpoint, 1, 1.0) as layer,
        gated.installed(layer.endpoints),
        ziplog.connect(cluster.endpoint) as log,
    ):
        rids = [log.insert_after(b"%d" % number) for number in range(20)]
        received = list(log.subscribe(follow=False))
        cut = log._core._cut
        assert all(rid.gsn < cut[rid.shard] for rid in rids)
    assert {record.rid: record.payload for record in received} == {
        rid: b"%d" % number for number, rid in enumerate(rids)
    }
