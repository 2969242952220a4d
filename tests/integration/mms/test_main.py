"""The process: it starts, answers, stops cleanly, and explains in one line a failed start."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.processes import Processes
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.deploy.new_shard import free_ports
from ziplog.wire import ClusterInfo, Hello, NotLeader, StatusQuery, StatusReply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ziplog.core.message import Message


def config(directory: Path, mms: int) -> ClusterConfig:
    ports = free_ports(2 * mms + 2, "127.0.0.1")
    return ClusterConfig(
        name="c",
        data_dir=directory / "data",
        mms=tuple(
            NodeConfig(f"mms-{i}", "127.0.0.1", next(ports), next(ports)) for i in range(mms)
        ),
        shards=(
            ShardConfig(0, tuple(NodeConfig(f"s{i}", "127.0.0.1", next(ports)) for i in range(2))),
        ),
    )


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[[int], Processes]]:
    with ExitStack() as made:
        yield lambda mms: made.enter_context(Processes(config(tmp_path, mms)))


def query(group: Processes, name: str, question: Message, kind: type[Message]) -> Any:
    """Send a request; return the first reply of a kind."""
    return group.ask([name], question, lambda answer: isinstance(answer, kind))[1]


def leader(group: Processes) -> tuple[str, dict[str, Any]]:
    """Return the name of the node that answers as the leader, and its status document."""
    name, reply = group.ask(
        group.running, StatusQuery(0, 1), lambda answer: isinstance(answer, StatusReply)
    )
    assert isinstance(reply, StatusReply)
    return name, json.loads(reply.document)


def test_one_node_keeps_its_cluster_over_a_restart(processes: Callable[[int], Processes]) -> None:
    group = processes(1)
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


def test_three_nodes_know_one_leader_and_survive_it(processes: Callable[[int], Processes]) -> None:
    group = processes(3)
    for node in group.config.mms:
        group.start("mms", node.name)
    info = query(group, "mms-0", Hello(0, 1), ClusterInfo)
    group.ask(group.running, StatusQuery(0, 2), lambda answer: isinstance(answer, NotLeader))
    first, _ = leader(group)
    group.kill(first)
    others = list(group.running)
    new, document = leader(group)
    assert [n["name"] for n in document["mms"] if n["leader"]] == [new]
    for name in others:
        again = query(group, name, Hello(0, 1), ClusterInfo)
        assert again.cluster == info.cluster
    for name in others:
        assert group.stop(name)[0] == 0


@pytest.mark.parametrize("which", ["port", "raft_port"])
def test_a_taken_port_is_one_line_and_exit_code_1(
    processes: Callable[[int], Processes], which: str
) -> None:
    group = processes(1)
    port = getattr(group.config.mms[0], which)
    with socket.create_server(("127.0.0.1", port)):
        code, stderr = group.refuses("mms", "mms-0")
    assert code == 1
    assert f"127.0.0.1:{port}" in stderr


@pytest.mark.parametrize(
    ("node", "text"), [("s0", "a membership node (mms-0)"), ("unknown", "one of mms-0, s0, s1")]
)
def test_a_wrong_node_is_bad_usage(
    processes: Callable[[int], Processes], node: str, text: str
) -> None:
    group = processes(1)
    code, stderr = group.refuses("mms", node)
    assert code == 2
    assert text in stderr


def test_a_broken_cluster_file_is_bad_usage(processes: Callable[[int], Processes]) -> None:
    group = processes(1)
    group.path.write_text("[cluster]\nnonsense = 1\n")
    code, stderr = group.refuses("mms", "mms-0")
    assert code == 2
    assert "nonsense" in stderr
