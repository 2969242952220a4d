"""Processes that cannot start: each ends with one line that names what to do."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ziplog.config import load
from ziplog.config_text import dump
from ziplog.deploy.new_shard import free_ports
from ziplog.deploy.supervisor import CLUSTER_FILE, running_pid
from ziplog.errors import (
    UnavailableError,
)
from ziplog.local import Cluster
from ziplog.runtime import wire_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("running"), shards=2) as running:
        yield running
        assert running.dead() == []


def start(module: str, config: Path, node: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Start a process that should end by itself, soon and with one clear line."""
    command = [sys.executable, *options, "-m", module, "--config", str(config), "--node", node]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def last_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    # Whatever is logged before has the shape of a log line.
    *before, last = done.stderr.splitlines()
    assert all(line.startswith(("timestamp=", "level=")) for line in before), done.stderr
    return last


def copy_of(cluster: Cluster, directory: Path, changes: dict[str, str]) -> Path:
    """Return a changed copy of a running cluster's cluster file."""
    text = dump(cluster.config)
    for old, new in changes.items():
        assert old in text, text
        text = text.replace(old, new)
    path = directory / "other.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(("module", "node"), [("mms", "mms-0"), ("shard", "shard-0-0")])
def test_a_port_in_use(cluster: Cluster, tmp_path: Path, module: str, node: str) -> None:
    # The same ports, other directories.
    path = copy_of(cluster, tmp_path, {str(cluster.config.data_dir): str(tmp_path)})
    line = last_line(start(module, path, node), 1)
    assert cluster.config.node(node).endpoint in line
    assert "in use" in line


def test_the_consensus_port_in_use(cluster: Cluster, tmp_path: Path) -> None:
    mms = cluster.config.mms[0]
    changes = {str(cluster.config.data_dir): str(tmp_path), f"port = {mms.port}\n": "port = 9\n"}
    line = last_line(start("mms", copy_of(cluster, tmp_path, changes), "mms-0"), 1)
    assert f"127.0.0.1:{mms.raft_port}" in line


@pytest.mark.parametrize(("module", "node"), [("mms", "mms-0"), ("shard", "shard-0-0")])
def test_two_processes_on_one_data_directory(
    cluster: Cluster, tmp_path: Path, module: str, node: str
) -> None:
    # The same directories, other ports.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    served = cluster.config.node(node)
    changes = {f"port = {served.port}": f"port = {free}"}
    if served.raft_port is not None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            changes[f"raft_port = {served.raft_port}"] = f"raft_port = {probe.getsockname()[1]}"
    line = last_line(start(module, copy_of(cluster, tmp_path, changes), node), 1)
    assert str(cluster.config.data_dir / node) in line
    assert re.search(r"in use by process \d+|another process uses it", line)
    with cluster.connect() as log:
        log.insert_after(b"undisturbed")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A cluster of which only the files are left."""
    with (
        Cluster(tmp_path_factory.mktemp("stopped"), shards=1, f=1) as cluster,
        cluster.connect() as log,
    ):
        log.insert_after(b"x")
    return cluster


def test_a_data_directory_of_another_cluster(stopped: Cluster, tmp_path: Path) -> None:
    path = copy_of(stopped, tmp_path, {'name = "local"': 'name = "other"'})
    line = last_line(start("shard", path, "shard-0-0"), 2)
    assert "'shard-0-0' of 'local'" in line
    assert "move it away" in line


def test_a_data_directory_of_another_node(stopped: Cluster, tmp_path: Path) -> None:
    directory = stopped.config.data_dir
    path = copy_of(stopped, tmp_path, {str(directory): str(tmp_path)})
    (tmp_path / "shard-0-0").symlink_to(directory / "shard-0-1")
    line = last_line(start("shard", path, "shard-0-0"), 2)
    assert "'shard-0-1' of 'local'" in line


MODULES = {"mms-0": "mms", "fh-0": "failure_handler", "shard-0-0": "shard"}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def copied(stopped: Cluster, tmp_path: Path) -> Path:
    """A copy of the stopped cluster's directory."""
    shutil.copytree(stopped.config.data_dir, tmp_path / "copy")
    file = tmp_path / "copy" / CLUSTER_FILE
    file.write_text(file.read_text().replace(str(stopped.config.data_dir), "."))
    return tmp_path / "copy"


@pytest.mark.parametrize("node", MODULES)
def test_a_python_without_assertions(copied: Path, node: str) -> None:
    before = contents(copied / node)
    line = last_line(start(MODULES[node], copied / CLUSTER_FILE, node, "-O"), 2)
    assert "Python runs without assertions" in line
    assert "unset PYTHONOPTIMIZE, and start Python without -O" in line
    assert contents(copied / node) == before


