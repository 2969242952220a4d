"""The process: it starts, answers, stops cleanly, and says in one line why it cannot start."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ziplog.config import ClusterConfig, NodeConfig, ShardConfig, dump
from ziplog.runtime.transport import Transport
from ziplog.wire import (
    ClusterInfo,
    Hello,
    Message,
    NotLeader,
    StatusQuery,
    StatusReply,
    decode,
    encode,
)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def cluster_file(directory: Path, mms: int) -> tuple[ClusterConfig, Path]:
    ports = free_ports(2 * mms + 2)
    config = ClusterConfig(
        name="c",
        data_dir=directory / "data",
        mms=tuple(
            NodeConfig(f"mms-{i}", "127.0.0.1", ports[2 * i], ports[2 * i + 1]) for i in range(mms)
        ),
        shards=(
            ShardConfig(
                0,
                tuple(NodeConfig(f"s{i}", "127.0.0.1", ports[2 * mms + i]) for i in range(2)),
            ),
        ),
    )
    path = directory / "cluster.toml"
    path.write_text(dump(config))
    return config, path


class Processes:
    def __init__(self, directory: Path, mms: int) -> None:
        self.config, self.path = cluster_file(directory, mms)
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *, wait: bool = True) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "mms", "--config", str(self.path), "--node", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running[name] = process
        if wait:
            assert process.stdout is not None
            assert "ready" in process.stdout.readline()
        return process

    def stop(self, name: str) -> tuple[int, str]:
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=20)
        return process.returncode, stderr

    def leader(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the node that answers as the leader, and its status document."""
        deadline = time.monotonic() + 30
        transport = Transport()
        try:
            for name in self.running:
                transport.connect(name.encode(), self.config.node(name).endpoint)
            while time.monotonic() < deadline:
                for name in self.running:
                    transport.send(name.encode(), encode(StatusQuery(0, 1)))
                transport.wait(50_000_000)
                while (received := transport.receive()) is not None:
                    answer = decode(received[1])
                    if isinstance(answer, StatusReply):
                        return received[0].decode(), json.loads(answer.document)
        finally:
            transport.close()
        raise AssertionError("nobody leads")

    def ask(self, name: str, message: Message, kind: type[Message]) -> Message:
        """Return the first answer of a kind, asking again until it comes."""
        deadline = time.monotonic() + 20
        transport = Transport()
        try:
            transport.connect(name.encode(), self.config.node(name).endpoint)
            while time.monotonic() < deadline:
                transport.send(name.encode(), encode(message))
                transport.wait(50_000_000)
                while (received := transport.receive()) is not None:
                    answer = decode(received[1])
                    if isinstance(answer, kind):
                        return answer
        finally:
            transport.close()
        raise AssertionError(f"no {kind.__name__} from {name}")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Processes]]:
    started: list[Processes] = []
    yield started
    for group in started:
        for process in group.running.values():
            process.kill()
            process.communicate(timeout=20)


def test_one_node_keeps_its_cluster_over_a_restart(
    processes: list[Processes], tmp_path: Path
) -> None:
    group = Processes(tmp_path, mms=1)
    processes.append(group)
    first = group.start("mms-0")
    before = group.ask("mms-0", Hello(0, 1), ClusterInfo)
    reply = group.ask("mms-0", StatusQuery(0, 2), StatusReply)
    assert isinstance(reply, StatusReply)
    document = json.loads(reply.document)
    assert document["mms"][0]["pid"] == first.pid
    assert document["shards"][0]["state"] == "joining"
    code, stderr = group.stop("mms-0")
    assert code == 0, stderr
    group.start("mms-0")
    after = group.ask("mms-0", Hello(0, 1), ClusterInfo)
    assert after.cluster == before.cluster
    assert group.stop("mms-0")[0] == 0


def test_three_nodes_know_one_leader_and_survive_it(
    processes: list[Processes], tmp_path: Path
) -> None:
    group = Processes(tmp_path, mms=3)
    processes.append(group)
    for node in group.config.mms:
        group.start(node.name)
    info = group.ask("mms-0", Hello(0, 1), ClusterInfo)
    leader = group.leader()[0]
    follower, other = (n.name for n in group.config.mms if n.name != leader)
    group.ask(follower, StatusQuery(0, 2), NotLeader)
    killed = group.running.pop(leader)
    killed.kill()
    killed.communicate(timeout=20)
    new, document = group.leader()
    assert new in {follower, other}
    assert [n["name"] for n in document["mms"] if n["leader"]] == [new]
    for name in (follower, other):
        again = group.ask(name, Hello(0, 1), ClusterInfo)
        assert again.cluster == info.cluster
    for name in (follower, other):
        assert group.stop(name)[0] == 0


@pytest.mark.parametrize("which", ["port", "raft_port"])
def test_a_taken_port_is_one_line_and_exit_code_1(
    processes: list[Processes], tmp_path: Path, which: str
) -> None:
    group = Processes(tmp_path, mms=1)
    processes.append(group)
    port = getattr(group.config.mms[0], which)
    with socket.create_server(("127.0.0.1", port)):
        process = group.start("mms-0", wait=False)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert len(stderr.splitlines()) == 1
    assert f"127.0.0.1:{port}" in stderr


@pytest.mark.parametrize(
    ("node", "text"), [("s0", "a membership node: mms-0"), ("nobody", "one of mms-0, s0, s1")]
)
def test_a_wrong_node_is_bad_usage(
    processes: list[Processes], tmp_path: Path, node: str, text: str
) -> None:
    group = Processes(tmp_path, mms=1)
    processes.append(group)
    process = group.start(node, wait=False)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2
    assert len(stderr.splitlines()) == 1
    assert text in stderr


def test_a_broken_cluster_file_is_bad_usage(processes: list[Processes], tmp_path: Path) -> None:
    group = Processes(tmp_path, mms=1)
    processes.append(group)
    group.path.write_text("[cluster]\nnonsense = 1\n")
    process = group.start("mms-0", wait=False)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2
    assert len(stderr.splitlines()) == 1
    assert "nonsense" in stderr
