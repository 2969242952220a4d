"""A transport in a process that has forked: a child keeps its sockets open, as a copy does here."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.ziplog.transport_world import SECOND, endpoint_of, port_of, take
from tests.raw_peer import RawPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziplog.runtime.transport import Transport


@contextlib.contextmanager
def copies_of_sockets() -> Iterator[None]:
    """Keep a copy of each descriptor of a socket, as a forked child does."""
    copies: list[int] = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith("socket:"):
                copies.append(os.dup(int(descriptor.name)))
    try:
        yield
    finally:
        for copy in copies:
            os.close(copy)


def test_an_attempt_that_failed_is_watched_no_more(opened: Callable[..., Transport]) -> None:
    client = opened()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        client.connect(b"server", f"127.0.0.1:{closed.getsockname()[1]}")
        with copies_of_sockets():
            until = time.monotonic() + 0.3
            turns = 0
            while time.monotonic() < until:
                client.wait(SECOND)
                turns += 1
            assert turns < 30, "it sleeps between its attempts"


def test_a_closed_transport_refuses_connections(opened: Callable[..., Transport]) -> None:
    server = opened("127.0.0.1:0")
    endpoint, port = endpoint_of(server), port_of(server)
    with copies_of_sockets():
        server.close()
        with socket.socket() as peer:
            peer.settimeout(10)
            assert peer.connect_ex(("127.0.0.1", port)) != 0
        again = opened(endpoint)
        with RawPeer(port) as other:
            other.send_frame(b"frame")
            assert take(again)[1] == b"frame"
