"""Cluster of a LogDB benchmark: its own servers, and one coordinator process."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fault_injection.coordinators import Coordinators
from metrics.cpu import servers_of
from metrics.setup import cluster as new_cluster
from scalog.layer import Layer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import psutil

    from ziplog.local import Cluster


_GATED: Final = str(Path(__file__).with_name("gated_inserts.py"))


class BenchSetup(NamedTuple):
    """The running cluster and coordinator."""

    cluster: Cluster
    coordinators: Coordinators
    #: The endpoints of the ordering layer; empty: no gate.
    layer: tuple[str, ...] = ()

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
    gate: tuple[int, float] | None = None,
) -> Iterator[BenchSetup]:
    """Run a database.

    Args:
        shards: of its log, f=1.
        options: of the coordinator.
        command: what runs the coordinator.
        launcher: what runs the nodes of the log, see `Cluster`.
        gate: the nodes of an ordering layer, and its interval in ms; the coordinator is behind it.

    """
    with (
        new_cluster(shards, launcher=launcher, supervise=False) as cluster,
        Layer(cluster.endpoint, *gate) if gate else nullcontext() as layer,
    ):
        endpoints = tuple(layer.endpoints) if layer else ()
        if layer:
            command = (sys.executable, _GATED, ",".join(endpoints))
        with Coordinators(
            cluster.config.data_dir.parent / "coordinators",
            cluster.endpoint,
            1,
            command=command,
            options=options,
        ) as coordinators:
            yield BenchSetup(cluster, coordinators, endpoints)
