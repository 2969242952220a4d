"""Baselines: the minimum cost of an insert with two message delays at f=1, one client, two servers.

Each baseline sends a payload to two echo servers, separate processes on loopback, and waits until
both returned it. No message is decoded or ordered; only `DiskFloor` stores it.
"""

from __future__ import annotations

import os
import select
import socket
import tempfile
from typing import IO, TYPE_CHECKING, Self

import zmq
from metrics.workers import Workers

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_HOST = "127.0.0.1"


def _echo_tcp(size: int, ready: Connection, file: IO[bytes] | None = None) -> None:
    """Return each payload; `file`: flush it there before."""
    with socket.create_server((_HOST, 0)) as server:
        ready.send(server.getsockname()[1])
        peer, _ = server.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(size)
        while True:
            got = 0
            while got < size:
                count = peer.recv_into(memoryview(buffer)[got:])
                if count == 0:
                    return
                got += count
            if file is not None:
                os.write(file.fileno(), buffer)
                os.fdatasync(file.fileno())
            peer.sendall(buffer)


def _echo_from_disk(size: int, folder: str, ready: Connection) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        _echo_tcp(size, ready, file)


def _echo_zmq(size: int, ready: Connection) -> None:  # noqa: ARG001
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        ready.send(router.bind_to_random_port(f"tcp://{_HOST}"))
        while True:
            router.send_multipart(router.recv_multipart())


class Floor:
    """Two echo servers and a client of both."""

    def __init__(self, size: int, *options: str) -> None:
        """Start the servers for payloads of `size` bytes; `options`: more of `serve`."""
        self._size = size
        self._servers = Workers(self.serve, [(size, *options)] * 2)
        self.ports: list[int] = self._servers.receive()

    serve = staticmethod(_echo_tcp)

    @property
    def pids(self) -> list[int]:
        """The servers' processes."""
        return self._servers.pids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.__exit__()


class TcpFloor(Floor):
    """Blocking sockets."""

    name = "raw TCP, two servers"

    def __init__(self, size: int, *options: str) -> None:
        super().__init__(size, *options)
        self._sockets = []
        for port in self.ports:
            connection = socket.create_connection((_HOST, port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(connection)
        self._poll = select.epoll()
        for connection in self._sockets:
            self._poll.register(connection, select.EPOLLIN)
        self._by_fd = {connection.fileno(): connection for connection in self._sockets}

    def insert(self, payload: bytes) -> None:
        """Make one round trip with both servers."""
        for connection in self._sockets:
            connection.sendall(payload)
        missing = dict.fromkeys(self._by_fd, self._size)
        while missing:
            for fd, _ in self._poll.poll():
                missing[fd] -= len(self._by_fd[fd].recv(self._size))
                if missing[fd] == 0:
                    del missing[fd]

    def __exit__(self, *details: object) -> None:
        for connection in self._sockets:
            connection.close()
        self._poll.close()
        super().__exit__(*details)


class DiskFloor(TcpFloor):
    """Servers that flush each payload to a file in a folder (the second argument)."""

    name = "raw TCP, two servers, each flushes"
    serve = staticmethod(_echo_from_disk)


class ZmqFloor(Floor):
    """pyzmq: two DEALERs to two ROUTERs."""

    name = "pyzmq, two servers"
    serve = staticmethod(_echo_zmq)

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._context = zmq.Context()
        self._dealers = []
        for port in self.ports:
            dealer = self._context.socket(zmq.DEALER)
            dealer.connect(f"tcp://{_HOST}:{port}")
            self._dealers.append(dealer)
        self._wanted = [(dealer, zmq.POLLIN) for dealer in self._dealers]

    def insert(self, payload: bytes) -> None:
        """Make one round trip with both servers."""
        for dealer in self._dealers:
            dealer.send(payload)
        missing = 2
        while missing:
            for dealer, _ in zmq.zmq_poll(self._wanted, -1):
                dealer.recv()
                missing -= 1

    def __exit__(self, *details: object) -> None:
        self._context.destroy(linger=0)
        super().__exit__(*details)
