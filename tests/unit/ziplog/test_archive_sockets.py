"""How long a peer of an archive connection may take."""

from __future__ import annotations

from typing import Any

import pytest

from ziplog.archive import sockets

TIMEOUT_S = 0.3


class SlowPeer:
    """A socket whose peer sends a chunk after each pause, which is shorter than the timeout."""

    def __init__(self, pause_s: float, chunk: int) -> None:
        self.pause_s, self.chunk = pause_s, chunk
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def gettimeout(self) -> float:
        return TIMEOUT_S

    def recv_into(self, left: memoryview) -> int:
        self.now += self.pause_s
        return min(self.chunk, len(left))


def received(monkeypatch: pytest.MonkeyPatch, peer: SlowPeer, size: int) -> bytearray:
    monkeypatch.setattr(sockets, "time", peer)
    connection: Any = peer
    return sockets.receive(connection, size)


def test_a_peer_that_sends_a_byte_now_and_then_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = SlowPeer(0.2, 1)
    with pytest.raises(TimeoutError, match="too slowly"):
        received(monkeypatch, peer, 64)
    assert peer.now - 100.0 < 2 * TIMEOUT_S


@pytest.mark.parametrize("size", [1, 64 * 1024, 8 * 1024 * 1024])
def test_a_slow_peer_has_time_for_a_long_answer(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    peer = SlowPeer(0.2, 16 * 1024)
    assert len(received(monkeypatch, peer, size)) == size
