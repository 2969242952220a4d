"""The wire of a DEALER socket, over a plain TCP socket: thousands of them fit one process.

ZMTP 3.0 (RFC 23) with the NULL mechanism, as far as a peer of our transport needs it: a greeting, a
READY, messages of one part, and an answer to every PING. What comes is stamped by the kernel, so
that it does not matter when this process gets around to reading it.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = (
    b"\x05READY"
     b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    + b"\x08Identity" + struct.pack(">I", 0)
)  # fmt: skip
_LONG: Final = 2
_COMMAND: Final = 4
_SHORT_SIZE: Final = 256
_SO_TIMESTAMPNS: Final = 35
_READ: Final = 1 << 20


def framed(body: bytes, flags: int = 0) -> bytes:
    """Return the bytes of one frame."""
    if len(body) < _SHORT_SIZE:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + struct.pack(">Q", len(body)) + body


class Dealer:
    """One connection."""

    def __init__(self, host: str, port: int) -> None:
        """Connect; raises OSError."""
        self._socket: Final = socket.create_connection((host, port), timeout=10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.sendall(_GREETING + framed(_READY, _COMMAND))
        self._socket.setblocking(False)
        self._unread = bytearray()
        self._is_greeted = False

    def fileno(self) -> int:
        """Return its file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def send(self, frame: bytes) -> bool:
        """Send a message of one part; False if the kernel has no room for it."""
        return self._write(framed(frame))

    def _write(self, data: bytes) -> bool:
        try:
            return self._socket.send(data) == len(data)
        except BlockingIOError:
            return False

    def receive(self) -> tuple[int, list[bytes]]:
        """Read available bytes; return their arrival time (ns since 1970) and complete messages.

        Raises:
            ConnectionError: the peer has closed the connection.

        """
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ, 64)
        except BlockingIOError:
            return 0, []
        if not data:
            raise ConnectionError("the membership service closed a connection")
        came = time.time_ns()
        for _, kind, stamp in ancillary:
            if kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = struct.unpack("qq", stamp[:16])
                came = seconds * 1_000_000_000 + nanoseconds
        self._unread += data
        if not self._is_greeted and len(self._unread) >= len(_GREETING):
            del self._unread[: len(_GREETING)]
            self._is_greeted = True
        return came, self._messages() if self._is_greeted else []

    def _messages(self) -> list[bytes]:
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
            elif body.startswith(b"\x04PING"):
                self._write(framed(b"\x04PONG" + body[7:], _COMMAND))
        del unread[:at]
        return found
