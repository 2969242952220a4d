"""Cluster of a LogDB benchmark: its own servers, and one coordinator process."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from fault_injection.coordinators import Coordinators
from metrics.cpu import servers_of
from metrics.setup import cluster as new_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import psutil

    from ziplog.local import Cluster


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
        servers = servers_of(self.cluster)
        return {
            "coordinator": self.coordinators.process(0),
            "primary": servers["shard-0-0"],
            "backup": servers["shard-0-1"],
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
        new_cluster(shards, launcher=launcher, supervise=False) as cluster,
        Coordinators(
            cluster.config.data_dir.parent / "coordinators",
            cluster.endpoint,
            1,
            command=command,
            options=options,
        ) as coordinators,
    ):
        yield BenchSetup(cluster, coordinators)
