"""Many concurrent clients, each with one insert at a time, and their cost at clients and servers.

The clients of one step run in a few processes, with asyncio. A step's figures are counts (inserts,
retries, views), times (p50, p99), CPU per insert, and the servers' memory. Rule: nothing fails in a
step, so every view that begins, and every error, is the load's doing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import psutil
from metrics.cpu import cpu_s
from metrics.picture import axes
from metrics.setup import cluster as new_cluster
from metrics.setup import progress
from metrics.workers import Workers

import ziplog
import ziplog.aio

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from ziplog.local import Cluster

Figures = dict[str, Any]

#: Number of clients in each step.
_STEPS: Final = (16, 64, 300, 600, 1000)
_PROCESSES: Final = 4
_SIZE: Final = 100
_MIB: Final = 2**20
#: Number of clients of a process that connect at the same time.
_CONNECTING: Final = 25
#: Between the last client's warm-up and the first insert that counts, in seconds.
_LEAD_S: Final = 0.5


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
    shares = [len(range(index, clients, _PROCESSES)) for index in range(_PROCESSES)]
    arguments = [(cluster.endpoint, share, seconds) for share in shares if share]
    with Workers(_run, arguments) as workers:
        workers.receive()
        before = _servers(cluster)
        workers.send(time.monotonic() + _LEAD_S)
        rows = workers.receive()
        after = _servers(cluster)
    return _figures(rows, clients, seconds, after["cpu_s"] - before["cpu_s"]) | {
        "views": after["views"],
        "new_views": after["views"] - before["views"],
        "not_live": after["not_live"],
        "server_mib": after["mib"],
    }


def _servers(cluster: Cluster) -> Figures:
    """Return the views of all shards together, and the servers' CPU seconds and largest memory."""
    with cluster.connect() as log:
        shards = log.cluster()["shards"]
    pids = [replica["pid"] for shard in shards for replica in shard["replicas"]]
    servers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return {
        "views": sum(shard["view"] for shard in shards),
        "not_live": sum(shard["state"] != "live" for shard in shards),
        "mib": max(server.memory_info().rss for server in servers) / _MIB,
        "cpu_s": cpu_s(servers),
    }


def _figures(rows: list[Figures], clients: int, seconds: float, servers_s: float) -> Figures:
    took = sorted(value for row in rows for value in row["took"])
    inserts = max(len(took), 1)
    errors: Counter[str] = sum((Counter(row["errors"]) for row in rows), Counter())
    retries = sum(row["retries"] for row in rows)
    return {
        "clients": clients,
        "per_s": len(took) / seconds,
        "retries": retries,
        "retries_per_insert": retries / inserts,
        "p50_ms": took[len(took) // 2] * 1e3 if took else None,
        "p99_ms": took[len(took) * 99 // 100] * 1e3 if took else None,
        "max_ms": took[-1] * 1e3 if took else None,
        "server_cpu_us": servers_s / inserts * 1e6,
        "client_cpu_us": sum(row["cpu_s"] for row in rows) / inserts * 1e6,
        "errors": sum(errors.values()),
        "error_types": dict(errors),
        "client_mib": max(row["mib"] for row in rows),
    }


# --- a process of clients ---


def _run(endpoint: str, clients: int, seconds: float, pipe: Connection) -> None:
    asyncio.run(_drive(endpoint, clients, seconds, pipe))


async def _drive(endpoint: str, clients: int, seconds: float, pipe: Connection) -> None:
    payload = random.randbytes(_SIZE)  # noqa: S311  only bytes
    gate = asyncio.Semaphore(_CONNECTING)

    async def open_one() -> ziplog.aio.AsyncLog:
        async with gate:
            log = await ziplog.aio.connect(endpoint, timeout=30)
            await log.insert_after(payload)
            return log

    logs = await asyncio.gather(*(open_one() for _ in range(clients)))
    loop = asyncio.get_running_loop()
    pipe.send("ready")
    begin = await loop.run_in_executor(None, pipe.recv)
    await asyncio.sleep(begin - time.monotonic())
    retries, cpu = sum(log.stats()["retries"] for log in logs), time.process_time()
    took: list[float] = []
    errors: Counter[str] = Counter()
    end = begin + seconds

    async def insert(log: ziplog.aio.AsyncLog) -> None:
        while (start := time.monotonic()) < end:
            try:
                await log.insert_after(payload)
            except ziplog.ZiplogError as error:
                errors[type(error).__name__] += 1
            else:
                if (done := time.monotonic()) <= end:
                    took.append(done - start)

    await asyncio.gather(*map(insert, logs))
    pipe.send(
        {
            "took": took,
            "errors": dict(errors),
            "retries": sum(log.stats()["retries"] for log in logs) - retries,
            "cpu_s": time.process_time() - cpu,
            "mib": psutil.Process().memory_info().rss / _MIB,
        }
    )
    await loop.run_in_executor(None, pipe.recv)  # with all connections, until it is killed


# --- output ---


def lines(figures: Figures) -> list[str]:
    """Return the steps as lines."""
    head = (
        "  clients inserts/s retries/insert  p50 ms  p99 ms  server CPU µs  client CPU µs"
        "  new views  errors  server MiB"
    )
    rows = [
        f"  {s['clients']:7} {s['per_s']:9,.0f} {s['retries_per_insert']:14.4f}"
        f" {s['p50_ms'] or 0:7.1f} {s['p99_ms'] or 0:7.1f} {s['server_cpu_us']:14.0f}"
        f" {s['client_cpu_us']:14.0f} {s['new_views']:10} {s['errors']:7} {s['server_mib']:11.0f}"
        for s in figures["steps"]
    ]
    return [head, *rows, f"  lowest goodput / peak: {figures['lowest_to_peak']:.2f}"]


def draw(figures: Figures, path: Path) -> None:
    """Draw goodput, and the times of inserts, over the number of clients."""
    with axes(path) as (left, right):
        clients = [step["clients"] for step in figures["steps"]]
        left.plot(clients, [step["per_s"] for step in figures["steps"]], "o-", color="#2a6f97")
        left.set_ylabel("inserts/s")
        left.set_ylim(bottom=0)
        for key, line in (("p50_ms", "-"), ("p99_ms", "--")):
            row = [step[key] for step in figures["steps"]]
            right.plot(clients, row, line, marker="o", color="#2a6f97", label=key[:3])
        right.set_ylabel("ms, one insert")
        right.set_yscale("log")
        right.legend()
        for axis in (left, right):
            axis.set_xlabel("clients, each with one insert at a time")
            axis.set_xscale("log")
