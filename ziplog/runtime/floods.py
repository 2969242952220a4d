"""A peer whose frames come faster than they are taken is cut off.

libzmq's own bound is a high-water mark: it stops reading a connection until frames are taken. But
in 4.3.5 (and later) a connection that ends, or begs for a sign of life, while it is not being read
makes libzmq stop the process, and so a stranger could. The transport therefore has no such mark,
and the bound is here: of each connection to our port, the bytes that the kernel received less those
that were taken as frames. What is no frame is never taken off.

Rule: `look` shuts down every such connection that is more than `LIMIT_BYTES` ahead. Its peer may
come back. (docs/protocol.md, section 4: rules of every server.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import sys
import time
from typing import TYPE_CHECKING, Final

from ziplog.wire import MAX_FRAME

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

#: Two of the largest frames; the windows of the protocols are less. Tiny frames take 30 times it.
LIMIT_BYTES: Final = 2 * MAX_FRAME
#: From one look to the next; more where there are so many connections that it would cost over 1%.
LOOK_NS: Final = 100_000_000
_COST_SHARE: Final = 100
#: Of `struct tcp_info`: tcpi_state and tcpi_bytes_received.
_INFO: Final = struct.Struct("=B127xQ")
_ESTABLISHED: Final = 1
#: From <asm-generic/socket.h>: a number that the kernel gives to no other socket.
_SO_COOKIE: Final = 57
_COOKIE_BYTES: Final = 8


class Peer:
    """A peer that frames come from: its name or route, and the bytes taken from it."""

    __slots__ = ("name", "taken")

    def __init__(self, name: bytes) -> None:
        """Count from 0 for `name`."""
        self.name = name
        #: On the wire: the frames and their heads.
        self.taken = 0


class Floods:
    """Watches the connections that came in at one port. For one thread."""

    #: Connections that were cut off.
    cut: int

    def __init__(self, port: int) -> None:
        """Watch `port` of this process."""
        self.cut = 0
        self._port: Final = port
        self._peers: dict[int, Peer] = {}
        self._next_look = 0

    def add(self, peer: Peer, fd: int) -> bool:
        """Count what is taken from `peer` for the connection with this file descriptor.

        Returns False if that connection is gone, or is counted for another peer.
        """
        with contextlib.suppress(OSError):
            connection = _connection(fd)
            if connection is not None:
                with connection:
                    return self._peers.setdefault(_cookie(connection), peer) is peer
        return False

    def look(self) -> list[Peer]:
        """Cut off who is too far ahead, if it is time to look.

        Returns the peers whose connections are gone since the last look.
        """
        now = time.monotonic_ns()
        if now < self._next_look:
            return []
        start = time.thread_time_ns()
        try:
            alive = self._check_all()
        except OSError:  # No descriptor is left to look with.
            alive = self._peers.keys()
        cost = time.thread_time_ns() - start
        self._next_look = now + max(LOOK_NS, cost * _COST_SHARE)
        return [self._peers.pop(cookie) for cookie in self._peers.keys() - alive]

    def _check_all(self) -> AbstractSet[int]:
        alive = set()
        with os.scandir("/proc/self/fd") as entries:
            descriptors = [int(entry.name) for entry in entries]
        for fd in descriptors:
            connection = _connection(fd)
            if connection is not None:
                with connection:
                    if connection.getsockname()[1] == self._port:
                        alive.add(self._check(connection))
        return alive

    def _check(self, connection: socket.socket) -> int:
        cookie = _cookie(connection)
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        peer = self._peers.get(cookie)
        state, received = _INFO.unpack(info)
        ahead = received - (0 if peer is None else peer.taken)
        if ahead > LIMIT_BYTES and state == _ESTABLISHED:
            with contextlib.suppress(OSError):  # Its other end was faster.
                connection.shutdown(socket.SHUT_RDWR)
                self.cut += 1
        return cookie


def _connection(fd: int) -> socket.socket | None:
    """Return a second descriptor of a TCP socket, so that it stays the same one; or None."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        found = socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        if error.errno == errno.EBADF:  # libzmq has closed it.
            return None
        raise
    if found.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP:
        return found
    found.close()
    return None


def _cookie(connection: socket.socket) -> int:
    cookie = connection.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, _COOKIE_BYTES)
    return int.from_bytes(cookie, sys.byteorder)
