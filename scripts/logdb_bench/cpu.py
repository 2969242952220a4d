"""Cost of one read-modify-write in each process: CPU time, frames and system calls.

One blocking client in this process, one shard, f=1, one coordinator. Each transaction reads a key,
writes its value plus one, and commits. Counting has a cost too, so there are three passes: CPU
time; system calls, of one process at a time, by `strace` if it is installed; frames, with nodes
that count them (`metrics.frames`). Figures are totals, with background work, per transaction.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
from metrics import frames
from metrics.cpu import spent
from metrics.setup import Progress

import logdb
from logdb_bench.cluster_setup import bench_setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Figures = dict[str, Any]

COMMITS: Final = 5_000
_TRACED: Final = 500
_KEYS: Final = 10
#: System calls with fewer uses per transaction than this are left out.
_SELDOM: Final = 0.1
_STRACE: Final = shutil.which("strace") or ""
_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.02


def measure(scale: float) -> Figures:
    """Measure; `scale` 1: 5,000 transactions."""
    commits = max(200, int(COMMITS * scale))
    progress = Progress("cpu", 3)
    result: Figures = {"commits": commits}
    with bench_setup(1, ("--no-checkpoints",)) as setup, logdb.connect(setup.endpoint) as db:
        processes = {"client": psutil.Process()} | setup.processes()
        modify(db, commits // 5)
        result["cpu"] = spent(processes, lambda count: modify(db, count), commits)
        result["cpu"]["latency_us"] = _latency_us(db, commits)
        progress.step("CPU time")
        result["system_calls"] = {
            name: traced(process.pid, lambda: modify(db, _TRACED), _TRACED)
            for name, process in processes.items()
            if _STRACE
        }
        progress.step("system calls")
    result["frames"] = _frames(commits)
    progress.step("frames")
    return result


def modify(db: logdb.Database, count: int) -> None:
    """Run `count` transactions."""
    for number in range(count):
        with db.transaction() as transaction:
            key = str(number % _KEYS)
            transaction.put(key, transaction.get(key, 0) + 1)


def _latency_us(db: logdb.Database, count: int) -> float:
    begin = time.perf_counter()
    modify(db, count)
    return (time.perf_counter() - begin) / count * 1e6


# --- system calls --------------------------------------------------------------------------------


def traced(pid: int, act: Callable[[], object], count: int) -> Figures:
    """Return how many system calls a process makes for one of the `count` things that `act` does.

    Raises:
        RuntimeError: `strace` may not trace it, or does not begin.

    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        command = [_STRACE, "-c", "-f", "-p", str(pid), "-o", str(output)]
        with errors.open("wb") as stderr:
            tracer = subprocess.Popen(command, stderr=stderr)
        try:
            until = time.monotonic() + _TIMEOUT_S
            while b"attached" not in errors.read_bytes():
                if tracer.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"strace: {errors.read_text(errors='replace')[:500]}")
                time.sleep(_POLL_S)
            act()
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.wait()
        calls = system_calls(output.read_text().splitlines())
    rows = {name: calls[name] / count for name in sorted(calls, key=calls.__getitem__)[::-1]}
    return {"all": sum(rows.values())} | {n: row for n, row in rows.items() if row >= _SELDOM}


def system_calls(lines: Iterable[str]) -> dict[str, int]:
    """Return the counts in the table that `strace -c` prints."""
    found = {}
    for line in lines:
        words = line.split()
        # share, seconds, microseconds a call, calls, maybe errors, name
        if len(words) in {5, 6} and words[3].isdigit() and words[-1] != "total":
            found[words[-1]] = int(words[3])
    return found


# --- frames --------------------------------------------------------------------------------------


def _frames(commits: int) -> Figures:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = frames.count()
        with bench_setup(
            1, ("--no-checkpoints",), launcher=(frames.__file__, name),
            command=(sys.executable, frames.__file__, name, "logdb"),
        ) as setup, logdb.connect(setup.endpoint) as db:  # fmt: skip
            modify(db, commits // 10)
            pids = {role: process.pid for role, process in setup.processes().items()}
            before = _counts(folder, pids) | {"client": own.copy()}
            modify(db, commits)
            after = {"client": own.copy()} | _counts(folder, pids)
        own.clear()
    return {
        role: {
            kind: count / commits
            for kind, count in (after[role] - before[role]).most_common()
            if count / commits >= _SELDOM
        }
        for role in after
    }


def _counts(folder: Path, pids: dict[str, int]) -> dict[str, Counter[str]]:
    """Return what processes have counted until now."""
    for pid in pids.values():
        (folder / str(pid)).unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + _TIMEOUT_S
    while any(not (folder / str(pid)).exists() for pid in pids.values()):
        if time.monotonic() > until:
            raise RuntimeError("a node did not write its counters")
        time.sleep(_POLL_S)
    return {
        role: Counter(json.loads((folder / str(pid)).read_text())) for role, pid in pids.items()
    }
