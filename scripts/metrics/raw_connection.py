"""Connections to a server over plain TCP sockets: one process has room for thousands of them.

The kernel stamps what arrives, so the time of an arrival does not depend on when this process reads
it.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from typing import Final

from ziplog.core.units import NS_PER_S
from ziplog.runtime.connection import GREETING, Connection, pack_length
from ziplog.runtime.descriptors import NODE_TOS

_SO_TIMESTAMPNS: Final = 35
_READ_BYTES: Final = 1 << 20

_ZMTP_GREETING: Final = (
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
)
_READY: Final = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"SUB"
_SUBSCRIBE_TO_ALL: Final = b"\x01"
_LONG: Final = 2
_COMMAND: Final = 4
_SHORT_BYTES: Final = 256


class RawSocket:
    """A non-blocking socket of a node."""

    def __init__(self, host: str, port: int) -> None:
        """Connect; raises OSError."""
        self._socket: Final = socket.socket()
        self._socket.settimeout(10)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, NODE_TOS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.connect((host, port))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Return its file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def write(self, data: bytes) -> bool:
        """Send some bytes; False if the kernel has no room for them."""
        try:
            return self._socket.send(data) == len(data)
        except BlockingIOError:
            return False

    def read(self) -> tuple[int, bytes]:
        """Return available bytes, and their arrival time in ns since 1970.

        Raises:
            ConnectionError: the server has closed the connection.

        """
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, 64)
        except BlockingIOError:
            return 0, b""
        if not data:
            raise ConnectionError("the server closed a connection")
        arrived = time.time_ns()
        for _, kind, stamp in ancillary:
            if kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = struct.unpack("qq", stamp[:16])
                arrived = seconds * NS_PER_S + nanoseconds
        return arrived, data


class RawConnection(RawSocket):
    """A connection with the frames of `ziplog.runtime.connection`."""

    def __init__(self, host: str, port: int) -> None:
        """Connect; raises OSError."""
        super().__init__(host, port)
        self.write(GREETING)
        self._parser: Final = Connection(b"server")

    def send(self, frame: bytes) -> bool:
        """Send a frame; False if the kernel has no room for it."""
        return self.write(pack_length(len(frame)) + frame)

    def receive(self) -> tuple[int, deque[bytes]]:
        """Return complete frames, and the arrival time of the last bytes (ns since 1970).

        Raises:
            ConnectionError: the server has closed the connection.

        """
        arrived, data = self.read()
        frames: deque[bytes] = deque()
        self._parser.parse(memoryview(data), frames)
        return arrived, frames


class RawSubscription(RawSocket):
    """A connection to a publisher: a SUB socket of ZMTP 3.0 (RFC 23) with the NULL mechanism."""

    def __init__(self, host: str, port: int) -> None:
        """Connect and subscribe to everything; raises OSError."""
        super().__init__(host, port)
        self.write(_ZMTP_GREETING + _framed(_READY, _COMMAND))
        self._unread = bytearray()
        self._is_greeted = False

    def receive(self) -> tuple[int, list[bytes]]:
        """Return complete publications, and the arrival time of the last bytes (ns since 1970).

        Raises:
            ConnectionError: the publisher has closed the connection.

        """
        arrived, data = self.read()
        self._unread += data
        if not self._is_greeted and len(self._unread) >= len(_ZMTP_GREETING):
            del self._unread[: len(_ZMTP_GREETING)]
            self._is_greeted = True
        return arrived, self._publications() if self._is_greeted else []

    def _publications(self) -> list[bytes]:
        unread, at, found = self._unread, 0, []
        while len(unread) - at > 1:
            flags, size, start = unread[at], unread[at + 1], at + 2
            if flags & _LONG:
                if len(unread) - at < 9:
                    break
                (size,) = struct.unpack_from(">Q", unread, at + 1)
                start = at + 9
            if len(unread) < start + size:
                break
            body = bytes(unread[start : start + size])
            at = start + size
            if not flags & _COMMAND:
                found.append(body)
            elif body.startswith(b"\x05READY"):
                self.write(_framed(_SUBSCRIBE_TO_ALL))
            elif body.startswith(b"\x04PING"):
                self.write(_framed(b"\x04PONG" + body[7:], _COMMAND))
        del unread[:at]
        return found


def _framed(body: bytes, flags: int = 0) -> bytes:
    if len(body) < _SHORT_BYTES:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + struct.pack(">Q", len(body)) + body
