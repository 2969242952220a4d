"""Runs measuring processes side by side, and collects their reports.

Each process runs a module with its arguments, and prints a list of `Measured` as its one line.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.bench.measured import Measured, total
from ziplog.errors import UnavailableError
from ziplog.runtime.child_processes import python, spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_S: Final = 0.1
_decode: Final = msgspec.json.Decoder(list[Measured]).decode


def run(
    module: str,
    arguments: list[str],
    clients: int,
    on_progress: Callable[[float], None],
    beside: tuple[str, ...] = (),
) -> list[Measured]:
    """Run a module in several processes until each has reported; return the sum.

    Args:
        module: the module, which measures.
        arguments: its arguments, the same for all processes.
        clients: the number of processes.
        on_progress: called with the seconds since the start, several times a second.
        beside: arguments of one more process, which runs until the others have ended.

    Raises:
        UnavailableError: a process failed; its last line says why.

    """
    with contextlib.ExitStack() as stack:
        if beside:
            stack.enter_context(_process(module, list(beside)))
        processes = [stack.enter_context(_process(module, arguments)) for _ in range(clients)]
        began = time.monotonic()
        while any(process.poll() is None for process in processes):
            on_progress(time.monotonic() - began)
            time.sleep(_POLL_S)
        return total(map(_report, processes))


@contextlib.contextmanager
def _process(module: str, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, and kill it at the end; it also ends if this process is killed."""
    try:
        started = spawn(python(module, *arguments), subprocess.PIPE, subprocess.PIPE)
    except OSError as error:
        raise UnavailableError(f"cannot start a process of the benchmark: {error}") from error
    with started as process:
        try:
            yield process
        finally:
            process.kill()


def _report(process: subprocess.Popen[bytes]) -> list[Measured]:
    said, errors = process.communicate()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise UnavailableError(f"a process of the benchmark failed: {last or 'it was killed'}")
    return _decode(said)
