"""Regions in a cluster of real processes: labels, near shards, and the loss of a region."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.waiting import wait_until
from ziplog import policy
from ziplog.config import load
from ziplog.config_text import dump
from ziplog.errors import ConfigError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)

REGIONS = ("eu", "us", "ap")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with Cluster(directory, mms=3, failure_handlers=3, regions=REGIONS) as running:
        yield running


def command(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"ZIPLOG_BOOTSTRAP": cluster.endpoint}
    return subprocess.run(
        [sys.executable, "-m", "ziplog", *words],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip


def spans(log: ziplog.Log) -> dict[int, list[str]]:
    return {shard["id"]: shard["regions"] for shard in log.cluster()["shards"]}


def test_the_status_has_the_regions_of_the_file(cluster: Cluster) -> None:
    with cluster.connect() as log:
        assert spans(log) == {0: ["eu", "us"], 1: ["ap", "us"], 2: ["ap", "eu"]}
        document = log.cluster()
        assert document["min_regions"] == 2
        assert {one["state"] for one in document["regions"].values()} == {"up"}
        assert log.regions()["eu"].shards == (0,)
        assert log.regions()["eu"].replicas == (0, 2)


@pytest.mark.parametrize(("region", "shard"), [("eu", 0), ("us", 1), ("ap", 2)])
def test_a_client_inserts_at_the_shard_whose_primary_is_near(
    cluster: Cluster, region: str, shard: int
) -> None:
    with cluster.connect(region=region) as log:
        assert {log.insert_after(b"x", min_regions=2).shard for _ in range(10)} == {shard}
        assert log.regions()[region].insert_ms is not None


def test_more_regions_than_any_shard_spans_fail_at_once(cluster: Cluster) -> None:
    with cluster.connect(policy=policy.pin(0), min_regions=2) as log:
        assert log.insert_after(b"x").shard == 0
        with pytest.raises(ConfigError, match=r"min_regions is 3, but .* spans 2"):
            log.insert_after(b"x", min_regions=3)


def test_appends_require_regions_as_inserts_do(cluster: Cluster) -> None:
    with cluster.connect(policy=policy.pin(0)) as log:
        assert log.append(b"x", min_regions=2).shard == 0
        assert log.append_nowait(b"x", min_regions=2).result().shard == 0
        for append in (
            lambda: log.append(b"x", min_regions=3),
            lambda: log.append_many([b"x"], min_regions=3),
            lambda: (log.append_nowait(b"x", min_regions=3), log.flush()),
        ):
            with pytest.raises(ConfigError, match=r"min_regions is 3, but .* spans 2"):
                append()


@pytest.mark.parametrize("region", REGIONS)
def test_a_client_reads_and_follows_from_each_region(cluster: Cluster, region: str) -> None:
    with cluster.connect(region=region) as log:
        rids = [log.insert_after(b"%d" % shard, shard=shard) for shard in range(3)]
        assert [log.read_record(rid).payload for rid in rids] == [b"0", b"1", b"2"]
        with log.subscribe(min(rids), follow=False) as records:
            assert set(rids) <= {record.rid for record in records}


def test_an_unknown_region_is_warned_of(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ziplog.client"), cluster.connect(region="mars") as log:
        log.insert_after(b"x")
    assert [record.getMessage() for record in caplog.records] == [
        "no storage server is in the region of this client: no shard is near"
    ]


@pytest.mark.parametrize("verb", ["lost", "back"])
def test_a_region_without_servers_is_refused_at_once(cluster: Cluster, verb: str) -> None:
    done = command(cluster, "region", verb, "ue")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is in region ue; give one with storage servers: ap, eu, us" in done.stderr


def test_commands_show_regions_and_insert_near(cluster: Cluster) -> None:
    listed = [
        json.loads(line)
        for line in command(cluster, "region", "list", "--json").stdout.split("\n")[:-1]
    ]
    assert [(one["region"], one["shards"]) for one in listed] == [
        ("ap", [2]),
        ("eu", [0]),
        ("us", [1]),
    ]
    inserted = command(cluster, "insert", "x", "--region", "us", "--min-regions", "2")
    assert inserted.stdout.strip().endswith("@1"), inserted.stderr
    appended = command(cluster, "append", "y", "--region", "ap", "--min-regions", "2")
    rid = appended.stdout.strip()
    assert rid.endswith("@2"), appended.stderr
    assert command(cluster, "read", rid, "--region", "eu").stdout == "y"
    assert rid in command(cluster, "tail", "--region", "us").stdout
    checked = command(cluster, "region", "check")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert (
        command(cluster, "region", "check", str(cluster.config.data_dir / "cluster.toml")).stdout
        == checked.stdout
    )


def test_a_planned_file_is_checked(cluster: Cluster, tmp_path: Path) -> None:
    made = command(cluster, "region", "plan", "eu", "us", "ap")
    file = tmp_path / "cluster.toml"
    file.write_text(made.stdout)
    assert len(load(file).shards) == 3
    assert command(cluster, "config", "check", str(file)).stderr.count("warning") == 0
    one_service = dump(load(file)).replace('region = "us"', 'region = "eu"', 1)
    file.write_text(one_service)
    checked = command(cluster, "region", "check", str(file))
    assert checked.returncode == 1
    assert "if eu is lost: 1 of 3 nodes of the membership service" in checked.stderr
    assert "warning: if eu is lost" in command(cluster, "config", "check", str(file)).stderr


def processes(document: dict[str, Any], region: str) -> list[int]:
    replicas = [replica for shard in document["shards"] for replica in shard["replicas"]]
    return [one["pid"] for one in replicas if one["region"] == region]


def test_inserts_go_on_in_two_regions_while_the_third_is_stopped(cluster: Cluster) -> None:
    with cluster.connect(region="eu", timeout=60.0) as log:
        stopped = processes(log.cluster(), "eu")
        cluster_pids = [pid for pid in stopped if pid]
        assert len(cluster_pids) == 2
        for pid in cluster_pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            rids = [log.insert_after(b"%d" % i, min_regions=2) for i in range(20)]
        finally:
            for pid in cluster_pids:
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: {s["state"] for s in log.cluster()["shards"]} == {"live"}, "back")
        assert [log.read_record(rid).payload for rid in rids] == [b"%d" % i for i in range(20)]
        assert rids[-1].shard == 1


def test_a_server_has_another_region_after_its_restart(tmp_path: Path) -> None:
    with Cluster(tmp_path, regions=("eu", "us")) as running:
        with running.connect() as log:
            assert spans(log) == {0: ["eu", "us"], 1: ["eu", "us"]}
            rid = log.insert_after(b"x", min_regions=2)
        file = tmp_path / "cluster.toml"
        file.write_text(file.read_text().replace('region = "us"', 'region = "ap"'))
        done = subprocess.run(
            [sys.executable, "-m", "ziplog", "config", "reload", str(file)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (
            "a change of regions of shard 0, regions of shard 1 needs `ziplog restart --rolling`"
            in done.stderr
        )
        running.stop()
    with Cluster(tmp_path) as running, running.connect(timeout=30.0) as log:
        wait_until(lambda: spans(log) == {0: ["ap", "eu"], 1: ["ap", "eu"]}, "relabelled")
        assert running.add_shard() == 2
        assert spans(log)[2] == ["ap", "eu"]
        assert log.read_record(rid).payload == b"x"
