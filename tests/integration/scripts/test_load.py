"""Open-loop load on a real cluster: every insert is reported, and can be found in the log."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from metrics import noops
from metrics.leases import leases_of
from metrics.load import Client, Load

from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)


def test_a_load_reports_every_insert(tmp_path: Path) -> None:
    shards = 2
    clients = [
        Client(number, 0.05, policy, ((0.0, 1.0), (1.5, 2.0)))
        for number, policy in enumerate(("0", "1", "random", "sticky", "by-key"))
    ]
    due = {
        (client.number, seq): at
        for client in clients
        for seq, at in enumerate(client.due(seed=5))
    }  # fmt: skip
    with Cluster(tmp_path, shards=shards) as cluster:
        with Load(cluster.endpoint, clients, seed=5, size=64) as load:
            begin = load.begin()
            outcome = load.finish()
        leases = leases_of(cluster.endpoint)
    assert outcome.begin == begin
    assert not outcome.failed
    assert {divmod(i.number, 2**32): i.due - begin for i in outcome.inserts} == {
        turn: int(at * 1e9) for turn, at in due.items()
    }
    assert all(i.due <= i.called <= i.done for i in outcome.inserts)
    for process in range(2):
        own = [i for i in outcome.inserts if i.number // 2**32 % 2 == process]
        in_turn = sorted(own, key=lambda insert: insert.called)
        assert in_turn == sorted(own, key=lambda insert: insert.due)
    # Pinned clients stay where they are.
    assert {i.shard for i in outcome.inserts if i.number < 2**32} == {0}
    # The follower saw each of them once, at its acknowledged position.
    assert (outcome.missing, outcome.repeated) == (0, 0)
    assert set(outcome.seen) == {i.number for i in outcome.inserts}
    assert all(leases.owner(i.gsn) == i.shard for i in outcome.inserts)
    stored = {
        shard: [e for e in noops.stored(tmp_path / f"shard-{shard}-0") if e.kind == noops.PLACE]
        for shard in range(shards)
    }
    warm_ups = len(clients)
    assert sum(map(len, stored.values())) == len(outcome.inserts) + warm_ups
    at = Counter(i.gsn for i in outcome.inserts)
    assert set(at) <= {entry.first for entries in stored.values() for entry in entries}
    assert set(at.values()) == {1}
