"""A process ends at SIGTERM, also if the kernel delivers the signal to another of its threads.

This happens to a process that was suspended: the signal arrives before its main thread runs again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests import interrupts
from tests.integration.ports import consecutive_ports
from tests.processes import signal_another_thread
from tests.waiting import wait_until
from ziplog.runtime.waiting import Latch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(240)


class Struck(Exception):  # noqa: N818 - it is no error
    """The exception of the handler."""


def strike(*_: object) -> None:
    raise Struck


@pytest.mark.parametrize("timeout_s", [None, 200.0])
def test_a_wait_ends_by_the_handler_of_a_signal_to_another_thread(timeout_s: float | None) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def signal_itself() -> None:
        wait_until(lambda: sys._current_frames()[main].f_code is Latch.wait.__code__, "it waits")
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, strike)
    thread = threading.Thread(target=signal_itself)
    try:
        thread.start()
        with pytest.raises(Struck):
            Latch().wait(timeout_s)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, former)


def test_a_wait_returns_whether_its_latch_is_set() -> None:
    latch = Latch()
    assert not latch.wait(0)
    assert not latch.wait(0.001)
    latch.set()
    latch.set()
    for timeout_s in (None, 0, 5.0):
        assert latch.wait(timeout_s)
    assert latch.is_set()


def test_a_latch_wakes_all_that_wait_for_it() -> None:
    latch = Latch()
    threads = [threading.Thread(target=latch.wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_handler_that_raises_in_a_wait_leaves_the_latch_usable() -> None:
    latch = Latch()

    def run() -> None:
        try:
            latch.wait(0.001)
            latch.set()
            latch.wait()
        except interrupts.Struck:
            pass

    def check() -> None:
        nonlocal latch
        latch.set()
        assert latch.wait(0)
        latch = Latch()

    assert interrupts.interrupted(run, check) > 10


def test_a_handler_may_set_the_latch_that_it_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    latch = Latch()
    monkeypatch.setattr(interrupts, "strike", lambda *_: latch.set())

    def run() -> None:
        latch.wait(0.001)

    def renew() -> None:
        nonlocal latch
        latch = Latch()

    assert interrupts.interrupted(run, renew) > 5


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
        assert (cluster.returncode, monitor.returncode) == (0, 0)
