"""Ports for tests that say where a cluster is to listen."""

from __future__ import annotations

import contextlib
import random
import socket

#: Below the ports that clusters draw by themselves.
_PORTS = range(4_000, 9_000)


def consecutive_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for first in random.sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probe = probes.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            return first
    raise AssertionError(f"no {count} consecutive ports are free")
