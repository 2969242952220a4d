"""Peers that send without end, read nothing or disconnect early: the process and others go on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, Self

import pytest

from tests.raw_peer import RawPeer, framed
from tests.waiting import wait_until
from ziplog.runtime import connection as connections
from ziplog.runtime import local_socket
from ziplog.runtime import transport as transports
from ziplog.runtime.connection import GREETING
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator

SECOND: Final = 1_000_000_000


@pytest.fixture
def server() -> Iterator[Transport]:
    with contextlib.closing(Transport("127.0.0.1:0")) as transport:
        yield transport


def port_of(transport: Transport) -> int:
    assert transport.endpoint is not None
    return int(transport.endpoint.rpartition(":")[2])


def take_all(transport: Transport) -> list[tuple[bytes, bytes]]:
    """Receive the frames that have arrived."""
    transport.poll()
    found = []
    while (received := transport.receive()) is not None:
        found.append(received)
    return found


def take(transport: Transport) -> tuple[bytes, bytes]:
    """Receive the next frame."""
    received: list[tuple[bytes, bytes]] = []
    wait_until(lambda: received.extend(take_all(transport)) or received, "a frame")
    (only,) = received
    return only


class Flood:
    """A peer that sends frames of 1,000 bytes until its connection is closed."""

    def __init__(self, port: int) -> None:
        self._peer = RawPeer(port)
        self._is_over = False
        self.sent = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        data = framed(bytes(1000)) * 100
        with contextlib.suppress(OSError):
            while not self._is_over:
                self._peer.send(data)
                self.sent += len(data)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):
            self._peer.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._peer.reset()


def test_peer_that_sends_more_than_is_read_is_held_back(server: Transport) -> None:
    with Flood(port_of(server)) as flood, RawPeer(port_of(server)) as other:
        sent = -1

        def has_stopped() -> bool:
            nonlocal sent
            before, sent = sent, flood.sent
            server.poll()  # Nothing is received.
            time.sleep(0.2)
            return sent == before > 0

        wait_until(has_stopped, "the flood stands still")
        other.send_frame(b"after")
        found: set[bytes] = set()
        wait_until(
            lambda: found.update(frame for _, frame in take_all(server)) or b"after" in found,
            "the other's frame",
        )
        wait_until(lambda: take_all(server) and flood.sent > sent, "the flood goes on")
    assert server.garbage == 0


def test_flood_does_not_delay_other_connections(server: Transport) -> None:
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(RawPeer(port_of(server)))
        other.send_frame(b"first")
        route, _ = take(server)
        floods = [stack.enter_context(Flood(port_of(server))) for _ in range(4)]
        wait_until(lambda: all(flood.sent for flood in floods), "floods")
        for number in range(20):
            other.send_frame(b"%d" % number)
            polls = 0
            while True:
                server.poll()
                polls += 1
                if (route, b"%d" % number) in list(iter(server.receive, None)):
                    break
                assert polls < 100, "each poll reads a limited part of each connection"


def test_incomplete_frames_of_all_connections_are_bounded(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_MAX_HELD_BYTES", 1_000_000)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(port_of(server))) for _ in range(8)]
        for peer in peers:
            peer.send(framed(bytes(400_000))[:-1])
        wait_until(lambda: take_all(server) or server.counters.flooded == 6, "six disconnects")
        left = [peer for peer in peers if not peer.is_closed()]
        assert len(left) == 2
        for peer in left:
            peer.send(b"\0")
        received: list[tuple[bytes, bytes]] = []
        wait_until(lambda: received.extend(take_all(server)) or len(received) == 2, "both frames")
        assert server._held_bytes == 0


@pytest.mark.parametrize("head", [b"\xff" * 4, (16 * 1024 * 1024 + 1).to_bytes(4, "little")])
def test_frame_that_is_too_long_ends_its_connection(server: Transport, head: bytes) -> None:
    with RawPeer(port_of(server)) as liar, RawPeer(port_of(server)) as other:
        liar.send(head)
        wait_until(lambda: take_all(server) or liar.is_closed(), "a disconnect")
        assert server.garbage == 1
        other.send_frame(b"fine")
        assert take(server)[1] == b"fine"


def test_peers_that_disconnect_at_any_byte_leave_nothing(server: Transport) -> None:
    data = GREETING + framed(b"hello") + framed(b"world")
    for size in range(len(data) + 1):
        connection = socket.create_connection(("127.0.0.1", port_of(server)))
        connection.sendall(data[:size])
        connection.close()
    with RawPeer(port_of(server)) as last:
        last.send_frame(b"last")
        found: list[bytes] = []
        wait_until(
            lambda: found.extend(f for _, f in take_all(server)) or b"last" in found, "a frame"
        )
        wait_until(lambda: take_all(server) or len(server._connections) == 1, "disconnects")
    wait_until(lambda: take_all(server) or not server._connections, "the last disconnect")
    assert len(found) == found.count(b"hello") + found.count(b"world") + 1
    assert found.count(b"world") == 1
    assert (server._held_bytes, server._queued_bytes) == (0, 0)


def test_slow_reader_loses_frames_and_no_other_peer_does(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_QUEUED_BYTES", 1_000_000)
    with RawPeer(port_of(server)) as slow, RawPeer(port_of(server)) as other:
        routes = []
        for peer in (slow, other):
            peer.send_frame(b"x")
            routes.append(take(server)[0])
        frame, sent = bytes(100_000), 0
        while server.send(routes[0], frame):
            sent += 1
            assert sent < 1_000
        assert server.dropped == 1
        assert server.send(routes[1], frame)
        server.poll()
        assert other.receive_frame() == frame
        for _ in range(sent):
            server.poll()
            assert slow.receive_frame() == frame
        assert server.send(routes[0], b"again")
        assert slow.receive_frame() == b"again"


def test_output_of_all_connections_is_bounded(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_MAX_QUEUED_BYTES", 10_000_000)
    with contextlib.ExitStack() as stack:
        routes = []
        for _ in range(10):
            stack.enter_context(RawPeer(port_of(server))).send_frame(b"x")
            routes.append(take(server)[0])
        for _ in range(200):
            for route in routes:
                server.send(route, bytes(100_000))
        assert server.dropped
        assert server._queued_bytes <= 10_000_000 + 10 * (64 * 1024 + 100_004)
        assert server._queued_bytes == sum(
            connection.queued_bytes for connection in server._connections.values()
        )
    wait_until(lambda: take_all(server) or not server._connections, "disconnects")
    assert server._queued_bytes == 0


def test_output_for_peers_that_are_down_leaves_room_for_others(server: Transport) -> None:
    frame = bytes(1_000_000)
    with (
        socket.socket() as reserved,
        RawPeer(port_of(server)) as slow,
        contextlib.closing(Transport()) as nobody,
    ):
        reserved.bind(("127.0.0.1", 0))  # Nothing listens there.
        down = f"127.0.0.1:{reserved.getsockname()[1]}"
        for name in (b"%d" % number for number in range(8)):
            server.connect(name, down)
            while server.send(name, frame):
                pass
            assert 4 * 2**20 < server._connections[name].queued_bytes < 6 * 2**20
        slow.send_frame(b"x")
        route = take(server)[0]
        assert all(server.send(route, frame) for _ in range(60))
        nobody.connect(b"server", down)
        assert nobody.send(b"server", bytes(16 * 2**20)), "one frame of any size is kept"


def test_silent_peers_are_found_by_the_kernel(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is gone without a word is disconnected within seconds (keepalive)."""
    monkeypatch.setattr(local_socket, "connect", lambda *_: None)
    with RawPeer(port_of(server)) as peer, contextlib.closing(Transport()) as client:
        peer.send_frame(b"x")
        take(server)
        assert server.endpoint is not None
        client.connect(b"server", server.endpoint)
        for transport in (server, client):
            for connection in transport._open.values():
                ours = connection._socket
                assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
                assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
                assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_frame_before_an_invalid_one_uses_no_memory(server: Transport) -> None:
    with RawPeer(port_of(server)) as peer:
        peer.send(framed(bytes(100_000))[:-1])
        wait_until(lambda: take_all(server) or server._held_bytes > 90_000, "a part has arrived")
        peer.send(b"\0" + b"\xff" * 4)
        wait_until(lambda: take_all(server) or server.garbage == 1, "a disconnect")
    assert server._held_bytes == 0
