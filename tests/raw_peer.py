"""A peer of a transport that sends any bytes: frames, parts of frames, or something else."""

from __future__ import annotations

import socket
import struct
from typing import Final, Self

from ziplog.runtime.connection import GREETING, LENGTH_BYTES, pack_length, unpack_length

_TIMEOUT_S: Final = 10.0


def framed(frame: bytes) -> bytes:
    """Return a frame as it is sent."""
    return pack_length(len(frame)) + frame


class RawPeer:
    """A connection that begins with a correct greeting."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(GREETING)
        self._has_greeting = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_frame(self, frame: bytes) -> None:
        self.socket.sendall(framed(frame))

    def is_greeted(self) -> bool:
        """Wait for the other side's greeting; return whether it is correct."""
        if not self._has_greeting:
            self._has_greeting = self._read(len(GREETING)) == GREETING
        return self._has_greeting

    def receive_frame(self) -> bytes:
        """Return the next frame.

        Raises:
            TimeoutError: none comes in time.
            ConnectionError: the connection has ended.

        """
        assert self.is_greeted()
        (size,) = unpack_length(self._read(LENGTH_BYTES))
        return self._read(size)

    def is_closed(self) -> bool:
        """Whether the other side has closed the connection; received bytes are dropped."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(65536):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(_TIMEOUT_S)
        return True

    def reset(self) -> None:
        """Close the connection; unsent data is lost."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the peer closed the connection")
            data += part
        return data
