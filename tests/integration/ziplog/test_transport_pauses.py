"""A paused connection is not read until its pause ends, and then in order and without loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.ziplog.transport_world import SECOND, port_of, take
from tests.raw_peer import RawPeer, framed
from ziplog.runtime import paused
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.runtime.transport import Transport

#: A pause that no test waits for.
LONG = 10_000 * SECOND


def test_other_connections_are_read_while_one_is_paused(opened: Callable[..., Transport]) -> None:
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer, RawPeer(port_of(server)) as other:
        peer.send_frame(b"first")
        route, _ = take(server)
        server.pause(route, now_ns() + LONG)
        peer.send_frame(b"held back")
        for text in (b"one", b"two", b"three"):
            other.send_frame(text)
            assert take(server)[1] == text
            assert server.wait_and_receive(SECOND // 100) is None


@pytest.mark.parametrize("waits", ["wait", "wait_and_receive"])
def test_a_pause_ends_by_itself(opened: Callable[..., Transport], waits: str) -> None:
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer:
        peer.send_frame(b"first")
        route, _ = take(server)
        until = now_ns() + SECOND // 5
        server.pause(route, until)
        peer.send(framed(b"second") + framed(b"third"))
        found = None
        while found is None:
            if waits == "wait":
                server.wait(None)
                found = server.receive()
            else:
                found = server.wait_and_receive(10 * SECOND)
        assert now_ns() >= until
        assert found == (route, b"second")
        assert take(server)[1] == b"third"


def test_input_that_was_found_before_a_pause_is_read_after_it(
    opened: Callable[..., Transport],
) -> None:
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer:
        peer.send_frame(b"first")
        route, _ = take(server)
        peer.send_frame(b"second")
        while not server.ready():
            server.poll()
        server.pause(route, until := now_ns() + SECOND // 5)
        assert server.receive() is None
        assert take(server)[1] == b"second"
        assert now_ns() >= until


def test_a_later_end_of_a_pause_holds(opened: Callable[..., Transport]) -> None:
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer:
        peer.send_frame(b"first")
        route, _ = take(server)
        server.pause(route, later := now_ns() + SECOND // 5)
        server.pause(route, now_ns())
        peer.send_frame(b"second")
        assert take(server)[1] == b"second"
        assert now_ns() >= later


def test_a_paused_peer_that_left_is_forgotten_and_does_not_keep_the_process_awake(
    opened: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer:
        peer.send_frame(b"first")
        route, _ = take(server)
        server.pause(route, until := now_ns() + SECOND // 5)
    server.pause(b"\0unknown", until)
    resumed: list[int] = []
    real = paused.PausedConnections.resume

    def resume(pauses: paused.PausedConnections, now: int, epoll: object) -> None:
        resumed.append(now)
        real(pauses, now, epoll)  # type: ignore[arg-type]

    monkeypatch.setattr(paused.PausedConnections, "resume", resume)
    while sum(server.connection_counts):
        server.wait(SECOND)
        assert server.receive() is None
    assert len(resumed) < 20, "it waited, and did not spin"
