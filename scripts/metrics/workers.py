"""Processes of a measurement, each with a pipe to this one, and their exact event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import select
import selectors
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection
    from multiprocessing.context import (
        ForkServerContext,
        ForkServerProcess,
        SpawnContext,
        SpawnProcess,
    )
    from typing import Self

_SPAWN: Final = multiprocessing.get_context("spawn")
#: For dozens of processes: they fork from one that has imported what they need, if `scripts` is in
#: PYTHONPATH (a fork server does not get `sys.path`).
FORK_SERVER: Final = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["bench"])


class Workers:
    """Runs a function in several processes; they are killed when the `with` block ends."""

    def __init__(
        self,
        target: Callable[..., None],
        arguments: Iterable[tuple[Any, ...]],
        context: SpawnContext | ForkServerContext = _SPAWN,
    ) -> None:
        """Start a process for each of `arguments`; the function gets its end of a pipe as well."""
        self.pipes: Final[list[Connection]] = []
        self._processes: Final[list[SpawnProcess | ForkServerProcess]] = []
        for each in arguments:
            here, there = context.Pipe()
            process = context.Process(target=target, args=(*each, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self._processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()

    def send(self, value: Any) -> None:
        """Send a value to every process."""
        for pipe in self.pipes:
            pipe.send(value)

    def receive(self) -> list[Any]:
        """Receive a value from each process, in their order; raises EOFError if one has ended."""
        return [pipe.recv() for pipe in self.pipes]


class _ExactSelector(selectors.EpollSelector):
    """Waits to the microsecond: epoll's own time-outs are whole milliseconds, rounded up."""

    def select(self, timeout: float | None = None) -> list[Any]:
        """Wait for a file, or for `timeout` seconds."""
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def exact_loop() -> asyncio.AbstractEventLoop:
    """Return such a loop, for `asyncio.Runner`."""
    return asyncio.SelectorEventLoop(_ExactSelector())
