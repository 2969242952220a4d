"""Cluster of a LogDB benchmark: its own servers, one coordinator process, and progress output."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
from fault_injection.coordinators import Coordinators

from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class BenchSetup(NamedTuple):
    """The running cluster and coordinator."""

    cluster: Cluster
    coordinators: Coordinators

    @property
    def endpoint(self) -> str:
        """The coordinator's address."""
        return self.coordinators.endpoints

    def processes(self) -> dict[str, psutil.Process]:
        """Return the processes on the path of a commit to shard 0, by role."""
        with self.cluster.connect() as log:
            primary, backup = log.cluster()["shards"][0]["replicas"]
        return {
            "coordinator": psutil.Process(self.coordinators.pid(0)),
            "primary": psutil.Process(primary["pid"]),
            "backup": psutil.Process(backup["pid"]),
        }


@contextmanager
def bench_setup(
    shards: int,
    options: Sequence[str] = (),
    *,
    command: Sequence[str] = (sys.executable, "-m", "logdb"),
    launcher: Sequence[str] = (),
) -> Iterator[BenchSetup]:
    """Run a database.

    Args:
        shards: of its log, f=1.
        options: of the coordinator.
        command: what runs the coordinator.
        launcher: what runs the nodes of the log, see `Cluster`.

    """
    with (
        tempfile.TemporaryDirectory(prefix="logdb-bench-") as folder,
        Cluster(Path(folder) / "log", shards=shards, launcher=launcher, supervise=False) as cluster,
        Coordinators(
            Path(folder) / "coordinators", cluster.endpoint, 1, command=command, options=options
        ) as coordinators,
    ):
        yield BenchSetup(cluster, coordinators)


class Progress:
    """Progress on stderr, with an estimate of the remaining time."""

    def __init__(self, name: str, steps: int, seconds: float) -> None:
        """Say what begins; `seconds`: about how long it will take."""
        self._name, self._steps, self._done = name, steps, 0
        self._began = time.monotonic()
        self.report(f"{steps} steps, about {_minutes(seconds)}")

    def step(self, text: str) -> None:
        """One more is done."""
        self._done += 1
        passed = time.monotonic() - self._began
        left = passed / self._done * (self._steps - self._done)
        self.report(f"{self._done}/{self._steps} {text}; about {_minutes(left)} left")

    def report(self, text: str) -> None:
        """Say something."""
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
