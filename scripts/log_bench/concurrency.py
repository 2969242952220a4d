"""Concurrent single inserts of one client: tasks of an asyncio client, threads of a blocking one.

One shard, f=1. A step's figures are inserts/s, p50 and p99, and CPU per insert, at the client and
at the servers together.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from metrics.cpu import cpu_s, servers_of
from metrics.picture import BLUE, OCHRE, axes
from metrics.setup import cluster as new_cluster
from metrics.setup import progress
from metrics.windows import latency_ms

import ziplog
import ziplog.aio

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ziplog.local import Cluster

Figures = dict[str, Any]

_COUNTS: Final = (1, 4, 16, 64)
_SIZES: Final = (4096, 100)
#: Part of a step before its figures count.
_WARM_UP: Final = 0.2


def measure(seconds: float) -> Figures:
    """Return the figures of each step, each of `seconds`."""
    steps = [
        (kind, size, count) for kind in ("tasks", "threads") for size in _SIZES for count in _COUNTS
    ]
    rows = []
    with new_cluster() as running:
        for kind, size, count in progress(steps, "concurrency"):
            run = _run_tasks if kind == "tasks" else _run_threads
            run(running.endpoint, os.urandom(size), count, _WARM_UP * seconds)
            figures = _step(running, run, os.urandom(size), count, seconds)
            rows.append({"kind": kind, "size": size, "concurrent": count} | figures)
    return {"steps": rows}


def _step(
    running: Cluster, run: Callable[..., list[float]], payload: bytes, count: int, seconds: float
) -> Figures:
    servers = servers_of(running).values()
    before, own_before = cpu_s(servers), time.process_time()
    took = run(running.endpoint, payload, count, seconds)
    own, theirs = time.process_time() - own_before, cpu_s(servers) - before
    return {
        "per_s": len(took) / seconds,
        **latency_ms(took),
        "client_cpu_us": own / len(took) * 1e6,
        "server_cpu_us": theirs / len(took) * 1e6,
    }


def _run_tasks(endpoint: str, payload: bytes, count: int, seconds: float) -> list[float]:
    """Insert in `count` tasks of one client; return how long each insert took, in seconds."""
    took: list[float] = []

    async def insert(log: ziplog.aio.AsyncLog, end: float) -> None:
        while (start := time.monotonic()) < end:
            await log.insert_after(payload)
            took.append(time.monotonic() - start)

    async def run() -> None:
        async with await ziplog.aio.connect(endpoint) as log:
            end = time.monotonic() + seconds
            await asyncio.gather(*(insert(log, end) for _ in range(count)))

    asyncio.run(run())
    return took


def _run_threads(endpoint: str, payload: bytes, count: int, seconds: float) -> list[float]:
    """Insert in `count` threads of one client; return how long each insert took, in seconds."""
    took: list[float] = []

    def insert(log: ziplog.Log, end: float) -> None:
        while (start := time.monotonic()) < end:
            log.insert_after(payload)
            took.append(time.monotonic() - start)

    with ziplog.connect(endpoint) as log:
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=insert, args=(log, end)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return took


def draw(figures: Figures, path: Path) -> None:
    """Draw inserts/s over the number of tasks or threads, for each size of payloads."""
    with axes(path) as panels:
        for panel, size in zip(panels, _SIZES, strict=True):
            for kind, color in (("tasks", BLUE), ("threads", OCHRE)):
                row = [s for s in figures["steps"] if (s["kind"], s["size"]) == (kind, size)]
                counts, rates = [s["concurrent"] for s in row], [s["per_s"] for s in row]
                panel.plot(counts, rates, "o-", color=color, label=kind)
            panel.set_xscale("log", base=2)
            panel.set(xlabel="concurrent inserts of one client", ylabel="inserts/s")
            panel.set(title=f"{size:,} B", ylim=(0, None))
            panel.legend()
