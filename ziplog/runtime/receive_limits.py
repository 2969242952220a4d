"""A peer whose frames come faster than they are taken is cut off.

libzmq's own bound is a high-water mark: it stops reading a connection until frames are taken. But
in 4.3.5 (and later) a connection that ends, or begs for a sign of life, while it is not being read
makes libzmq stop the process, and so a stranger could. The transport therefore has no such mark,
and the bound is here: of each connection to our port, the bytes that the kernel received less those
that were taken as frames. What is no frame is never taken off.

Rules: `enforce` shuts down every such connection that is more than `LIMIT_BYTES` ahead; and if all
together hold more than `TOTAL_BYTES` of memory, those that hold most, until they do not. There a
frame counts with its overhead, by the size of the frames that its peer sent so far. A peer may come
back; but while connections that ended have left more than `TOTAL_BYTES`, the port answers no new
ones, so that peers which connect again at once cannot pile up frames. `enforce` also
shuts down idle connections where the process is about to lack file descriptors
(ziplog/runtime/descriptors). (docs/protocol.md, section 4: rules of every server.)
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
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from ziplog.core.fields import MAX_FRAME
from ziplog.runtime.descriptors import AcceptPause, Reserve, descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

#: Two of the largest frames; the windows of the protocols are less. Tiny frames take 30 times it.
LIMIT_BYTES: Final = 2 * MAX_FRAME
#: What all connections together may hold, frames with their overhead; nobody is cut off for less
#: than the second.
TOTAL_BYTES: Final = 128 * 1024 * 1024
_SMALL_BYTES: Final = 64 * 1024
#: What libzmq needs for a frame besides its bytes.
_FRAME_OVERHEAD: Final = 100
#: From one look to the next; more where there are so many connections that it would cost over 1%.
CHECK_INTERVAL_NS: Final = 100_000_000
_COST_SHARE: Final = 100
#: Of `struct tcp_info`: tcpi_state and tcpi_bytes_received.
_INFO: Final = struct.Struct("=B127xQ")
_ESTABLISHED: Final = 1
_LISTENING: Final = 10
#: From <asm-generic/socket.h>: a number that the kernel gives to no other socket.
_SO_COOKIE: Final = 57
_COOKIE_BYTES: Final = 8
#: Without a descriptor to list them with, so many beyond those of the last list are tried.
_MORE_DESCRIPTORS: Final = 4096


class Peer:
    """A peer that frames come from: its name or route, and what was taken from it."""

    __slots__ = ("frames", "name", "taken")

    def __init__(self, name: bytes) -> None:
        """Count from 0 for `name`."""
        self.name = name
        #: On the wire: the frames and their heads.
        self.taken = 0
        self.frames = 0

    def held(self, ahead: int) -> int:
        """Return how much memory bytes take that were received from it and not taken."""
        return ahead + ahead * _FRAME_OVERHEAD * self.frames // max(self.taken, 1)


class ReceiveLimiter:
    """Watches the connections that came in at one port. For one thread."""

    #: Connections that were cut off.
    cut: int

    def __init__(self, port: int) -> None:
        """Watch `port` of this process."""
        self.cut = 0
        self._port: Final = port
        self._peers: dict[int, Peer] = {}
        #: By cookie, what was received; of connections that are gone, what is not taken stays.
        self._received: dict[int, int] = {}
        self._unread_of_closed: list[tuple[Peer, int]] = []
        self._next_check = 0
        self._descriptor_reserve: Final = Reserve()
        self._accept_pause: Final = AcceptPause()
        #: The descriptor of the socket that listens, and the highest one; -1, 0: not known yet.
        self._listening = -1
        self._highest = 0

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

    def enforce(self) -> list[Peer]:
        """Cut off who is too far ahead, if it is time to look.

        Returns the peers whose connections are gone since the last look.
        """
        now = time.monotonic_ns()
        if now < self._next_check:
            return []
        start = time.thread_time_ns()
        try:
            alive = self._check_all(now)
        except OSError:  # No descriptor is left to look with.
            alive = self._peers.keys()
            self._shed_unlisted(now)
        cost = time.thread_time_ns() - start
        self._next_check = now + max(CHECK_INTERVAL_NS, cost * _COST_SHARE)
        gone = [(cookie, self._peers.pop(cookie)) for cookie in self._peers.keys() - alive]
        self._unread_of_closed += [(peer, self._received.pop(cookie, 0)) for cookie, peer in gone]
        return [peer for _, peer in gone]

    def on_drained(self) -> None:
        """Note that everything was taken that had come."""
        self._unread_of_closed.clear()

    @property
    def _closed_bytes(self) -> int:
        """What connections that are gone have left in memory."""
        self._unread_of_closed = [one for one in self._unread_of_closed if one[0].taken < one[1]]
        return sum(peer.held(received - peer.taken) for peer, received in self._unread_of_closed)

    def _check_all(self, now: int) -> AbstractSet[int]:
        alive: set[int] = set()
        held: list[tuple[int, socket.socket]] = []
        try:
            used = self._check_each(alive, held)
            self._cut_largest(held)
        finally:
            for _, connection in held:
                connection.close()
        self._shed(self._descriptor_reserve.choose(used, now), now)
        return alive

    def _check_each(self, alive: set[int], held: list[tuple[int, socket.socket]]) -> int:
        """Note all connections, and a descriptor of each that holds much, with how much.

        Returns how many descriptors are open.
        """
        with os.scandir("/proc/self/fd") as entries:
            descriptors = [int(entry.name) for entry in entries]
        self._highest = max(descriptors)
        for fd in descriptors:
            connection = _connection(fd)
            if connection is not None:
                with connection:
                    if connection.getsockname()[1] == self._port:
                        cookie, size = self._check(fd, connection)
                        alive.add(cookie)
                        if size > _SMALL_BYTES:
                            held.append((size, connection.dup()))
        return len(descriptors)

    def _shed_unlisted(self, now: int) -> None:
        """Close idle connections where not even the list of descriptors can be opened."""
        limit = descriptor_limit()
        used = 0
        for fd in range(min(limit, self._highest + _MORE_DESCRIPTORS)):
            with contextlib.suppress(OSError):
                os.fstat(fd)
                used += 1
                with _borrowed(fd) as connection:
                    if connection.getsockname()[1] == self._port:
                        self._check(fd, connection)
        self._shed(self._descriptor_reserve.choose(used, now), now)

    def _shed(self, descriptors: Sequence[int], now: int) -> None:
        """Shut down connections. One that has just ended may have left its number to another."""
        must_shut = bool(descriptors) or self._closed_bytes > TOTAL_BYTES
        if self._listening >= 0 and (must_shut or self._accept_pause.is_active):
            with contextlib.suppress(OSError), _borrowed(self._listening) as listening:
                if must_shut:
                    self._accept_pause.start(listening, now)
                self._accept_pause.end_if_due(listening, now)
        for fd in descriptors:
            with contextlib.suppress(OSError), _borrowed(fd) as connection:
                # Never the socket that listens: libzmq would end the process.
                if fd != self._listening and connection.getsockname()[1] == self._port:
                    connection.shutdown(socket.SHUT_RDWR)

    def _cut_largest(self, held: list[tuple[int, socket.socket]]) -> None:
        total = self._closed_bytes + sum(size for size, _ in held)
        for size, connection in sorted(held, key=itemgetter(0), reverse=True):
            if total <= TOTAL_BYTES:
                return
            total -= size
            self._cut(connection)

    def _cut(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # Its other end was faster.
            connection.shutdown(socket.SHUT_RDWR)
            self.cut += 1

    def _check(self, fd: int, connection: socket.socket) -> tuple[int, int]:
        """Cut a connection off that is too far ahead; return its cookie, and what it holds."""
        cookie = _cookie(connection)
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        peer = self._peers.get(cookie)
        state, received = _INFO.unpack(info)
        if state == _LISTENING:
            self._listening = fd
        elif state == _ESTABLISHED:
            self._descriptor_reserve.observe(fd, cookie, received)
        ahead = received - (0 if peer is None else peer.taken)
        if peer is not None:
            self._received[cookie] = received
        if state != _ESTABLISHED:
            return cookie, 0
        if ahead > LIMIT_BYTES:
            self._cut(connection)
            return cookie, 0
        return cookie, ahead if peer is None else peer.held(ahead)


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


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Give a TCP socket without a second descriptor, for when there is none left.

    Raises:
        OSError: it is no TCP socket.

    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)
    try:
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) != socket.IPPROTO_TCP:
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        yield found
    finally:
        found.detach()


def _cookie(connection: socket.socket) -> int:
    cookie = connection.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, _COOKIE_BYTES)
    return int.from_bytes(cookie, sys.byteorder)
