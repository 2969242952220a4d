"""The process: it starts, answers, finds the service, stops, and explains a failed start."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.processes import Processes
from tests.waiting import wait_until
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.deploy.new_shard import free_ports
from ziplog.wire import NotLeader, Orders, OrdersQuery, StatusQuery, StatusReply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ziplog.core.message import Message


def config(directory: Path, handlers: int) -> ClusterConfig:
    ports = free_ports(2 * handlers + 3, "127.0.0.1")
    return ClusterConfig(
        name="c",
        f=0,
        data_dir=directory / "data",
        mms=(NodeConfig("mms-0", "127.0.0.1", next(ports), next(ports)),),
        failure_handlers=tuple(
            NodeConfig(f"fh-{i}", "127.0.0.1", next(ports), next(ports)) for i in range(handlers)
        ),
        shards=(ShardConfig(0, (NodeConfig("s0", "127.0.0.1", next(ports)),)),),
    )


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[[int], Processes]]:
    with ExitStack() as made:
        yield lambda handlers: made.enter_context(Processes(config(tmp_path, handlers)))


def test_a_node_leads_finds_the_service_and_stops(processes: Callable[[int], Processes]) -> None:
    group = processes(1)
    group.start("mms", "mms-0")
    pid = group.start("failure_handler", "fh-0")
    _, answer = group.ask(["fh-0"], OrdersQuery(0, 3), lambda m: isinstance(m, Orders))
    assert isinstance(answer, Orders)
    assert (answer.request, answer.orders) == (3, [])

    def leads(message: Message) -> bool:
        if not isinstance(message, StatusReply):
            return False
        (handler,) = json.loads(message.document)["failure_handlers"]
        return bool(handler["leader"])

    _, reply = group.ask(["mms-0"], StatusQuery(0, 1), leads)
    assert isinstance(reply, StatusReply)
    (handler,) = json.loads(reply.document)["failure_handlers"]
    assert handler.pop("heartbeat_age_ms") >= 0
    assert handler == {
        "name": "fh-0", "endpoint": group.config.failure_handlers[0].endpoint,
        "pid": pid, "state": "up", "leader": True,
    }  # fmt: skip
    code, stderr = group.stop("fh-0")
    assert code == 0, stderr
    assert "Traceback" not in stderr


def test_of_three_nodes_one_leads_and_another_after_it(
    processes: Callable[[int], Processes],
) -> None:
    group = processes(3)
    for node in group.config.failure_handlers:
        group.start("failure_handler", node.name)
    endpoints = {node.endpoint: node.name for node in group.config.failure_handlers}

    def leader(asked: str) -> str:
        _, answer = group.ask(
            [asked],
            OrdersQuery(0, 1),
            lambda m: isinstance(m, Orders) or (isinstance(m, NotLeader) and m.leader != ""),
        )
        return endpoints[answer.leader] if isinstance(answer, NotLeader) else asked

    leaders: set[str] = set()

    def agree() -> bool:
        leaders.clear()
        leaders.update(leader(name) for name in endpoints.values())
        return len(leaders) == 1

    # It may change between two queries.
    wait_until(agree, "all know the same leader")
    (first,) = leaders
    group.kill(first)
    others = [name for name in endpoints.values() if name != first]
    wait_until(lambda: leader(others[0]) != first, "another one leads")
    group.ask(others, OrdersQuery(0, 2), lambda m: isinstance(m, Orders))
    for name in others:
        assert group.stop(name)[0] == 0


@pytest.mark.parametrize("which", ["port", "raft_port"])
def test_a_taken_port_is_one_line_and_exit_code_1(
    processes: Callable[[int], Processes], which: str
) -> None:
    group = processes(1)
    port = getattr(group.config.failure_handlers[0], which)
    with socket.create_server(("127.0.0.1", port)):
        code, stderr = group.refuses("failure_handler", "fh-0")
    assert code == 1
    assert f"127.0.0.1:{port}" in stderr


@pytest.mark.parametrize("node", ["s0", "mms-0", "unknown"])
def test_a_wrong_node_is_bad_usage(processes: Callable[[int], Processes], node: str) -> None:
    group = processes(1)
    code, stderr = group.refuses("failure_handler", node)
    assert code == 2
    assert "fh-0" in stderr
