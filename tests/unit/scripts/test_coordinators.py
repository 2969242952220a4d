"""Coordinator processes of a trial: an unexpected exit is reported, even after a restart."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from fault_injection.coordinators import Coordinators

from tests.waiting import wait_until
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

#: A stand-in: ready at once, until a signal; it exits by itself if there is a file `end`.
STANDS_IN = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
if not pathlib.Path(__file__).with_name("end").exists():
    print("ready", flush=True)
    signal.sigwait([signal.SIGUSR1])
sys.exit("an invariant is broken")
"""


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, str]:
    program = tmp_path / "stands_in.py"
    program.write_text(STANDS_IN)
    return sys.executable, str(program)


def test_a_killed_and_restarted_coordinator_has_not_crashed(
    tmp_path: Path, command: tuple[str, str]
) -> None:
    with Coordinators(tmp_path / "logs", "127.0.0.1:1", 2, command=command) as coordinators:
        coordinators.kill(0)
        assert not coordinators.is_running(0)
        coordinators.pause(1)
        coordinators.heal()
        assert coordinators.is_ready(0)
        assert coordinators.paused == set()
        assert coordinators.crashed() == []
        pids = [process.pid for process in coordinators._running.values()]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_coordinator_that_exits_by_itself_has_crashed(
    tmp_path: Path, command: tuple[str, str]
) -> None:
    with Coordinators(tmp_path / "logs", "127.0.0.1:1", 1, command=command) as coordinators:
        coordinators.process(0).send_signal(signal.SIGUSR1)
        wait_until(lambda: not coordinators.is_running(0), "it ends")
        coordinators.heal()
        (crashed,) = coordinators.crashed()
        assert "coordinator 0 ended (exit code 1)" in crashed
        assert "an invariant is broken" in crashed
        assert coordinators.crashed() == [crashed]


def test_a_coordinator_that_does_not_start_is_named(
    tmp_path: Path, command: tuple[str, str]
) -> None:
    (tmp_path / "end").touch()
    coordinators = Coordinators(tmp_path / "logs", "127.0.0.1:1", 1, command=command)
    with pytest.raises(UnavailableError, match="coordinator 0 ended"), coordinators:
        pytest.fail("it came up")
