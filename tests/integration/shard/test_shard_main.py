"""A storage server's process: start, stop, and the errors of a failed start."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.config_text import dump
from ziplog.deploy.new_shard import free_ports
from ziplog.runtime import level_file
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def run(path: Path, name: str = "shard-0-0") -> tuple[int, str]:
    """Run a server that fails to start; return its exit code and stderr."""
    command = [sys.executable, "-m", "shard", "--config", str(path), "--node", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    ports = free_ports(4, "127.0.0.1")
    nodes = [NodeConfig(f"shard-0-{index}", "127.0.0.1", next(ports)) for index in range(2)]
    config = ClusterConfig(
        name="demo",
        data_dir=tmp_path / "data",
        mms=(NodeConfig("mms-0", "127.0.0.1", next(ports), next(ports)),),
        shards=(ShardConfig(0, tuple(nodes)),),
        disk_reserve_bytes=0,
    )
    path = tmp_path / "cluster.toml"
    path.write_text(dump(config), encoding="utf-8")
    return path


@pytest.fixture
def started(cluster: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "shard", "--config", str(cluster), "--node", "shard-0-0"]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return processes[-1], log_until_ready(processes[-1])

    yield start
    for process in processes:
        process.kill()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()


def log_until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    found = ""
    patience = threading.Timer(60, process.kill)
    patience.start()
    try:
        for line in process.stderr:
            found += line
            if "event=ready" in line:
                return found
    finally:
        patience.cancel()
        patience.join()
    raise AssertionError("it ended, or never became ready")


def test_a_clean_stop_leaves_a_checkpoint_and_a_crash_none(
    cluster: Path, started: Callable[[], tuple[subprocess.Popen[str], str]]
) -> None:
    checkpoint = cluster.parent / "data" / "shard-0-0" / "checkpoint"
    process, line = started()
    assert "durability=memory" in line
    assert "limbo=false" in line
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert checkpoint.exists()
    process, line = started()
    assert "limbo=false" in line
    assert not checkpoint.exists()
    process.kill()
    process.wait(20)
    process, line = started()
    assert "limbo=true" in line
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_a_start_that_lowers_the_durability_level_is_reported(
    cluster: Path, started: Callable[[], tuple[subprocess.Popen[str], str]]
) -> None:
    """The file of this machine may be out of date."""
    directory = cluster.parent / "data" / "shard-0-0"
    directory.mkdir(parents=True)
    level_file.record(directory, "disk")
    _, log = started()
    assert "the cluster file lowers the durability level" in log


def test_a_second_process_for_a_node_is_refused(
    cluster: Path,
    started: Callable[[], tuple[subprocess.Popen[str], str]],
) -> None:
    process, _ = started()
    code, error = run(cluster)
    assert code == 1
    assert f"in use by process {process.pid}" in error


def test_a_port_in_use_is_named_and_does_not_count_as_a_start(cluster: Path) -> None:
    config = cluster.read_text(encoding="utf-8")
    other = Transport("127.0.0.1:0")
    try:
        assert other.endpoint is not None
        port = other.endpoint.split(":")[1]
        head, _, rest = config.partition('name = "shard-0-0"')
        before, _, after = rest.partition("port = ")
        digits = len(after) - len(after.lstrip("0123456789"))
        moved = f'{head}name = "shard-0-0"{before}port = {port}{after[digits:]}'
        cluster.write_text(moved, encoding="utf-8")
        code, error = run(cluster)
    finally:
        other.close()
    assert code == 1
    assert port in error
    assert "choose another port" in error
    assert not (cluster.parent / "data" / "shard-0-0" / "started").exists()


@pytest.mark.parametrize("name", ["shard-9-9", "mms-0"])
def test_a_node_that_is_not_a_storage_server(cluster: Path, name: str) -> None:
    code, error = run(cluster, name)
    assert code == 2
    assert "shard-0-0, shard-0-1" in error


def test_a_missing_cluster_file(tmp_path: Path) -> None:
    code, error = run(tmp_path / "none.toml")
    assert code == 2
    assert "none.toml" in error
