"""Socket functions that both ends of an archive connection use.

Rule: exactly the announced number of bytes is received, within the socket's timeout
(docs/protocol.md, section 14.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket


def receive(connection: socket.socket, size: int) -> bytearray:
    """Return the next `size` bytes.

    Raises:
        ConnectionError: the peer closed the connection.
        TimeoutError: the peer sent nothing within the timeout.

    """
    content = bytearray(size)
    left = memoryview(content)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        left = left[count:]
    return content


def is_same_machine(connection: socket.socket) -> bool:
    """Whether the peer seems to run on this machine: both ends have the same address.

    The result may be wrong if connections are forwarded, or machines share an address.

    Raises:
        OSError: the connection is closed.

    """
    return bool(connection.getsockname()[0] == connection.getpeername()[0])
