"""Fast and slow path: how often an insert takes which, over clients and load."""

from __future__ import annotations

import os
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

from metrics.picture import BLUE, axes
from metrics.setup import cluster, progress
from metrics.workers import Workers

import ziplog
from log_bench.latency import micros

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

Figures = dict[str, Any]


def insert_openly(
    endpoint: str, rate_per_s: float, seconds: float, size: int, pipe: Connection
) -> None:
    """Insert at random times, `rate_per_s` on average (0: as fast as one call at a time goes)."""
    rng = random.Random(os.getpid())  # noqa: S311  only arrival times
    payload = rng.randbytes(size)
    fast: list[int] = []
    slow: list[int] = []
    with ziplog.connect(endpoint) as log:
        log.insert_after(payload)
        pipe.send("ready")
        pipe.recv()
        stats = log.stats()
        end = time.monotonic() + seconds
        due = sorted(
            time.monotonic() + rng.random() * seconds for _ in range(int(rate_per_s * seconds))
        )
        while time.monotonic() < end:
            if rate_per_s:
                if not due:
                    break
                time.sleep(max(0.0, due.pop(0) - time.monotonic()))
            start = time.perf_counter_ns()
            log.insert_after(payload)
            took = time.perf_counter_ns() - start
            now = log.stats()
            (slow if now["slow_path"] > stats["slow_path"] else fast).append(took)
            stats = now
    pipe.send((fast, slow))


def load(endpoint: str, clients: int, rate_per_s: float, seconds: float) -> Figures:
    """Run client processes against one shard; return what both paths took."""
    arguments = (endpoint, rate_per_s / clients, seconds, 4096)
    with Workers(insert_openly, [arguments] * clients) as workers:
        workers.receive()
        workers.send("go")
        both = workers.receive()
    fast = [took for of_client, _ in both for took in of_client]
    slow = [took for _, of_client in both for took in of_client]
    total = len(fast) + len(slow)
    return {
        "clients": clients,
        "target_per_s": rate_per_s or None,
        "per_s": total / seconds,
        "fast_share": len(fast) / max(total, 1),
        "fast": micros(fast),
        "slow": micros(slow),
    }


def _follow(endpoint: str, pipe: Connection) -> None:
    """Receive all records."""
    with ziplog.connect(endpoint) as log, log.subscribe() as subscription:
        pipe.send("ready")
        for _ in subscription:
            pass


def followed(shards: int, seconds: float) -> list[Figures]:
    """Return the same for a log that a subscriber follows: its shards send each other hints."""
    with cluster(shards) as running, Workers(_follow, [(running.endpoint,)]) as follower:
        follower.receive()
        return [load(running.endpoint, clients, 0, seconds) for clients in (1, 4)]


def paths(seconds: float) -> Figures:
    """The share of the fast path over clients and load, as thesis Fig. 4.4; slow / fast.

    `followed`: the share with a subscriber, by the number of shards.
    """
    points = []
    with cluster() as running:
        plan = [(n, rate) for n in (1, 2, 4, 8) for rate in (250, 1000, 2000, 0)]
        for clients, rate in progress(plan, "paths"):
            points.append(load(running.endpoint, clients, rate, seconds))
    contended = [p for p in points if p["slow"]["count"] >= 50 and p["fast"]["count"] >= 50]
    ratios = [p["slow"]["p50_us"] / p["fast"]["p50_us"] for p in contended]
    return {
        "points": points,
        "slow_to_fast": statistics.median(ratios) if ratios else None,
        "followed": {f"{shards} shards": followed(shards, seconds) for shards in (2, 6)},
    }


def draw(results: Figures, path: Path) -> None:
    """Draw latency and paths, of all results."""
    with axes(path) as (left, right):
        if "latency" in results:
            targets = results["latency"]["targets"]
            names = list(targets)
            left.barh(names, [targets[n]["p99_us"] for n in names], color="#c6d8e8", label="p99")
            left.barh(names, [targets[n]["p50_us"] for n in names], color=BLUE, label="p50")
            left.set_xlabel("µs, one client, 4 KB, f=1")
            left.invert_yaxis()
            left.legend()
        if "paths" in results:
            points = results["paths"]["points"]
            for clients in sorted({p["clients"] for p in points}):
                own = sorted(
                    (p["per_s"], p["fast_share"]) for p in points if p["clients"] == clients
                )
                right.plot(*zip(*own, strict=True), marker="o", label=f"{clients} clients")
            right.set(xlabel="inserts/s into one shard", ylabel="share of the fast path")
            right.set_ylim(0, 1.02)
            right.legend()
