"""A process ends at SIGTERM, also if the kernel delivers the signal to another of its threads.

This happens to a process that was suspended: the signal arrives before its main thread runs again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.integration.ports import consecutive_ports
from tests.processes import signal_another_thread
from tests.waiting import wait_until
from ziplog.runtime.waiting import wait

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(240)


class Struck(Exception):  # noqa: N818 - it is no error
    """The exception of the handler."""


def strike(*_: object) -> None:
    raise Struck


@pytest.mark.parametrize("timeout_s", [None, 200.0, threading.TIMEOUT_MAX * 2])
def test_a_wait_ends_by_the_handler_of_a_signal_to_another_thread(timeout_s: float | None) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def waits() -> bool:
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
        is_waiting = frames[0].f_code is threading.Condition.wait.__code__
        return is_waiting and any(frame.f_code is wait.__code__ for frame in frames)

    def signal_itself() -> None:
        wait_until(waits, "the main thread waits")
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, strike)
    thread = threading.Thread(target=signal_itself)
    try:
        thread.start()
        with pytest.raises(Struck):
            wait(threading.Event(), timeout_s)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, former)


def test_a_wait_returns_whether_its_event_is_set() -> None:
    event = threading.Event()
    assert not wait(event, 0)
    assert not wait(event, 0.001)
    event.set()
    assert wait(event)
    assert wait(event, 0)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a verb until its first line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ziplog", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


def test_servers_and_their_monitor_end_if_another_thread_gets_the_signal(tmp_path: Path) -> None:
    first = consecutive_ports(6)
    up = ("up", f"--data-dir={tmp_path}", "--shards=1", f"--port={first}", "--timeout=100")
    with (
        running(*up) as cluster,
        running("monitor", f"--bootstrap=127.0.0.1:{first}", "--port=0") as monitor,
    ):
        for process in (monitor, cluster):
            signal_another_thread(process.pid, signal.SIGTERM)
            process.communicate(timeout=100)
        assert (cluster.returncode, monitor.returncode) == (0, 130)
