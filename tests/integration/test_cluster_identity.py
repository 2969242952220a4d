"""The identity of a cluster: its id, its directory and its ports are never another cluster's."""

from __future__ import annotations

import asyncio
import re
import shutil
from typing import TYPE_CHECKING

import pytest

import ziplog
from ziplog.config import load
from ziplog.errors import ClusterMismatchError, ConfigError, UnavailableError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def test_the_status_has_the_clusters_id_the_versions_and_the_disks(cluster: Cluster) -> None:
    with cluster.connect() as log:
        status = log.cluster()
    assert re.fullmatch("[0-9a-f]{32}", status["cluster_id"])
    assert int(status["cluster_id"], 16)
    replicas = [replica for shard in status["shards"] for replica in shard["replicas"]]
    for node in (*status["mms"], *status["failure_handlers"], *replicas):
        assert node["version"] == ziplog.__version__
    for replica in replicas:
        disk = replica["disk"]
        assert disk["free_bytes"] > disk["reserve_bytes"] == cluster.config.disk_reserve_bytes
        assert not disk["full"]


def test_a_client_notices_another_cluster_at_its_endpoint(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path / "first", shards=1) as first:
        port, former = first.config.mms[0].port, first.connect()
        expected = former.cluster()["cluster_id"]
        rid = former.insert_after(b"one")
    with Cluster(tmp_path / "second", shards=1, port=port) as second, former:
        with second.connect() as log:
            found = log.cluster()["cluster_id"]
        calls: list[Callable[[], object]] = [
            lambda: former.insert_after(b"two"),
            lambda: former.read_record(rid),
            former.check_tail,
            lambda: list(former.subscribe(follow=False)),
            former.cluster,
        ]
        for call in calls:
            with pytest.raises(ClusterMismatchError) as mismatch:
                call()
            error = mismatch.value
            assert (error.expected, error.found, error.endpoint) == (
                expected, found, second.endpoint
            )  # fmt: skip
        with pytest.raises(ClusterMismatchError):
            ziplog.connect(second.endpoint, cluster_id=expected)
        with pytest.raises(ClusterMismatchError):
            ziplog.connect(f"ziplog://{second.endpoint}/?cluster={expected}")
        monkeypatch.setenv("ZIPLOG_CLUSTER_ID", expected)
        with pytest.raises(ClusterMismatchError):
            ziplog.connect(second.endpoint)
        with pytest.raises(ClusterMismatchError):
            asyncio.run(connect_async(second.endpoint))
        with ziplog.connect(second.endpoint, cluster_id=found) as log:
            log.insert_after(b"here")
        with ziplog.connect(second.endpoint, cluster_id="") as log:
            assert log.cluster()["cluster_id"] == found
    with pytest.raises(ConfigError, match="cluster_id is 'x'; it must be 32 hexadecimal digits"):
        ziplog.connect(cluster.endpoint, cluster_id="x")


async def connect_async(endpoint: str) -> None:
    async with ziplog.aio.connect(endpoint):
        pass


@pytest.mark.parametrize("mms", [1, 3])
def test_a_cluster_without_its_membership_files_is_not_created_again(
    tmp_path: Path, mms: int
) -> None:
    data, away = tmp_path / "data", tmp_path / "away"
    away.mkdir()
    with Cluster(data, shards=1, mms=mms) as cluster, cluster.connect() as log:
        rid, found = log.insert_after(b"precious"), log.cluster()["cluster_id"]
    assert load(data / "cluster.toml").id == found
    lost = [f"mms-{number}" for number in range(mms // 2 + 1)]
    for name in lost:
        (data / name).rename(away / name)
    refusal = f"cluster {found} had data, and its files are not here: there is no directory with"
    with pytest.raises(UnavailableError, match=f"{refusal} files for {', '.join(lost)} in"):
        Cluster(data)
    assert not [name for name in lost if (data / name).exists()]
    for name in lost:
        (data / name).mkdir()
    with pytest.raises(UnavailableError, match=f"{refusal} files for {', '.join(lost)} in"):
        Cluster(data)
    for name in lost:
        (data / name).rmdir()  # Nothing was written there.
    # A minority may be lost.
    (away / lost[0]).rename(data / lost[0])
    with Cluster(data, timeout=60.0) as cluster, cluster.connect() as log:
        assert log.read_record(rid).payload == b"precious"


def test_a_cluster_is_created_again_only_on_request(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1) as cluster, cluster.connect() as log:
        former = log.cluster()["cluster_id"]
    for name in cluster.nodes:
        shutil.rmtree(tmp_path / name)
    with pytest.raises(UnavailableError, match="had data, and its files are not here"):
        Cluster(tmp_path)
    with Cluster(tmp_path, found_again=True) as cluster, cluster.connect() as log:
        found = log.cluster()["cluster_id"]
        assert found != former
        log.insert_after(b"new")
    assert load(tmp_path / "cluster.toml").id == found


def test_nodes_of_another_cluster_do_not_start(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Cluster(tmp_path / name, shards=1):
            pass
    shutil.rmtree(tmp_path / "one" / "mms-0")
    (tmp_path / "two" / "mms-0").rename(tmp_path / "one" / "mms-0")
    with pytest.raises(UnavailableError, match=r"mms-0 ended .* this is the log of cluster"):
        Cluster(tmp_path / "one")


def test_a_moved_directory_keeps_its_records_and_a_copy_has_its_own(tmp_path: Path) -> None:
    with Cluster(tmp_path / "first", shards=1) as cluster, cluster.connect() as log:
        log.insert_after(b"before")
    (tmp_path / "first").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    for name in ("moved", "copy"):
        with Cluster(tmp_path / name) as cluster, cluster.connect() as log:
            payloads = [record.payload for record in log.subscribe(follow=False)]
            assert payloads == [b"before"]
            log.insert_after(name.encode())
    with Cluster(tmp_path / "moved") as cluster, cluster.connect() as log:
        payloads = [record.payload for record in log.subscribe(follow=False)]
        assert payloads == [b"before", b"moved"]
    assert not (tmp_path / "first").exists()


def test_the_ports_of_another_cluster_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    mms = cluster.config.mms[0]
    with pytest.raises(UnavailableError) as refused:
        Cluster(tmp_path / "other", port=mms.port)
    user = f"cluster 'local' (process {cluster.pid(mms.name)})"
    wanted = f"cannot start mms-0: port {mms.port} on 127.0.0.1 is in use by {user}"
    assert wanted in str(refused.value)
    assert list((tmp_path / "other").glob("*.toml")) == []
    with cluster.connect() as log:
        log.insert_after(b"undisturbed")


def test_a_cluster_does_not_take_the_nodes_of_another_for_its_own(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other cluster takes the ports after they were found free.
    monkeypatch.setattr("ziplog.deploy.new_shard.taken_port", lambda _: None)
    with pytest.raises(UnavailableError, match=r"in use|answers as process \d+, not as \d+"):
        Cluster(tmp_path / "other", port=cluster.config.mms[0].port, timeout=20.0)
