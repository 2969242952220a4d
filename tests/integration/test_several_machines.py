"""The guide for several machines: its cluster file on three loopback addresses, one of which fails.

Each address has processes, a cluster file and a data directory of its own, as a machine has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import ziplog
from tests.integration.ports import consecutive_ports
from tests.waiting import wait_until
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig, load
from ziplog.config_text import dump
from ziplog.errors import UnavailableError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)

GUIDE: Final = Path(__file__).resolve().parents[2] / "docs" / "several_machines.md"
MACHINES: Final = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
#: The ports of the guide.
PORTS: Final = range(7400, 7408)
DEADLINE_S: Final = 100.0


class Machine:
    """The processes at one address."""

    def __init__(self, home: Path, host: str, text: str) -> None:
        home.mkdir()
        self.file: Final = home / "cluster.toml"
        self.file.touch(mode=0o600)
        self.file.write_text(text.replace("/var/lib/ziplog", str(home / "data")))
        config = load(self.file)
        self._nodes: Final = [node.name for node in config.nodes if node.host == host]
        self._log: Final = home / "log"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in self._nodes:
            command = [sys.executable, "-m", "ziplog", "node", "run", "--node", name]
            command += ["--config", str(self.file)]
            with self._log.open("ab") as log:
                self._running.append(subprocess.Popen(command, stdout=log, stderr=log))

    def stop(self, number: int) -> None:
        for process in self._running:
            process.send_signal(number)
        for process in self._running:
            process.wait(30)
        self._running.clear()

    def kill(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    text = GUIDE.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    # All addresses are of one machine, so the ports must be free at each.
    first = consecutive_ports(len(PORTS))
    for port in PORTS:
        text = text.replace(f"port = {port}", f"port = {first + port - PORTS[0]}")
    for number, host in enumerate(MACHINES, 1):
        text = text.replace(f"log-{number}.example", host)
    made = [Machine(tmp_path / host, host, text) for host in MACHINES]
    try:
        for machine in made:
            machine.start()
        yield made
    finally:
        for machine in made:
            machine.kill()


def check(config: ClusterConfig) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ziplog", "check", "--bootstrap", config.bootstrap],
        check=False, capture_output=True, text=True,
        env=os.environ | {"ZIPLOG_CLUSTER_ID": ""},
    )  # fmt: skip
    return done.returncode, done.stdout


def states(log: ziplog.Log) -> dict[int, str]:
    try:
        return {shard["id"]: shard["state"] for shard in log.cluster()["shards"]}
    except UnavailableError:
        return {}


def test_a_cluster_of_three_machines_survives_the_loss_of_one(machines: list[Machine]) -> None:
    config = load(machines[0].file)
    assert config.raft_password is not None
    for machine in machines:
        done = subprocess.run(
            [sys.executable, "-m", "ziplog", "config", "check", str(machine.file)],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    wait_until(lambda: check(config)[0] == 0, "all checks are ok", DEADLINE_S)
    # A client may name any of the machines.
    payloads = []
    for node in config.mms:
        with ziplog.connect(node.endpoint, timeout=DEADLINE_S) as log:
            payloads.append(f"through {node.host}".encode())
            log.insert_after(payloads[-1], log.check_tail())
    with ziplog.connect(config.bootstrap, timeout=DEADLINE_S) as log:
        assert [record.payload for record in log.subscribe(follow=False)] == payloads
        machines[2].stop(signal.SIGKILL)
        wait_until(
            lambda: states(log) == {0: "live", 1: "recovering", 2: "recovering"},
            "the shards of the failed machine are out of service", DEADLINE_S,
        )  # fmt: skip
        later = [b"meanwhile %d" % number for number in range(20)]
        for payload in later:
            log.insert_after(payload)
        code, shown = check(config)
        assert code == 1
        assert "2 of 3 up" in shown
        machines[2].start()
        wait_until(lambda: set(states(log).values()) == {"live"}, "all shards live", DEADLINE_S)
        found = [record.payload for record in log.subscribe(follow=False)]
    assert sorted(found) == sorted(payloads + later)
    assert found[0] == payloads[0]
    for machine in machines:
        machine.stop(signal.SIGTERM)


def test_nodes_connect_to_each_other_at_their_advertised_host(tmp_path: Path) -> None:
    # Both names are of this machine. A container's host differs from its machine's likewise.
    ports = iter(range(first := consecutive_ports(10), first + 10))
    mms = tuple(advertised(f"mms-{i}", next(ports), next(ports)) for i in range(3))
    handler = advertised("fh-0", next(ports), next(ports))
    servers = tuple(advertised(f"shard-0-{i}", next(ports)) for i in range(2))
    config = ClusterConfig("containers", tmp_path, mms, (ShardConfig(0, servers),), (handler,))
    (tmp_path / "cluster.toml").write_text(dump(config))
    with Cluster(tmp_path) as cluster, cluster.connect() as log:
        rid = log.insert_after(b"x")
        document = log.cluster()
        listed = [
            *document["mms"],
            *document["failure_handlers"],
            *document["shards"][0]["replicas"],
        ]
        assert {node["endpoint"].partition(":")[0] for node in listed} == {"localhost"}
        cluster.kill("shard-0-0")
        assert log.insert_after(b"y", rid) > rid
        assert log.read_record(rid).payload == b"x"


def advertised(name: str, port: int, raft_port: int | None = None) -> NodeConfig:
    return NodeConfig(name, "127.0.0.1", port, raft_port, advertise_host="localhost")
