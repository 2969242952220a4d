"""Coordinators of a database as processes of their own, which are killed, paused and started again.

Invariant: when `Coordinators` is left, none of its processes runs any more.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

import psutil

from ziplog.deploy.new_shard import free_ports
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Self

_HOST: Final = "127.0.0.1"
_POLL_S: Final = 0.02
_STOP_S: Final = 10.0
_TAIL: Final = 1500


class Coordinators:
    """Coordinator processes of one log, each on its own fixed port."""

    def __init__(
        self,
        folder: Path,
        bootstrap: str,
        count: int = 2,
        *,
        command: Sequence[str] = (sys.executable, "-m", "logdb"),
        options: Sequence[str] = (),
        ready_s: float = 30.0,
    ) -> None:
        """Prepare the processes.

        Args:
            folder: gets their output; created if it is missing.
            bootstrap: "host:port,..." of the log's membership service.
            count: the number of coordinators.
            command: the command of a coordinator.
            options: additional arguments.
            ready_s: timeout for a coordinator's replay of the log, in seconds.

        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder: Final = folder
        self._command: Final = [*command, "--bootstrap", bootstrap, *options]
        self._ports: Final = list(free_ports(count, _HOST))
        self._ready_s: Final = ready_s
        self._running: Final[dict[int, subprocess.Popen[bytes]]] = {}
        self.paused: Final[set[int]] = set()
        #: Those that ended by themselves: which one, and the end of its log.
        self._crashed: Final[list[str]] = []

    def __enter__(self) -> Self:
        """Start all."""
        try:
            for number in self.numbers:
                self.start(number)
            for number in self.numbers:
                self.wait_ready(number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all."""
        self.stop()

    @property
    def numbers(self) -> range:
        """The numbers of all."""
        return range(len(self._ports))

    @property
    def endpoints(self) -> str:
        """Their addresses: "host:port,..."."""
        return ",".join(f"{_HOST}:{port}" for port in self._ports)

    def start(self, number: int) -> None:
        """Start one that does not run; returns at once."""
        if self.is_running(number):
            return
        self._note_end(number)
        log, said = self._paths(number)
        with log.open("ab") as errors, said.open("wb") as output:
            self._running[number] = subprocess.Popen(
                [*self._command, "--port", str(self._ports[number])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    def _paths(self, number: int) -> tuple[Path, Path]:
        """Return where one logs to, and where it says that it is ready."""
        name = f"coordinator-{number}"
        return self._folder / f"{name}.log", self._folder / f"{name}.ready"

    def _log_end(self, number: int) -> str:
        return f"its log ends: {self._paths(number)[0].read_text(errors='replace')[-_TAIL:]}"

    def process(self, number: int) -> psutil.Process:
        """Return the process of one that was started."""
        return psutil.Process(self._running[number].pid)

    def is_running(self, number: int) -> bool:
        """Whether its process lives, paused or not."""
        process = self._running.get(number)
        return process is not None and process.poll() is None

    def is_ready(self, number: int) -> bool:
        """Whether it has replayed the log since its start."""
        return self.is_running(number) and bool(self._paths(number)[1].read_bytes())

    def wait_ready(self, number: int) -> None:
        """Wait until one has replayed the log.

        Raises:
            UnavailableError: it ended, or has not done so by then; quotes its log.

        """
        deadline = time.monotonic() + self._ready_s
        while not self.is_ready(number):
            if not self.is_running(number):
                raise UnavailableError(f"coordinator {number} ended; {self._log_end(number)}")
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"coordinator {number} is not ready; {self._log_end(number)}"
                )
            time.sleep(_POLL_S)

    def kill(self, number: int) -> None:
        """Kill one (SIGKILL); returns when it is dead."""
        self._running[number].kill()
        self._running[number].wait()
        self.paused.discard(number)

    def pause(self, number: int) -> None:
        """Freeze one (SIGSTOP)."""
        self._running[number].send_signal(signal.SIGSTOP)
        self.paused.add(number)

    def resume(self, number: int) -> None:
        """Resume a paused one (SIGCONT)."""
        self._running[number].send_signal(signal.SIGCONT)
        self.paused.discard(number)

    def heal(self) -> None:
        """Let all run again, and wait until they are ready.

        Raises:
            UnavailableError: one does not come up.

        """
        for number in self.numbers:
            if number in self.paused:
                self.resume(number)
            self.start(number)
        for number in self.numbers:
            self.wait_ready(number)

    def crashed(self) -> list[str]:
        """Return those that ended by themselves so far: which one, and the end of its log."""
        for number in self.numbers:
            self._note_end(number)
        return self._crashed

    def _note_end(self, number: int) -> None:
        process = self._running.get(number)
        if process is None or process.poll() in {None, 0, -signal.SIGKILL}:
            return
        del self._running[number]
        self._crashed.append(
            f"coordinator {number} ended (exit code {process.returncode}); {self._log_end(number)}"
        )

    def stop(self) -> None:
        """Ask all to end, and kill those that do not. Idempotent."""
        for number in list(self.paused):
            self.resume(number)
        running = [process for process in self._running.values() if process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _STOP_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
