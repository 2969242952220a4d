"""Starts of players and receivers that are cancelled, or overtaken by a stop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import MagicMock

import pytest

import logplayer
import logplayer.aio
import ziplog
from logplayer import targets
from ziplog.errors import ClosedError


@pytest.mark.parametrize(("kind", "stop"), [("Player", "stop"), ("Receiver", "close")])
def test_cancelled_entry_stops_what_it_starts(
    kind: str, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def start(*_: Any) -> None:
        begun.set()
        assert ended.wait(60), "nothing stops it"

    monkeypatch.setattr(getattr(logplayer, kind), "start", start)
    monkeypatch.setattr(getattr(logplayer, kind), stop, lambda *_: ended.set())
    target = targets.function("f", print)
    entered: Any = (
        logplayer.aio.Player("127.0.0.1:1", "orders", [target])
        if kind == "Player"
        else logplayer.aio.Receiver("127.0.0.1:0", target)
    )

    async def main() -> None:
        entering = asyncio.create_task(entered.__aenter__())
        await asyncio.to_thread(begun.wait, 60)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        assert ended.is_set()

    asyncio.run(main())
    ended.set()


def test_player_that_is_stopped_while_it_starts_claims_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    player = logplayer.Player("127.0.0.1:1", "orders", [targets.function("f", print)])
    monkeypatch.setattr(ziplog, "connect", MagicMock())
    monkeypatch.setattr("logplayer.player.check_start", lambda *_: player.stop())
    with pytest.raises(ClosedError):
        player.start()
    assert player._thread is None
