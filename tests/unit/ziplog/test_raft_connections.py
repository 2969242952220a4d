"""PySyncObj's connections: a full socket, and a connection of a former process."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
from pysyncobj.poller import createPoller

from tests.unit.ziplog.bench import Words, free_endpoints
from tests.waiting import wait_until
from ziplog.raft.connections import Connection
from ziplog.raft.raft import Raft

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any, Any]]:
    poller = createPoller("auto")
    with socket.create_server(("127.0.0.1", 0)) as server:
        sockets = socket.create_connection(server.getsockname()), server.accept()[0]
    for one in sockets:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    ends = [Connection(poller, socket=one, timeout=60.0) for one in sockets]
    yield poller, *ends
    for end in ends:
        end.disconnect()


def test_rest_of_a_message_follows_when_a_full_socket_drains(pair: tuple[Any, Any, Any]) -> None:
    poller, one, other = pair
    received: list[Any] = []
    other.setOnMessageReceivedCallback(received.append)
    poller.poll(0.01)  # from now on it waits for news only
    message = {"data": os.urandom(3_000_000)}  # no compression shortens it
    one.send(message)
    assert one.getSendBufferSize() > 0
    wait_until(lambda: poller.poll(0.01) or received, "the whole message")
    assert received == [message]


def test_the_kernel_gives_up_what_a_peer_does_not_acknowledge() -> None:
    # Otherwise it repeats a request to connect ever more seldom, long after a cut is healed.
    with socket.create_server(("127.0.0.1", 0)) as server:
        poller = createPoller("auto")
        connecting = Connection(poller)
        connecting.connect(*server.getsockname())
        accepted = Connection(poller, socket=server.accept()[0])
        for one in (connecting, accepted):
            option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
            assert one._TcpConnection__socket.getsockopt(*option) == 3000
            one.disconnect()


@pytest.mark.parametrize("is_handshake_over", [False, True])
def test_no_message_is_sent_before_the_keys_are_exchanged(
    pair: tuple[Any, Any, Any], tmp_path: Path, *, is_handshake_over: bool
) -> None:
    _, one, _ = pair
    own, peer = sorted(free_endpoints(2))
    node = Raft(
        "a", {"a": own, "b": peer}, tmp_path, Words(), password="sixteen characters",
        on_event=lambda _: None, on_fatal=lambda _: None,
    )  # fmt: skip
    try:
        transport = node._sync._SyncObj__transport
        (other,) = node._sync.otherNodes
        one.sendRandKey = b"key" if is_handshake_over else None
        transport._connections[other] = one
        assert transport.send(other, "status") is is_handshake_over
    finally:
        node.stop()


def test_new_connection_of_a_node_replaces_its_former_one(tmp_path: Path) -> None:
    # The node with the greater endpoint opens the connection.
    own, caller = sorted(free_endpoints(2))
    node = Raft(
        "a", {"a": own, "b": caller}, tmp_path, Words(),
        on_event=lambda _: None, on_fatal=lambda _: None,
    )  # fmt: skip
    host, port = own.split(":")
    poller = createPoller("auto")
    connections = node._sync._SyncObj__transport._connections
    calls: list[Any] = []

    def call() -> Any:
        connected = socket.create_connection((host, int(port)))
        connected.setblocking(False)
        calls.append(Connection(poller, socket=connected, timeout=60.0))
        calls[-1].send(caller)
        former = list(connections.values())
        wait_until(
            lambda: node._sync.doTick(0.01) or list(connections.values()) != former, "a connection"
        )
        (accepted,) = connections.values()
        return accepted

    try:
        first, second = call(), call()
        assert first.fileno() is None
        assert second.fileno() is not None
        assert len(node._sync.connected_nodes()) == 1
        # Messages over it no longer count, and the peer detects its end.
        wait_until(lambda: poller.poll(0.01) or calls[0].fileno() is None, "it is closed")
        assert calls[1].fileno() is not None
    finally:
        for one in calls:
            one.disconnect()
        node.stop()
