"""Client processes of a workload, by number: started, killed, and stopped together.

Rule: a client process ends soon after SIGTERM, and when its parent process is gone (`Stopped`).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tests.history import events
from tests.history.events import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import SpawnProcess

_SPAWN: Final = multiprocessing.get_context("spawn")
_PR_SET_PDEATHSIG: Final = 1
#: Timeout for the last operations of a client, in seconds; resolving takes up to 20 s.
_STOP_S: Final = 40.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all processes of a workload share."""

    #: Folder of the history files.
    directory: str
    #: Weights of a client's operations.
    mix: dict[str, int]
    seed: int = 1
    #: Operations a second of one client; 0: no limit.
    rate_per_s: float = 0.0
    timeout_s: float = 5.0

    def recorder(self, process: str) -> Recorder:
        """Begin the history of a process."""
        note = msgspec.to_builtins(self)
        return Recorder(Path(self.directory) / f"{process}{events.SUFFIX}", process, plan=note)


class Pace:
    """Limits the rate of one client; it makes up for at most a second."""

    def __init__(self, per_s: float) -> None:
        """Prepare; `per_s` 0: no limit."""
        self._interval_s: Final = 1 / per_s if per_s else 0.0
        self._due = time.monotonic()

    def wait(self) -> None:
        """Wait until the next operation is due."""
        if self._interval_s:
            self._due = max(self._due + self._interval_s, time.monotonic() - 1.0)
            time.sleep(max(0.0, self._due - time.monotonic()))


class Stopped:
    """Becomes true on SIGTERM, or when the parent process is gone."""

    def __init__(self) -> None:
        self._is_set = False
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.signal(signal.SIGTERM, self._set)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _set(self, *_: object) -> None:
        self._is_set = True

    def __bool__(self) -> bool:
        return self._is_set


class ClientProcesses:
    """Processes that run one function, each with its number. For one thread."""

    def __init__(
        self, name: str, run: Callable[[Any, int], None], plan: Plan, first: int = 1
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            name: of such a process, in reports.
            run: called in each process, with the plan and the number.
            plan: of the workload.
            first: the number of the first process.

        """
        self._name, self._run, self._plan = name, run, plan
        self._next = first
        self._processes: Final[dict[int, SpawnProcess]] = {}
        self._killed: Final[set[int]] = set()

    def start(self) -> int:
        """Start one more process; return its number."""
        number = self._next
        self._next += 1
        process = _SPAWN.Process(target=self._run, args=(self._plan, number), daemon=True)
        self._processes[number] = process
        process.start()
        return number

    @property
    def numbers(self) -> list[int]:
        """The numbers of all processes, those that have ended too."""
        return list(self._processes)

    def running(self) -> list[int]:
        """Return the numbers of the processes that run."""
        return [number for number, process in self._processes.items() if process.is_alive()]

    def exit_code(self, number: int) -> int | None:
        """Return the exit code of a process; None while it runs."""
        return self._processes[number].exitcode

    def kill(self, number: int) -> None:
        """Kill a process, whatever it is doing."""
        self._killed.add(number)
        self._processes[number].kill()
        self._processes[number].join()

    def terminate(self) -> None:
        """Ask all processes to end."""
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()

    def stop(self) -> list[str]:
        """End all processes; return those that ended by an error of their own. Idempotent."""
        self.terminate()
        deadline = time.monotonic() + _STOP_S
        crashed = []
        for number, process in self._processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            # A process that was asked to end before it could listen was ended by that.
            if number not in self._killed and process.exitcode not in {0, -signal.SIGTERM}:
                crashed.append(f"{self._name} {number} (exit code {process.exitcode})")
        return crashed
