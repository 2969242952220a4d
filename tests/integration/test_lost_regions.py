"""Two of three regions are lost in a cluster of real processes, and an operator gives them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.test_regions import REGIONS, command
from tests.waiting import wait_until
from ziplog.errors import UnavailableError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path

    import ziplog

pytestmark = pytest.mark.timeout(180)


def servers(cluster: Cluster, region: str) -> list[str]:
    replicas = [replica for shard in cluster.config.shards for replica in shard.replicas]
    return [replica.name for replica in replicas if replica.region == region]


def obstacle(log: ziplog.Log) -> str:
    return log.cluster()["shards"][0]["obstacle"] or ""


def read(log: ziplog.Log, timeout: float) -> list[ziplog.RecordId]:
    with log.subscribe(follow=False, timeout=timeout) as records:
        return [record.rid for record in records]


def test_readers_continue_with_one_region_of_three(tmp_path: Path) -> None:
    """The servers of one lost region stand still, and return in their old views."""
    with (
        Cluster(
            tmp_path, f=2, mms=3, failure_handlers=3, regions=REGIONS, supervise=False
        ) as cluster,
        cluster.connect(region="eu", timeout=60.0) as log,
    ):
        rids = log.insert_many([b"%d" % i for i in range(20)])
        with pytest.raises(UnavailableError, match=r"shard-0-1.* may run"):
            log.lose_region("us")
        for name in servers(cluster, "us"):
            cluster.pause(name)
        for name in servers(cluster, "ap"):
            cluster.kill(name)
        wait_until(lambda: "`ziplog region lost us`" in obstacle(log), "the obstacle")
        with pytest.raises(UnavailableError):
            read(log, timeout=0.5)
        wait_until(lambda: command(cluster, "region", "lost", "us").returncode == 0, "given up")
        log.lose_region("ap")
        assert read(log, timeout=20.0) == rids
        assert {n for n, one in log.regions().items() if one.state == "lost"} == {"us", "ap"}
        assert "given up: regions ap, us" in command(cluster, "status").stdout

        for name in servers(cluster, "us"):
            cluster.resume(name)
        for name in servers(cluster, "ap"):
            cluster.restart(name)
        wait_until(lambda: not log.cluster()["lost_regions"], "all are back")
        rids.append(log.insert_after(b"more"))
        assert read(log, timeout=20.0) == rids
        assert command(cluster, "region", "back", "us").returncode == 0
        wait_until(lambda: len(events(log)) == 4, "all events")
        assert sorted(events(log)[:2]) == ["region ap was given up", "region us was given up"]
        assert sorted(events(log)[2:]) == ["region ap is back", "region us is back"]


def events(log: ziplog.Log) -> list[str]:
    return [event["text"] for event in log.events() if event["kind"] == "region"]
