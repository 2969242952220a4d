"""Many concurrent clients, each with one insert at a time, and their cost at clients and servers.

The clients of one step run in a few processes, with asyncio. A step's figures are counts (inserts,
retries, views), times (p50, p99), CPU per insert, and the servers' memory. Rule: nothing fails in a
step, so every view that begins, and every error, is the load's doing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from metrics.closed_loop import ClientProcesses, Tally
from metrics.cpu import cpu_s, servers_of
from metrics.picture import BLUE, axes
from metrics.setup import cluster as new_cluster
from metrics.setup import progress
from metrics.windows import latency_ms

import ziplog
import ziplog.aio

if TYPE_CHECKING:
    from pathlib import Path

    from metrics.closed_loop import Done

    from ziplog.local import Cluster

Figures = dict[str, Any]

#: Number of clients in each step.
_STEPS: Final = (16, 64, 300, 600, 1000)
_SIZE: Final = 100
_INSERT: Final = "insert"


def measure(seconds: float) -> Figures:
    """Return goodput, copies, times, views and memory of more and more clients; 2 shards, f=1."""
    steps = []
    for count in progress(_STEPS, "clients"):
        with new_cluster(shards=2) as running:
            steps.append(step(running, count, seconds))
    rates = [one["per_s"] for one in steps]
    return {"steps": steps, "lowest_to_peak": min(rates) / max(rates)}


def step(cluster: Cluster, clients: int, seconds: float) -> Figures:
    """Run `clients` inserting clients for `seconds`; return the result."""
    before: Figures = {}
    with ClientProcesses(InsertPlan(cluster.endpoint)) as processes:
        outcome = processes.run(clients, seconds, 0.0, lambda: before.update(_servers(cluster)))
        after = _servers(cluster)
    inserts = outcome.tallies.get(_INSERT, Tally([], 0))
    errors = {kind: of.aborted for kind, of in outcome.tallies.items() if kind != _INSERT}
    count = max(len(inserts.took_us), 1)
    return {
        "clients": clients,
        "per_s": len(inserts.took_us) / seconds,
        "retries_per_insert": inserts.aborted / count,
        **latency_ms(took / 1e6 for took in inserts.took_us),
        "server_cpu_us": (after["cpu_s"] - before["cpu_s"]) / count * 1e6,
        "client_cpu_us": outcome.cpu_s / count * 1e6,
        "errors": sum(errors.values()),
        "error_types": ", ".join(errors),
        "views": after["views"],
        "new_views": after["views"] - before["views"],
        "not_live": after["not_live"],
        "server_mib": after["mib"],
    }


def _servers(cluster: Cluster) -> Figures:
    """Return the views of all shards together, and the servers' CPU seconds and largest memory."""
    with cluster.connect() as log:
        shards = log.cluster()["shards"]
    servers = servers_of(cluster).values()
    return {
        "views": sum(shard["view"] for shard in shards),
        "not_live": sum(shard["state"] != "live" for shard in shards),
        "mib": max(server.memory_info().rss for server in servers) / 2**20,
        "cpu_s": cpu_s(servers),
    }


@dataclass(frozen=True)
class InsertPlan:
    """Clients that insert."""

    endpoint: str

    def prepare(self) -> None:
        """Change nothing."""

    def session(self, _number: int) -> InsertSession:
        """Return a client."""
        return InsertSession(self.endpoint)


class InsertSession:
    """A client that inserts."""

    def __init__(self, endpoint: str, size: int = _SIZE) -> None:
        self._endpoint: Final = endpoint
        self._payload: Final = os.urandom(size)
        self._log: ziplog.aio.AsyncLog

    async def connect(self) -> None:
        """Connect, and insert once."""
        self._log = await ziplog.aio.connect(self._endpoint, timeout=30)
        await self._log.insert_after(self._payload)

    async def act(self) -> Done:
        """Insert once; copies of an insert, and inserts that fail, are in vain."""
        copies = self._log.stats()["retries"]
        try:
            await self._log.insert_after(self._payload)
        except ziplog.ZiplogError as error:
            return type(error).__name__, False, 1
        return _INSERT, True, self._log.stats()["retries"] - copies

    async def close(self) -> None:
        """Close the connection."""
        await self._log.close()


def draw(figures: Figures, path: Path) -> None:
    """Draw goodput, and the times of inserts, over the number of clients."""
    x = {"xlabel": "clients, each with one insert at a time", "xscale": "log"}
    with axes(path) as (left, right):
        clients = [step["clients"] for step in figures["steps"]]
        left.plot(clients, [step["per_s"] for step in figures["steps"]], "o-", color=BLUE)
        left.set(**x, ylabel="inserts/s", ylim=(0, None))
        for key, line in (("p50_ms", "-"), ("p99_ms", "--")):
            row = [step[key] for step in figures["steps"]]
            right.plot(clients, row, line, marker="o", color=BLUE, label=key[:3])
        right.set(**x, ylabel="ms, one insert", yscale="log")
        right.legend()
