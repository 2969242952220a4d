"""Attempts to connect to a peer that comes back."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from tests.integration.ziplog.transport_world import SECOND, endpoint_of, settle, take
from tests.waiting import wait_until
from ziplog.deploy.new_shard import free_ports
from ziplog.runtime import transport as transports

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from ziplog.runtime.transport import Transport


def test_another_connect_does_not_wait_for_the_next_attempt(
    opened: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, now = opened(), [0]
    monkeypatch.setattr(transports, "now_ns", lambda: now[0])
    [free] = free_ports(1, "127.0.0.1")

    def has_changed(problem: str) -> bool:
        client.wait(SECOND // 100)
        return client.changes.get(b"server") == problem

    client.connect(b"server", f"127.0.0.1:{free}")
    wait_until(lambda: has_changed("connection refused"), "the attempt fails")
    with socket.create_server(("127.0.0.1", free)):
        client.connect(b"server", f"127.0.0.1:{free}")
        wait_until(lambda: has_changed(""), "it is connected")


def test_frames_that_waited_for_a_connection_count_until_they_are_written(
    opened: Callable[..., Transport],
) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    endpoint = endpoint_of(server)
    server.close()
    client.connect(b"server", endpoint)
    for _ in range(2):
        assert client.send(b"server", bytes(100_000))
        assert client._queued_bytes == client._connections[b"server"].queued_bytes > 100_000
        server = opened(endpoint)
        assert take(server, client)[1] == bytes(100_000)
        assert client._queued_bytes == 0
        server.close()
        settle(client, lambda: client.connection_counts == (0, 0), "the connection ends")
