"""Concurrent single inserts of one client: tasks of an asyncio client, threads of a blocking one.

One shard, f=1. A step's figures are inserts/s, p50 and p99, and CPU per insert, at the client and
at the servers together. The tasks take turns with tasks of one client of Redis, if it is installed.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import psutil
from metrics.closed_loop import medians
from metrics.cpu import cpu_s, servers_of
from metrics.picture import BLUE, OCHRE, RED, axes
from metrics.rounds import alternate, ratio
from metrics.setup import progress
from metrics.steady_state import steady_cluster
from metrics.windows import latency_ms

import ziplog
import ziplog.aio
from log_bench.other_systems import Redis, append_to_redis

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

Figures = dict[str, Any]

_COUNTS: Final = (1, 4, 16, 64)
_SIZES: Final = (4096, 100)
_ROUNDS: Final = 3
#: The kind of the tasks of an asyncio client.
_TASKS: Final = "tasks"
#: Part of a step before its figures count.
_WARM_UP: Final = 0.2


def measure(seconds: float) -> Figures:
    """Return the figures of each step, each of `seconds`."""
    steps = [
        (kind, size, count) for kind in ("tasks", "threads") for size in _SIZES for count in _COUNTS
    ]
    rows = []
    with ExitStack() as stack:
        running = stack.enter_context(steady_cluster())
        servers = servers_of(running).values()
        tasks = {_TASKS: partial(_step, servers, partial(_run_tasks, running.endpoint))}
        if Redis.is_installed():
            redis = stack.enter_context(Redis())
            peers = [psutil.Process(pid) for pid in redis.pids]
            tasks[Redis.name] = partial(_step, peers, partial(_run_redis, redis.port))
        threads = {"threads": partial(_step, servers, partial(_run_threads, running.endpoint))}
        for kind, size, count in progress(steps, "concurrency"):
            kinds = tasks if kind == _TASKS else threads
            found = _rounds(kinds, os.urandom(size), count, seconds)
            rows += [{"kind": k, "size": size, "concurrent": count} | found[k] for k in kinds]
    return {"rounds": _ROUNDS, "steps": rows}


def _rounds(
    kinds: dict[str, Callable[..., Figures]], payload: bytes, count: int, seconds: float
) -> dict[str, Figures]:
    """Return the medians of each kind; the kinds take turns in each round."""
    rows: dict[str, list[Figures]] = {kind: [] for kind in kinds}

    def run(kind: str) -> float:
        kinds[kind](payload, count, _WARM_UP * seconds)
        rows[kind].append(kinds[kind](payload, count, seconds))
        rate: float = rows[kind][-1]["per_s"]
        return rate

    rates = alternate({kind: partial(run, kind) for kind in kinds}, _ROUNDS, warm=0)
    ours = next(iter(kinds))
    return {
        kind: {
            **medians(rows[kind], list(rows[kind][0])),
            "ziplog_ratio": ratio(rates[ours], rates[kind]),
        }
        for kind in kinds
    }


def _step(
    servers: Collection[psutil.Process],
    run: Callable[..., list[float]],
    payload: bytes,
    count: int,
    seconds: float,
) -> Figures:
    before, own_before = cpu_s(servers), time.process_time()
    took = run(payload, count, seconds)
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


def _run_redis(port: int, payload: bytes, count: int, seconds: float) -> list[float]:
    """Append in `count` tasks of one client of Redis; return how long each took, in seconds.

    Each task uses a connection of the client's pool, as `WAIT` is about one connection.
    """
    from redis.asyncio import Redis as AsyncRedis  # noqa: PLC0415 - an optional peer

    took: list[float] = []

    async def append(client: AsyncRedis, end: float) -> None:
        while (start := time.monotonic()) < end:
            await append_to_redis(client, payload)
            took.append(time.monotonic() - start)

    async def run() -> None:
        async with AsyncRedis(host="127.0.0.1", port=port) as client:
            end = time.monotonic() + seconds
            await asyncio.gather(*(append(client, end) for _ in range(count)))

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
            for kind, color in ((_TASKS, BLUE), ("threads", OCHRE), (Redis.name, RED)):
                row = [s for s in figures["steps"] if (s["kind"], s["size"]) == (kind, size)]
                if not row:
                    continue
                counts, rates = [s["concurrent"] for s in row], [s["per_s"] for s in row]
                panel.plot(counts, rates, "o-", color=color, label=kind)
            panel.set_xscale("log", base=2)
            panel.set(xlabel="concurrent inserts of one client", ylabel="inserts/s")
            panel.set(title=f"{size:,} B", ylim=(0, None))
            panel.legend()
