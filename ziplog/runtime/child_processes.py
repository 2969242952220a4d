"""Child processes that run our modules, and end with their parent.

Rule: once the parent of a child of `spawn` has died, however it died, the kernel sends the child a
SIGTERM.
"""

from __future__ import annotations

import errno
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]

#: Program of a child before its own: it requests a SIGTERM for when this process ends
#: (PR_SET_PDEATHSIG), and ends if that was before. A `preexec_fn` is not usable: it makes Python
#: clear the thread-local data of other threads in the child. A library that shuts its connection
#: down on clearing (Spark's client does) would then shut down this process's connection, too.
_DIE_WITH_PARENT: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def python(module: str, *arguments: str, launcher: Sequence[str] = ()) -> list[str]:
    """Return the command that runs one of our modules, with `environment()`, from any directory."""
    return [sys.executable, *(launcher or ("-P", "-m")), module, *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment, extended so that Python finds our packages."""
    paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def spawn(
    command: list[str], log: int, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, whichever thread calls.

    Args:
        command: what `python` returns.
        log: the descriptor of its log, for stderr; or `subprocess.PIPE`.
        stdout: its stdout, as for `subprocess.Popen`.

    Raises:
        OSError: the machine cannot start another process now.

    """
    return _starter.call(lambda: _spawn(command, log, stdout))


def _spawn(command: list[str], log: int, stdout: int) -> subprocess.Popen[bytes]:
    prelude = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    return subprocess.Popen(  # noqa: S603 - our own interpreter and modules
        prelude + command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=log,
        env=environment(),
        start_new_session=True,  # The terminal's Ctrl-C is for the supervisor.
    )


class _Starter:
    """A thread that lives as long as this process and starts all others.

    The kernel sends the death signal when the *thread* that started a process ends.
    """

    def __init__(self) -> None:
        self._calls: Final[
            queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], _Started]]
        ] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._guard: Final = threading.Lock()

    def call(self, spawn: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Run `spawn` in the thread and return what it returns."""
        with self._guard:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ziplog-starter", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise OSError(errno.EAGAIN, str(error)) from error
                self._thread = thread
        started: _Started = Future()
        self._calls.put((spawn, started))
        return started.result()

    def _run(self) -> None:
        while True:
            spawn, started = self._calls.get()
            try:
                started.set_result(spawn())
            except BaseException as error:  # noqa: BLE001 - raised again in `call`
                started.set_exception(error)


_Started = Future[subprocess.Popen[bytes]]
_starter = _Starter()


def _on_fork() -> None:
    """Give a forked child a starter of its own: threads are not forked."""
    global _starter  # noqa: PLW0603 - a process has one
    _starter = _Starter()


os.register_at_fork(after_in_child=_on_fork)
