"""The transport's counters: frames, bytes, handshakes, and connections that it cuts."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

import pytest

from tests.integration.ziplog.transport_world import endpoint_of, port_of, settle, take
from tests.raw_peer import RawPeer, framed
from ziplog.deploy.new_shard import free_ports
from ziplog.runtime.connection import GREETING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.runtime.transport import Transport


def counts(transport: Transport) -> tuple[int, int, int, int]:
    of = transport.counters
    return of.received_frames, of.received_bytes, of.sent_frames, of.sent_bytes


def test_frames_and_bytes_are_counted_alone_and_in_batches(
    opened: Callable[..., Transport],
) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    client.connect(b"server", endpoint_of(server))
    greeting = len(GREETING)
    client.send(b"server", b"one")  # One frame, after the greeting.
    route, _ = take(server)
    assert counts(server)[:2] == (1, greeting + len(framed(b"one")))
    server.send(route, b"reply")
    take(client)
    sizes = (10, 200_000, 0, 70_000)  # Two of them wait behind their lengths, without a copy.
    for size in sizes:
        client.send(b"server", bytes(size))
    taken = [len(take(server, client)[1]) for _ in sizes]
    assert taken == list(sizes)
    total = greeting + len(framed(b"one")) + sum(len(framed(bytes(size))) for size in sizes)
    back = greeting + len(framed(b"reply"))
    assert counts(server) == (5, total, 1, back)
    assert counts(client) == (1, back, 5, total)


def test_frames_of_one_read_are_counted_together(opened: Callable[..., Transport]) -> None:
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer:
        peer.send(framed(b"a") + framed(b"bc") + framed(b"def"))
        for frame in (b"a", b"bc", b"def"):  # They follow the greeting, in one read or in two.
            route, received = take(server)
            assert received == frame
            server.send(route, frame)  # Gathered: one system call for all.
        server.poll()
        server.receive()
        assert [peer.receive_frame() for _ in range(3)] == [b"a", b"bc", b"def"]
        size = len(GREETING) + len(framed(b"a") + framed(b"bc") + framed(b"def"))
        assert counts(server) == (3, size, 3, size)
        peer.send_frame(b"alone")
        take(server)
    assert counts(server) == (4, size + len(framed(b"alone")), 3, size)


def test_handshakes_are_counted_by_result(opened: Callable[..., Transport]) -> None:
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer:
        peer.send_frame(b"x")
        take(server)
        for data in (b"GET / HTTP/1.1\r\n", GREETING[:3], GREETING + b"\xff" * 4):
            with socket.create_connection(("127.0.0.1", port_of(server))) as stranger:
                stranger.sendall(data)
        settle(server, lambda: server.connection_counts == (1, 0), "the strangers have left")
    settle(server, lambda: server.connection_counts == (0, 0), "all peers have left")
    assert server.counters.handshakes == {"ok": 2, "malformed": 1, "ended": 1}
    assert server.garbage == 2


def test_a_refused_attempt_is_no_handshake(opened: Callable[..., Transport]) -> None:
    client = opened()
    [free] = free_ports(1, "127.0.0.1")
    client.connect(b"server", f"127.0.0.1:{free}")
    settle(client, lambda: b"server" in client.changes, "the attempt fails")
    assert client.changes[b"server"] == "connection refused"
    assert client.counters.handshakes == {"ok": 0, "malformed": 0, "ended": 0}


def test_frames_without_a_peer_are_counted(opened: Callable[..., Transport]) -> None:
    server = opened("127.0.0.1:0")
    assert not server.send(b"nowhere", b"x")
    assert (server.dropped, server.counters.unroutable) == (1, 1)


@pytest.mark.parametrize(("number", "silent"), [(errno.ETIMEDOUT, 1), (errno.ECONNRESET, 0)])
def test_silent_peers_are_counted(
    opened: Callable[..., Transport], number: int, silent: int
) -> None:
    def fail(_: bytearray) -> int:
        raise OSError(number, os.strerror(number))

    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer:
        peer.send_frame(b"x")
        take(server)
        (connection,) = server._connections.values()
        connection.read_into = fail
        peer.send_frame(b"y")
        settle(server, lambda: server.connection_counts == (0, 0), "it is cut")
    assert server.counters.silent == silent
    assert (server.garbage, server.counters.flooded) == (0, 0)
