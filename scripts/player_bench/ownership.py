"""Players that die, stop or have nothing to do, and what cursors cost the membership service."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psutil
from log_bench import cursors as cursor_load
from metrics.cpu import cpu_s
from metrics.setup import cluster as new_cluster
from metrics.workers import Workers

import ziplog
from ziplog.core.units import NS_PER_S
from ziplog.runtime.child_processes import environment, python
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ziplog.local import Cluster

Figures = dict[str, Any]

_LEASE_S: Final = 3.0
_KILL_GOAL_S: Final = _LEASE_S + 1.0
_STOP_GOAL_S: Final = 0.5
_SERVICE_GOAL_PERCENT: Final = 5.0
_IDLE_GOAL_PERCENT: Final = 1.0
_IDLE_TARGETS: Final = 5
_FUNCTION: Final = """\
import os
from ziplog.runtime.clock import now_ns

FILE = os.open({path!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND)


def write(record):
    os.write(FILE, b"%d %d\\n" % (os.getpid(), now_ns()))
"""


# --- fail-over ---------------------------------------------------------------------------------


def failover(scale: float) -> Figures:
    """Time from the kill, or SIGTERM, of a task's owner to the first delivery by another process.

    Two processes of `ziplog player run`, one task, 100 inserts a second.
    """
    rounds = max(2, round(5 * scale))
    with (
        tempfile.TemporaryDirectory(prefix="ziplog-bench-") as folder,
        new_cluster(mms=3) as cluster,
        _Inserts(cluster),
        _Processes(cluster, Path(folder)) as players,
    ):
        kills = [players.end_owner(signal.SIGKILL) for _ in range(rounds)]
        stops = [players.end_owner(signal.SIGTERM) for _ in range(rounds)]
    return {
        "L9": {
            "killed": {**_seconds(kills), "goal_s": _KILL_GOAL_S},
            "SIGTERM": {**_seconds(stops), "goal_s": _STOP_GOAL_S},
        }
    }


def _seconds(took: list[float]) -> Figures:
    return {"median_s": statistics.median(took), "worst_s": max(took), "rounds": len(took)}


class _Inserts:
    """Inserts in a thread, 100 a second."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster: Final = cluster
        self._stopped: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with self._cluster.connect(timeout=60.0) as log:
            while not self._stopped.wait(0.01):
                log.insert_after(bytes(100))


class _Processes:
    """Two processes of a player, and the lines that its target writes."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._file: Final = folder / "player.toml"
        self._lines: Final = folder / "lines.txt"
        self._running: Final[list[subprocess.Popen[bytes]]] = []
        self._lines.touch()
        source = _FUNCTION.format(path=os.fspath(self._lines))
        (folder / "bench_function.py").write_text(source)
        self._file.write_text(
            f'[player]\nname = "bench"\nbootstrap = "{cluster.endpoint}"\nstart = "recent"\n'
            f"lease_s = {int(_LEASE_S)}\nhold_s = 0\n"
            '[[target]]\nname = "lines"\nkind = "function"\nfunction = "bench_function:write"\n'
        )

    def __enter__(self) -> Self:
        self._start()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def _start(self) -> None:
        process = subprocess.Popen(
            python("ziplog", "player", "run", os.fspath(self._file)),
            env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout is not None
        with process.stdout as output:
            assert b"ready" in output.readline()
        self._running.append(process)

    def end_owner(self, number: signal.Signals) -> float:
        """Send the owner a signal; return the seconds until another process delivers."""
        owner, _ = self._next_line(set())
        now = now_ns()
        (process,) = [one for one in self._running if one.pid == owner]
        process.send_signal(number)
        _, at = self._next_line({owner})
        process.wait()
        self._running.remove(process)
        self._start()
        return (at - now) / NS_PER_S

    def _next_line(self, but: set[int]) -> tuple[int, int]:
        """Return the process and the time of the next line that comes from other processes."""
        with self._lines.open("rb") as lines:
            lines.seek(0, os.SEEK_END)
            rest, end = b"", time.monotonic() + 60
            while time.monotonic() < end:
                *whole, rest = (rest + lines.read()).split(b"\n")
                for line in whole:
                    if line.count(b" ") == 1:
                        pid, at = map(int, line.split())
                        if pid not in but:
                            return pid, at
                time.sleep(0.002)
        raise TimeoutError("no process delivered for a minute")


# --- the service, an idle player ---------------------------------------------------------------


def service(scale: float) -> Figures:
    """CPU of the membership service with 1,000 cursors of 100 owners, one move a second each."""
    with new_cluster(mms=3) as cluster:
        found = cursor_load.load(cluster, max(5.0, 15 * scale))
    more = found["with"]["core_percent"] - found["without"]["core_percent"]
    goal = {"more_core_percent": more, "goal_core_percent": _SERVICE_GOAL_PERCENT}
    return {"L10": {**found, **goal}}


def idle(scale: float) -> Figures:
    """CPU of an idle player of five SQLite targets, beside an idle subscription."""
    seconds = max(5.0, 15 * scale)
    with tempfile.TemporaryDirectory(prefix="ziplog-bench-") as folder, new_cluster() as cluster:
        with cluster.connect() as log:
            log.insert_after(b"first")
        with ExitStack() as stack:
            workers = {
                "player": stack.enter_context(Workers(_play_idle, [(cluster.endpoint, folder)])),
                "subscription": stack.enter_context(Workers(_follow, [(cluster.endpoint,)])),
            }
            for worker in workers.values():
                worker.receive()
            time.sleep(2)
            nodes = {name: [psutil.Process(worker.pids[0])] for name, worker in workers.items()}
            before = {name: cpu_s(processes) for name, processes in nodes.items()}
            time.sleep(seconds)
            percent = {
                f"{name}_core_percent": 100 * (cpu_s(processes) - before[name]) / seconds
                for name, processes in nodes.items()
            }
    return {"L11": {"targets": _IDLE_TARGETS, **percent, "goal_core_percent": _IDLE_GOAL_PERCENT}}


def _play_idle(endpoint: str, folder: str, pipe: Connection) -> None:
    from logplayer import Player, targets  # noqa: PLC0415 - in the worker

    specs = [targets.sqlite(f"idle-{n}", f"{folder}/{n}.db") for n in range(_IDLE_TARGETS)]
    with Player(endpoint, "idle", specs) as player:
        with ziplog.connect(endpoint) as log:
            last = log.check_tail()
        player.wait_until(last, timeout=60)
        pipe.send("ready")
        pipe.recv()


def _follow(endpoint: str, pipe: Connection) -> None:
    with ziplog.connect(endpoint) as log, log.subscribe() as records:
        records.fetch(1)
        pipe.send("ready")
        threading.Thread(target=list, args=(records,), daemon=True).start()
        pipe.recv()
