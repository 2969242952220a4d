"""Unix sockets between processes of one machine: the same frames, without the cost of TCP.

A server that listens at "host:port" also listens at a Unix socket whose abstract name contains that
address. A process that connects tries this name first, and then TCP. Abstract names belong to a
network namespace, as loopback ports do, and vanish with the process.

Rule: a process uses a Unix socket only if the peer runs as the same user, or as root. Any user may
take a free name. (docs/adr/0023-use-unix-sockets-on-one-machine.md)
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

#: Requested size of the send buffer; the system's limit is often lower (net.core.wmem_max).
_SEND_BUFFER_BYTES: Final = 1024 * 1024
#: `struct ucred`: the process, user and group of the peer.
_CREDENTIALS: Final = struct.Struct("iII")
_ROOT: Final = 0


def listen(address: str, port: int, backlog: int) -> socket.socket | None:
    """Return a non-blocking socket that listens for this machine; None: the system refuses it.

    Args:
        address: the IPv4 address where the process listens for TCP connections.
        port: its port there.
        backlog: the maximum number of connections that wait.

    """
    try:
        listening = _open_socket()
    except OSError:
        return None
    try:
        listening.bind(_name(address, port))
        listening.listen(backlog)
    except OSError:
        listening.close()
        return None
    return listening


def connect(address: str, port: int) -> socket.socket | None:
    """Return a non-blocking socket that is connected to the process at "address:port".

    None: no process of this user or of root listens there on this machine, or it accepts no
    connection now. Never blocks.
    """
    try:
        opened = _open_socket()
    except OSError:
        return None
    try:
        opened.connect(_name(address, port))
        _, user, _ = _CREDENTIALS.unpack(
            opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
    except OSError:
        opened.close()
        return None
    if user not in {os.geteuid(), _ROOT}:
        opened.close()
        return None
    return opened


def _open_socket() -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return opened


def _name(address: str, port: int) -> bytes:
    return b"\0ziplog-%b:%d" % (address.encode(), port)
