"""What tests of the transport share: endpoints, and waits for frames and conditions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.runtime.transport import Transport

SECOND = 1_000_000_000


def take(transport: Transport, *others: Transport, within_s: float = 10) -> tuple[bytes, bytes]:
    """Return the next frame, or fail; `others` make progress meanwhile."""
    deadline = time.monotonic_ns() + int(within_s * SECOND)
    while time.monotonic_ns() < deadline:
        received = transport.receive()
        if received is not None:
            return received
        transport.wait(SECOND // 100 if others else SECOND // 10)
        for other in others:
            other.wait(0)
    raise AssertionError("no frame came")


def endpoint_of(transport: Transport) -> str:
    assert transport.endpoint is not None
    return transport.endpoint


def port_of(transport: Transport) -> int:
    return int(endpoint_of(transport).rpartition(":")[2])


def settle(transport: Transport, condition: Callable[[], bool], what: str) -> None:
    """Let a transport work until the condition holds; drop the frames that arrive."""
    wait_until(lambda: transport.poll() or transport.receive() or condition(), what)


def send_until_received(client: Transport, server: Transport) -> None:
    """Send frames to the peer "server" until one arrives; a dying connection may lose some."""

    def is_received() -> bool:
        client.send(b"server", b"frame")
        client.wait(SECOND // 100)
        assert client.receive() is None
        server.wait(0)
        return server.receive() is not None

    wait_until(is_received, "a frame")
