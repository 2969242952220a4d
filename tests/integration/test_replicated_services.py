"""The processes of both services: start, replies, clean stop, one line about a failed start."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.processes import Processes
from tests.services import cluster_config
from tests.waiting import wait_until
from ziplog.deploy.new_shard import free_ports
from ziplog.wire import (
    ClusterInfo,
    Hello,
    NotLeader,
    Orders,
    OrdersQuery,
    StatusQuery,
    StatusReply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ziplog.core.message import Message


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    """Return a function that prepares a cluster of one shard."""

    def prepare(**nodes: int) -> Processes:
        ports = free_ports(2 * sum(nodes.values()) + 4, "127.0.0.1")
        config = cluster_config(ports=ports, data_dir=tmp_path / "data", **nodes)
        return made.enter_context(Processes(config))

    with ExitStack() as made:
        yield prepare


def query(group: Processes, name: str, question: Message, kind: type[Message]) -> Any:
    """Send a request; return the first reply of a kind."""
    return group.ask([name], question, lambda answer: isinstance(answer, kind))[1]


def leader(group: Processes) -> tuple[str, dict[str, Any]]:
    """Return the leader's name and its status document, which a follower may have forwarded."""
    _, reply = group.ask(
        group.running, StatusQuery(0, 1), lambda answer: isinstance(answer, StatusReply)
    )
    assert isinstance(reply, StatusReply)
    document = json.loads(reply.document)
    (name,) = [node["name"] for node in document["mms"] if node["leader"]]
    return name, document


# --- the membership service ---


def test_one_node_keeps_its_cluster_over_a_restart(processes: Callable[..., Processes]) -> None:
    group = processes(mms=1)
    pid = group.start("mms", "mms-0")
    before = query(group, "mms-0", Hello(0, 1), ClusterInfo)
    reply = query(group, "mms-0", StatusQuery(0, 2), StatusReply)
    document = json.loads(reply.document)
    assert document["mms"][0]["pid"] == pid
    assert document["shards"][0]["state"] == "joining"
    code, stderr = group.stop("mms-0")
    assert code == 0, stderr
    group.start("mms", "mms-0")
    after = query(group, "mms-0", Hello(0, 1), ClusterInfo)
    assert after.cluster == before.cluster
    assert group.stop("mms-0")[0] == 0


def test_three_nodes_know_one_leader_and_survive_it(processes: Callable[..., Processes]) -> None:
    group = processes(mms=3)
    for node in group.config.mms:
        group.start("mms", node.name)
    info = query(group, "mms-0", Hello(0, 1), ClusterInfo)
    group.ask(group.running, StatusQuery(0, 2), lambda answer: isinstance(answer, NotLeader))
    first, _ = leader(group)
    group.kill(first)
    others = list(group.running)
    assert leader(group)[0] in others
    for name in others:
        again = query(group, name, Hello(0, 1), ClusterInfo)
        assert again.cluster == info.cluster
    for name in others:
        assert group.stop(name)[0] == 0


# --- the failure handler ---


def test_a_node_leads_finds_the_service_and_stops(processes: Callable[..., Processes]) -> None:
    group = processes(mms=1, handlers=1)
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
    disk = handler.pop("disk")
    assert disk.pop("free_bytes") > 0
    assert disk == {"reserve_bytes": 0, "full": False}
    assert handler == {
        "name": "fh-0", "endpoint": group.config.failure_handlers[0].endpoint,
        "pid": pid, "state": "up", "leader": True, "version": ziplog.__version__,
        "region": "", "wire_versions": [1, 1],
    }  # fmt: skip
    code, stderr = group.stop("fh-0")
    assert code == 0, stderr
    assert "Traceback" not in stderr


def test_of_three_nodes_one_leads_and_another_after_it(
    processes: Callable[..., Processes],
) -> None:
    group = processes(mms=1, handlers=3)
    for node in group.config.failure_handlers:
        group.start("failure_handler", node.name)
    endpoints = {node.endpoint: node.name for node in group.config.failure_handlers}

    def leader_of(asked: str) -> str:
        _, answer = group.ask(
            [asked],
            OrdersQuery(0, 1),
            lambda m: isinstance(m, Orders) or (isinstance(m, NotLeader) and m.leader != ""),
        )
        return endpoints[answer.leader] if isinstance(answer, NotLeader) else asked

    leaders: set[str] = set()

    def agree() -> bool:
        leaders.clear()
        leaders.update(leader_of(name) for name in endpoints.values())
        return len(leaders) == 1

    # It may change between two queries.
    wait_until(agree, "all know the same leader")
    (first,) = leaders
    group.kill(first)
    others = [name for name in endpoints.values() if name != first]
    wait_until(lambda: leader_of(others[0]) != first, "another one leads")
    group.ask(others, OrdersQuery(0, 2), lambda m: isinstance(m, Orders))
    for name in others:
        assert group.stop(name)[0] == 0


# --- starts that fail ---


@pytest.mark.parametrize("which", ["port", "raft_port"])
@pytest.mark.parametrize(("module", "name"), [("mms", "mms-0"), ("failure_handler", "fh-0")])
def test_a_taken_port_is_one_line_and_exit_code_1(
    processes: Callable[..., Processes], module: str, name: str, which: str
) -> None:
    group = processes(mms=1, handlers=1)
    port = getattr(group.config.node(name), which)
    with socket.create_server(("127.0.0.1", port)):
        code, stderr = group.refuses(module, name)
    assert code == 1
    assert f"127.0.0.1:{port}" in stderr


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        ("mms", "shard-0-0", "a membership node (mms-0)"),
        ("mms", "unknown", "one of mms-0, shard-0-0, shard-0-1"),
        ("failure_handler", "shard-0-0", "fh-0"),
        ("failure_handler", "mms-0", "fh-0"),
        ("failure_handler", "unknown", "fh-0"),
    ],
)
def test_a_wrong_node_is_bad_usage(
    processes: Callable[..., Processes], module: str, name: str, text: str
) -> None:
    group = processes(mms=1, handlers=int(module == "failure_handler"))
    code, stderr = group.refuses(module, name)
    assert code == 2
    assert text in stderr


def test_a_broken_cluster_file_is_bad_usage(processes: Callable[..., Processes]) -> None:
    group = processes(mms=1)
    group.path.write_text("[cluster]\nnonsense = 1\n")
    code, stderr = group.refuses("mms", "mms-0")
    assert code == 2
    assert "nonsense" in stderr
