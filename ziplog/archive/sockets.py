"""What both ends of an archive's connection do with its socket.

Rule: nothing is received but as much as was announced, within the socket's timeout
(docs/protocol.md, section 14.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket


def receive(connection: socket.socket, size: int) -> bytearray:
    """Return the next `size` bytes.

    Raises:
        ConnectionError: the peer has gone.
        TimeoutError: it was silent for too long.

    """
    content = bytearray(size)
    left = memoryview(content)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionResetError("it has left the connection")
        left = left[count:]
    return content


def is_same_machine(connection: socket.socket) -> bool:
    """Whether the peer seems to be on this machine: both ends have the same address.

    It may be wrong where connections are forwarded, or machines share an address.

    Raises:
        OSError: the peer has gone.

    """
    return bool(connection.getsockname()[0] == connection.getpeername()[0])
