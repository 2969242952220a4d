"""The durability level of a running log changes, and then holds (docs/protocol.md, section 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from tests.integration.reloading import reload, rewrite
from tests.waiting import wait_until
from ziplog import RID_GENESIS
from ziplog.cli import app
from ziplog.errors import ConfigError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


#: An insert is on the disk of level `memory` so late that a crash loses it.
SLOW_FLUSH = {"flush_interval_ms": 1000}


def crash(cluster: Cluster, shard: int) -> None:
    """Kill all servers of a shard at once; what they had not flushed is not on their disks."""
    names = [node.name for node in cluster.config.shards[shard].replicas]
    for name in names:
        cluster.kill(name)
    for name in names:
        cluster.restart(name)


def status(cluster: Cluster) -> dict[str, Any]:
    with cluster.connect() as log:
        return log.cluster()


def test_level_is_raised_under_load_and_then_holds(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=2, settings=SLOW_FLUSH, supervise=False) as cluster:
        with cluster.connect() as log:
            futures = [log.insert_nowait(b"before %d" % i) for i in range(200)]
            done = reload(rewrite(cluster, durability="disk"))
            assert done.exit_code == 0, done.stderr
            assert "durability is disk from epoch" in done.stderr
            futures += [log.insert_nowait(b"after %d" % i) for i in range(200)]
            rids = [future.result(30) for future in futures]
        for shard in (0, 1):
            crash(cluster, shard)
        with cluster.connect(timeout=60) as log:
            found = [record.rid for record in log.subscribe(RID_GENESIS, follow=False)]
            assert found == sorted(rids)
        document = status(cluster)
        assert document["durability"] == "disk"
        assert document["durability_change"] is None
        assert document["durability_since_epoch"] > 0
        assert document["losses"] == []


def test_level_is_lowered_with_consent_only(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1, durability="disk") as cluster:
        assert status(cluster)["durability"] == "disk"
        path = rewrite(cluster, durability="memory")
        refused = reload(path)
        assert refused.exit_code == 2
        assert "--yes" in refused.stderr
        restart = ["restart", "--rolling", "--data-dir", str(tmp_path)]
        refused = CliRunner().invoke(app, restart)
        assert refused.exit_code == 2
        assert "config reload" in refused.stderr
        assert status(cluster)["durability"] == "disk"
        done = reload(path, "--yes")
        assert done.exit_code == 0, done.stderr
        assert status(cluster)["durability"] == "memory"
        with cluster.connect() as log:
            rids = log.insert_many([b"1", b"2"])
            assert log.insert_after(b"3", rids[-1]) > rids[-1]
        assert reload(rewrite(cluster, durability="disk")).exit_code == 0
        assert status(cluster)["durability"] == "disk"


def test_a_change_beside_one_that_needs_a_restart_is_refused(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1) as cluster:
        refused = reload(rewrite(cluster, durability="disk", epoch_ms=20))
        assert refused.exit_code == 2
        assert "a change of epoch_ms needs `ziplog restart --rolling`" in refused.stderr
        assert status(cluster)["durability"] == "memory"


def test_a_stopped_cluster_is_raised_when_it_starts_and_not_lowered(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1) as cluster, cluster.connect() as log:
        log.insert_after(b"record")
    rewrite(cluster, durability="disk")
    with Cluster(tmp_path) as cluster:
        wait_until(lambda: status(cluster)["durability"] == "disk", "all servers keep to disk")
    rewrite(cluster, durability="memory")
    with pytest.raises(ConfigError, match="config reload"):
        Cluster(tmp_path)
    rewrite(cluster, durability="disk")
    with Cluster(tmp_path) as cluster, cluster.connect() as log:
        assert [r.payload for r in log.subscribe(RID_GENESIS, follow=False)] == [b"record"]


def test_a_crash_during_the_change_is_reported_as_a_possible_loss(tmp_path: Path) -> None:
    """A server that has not recorded `disk` may have lost what it acked."""
    with Cluster(tmp_path, shards=1, settings=SLOW_FLUSH, supervise=False) as cluster:
        with cluster.connect() as log:
            log.sync()
            log.insert_many([b"%d" % i for i in range(50)])
            path = rewrite(cluster, durability="disk")
            crash(cluster, 0)
        assert reload(path).exit_code in {0, 1}  # the servers may still recover
        wait_until(lambda: status(cluster)["durability"] == "disk", "all servers keep to disk")
        with cluster.connect(timeout=60) as log:
            log.insert_after(b"last")
        assert len(status(cluster)["losses"]) == 1
