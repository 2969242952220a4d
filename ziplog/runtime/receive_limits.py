"""Backpressure by disconnect: closes connections with too many unread bytes.

libzmq's own limit, a high-water mark, stops reading a connection. But libzmq 4.3.5 (and later)
aborts the process if a connection ends or sends a ZMTP ping while it is not read, so any peer could
stop a server. The transport therefore sets no high-water mark, and this module enforces the limit.
The unread bytes of a connection are the bytes that the kernel received, minus the frames read.

`enforce` closes every connection with more than `LIMIT_BYTES` unread. If all connections together
hold more than `TOTAL_BYTES`, it closes the largest ones; there, a frame counts with its overhead.
A peer may connect again. But while closed connections have left more than `TOTAL_BYTES`, the port
accepts new ones of nodes only. `enforce` also closes idle connections if file descriptors become
scarce (ziplog/runtime/descriptors). (docs/protocol.md, section 4: rules of every server.)
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

#: Unread bytes allowed per connection: two of the largest frames, which is more than the windows of
#: the protocols. With tiny frames, the memory used is 30 times as much.
LIMIT_BYTES: Final = 2 * MAX_FRAME
#: Memory that all connections together may hold, frames with their overhead.
TOTAL_BYTES: Final = 128 * 1024 * 1024
#: A connection that holds less is never closed for the total.
_SMALL_BYTES: Final = 64 * 1024
#: Memory that libzmq needs for a frame besides its bytes.
_FRAME_OVERHEAD: Final = 100
#: Interval between checks; longer if a check takes more than 1 % of it.
CHECK_INTERVAL_NS: Final = 100_000_000
_COST_SHARE: Final = 100
#: Of `struct tcp_info`: tcpi_state and tcpi_bytes_received.
_INFO: Final = struct.Struct("=B127xQ")
_ESTABLISHED: Final = 1
_LISTENING: Final = 10
#: From <asm-generic/socket.h>: a number that the kernel gives to no other socket.
_SO_COOKIE: Final = 57
_COOKIE_BYTES: Final = 8
#: If no descriptor is left to list the open ones: numbers to try above the highest known one.
_MORE_DESCRIPTORS: Final = 4096


class Peer:
    """A peer that sends frames: its name or route, and the size of the frames read from it."""

    __slots__ = ("frames", "name", "taken")

    def __init__(self, name: bytes) -> None:
        """Start at 0 for `name`."""
        self.name = name
        #: Bytes on the wire of the frames read, with their headers.
        self.taken = 0
        self.frames = 0

    def held(self, ahead: int) -> int:
        """Return the memory that `ahead` unread bytes of this peer use."""
        return ahead + ahead * _FRAME_OVERHEAD * self.frames // max(self.taken, 1)


class ReceiveLimiter:
    """Limits the unread bytes of the connections to one port. For one thread."""

    #: Number of connections closed.
    cut: int

    def __init__(self, port: int) -> None:
        """Limit the connections to `port` of this process."""
        self.cut = 0
        self._port: Final = port
        self._peers: dict[int, Peer] = {}
        #: Bytes received, by socket cookie.
        self._received: dict[int, int] = {}
        self._unread_of_closed: list[tuple[Peer, int]] = []
        self._next_check = 0
        self._descriptor_reserve: Final = Reserve()
        self._accept_pause: Final = AcceptPause()
        #: The descriptor of the listening socket, and the highest one; -1 and 0: not known yet.
        self._listening = -1
        self._highest = 0

    def add(self, peer: Peer, fd: int) -> bool:
        """Assign `peer` to the connection with this file descriptor.

        Returns False if that connection is closed, or assigned to another peer.
        """
        with contextlib.suppress(OSError):
            connection = _connection(fd)
            if connection is not None:
                with connection:
                    return self._peers.setdefault(_cookie(connection), peer) is peer
        return False

    def enforce(self) -> list[Peer]:
        """Close the connections that exceed a limit, if a check is due.

        Returns the peers of the connections that were closed since the last check.
        """
        now = time.monotonic_ns()
        if now < self._next_check:
            return []
        start = time.thread_time_ns()
        try:
            alive = self._check_all(now)
        except OSError:  # No descriptor is left for the check.
            alive = self._peers.keys()
            self._shed_unlisted(now)
        cost = time.thread_time_ns() - start
        self._next_check = now + max(CHECK_INTERVAL_NS, cost * _COST_SHARE)
        gone = [(cookie, self._peers.pop(cookie)) for cookie in self._peers.keys() - alive]
        self._unread_of_closed += [(peer, self._received.pop(cookie, 0)) for cookie, peer in gone]
        return [peer for _, peer in gone]

    def on_drained(self) -> None:
        """Record that every received frame was read."""
        self._unread_of_closed.clear()

    @property
    def _closed_bytes(self) -> int:
        """Memory that unread frames of closed connections use."""
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
        """Check each connection; collect the large ones in `held`, with the memory they use.

        Returns the number of open descriptors.
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
        """Close idle connections without a list of the open descriptors, which cannot be read."""
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
        """Close connections by descriptor, unless the number now belongs to another file."""
        must_shut = bool(descriptors) or self._closed_bytes > TOTAL_BYTES
        if self._listening >= 0 and (must_shut or self._accept_pause.is_active):
            with contextlib.suppress(OSError), _borrowed(self._listening) as listening:
                if must_shut:
                    self._accept_pause.start(listening, now)
                self._accept_pause.end_if_due(listening, now)
        for fd in descriptors:
            with contextlib.suppress(OSError), _borrowed(fd) as connection:
                # Never the listening socket: libzmq would abort the process.
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
        with contextlib.suppress(OSError):  # The peer has closed it.
            connection.shutdown(socket.SHUT_RDWR)
            self.cut += 1

    def _check(self, fd: int, connection: socket.socket) -> tuple[int, int]:
        """Close a connection with too many unread bytes; return its cookie and the memory used."""
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
    """Return a duplicate descriptor of a TCP socket, so that it stays open; None if it is none."""
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
    """Give a TCP socket without a duplicate descriptor, for when none is left.

    Raises:
        OSError: it is not a TCP socket.

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
