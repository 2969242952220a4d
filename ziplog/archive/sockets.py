"""Socket functions that both ends of an archive connection use.

Rule: exactly the announced number of bytes is received. A peer costs a thread only so long: the
socket's timeout, and the time of the bytes at a low speed (docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket

#: Speed of a peer that is slow, and not hostile.
_LEAST_BYTES_PER_S: Final = 64 * 1024


def receive(connection: socket.socket, size: int) -> bytearray:
    """Return the next `size` bytes. The socket has a timeout.

    Raises:
        ConnectionError: the peer closed the connection.
        TimeoutError: the peer sent nothing within the timeout; or all of it took longer than the
            timeout and 1 s for each 64 KiB.

    """
    timeout_s = connection.gettimeout()
    assert timeout_s, "a peer could hold the thread for ever"
    deadline = time.monotonic() + timeout_s + size / _LEAST_BYTES_PER_S
    content = bytearray(size)
    left = memoryview(content)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        left = left[count:]
        if left and time.monotonic() >= deadline:
            raise TimeoutError("the peer sends too slowly")
    return content


def is_same_machine(connection: socket.socket) -> bool:
    """Whether the peer seems to run on this machine: both ends have the same address.

    The result may be wrong if connections are forwarded, or machines share an address.

    Raises:
        OSError: the connection is closed.

    """
    return bool(connection.getsockname()[0] == connection.getpeername()[0])
