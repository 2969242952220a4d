"""A player that is stopped while it starts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

import logplayer
from logplayer import targets
from logplayer.calls import StartedCall, StopCall
from logplayer.cli import commands
from tests.waiting import wait_until
from ziplog.core.units import NS_PER_S
from ziplog.errors import ClosedError
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from pathlib import Path

    import ziplog
    from ziplog.types import Record

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


def test_a_signal_in_a_start_leaves_the_steps_under_way_the_time_of_drain_s(
    log: ziplog.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, limits = threading.Event(), threading.Event(), []
    call = logplayer.Player._call

    def hang(_: Record) -> None:
        begun.set()
        goes_on.wait(60)

    def strike_once_a_step_is_under_way(player: logplayer.Player, request: Any) -> Any:
        if isinstance(request, StartedCall):
            call(player, request)
            log.insert_many([b"x"])
            assert begun.wait(60)
            raise commands._StopSignal
        if isinstance(request, StopCall):
            limits.append((request.deadline - now_ns()) / NS_PER_S)
            request = replace(request, deadline=now_ns())
        return call(player, request)

    playing = logplayer.Player(log, "drained", [targets.function("f", hang)])
    codes: list[int] = []
    monkeypatch.setattr(logplayer.Player, "_call", strike_once_a_step_is_under_way)
    monkeypatch.setattr(commands, "read", lambda _: SimpleNamespace(player=lambda: playing))
    monkeypatch.setattr(commands, "configure", lambda *_: None)
    monkeypatch.setattr(commands, "spare_collector", lambda: None)
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    monkeypatch.setattr(commands.os, "_exit", codes.append)
    commands.run(tmp_path / "unused.toml", drain_s=7)
    goes_on.set()
    assert len(limits) == 1
    assert 6 < limits[0] <= 7
    assert codes == [1], "a target did not return in time"
