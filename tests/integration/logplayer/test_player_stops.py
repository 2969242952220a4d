"""A player that stops: by a signal, at each point, and although something hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import logplayer.aio
from logplayer import targets
from tests.integration.logplayer.playing import Process
from tests.waiting import wait_until
from ziplog.errors import DeadlineError
from ziplog.types import RecordId

if TYPE_CHECKING:
    import ziplog
    from ziplog.types import Record

pytestmark = pytest.mark.timeout(240)


def tail(log: ziplog.Log) -> RecordId:
    """Return the position after the last record."""
    return RecordId(log.check_tail().gsn + 1, 0)


def owners(log: ziplog.Log, player: str) -> dict[str, str]:
    """Return the owner of each cursor of a player."""
    return {cursor.name: cursor.owner for cursor in log.cursors(f"{player}/*")}


def test_a_signal_after_a_task_has_failed_does_not_end_the_stop(
    log: ziplog.Log, tmp_path: Path
) -> None:
    start, pipe = tail(log), tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "slow_of_test.py").write_text(f"""\
def wait(record):
    open({str(pipe)!r}).read()

def fail(record):
    raise TypeError("a bug")
""")
    log.insert_many([b"x"])
    file = tmp_path / "ends.toml"
    file.write_text(f"""\
[player]
name = "signal-at-stop"
bootstrap = "{",".join(log.endpoints)}"
start = "{start}"
on_failed = "exit"
[[target]]
name = "slow"
kind = "python"
function = "slow_of_test:wait"
[[target]]
name = "bug"
kind = "python"
function = "slow_of_test:fail"
""")
    with Process(file) as process:
        process.ready()
        wait_until(lambda: not owners(log, "signal-at-stop")["signal-at-stop/bug/0"], "it stops")
        process.send(signal.SIGTERM)
        pipe.write_text("")  # The step of the other task ends.
        code, stderr = process.end()
    assert code == 1
    assert "error: signal-at-stop/bug/0: TypeError: a bug" in stderr
    assert "StopSignal" not in stderr
    assert set(owners(log, "signal-at-stop").values()) == {""}, "its tasks are released"


def test_a_process_ends_although_a_thread_of_a_target_hangs(
    log: ziplog.Log, tmp_path: Path
) -> None:
    start, begun, pipe = tail(log), tmp_path / "begun", tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "hanging_of_test.py").write_text(f"""\
import asyncio
import pathlib

def wait():
    pathlib.Path({str(begun)!r}).touch()
    open({str(pipe)!r}).read()

async def handle(record):
    await asyncio.to_thread(wait)
""")
    log.insert_many([b"x"])
    file = tmp_path / "hangs.toml"
    file.write_text(f"""\
[player]
name = "hanging-thread"
bootstrap = "{",".join(log.endpoints)}"
start = "{start}"
[[target]]
name = "copy"
kind = "python"
function = "hanging_of_test:handle"
""")
    with Process(file, "--drain-s", "0.1") as process:
        process.ready()
        wait_until(begun.exists, "a call has begun")
        code, stderr = process.stop()
    assert code == 1
    assert stderr.endswith(
        "error: these tasks did not end before the deadline: hanging-thread/copy/0\n"
    )


def test_a_stdout_that_fails_leaves_no_task_owned(log: ziplog.Log, tmp_path: Path) -> None:
    file = tmp_path / "stdout.toml"
    file.write_text(f"""\
[player]
name = "no-stdout"
bootstrap = "{",".join(log.endpoints)}"
[[target]]
name = "copy"
kind = "python"
function = "builtins:id"
""")
    command = [sys.executable, "-m", "ziplog", "player", "run", str(file)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100
        )
    assert done.returncode == 1
    assert "error: input or output: No space left on device" in done.stderr
    assert set(owners(log, "no-stdout").values()) == {""}


def test_a_map_that_does_not_return_does_not_hold_up_the_program(
    log: ziplog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logplayer.player._STUCK_S", 0.1)
    start, begun, goes_on = tail(log), threading.Event(), threading.Event()

    def wait(record: Record) -> Record:
        begun.set()
        goes_on.wait(120)
        return record

    target = targets.function("f", print, map=wait)
    playing = logplayer.Player(log, "stuck", [target], start=start)
    playing.start()
    try:
        log.insert_many([b"x"])
        assert begun.wait(60)
        with pytest.raises(DeadlineError, match="stuck, as in a `map`"):
            playing.status(timeout=0)
        with pytest.raises(DeadlineError, match="stuck, as in a `map`"):
            playing.stop(timeout=0)
    finally:
        goes_on.set()
    assert playing.join(60)


def test_a_wait_that_is_cancelled_keeps_no_thread(log: ziplog.Log) -> None:
    last = RecordId(2**62, 0)

    def threads() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "player call"]

    async def play() -> None:
        target = targets.function("f", lambda _: None)
        async with logplayer.aio.Player(log, "cancelled", [target], start=tail(log)) as playing:
            for wait in (playing.join(), playing.wait_until(last)):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(wait, 0.05)
            await asyncio.to_thread(wait_until, lambda: not threads(), "the threads end", 30)
            with pytest.raises(DeadlineError, match="cancelled/f/0"):
                await playing.wait_until(last, timeout=1.5)
            assert await playing.join(timeout=1.5) is False

    asyncio.run(play())


def test_a_function_of_a_target_stops_its_player(log: ziplog.Log) -> None:
    start, seen = tail(log), []

    def stop(record: Record) -> None:
        seen.append(record.payload)
        playing.stop()

    target = targets.function("f", stop, partitions=2)
    playing = logplayer.Player(log, "stops-itself", [target], start=start)
    with playing:
        log.insert_many([b"x", b"y"], keys=[b"same", b"same"])
        assert playing.join(20), "the stop does not wait for the step that made it"
    assert seen == [b"x", b"y"], "the step under way ends"
    cursors = log.cursors("stops-itself/*")
    assert {cursor.owner for cursor in cursors} == {""}
    assert max(cursor.position for cursor in cursors) > start, "its effect is committed"


def test_a_coroutine_of_a_target_stops_its_player(log: ziplog.Log) -> None:
    async def stop(_: Record) -> None:
        await playing.stop()

    target = targets.function("f", stop)
    playing = logplayer.aio.Player(log, "coroutine-stops", [target], start=tail(log))

    async def play() -> None:
        async with playing:
            await asyncio.to_thread(log.insert_many, [b"x"])
            assert await playing.join(20)

    asyncio.run(play())
    assert set(owners(log, "coroutine-stops").values()) == {""}
