"""A process that `ziplog up` runs beside a cluster: a LogDB coordinator, or the monitor.

It is no node of the cluster file. If it dies, it is started again.
"""

from __future__ import annotations

import logging
import select
import subprocess
import threading
from typing import TYPE_CHECKING, Final

from ziplog.deploy import node_logs
from ziplog.errors import UnavailableError
from ziplog.runtime.child_processes import python, spawn

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from ziplog.config import ClusterConfig

_log: Final = logging.getLogger(__name__)
#: Where a coordinator listens.
COORDINATOR_HOST: Final = "127.0.0.1"
#: Pause before a dead process is started again; it doubles up to the last value.
_MIN_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 10.0
_STOP_S: Final = 10.0


class Companion:
    """One process, until `stop`."""

    def __init__(
        self, directory: Path, name: str, noun: str, command: list[str], timeout_s: float
    ) -> None:
        """Start it; return when it is ready: it has printed a line.

        If it takes longer than `timeout_s`, a warning is logged, and it goes on: a coordinator
        waits for the records of a shard that is not recovered.

        Args:
            directory: the cluster's data directory, for its log.
            name: the name of its log.
            noun: what it is, for messages.
            command: the program and its arguments.
            timeout_s: see above.

        Raises:
            UnavailableError: it ended, for example because its port is in use; quotes its log.

        """
        self._path: Final = directory / node_logs.LOG_DIRECTORY / f"{name}.log"
        self._noun: Final = noun
        self._command: Final = command
        self._stopped: Final = threading.Event()
        start = self._path.stat().st_size if self._path.exists() else 0
        self._process = self._spawn(subprocess.PIPE)
        #: It stays open if the process is late, which may still print its line.
        self._stdout: Final = self._process.stdout
        self._await_ready(directory, name, start, timeout_s)
        self._thread: Final = threading.Thread(target=self._keep, name=f"ziplog-{name}")
        self._thread.start()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def stop(self) -> None:
        """Stop it cleanly, or kill it after 10 s. Idempotent."""
        self._stopped.set()
        self._process.terminate()
        self._thread.join()
        if self._stdout is not None:
            self._stdout.close()

    def _await_ready(self, directory: Path, name: str, start: int, timeout_s: float) -> None:
        assert self._stdout is not None
        if not select.select([self._stdout], [], [], timeout_s)[0]:
            _log.warning(
                "%s is not ready after %.0f s, and goes on; see the end of %s",
                self._noun, timeout_s, self._path,
            )  # fmt: skip
            return
        with self._stdout as ready:
            if not ready.readline():
                self._process.wait()
                said = node_logs.tail(directory, name, start)
                raise UnavailableError(f"{self._noun} ended during its start: {said}")

    def _keep(self) -> None:
        pause_s = _MIN_PAUSE_S
        while True:
            try:
                code = self._process.wait(_STOP_S if self._stopped.is_set() else 1.0)
            except subprocess.TimeoutExpired:
                if self._stopped.is_set():
                    self._process.kill()
                pause_s = _MIN_PAUSE_S
                continue
            if self._stopped.is_set():
                return
            _log.warning("%s ended (%d); starting again in %g s", self._noun, code, pause_s)
            if self._stopped.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            try:
                self._process = self._spawn(subprocess.DEVNULL)
            except OSError as error:
                _log.warning("%s cannot be started now: %s", self._noun, error)

    def _spawn(self, stdout: int) -> subprocess.Popen[bytes]:
        with self._path.open("ab") as log:
            return spawn(self._command, log.fileno(), stdout)


def coordinator(directory: Path, config: ClusterConfig, port: int, timeout_s: float) -> Companion:
    """Start a coordinator of LogDB for the cluster in `directory`; raises what `Companion` raises.

    It stores nothing, so it is in no cluster file.
    """
    command = python(
        "logdb", "--bootstrap", config.bootstrap, "--host", COORDINATOR_HOST, "--port", f"{port}",
        "--log-level", config.log.level, "--log-format", config.log.format,
    )  # fmt: skip
    return Companion(directory, node_logs.COORDINATOR, "LogDB's coordinator", command, timeout_s)


def monitor(directory: Path, path: Path, timeout_s: float) -> Companion:
    """Start the monitor of `[monitor]` of the cluster file `path`; raises what `Companion` raises.

    `ziplog config reload` moves it.
    """
    command = python("ziplog", "monitor", "--config", str(path))
    return Companion(directory, node_logs.MONITOR, "the monitor", command, timeout_s)
