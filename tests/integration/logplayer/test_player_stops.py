"""A player that stops: by a signal, at each point, and although something hangs."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.integration.logplayer.playing import Process
from tests.waiting import wait_until
from ziplog.types import RecordId

if TYPE_CHECKING:
    from pathlib import Path

    import ziplog

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