def test_up_quotes_that_python_has_no_assertions(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ziplog", "up", "--data-dir", str(tmp_path / "d")]
    done = subprocess.run(
        [*command, "--port", str(next(free_ports(1, "127.0.0.1"))), "--shards", "1", "--f", "0"],
        check=False, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONOPTIMIZE": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "unset PYTHONOPTIMIZE" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("node", MODULES)
def test_a_directory_of_a_cluster_that_uses_a_later_version(copied: Path, node: str) -> None:
    wire_file.record(copied / node, 2)
    before = contents(copied / node)
    line = last_line(start(MODULES[node], copied / CLUSTER_FILE, node), 1)
    assert f"{copied / node}: the cluster uses wire version 2, but this release (Ziplog" in line
    assert "install a release that knows 2" in line
    assert contents(copied / node) == before


def test_up_quotes_the_versions_of_a_later_cluster(copied: Path) -> None:
    wire_file.record(copied / "shard-0-0", 2)
    with pytest.raises(UnavailableError) as refused:
        Cluster(copied)
    assert re.search(
        r"shard-0-0 ended during its start: .*uses wire version 2, but this release \(Ziplog .*"
        r" knows 1: install a release that knows 2",
        str(refused.value),
    )


def test_a_wire_version_that_is_no_number(copied: Path) -> None:
    (copied / "shard-0-0" / "wire").write_text("two")
    line = last_line(start("shard", copied / CLUSTER_FILE, "shard-0-0"), 2)
    assert f"'two' in {copied / 'shard-0-0' / 'wire'}" in line


@pytest.mark.parametrize(("name", "form"), [("journal", b"ZIPRAFT4"), ("snapshot", b"ZIPSNAP2")])
def test_a_consensus_file_of_a_later_form(copied: Path, name: str, form: bytes) -> None:
    path = copied / "mms-0" / name
    path.write_bytes(form + (path.read_bytes()[8:] if path.exists() else b""))
    before = contents(path.parent)
    line = last_line(start("mms", copied / CLUSTER_FILE, "mms-0"), 1)
    assert f"{path} was written by a later release of Ziplog: start that release again" in line
    assert path.read_bytes() == before[str(path)]
    if name == "journal":
        assert contents(path.parent) == before


def test_a_journal_that_was_deleted(copied: Path) -> None:
    (copied / "mms-0" / "journal").unlink()
    before = contents(copied / "mms-0")
    line = last_line(start("mms", copied / CLUSTER_FILE, "mms-0"), 1)
    assert "journal is missing or empty, but `flushed` exists" in line
    assert contents(copied / "mms-0") == before


def test_a_cluster_of_which_a_shards_directories_were_deleted(copied: Path) -> None:
    for name in ("shard-0-0", "shard-0-1"):
        shutil.rmtree(copied / name)
    with pytest.raises(UnavailableError) as refused:
        Cluster(copied, timeout=12.0)
    why = "none of its servers has its data directory. Restore one, and start its server"
    assert f"shard-0-0 is limbo, shard-0-1 is limbo ({why})" in str(refused.value)
    assert running_pid(copied) is None


def test_a_storage_directory_of_another_cluster_with_the_same_names(
    copied: Path, tmp_path: Path
) -> None:
    with Cluster(tmp_path / "other", shards=1):
        other = load(tmp_path / "other" / CLUSTER_FILE).id
    shutil.rmtree(copied / "shard-0-0")
    (tmp_path / "other" / "shard-0-0").rename(copied / "shard-0-0")
    with pytest.raises(UnavailableError) as refused:
        Cluster(copied, timeout=8.0)
    own = load(copied / CLUSTER_FILE).id
    warning = f"shard-0-0 has the data of cluster {other}, but mms-0 belongs to cluster {own}."
    assert warning in str(refused.value)
    assert "move this directory away" in str(refused.value)


def test_a_data_directory_that_cannot_be_made(stopped: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = copy_of(stopped, tmp_path, {str(stopped.config.data_dir): str(tmp_path / "file")})
    assert str(tmp_path / "file") in last_line(start("shard", path, "shard-0-0"), 2)
    assert str(tmp_path / "file") in last_line(start("mms", path, "mms-0"), 1)


def test_an_unknown_node(stopped: Cluster) -> None:
    path = stopped.config.data_dir / CLUSTER_FILE
    for module in ("mms", "shard"):
        line = last_line(start(module, path, "no-such-node"), 2)
        assert "no-such-node" in line
    assert "mms-0" in last_line(start("mms", path, "shard-0-0"), 2)
    assert "shard-0-1" in last_line(start("shard", path, "mms-0"), 2)


@pytest.mark.parametrize("module", ["mms", "shard"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[cluster]", "[cluster", ["TOML"]),
        ("epoch_ms = 10", "epoch_ms = 0", ["epoch_ms", "1 to 60000"]),
        ("epoch_ms = 10", "epoch_mss = 10", ["epoch_mss", "did you mean 'epoch_ms'?"]),
        ("f = 1", "f = 2", ["number of replicas of shard 0", "f + 1 = 3"]),
        ("shard-0-1", "shard-0-0", ["node name", "shard-0-0", "once"]),
        ("replicas = [", "replica = [", ["replica", "did you mean 'replicas'?"]),
        ("replicas = [", "spare = [", ["spare", "`ziplog config show` lists all keys"]),
        ('durability = "memory"', 'durability = "ram"', ["durability", "'memory' or 'disk'"]),
    ],
)
def test_a_broken_cluster_file(
    stopped: Cluster, tmp_path: Path, module: str, old: str, new: str, said: list[str]
) -> None:
    path = copy_of(stopped, tmp_path, {old: new})
    line = last_line(start(module, path, "mms-0" if module == "mms" else "shard-0-0"), 2)
    for words in [str(path), *said]:
        assert words in line


def test_a_port_that_two_nodes_have(stopped: Cluster, tmp_path: Path) -> None:
    first, second = stopped.config.shards[0].replicas
    path = copy_of(stopped, tmp_path, {f"port = {second.port}": f"port = {first.port}"})
    line = last_line(start("shard", path, "shard-0-0"), 2)
    assert f"port '127.0.0.1:{first.port}' is used more than once" in line


def test_a_cluster_file_that_does_not_exist(tmp_path: Path) -> None:
    line = last_line(start("shard", tmp_path / "none.toml", "shard-0-0"), 2)
    assert str(tmp_path / "none.toml") in line
    assert "No such file" in line
