"""Latency of a gated insert in virtual time: `python -m tests.sim.scalog [--t-ord-ms 0.1 1 5]`.

The ordering layer (scripts/scalog) runs with the project's consensus beside a simulated cluster.
As in `tests.sim.latency`, every hop takes 40 to 60 µs. A turn of consensus takes 20 µs, and nothing
else takes time. The pause between two inserts varies, so a report may come at any time of an
interval.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from scalog.gated import GatedCore
from scalog.layer import LayerNode
from scalog.messages import decode
from scalog.ordering import Cuts, Ordering
from scalog.tracker import Tracker

from tests.sim.latency import Loop, quantiles_us, run_load
from tests.sim.programs import ClientProgram
from tests.simulator.disk import Disk
from tests.simulator.kernel import MS
from tests.simulator.process import Process
from tests.simulator.raft import RaftGroup
from ziplog.client.common.requests import Preferences
from ziplog.runtime.driver import Driver

if TYPE_CHECKING:
    from tests.sim.cluster import SimCluster
    from ziplog.core.node import Event

_FIRST_PORT: Final = 29_000
_UNGATED: Final = ("insert", "append")


class LayerProgram:
    """The program of a node of the layer, as in `scalog.layer.main`."""

    def __init__(self, process: Process, group: RaftGroup, log: list[str], t_ord_ns: int) -> None:
        tracker = Tracker(process.kernel.random.randbytes(16), log)
        self.node = LayerNode(Ordering(t_ord_ns), tracker)
        self._group, self._name = group, process.name
        early: list[Event] = []
        self._post = early.append
        member = group.join(process.name, self._report)
        assert process.transport is not None
        self.driver = Driver(
            self.node, process.transport, propose=member.propose, clock=process.clock,  # type: ignore[arg-type]
            on_halt=process.halt, decode=decode,
        )  # fmt: skip
        self._post = self.driver.post
        for event in early:
            self._post(event)

    def _report(self, event: Event) -> None:
        self._post(event)

    def turn(self) -> None:
        self.driver.run_once()

    def check(self) -> None:
        self.node.check()

    def end(self) -> None:
        self._group.leave(self._name)


class SimLayer:
    """The layer beside a simulated cluster, whose later clients are gated."""

    def __init__(self, cluster: SimCluster, nodes: int, t_ord_ns: int) -> None:
        names = [f"scalog-{number}" for number in range(nodes)]
        disks = {name: Disk(cluster.kernel.random) for name in names}
        log = [node.endpoint for node in cluster.config.mms]
        paths = {name: disk.path("consensus") for name, disk in disks.items()}
        self.group = RaftGroup(cluster.network, names, Cuts, paths)
        endpoints = [f"127.0.0.1:{_FIRST_PORT + number}" for number in range(nodes)]

        def start(process: Process) -> LayerProgram:
            return LayerProgram(process, self.group, log, t_ord_ns)

        def start_client(process: Process) -> ClientProgram:
            client = process.kernel.random.randbytes(16)
            core = GatedCore(endpoints, client, log, Preferences(cluster.choose))
            return ClientProgram(process, core, decode)

        self.processes = {
            name: Process(cluster.network, name, endpoint, start)
            for name, endpoint in zip(names, endpoints, strict=True)
        }
        for process in self.processes.values():
            process.start()
        cluster._start_client = start_client  # type: ignore[method-assign, assignment]
        assert cluster.kernel.run_until(lambda: bool(self.group.leader), 10_000 * MS)


def measure(
    shards: int,
    t_ord_ms: float,
    nodes: int = 3,
    count: int = 1500,
    *,
    think_us: int = 3000,
    seed: int = 7,
) -> dict[str, float]:
    """Return p50 and p99 of gated inserts in µs, beside inserts and appends, and the ratios."""
    t_ord_ns = int(t_ord_ms * MS)

    def begin(cluster: SimCluster) -> Loop:
        SimLayer(cluster, nodes, t_ord_ns)
        jitter_us = max(t_ord_ns // 1000, 1)
        return Loop(cluster, "writer-0", ["gate"], count, think_us, jitter_us)

    took = run_load(shards, begin, seed, is_raft_real=True).took
    found = _ungated(shards, count, think_us, seed) | quantiles_us("gate", took["gate"])
    for kind in _UNGATED:
        found[f"gate_{kind}_ratio"] = found["gate_p50_us"] / found[f"{kind}_p50_us"]
    return found


@cache
def _ungated(shards: int, count: int, think_us: int, seed: int) -> dict[str, float]:
    """Return p50 and p99 of inserts and appends, in µs."""
    found: dict[str, float] = {}
    for kind in _UNGATED:

        def begin(cluster: SimCluster, kinds: tuple[str] = (kind,)) -> Loop:
            return Loop(cluster, "writer-0", kinds, count, think_us)

        found |= quantiles_us(kind, run_load(shards, begin, seed).took[kind])
    return found


def main() -> None:
    """Print a line for each interval, size of the layer, and number of shards."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.scalog", description=__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 6])
    parser.add_argument("--t-ord-ms", type=float, nargs="+", default=[0.1, 1, 5])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 3])
    arguments = parser.parse_args()
    for shards in arguments.shards:
        for t_ord_ms in arguments.t_ord_ms:
            for nodes in arguments.nodes:
                found = measure(shards, t_ord_ms, nodes)
                figures = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
                name = f"{shards} shards, T_ord {t_ord_ms:g} ms, {nodes} nodes"
                sys.stdout.write(f"{name}: {figures}\n")


if __name__ == "__main__":
    main()
