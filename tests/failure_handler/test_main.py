"""The process: it starts, answers, finds the service, stops, and says why it cannot start."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ziplog.config import ClusterConfig, NodeConfig, ShardConfig, dump
from ziplog.runtime.transport import Transport
from ziplog.wire import (
    Message,
    NotLeader,
    Orders,
    OrdersQuery,
    StatusQuery,
    StatusReply,
    decode,
    encode,
)


def free_ports(count: int) -> Iterator[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return iter(ports)


class Processes:
    def __init__(self, directory: Path, handlers: int = 1) -> None:
        ports = free_ports(2 * handlers + 3)
        self.config = ClusterConfig(
            name="c",
            f=0,
            data_dir=directory / "data",
            mms=(NodeConfig("mms-0", "127.0.0.1", next(ports), next(ports)),),
            failure_handlers=tuple(
                NodeConfig(f"fh-{i}", "127.0.0.1", next(ports), next(ports))
                for i in range(handlers)
            ),
            shards=(ShardConfig(0, (NodeConfig("s0", "127.0.0.1", next(ports)),)),),
        )
        self.path = directory / "cluster.toml"
        self.path.write_text(dump(self.config))
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(
        self, name: str, module: str = "failure_handler", *, wait: bool = True
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(self.path), "--node", name],
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

    def ask(self, name: str, question: Message, fits: Callable[[Message], bool]) -> Message:
        """Return the first answer that fits, asking again until it comes."""
        deadline = time.monotonic() + 30
        transport = Transport()
        try:
            transport.connect(name.encode(), self.config.node(name).endpoint)
            while time.monotonic() < deadline:
                transport.send(name.encode(), encode(question))
                transport.wait(50_000_000)
                while (received := transport.receive()) is not None:
                    answer = decode(received[1])
                    if fits(answer):
                        return answer
        finally:
            transport.close()
        raise AssertionError(f"no such answer from {name}")


@pytest.fixture
def processes() -> Iterator[Callable[[Processes], Processes]]:
    started: list[Processes] = []

    def keep(group: Processes) -> Processes:
        started.append(group)
        return group

    yield keep
    for group in started:
        for process in group.running.values():
            process.kill()
            process.communicate(timeout=20)


Keep = Callable[[Processes], Processes]


def test_a_node_leads_finds_the_service_and_stops(processes: Keep, tmp_path: Path) -> None:
    group = processes(Processes(tmp_path))
    group.start("mms-0", "mms")
    process = group.start("fh-0")
    answer = group.ask("fh-0", OrdersQuery(0, 3), lambda m: isinstance(m, Orders))
    assert isinstance(answer, Orders)
    assert (answer.request, answer.orders) == (3, [])

    def leads(message: Message) -> bool:
        if not isinstance(message, StatusReply):
            return False
        (handler,) = json.loads(message.document)["failure_handlers"]
        return bool(handler["leader"])

    reply = group.ask("mms-0", StatusQuery(0, 1), leads)
    assert isinstance(reply, StatusReply)
    (handler,) = json.loads(reply.document)["failure_handlers"]
    assert handler == {
        "name": "fh-0", "endpoint": group.config.failure_handlers[0].endpoint,
        "pid": process.pid, "state": "up", "leader": True,
    }  # fmt: skip
    code, stderr = group.stop("fh-0")
    assert code == 0, stderr
    assert "Traceback" not in stderr


def test_of_three_nodes_one_leads_and_another_after_it(processes: Keep, tmp_path: Path) -> None:
    group = processes(Processes(tmp_path, handlers=3))
    for node in group.config.failure_handlers:
        group.start(node.name)
    endpoints = {node.endpoint: node.name for node in group.config.failure_handlers}

    def leader(asked: str) -> str:
        answer = group.ask(
            asked,
            OrdersQuery(0, 1),
            lambda m: isinstance(m, Orders) or (isinstance(m, NotLeader) and m.leader != ""),
        )
        return endpoints[answer.leader] if isinstance(answer, NotLeader) else asked

    first = leader("fh-0")
    assert {leader(name) for name in endpoints.values()} == {first}
    killed = group.running.pop(first)
    killed.kill()
    killed.communicate(timeout=20)
    others = [name for name in endpoints.values() if name != first]
    deadline = time.monotonic() + 30
    while (second := leader(others[0])) == first:
        assert time.monotonic() < deadline
    group.ask(second, OrdersQuery(0, 2), lambda m: isinstance(m, Orders))
    for name in others:
        assert group.stop(name)[0] == 0


@pytest.mark.parametrize("which", ["port", "raft_port"])
def test_a_taken_port_is_one_line_and_exit_code_1(
    processes: Keep, tmp_path: Path, which: str
) -> None:
    group = processes(Processes(tmp_path))
    port = getattr(group.config.failure_handlers[0], which)
    with socket.create_server(("127.0.0.1", port)):
        process = group.start("fh-0", wait=False)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert len(stderr.splitlines()) == 1
    assert f"127.0.0.1:{port}" in stderr


@pytest.mark.parametrize("node", ["s0", "mms-0", "nobody"])
def test_a_wrong_node_is_bad_usage(processes: Keep, tmp_path: Path, node: str) -> None:
    group = processes(Processes(tmp_path))
    process = group.start(node, wait=False)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2
    assert len(stderr.splitlines()) == 1
    assert "fh-0" in stderr
