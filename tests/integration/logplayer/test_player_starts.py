"""A player that is stopped while it starts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import logplayer
from logplayer import targets
from logplayer.calls import StartedCall, StopCall
from tests.waiting import wait_until
from ziplog.errors import ClosedError

if TYPE_CHECKING:
    import ziplog

pytestmark = pytest.mark.timeout(240)


def test_stop_of_another_thread_releases_what_a_start_has_claimed(
    log: ziplog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing = logplayer.Player(log, "starting", [targets.function("f", print)])
    stopping = threading.Thread(target=playing.stop)
    call = playing._call

    def owned() -> list[str]:
        return [cursor.name for cursor in log.cursors("starting/*") if cursor.state == "owned"]

    def call_after_the_stop(request: Any) -> Any:
        if isinstance(request, StartedCall):
            wait_until(lambda: bool(owned()), "something is claimed", 60)
            stopping.start()
            stopped.wait(60)
            raise ClosedError("this player", "make another one to continue")
        if isinstance(request, StopCall):
            stopped.set()
        return call(request)

    stopped = threading.Event()
    monkeypatch.setattr(playing, "_call", call_after_the_stop)
    with pytest.raises(ClosedError):
        playing.start(60)
    stopping.join()
    assert not owned()


def test_a_signal_in_a_start_releases_what_it_has_claimed(
    log: ziplog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing = logplayer.Player(log, "struck", [targets.function("f", print)])
    call = playing._call

    def strike_once_it_has_started(request: Any) -> Any:
        result = call(request)
        if isinstance(request, StartedCall):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(playing, "_call", strike_once_it_has_started)
    with pytest.raises(KeyboardInterrupt):
        playing.start(60)
    assert playing.join(0), "its threads have ended"
    assert {cursor.owner for cursor in log.cursors("struck/*")} == {""}
