"""Unix sockets between processes of one machine: found without configuration, never required."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import TYPE_CHECKING

import pytest

from tests.waiting import wait_until
from ziplog.runtime import listener as listeners
from ziplog.runtime import local_socket
from ziplog.runtime.connection import GREETING
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[Transport]:
    with contextlib.closing(Transport("127.0.0.1:0")) as transport:
        yield transport


@pytest.fixture
def client() -> Iterator[Transport]:
    with contextlib.closing(Transport()) as transport:
        yield transport


def address_of(server: Transport) -> tuple[str, int]:
    assert server.endpoint is not None
    host, _, port = server.endpoint.rpartition(":")
    return host, int(port)


def families(transport: Transport) -> list[int]:
    """Return the address family of each open connection."""
    return [connection._socket.family for connection in transport._open.values()]


def exchange(client: Transport, server: Transport) -> int:
    """Send a frame to the server and back; return the address family of the client's connection."""
    assert server.endpoint is not None
    client.connect(b"server", server.endpoint)
    client.send(b"server", b"question")
    assert take(server, client) == b"question"
    return families(client)[0]


def take(receiver: Transport, sender: Transport) -> bytes:
    """Receive the next frame, and send it back."""
    received: list[tuple[bytes, bytes]] = []

    def has_frame() -> bool:
        sender.poll()
        receiver.poll()
        found = receiver.receive()
        received.extend([found] if found is not None else [])
        return bool(received)

    wait_until(has_frame, "a frame")
    [(route, frame)] = received
    assert receiver.send(route, frame)
    wait_until(lambda: sender.poll() or receiver.poll() or sender.receive(), "the same frame")
    return frame


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_peers_of_one_machine_use_a_unix_socket(
    server: Transport, client: Transport, host: str
) -> None:
    client.connect(b"server", f"{host}:{address_of(server)[1]}")
    client.send(b"server", bytes(3_000_000))
    assert take(server, client) == bytes(3_000_000)
    assert families(client) == families(server) == [socket.AF_UNIX]


def test_peer_without_a_unix_socket_is_reached_over_tcp(
    server: Transport, client: Transport
) -> None:
    assert server._listener is not None
    server._listener._close_local()
    assert exchange(client, server) == socket.AF_INET


def test_socket_of_another_user_is_not_used(
    server: Transport, client: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "_ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert exchange(client, server) == socket.AF_INET


def test_socket_of_root_is_used(
    server: Transport, client: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_socket, "_ROOT", os.getuid())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert exchange(client, server) == socket.AF_UNIX


def test_server_whose_name_is_taken_is_reached_over_tcp(client: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(local_socket._name(*address))  # It does not listen.
        with contextlib.closing(Transport("{}:{}".format(*address))) as server:
            assert exchange(client, server) == socket.AF_INET


def test_full_backlog_means_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_BACKLOG", 1)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(Transport("127.0.0.1:0")))
        waiting = []
        while (opened := local_socket.connect(*address_of(server))) is not None:
            waiting.append(stack.enter_context(opened))
            assert len(waiting) < 10
        assert waiting


def test_name_is_free_once_the_server_has_closed(server: Transport) -> None:
    address = address_of(server)
    opened = local_socket.connect(*address)
    assert opened is not None
    with opened:
        server.close()
        assert local_socket.connect(*address) is None
        with contextlib.closing(Transport("{}:{}".format(*address))):
            again = local_socket.connect(*address)
            assert again is not None
            again.close()


def test_client_reconnects_to_a_server_that_restarted(client: Transport) -> None:
    with contextlib.closing(Transport("127.0.0.1:0")) as first:
        assert exchange(client, first) == socket.AF_UNIX
        endpoint = first.endpoint
    with contextlib.closing(Transport(endpoint)) as second:
        wait_until(lambda: client.wait(0) or client.receive() or client._attempts, "a lost peer")
        wait_until(lambda: client.wait(0) or not client._attempts, "another connection")
        assert exchange(client, second) == socket.AF_UNIX


def test_server_that_lacks_descriptors_refuses_unix_connections_for_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers use TCP meanwhile, where the kernel ignores clients and lets nodes pass."""
    with (
        contextlib.closing(select.epoll()) as epoll,
        contextlib.closing(listeners.Listener("127.0.0.1:0", epoll)) as listener,
    ):
        address = listener._address
        with monkeypatch.context() as patch:
            patch.setattr(listener._reserve, "choose", lambda *_: ["an idle connection"])
            assert listener.check([], 0)
        assert local_socket.connect(*address) is None
        assert not listener.check([], 999_999_999)
        assert local_socket.connect(*address) is None
        assert not listener.check([], 1_000_000_000)
        again = local_socket.connect(*address)
        assert again is not None
        again.close()


def test_hostile_unix_peer_is_disconnected(server: Transport) -> None:
    hostile, honest = (local_socket.connect(*address_of(server)) for _ in range(2))
    assert hostile is not None
    assert honest is not None
    with hostile, honest:
        hostile.send(b"GET / HTTP/1.1\r\n\r\n")
        honest.send(GREETING + (4).to_bytes(4, "little") + b"fine")
        frames: list[bytes] = []

        def has_frame() -> bool:
            server.poll()
            frames.extend(frame for _, frame in iter(server.receive, None))
            return bool(frames) and server.garbage == 1

        wait_until(has_frame, "a frame and a disconnect")
        assert frames == [b"fine"]
        assert len(families(server)) == 1
