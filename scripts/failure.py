"""Throughput around the kill of a storage server, in windows of 100 ms (T Fig. 4.7).

Each shard has a client of its own that inserts at a steady pace (an open loop: what cannot be done
now is done later, and counts when it is done). A subscriber follows from the tail.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import ziplog
import ziplog.aio
from ziplog.local import Cluster

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

_SPAWN = multiprocessing.get_context("spawn")
WINDOW_S = 0.1
#: Before the kill, and in all.
_BEFORE_S = 3.0
_PAYLOAD = b"x" * 100


def measure(seconds: float, shards: int, per_s: int, victim: int) -> dict[str, Any]:
    """Kill replica `victim` of shard 0 under load; return figures and the windows' counts.

    Args:
        seconds: the duration after the kill.
        shards: the number of shards, each with f=1 and its own client.
        per_s: inserts per second at each shard.
        victim: 0 for the primary, 1 for the backup.

    """
    with (
        tempfile.TemporaryDirectory(prefix="ziplog-bench-") as folder,
        Cluster(folder, shards=shards) as cluster,
    ):
        suspicion_s = cluster.config.suspicion_ms / 1000
        pipes, workers = [], []
        groups = [list(range(shards))[start::2] for start in range(2)]
        for target, arguments in [
            *((_load, (cluster.endpoint, group, per_s)) for group in groups),
            (_follow, (cluster.endpoint,)),
        ]:
            here, there = _SPAWN.Pipe()
            worker = _SPAWN.Process(target=target, args=(*arguments, there), daemon=True)
            worker.start()
            pipes.append(here)
            workers.append(worker)
        for pipe in pipes:
            pipe.recv()  # it has begun
        start = time.monotonic()
        time.sleep(_BEFORE_S)
        killed_at = time.monotonic()
        cluster.kill(f"shard-0-{victim}")
        time.sleep(seconds)
        for pipe in pipes:
            pipe.send(None)
        *loads, followed = [pipe.recv() for pipe in pipes]
        for worker in workers:
            worker.join()
    done = {shard: times for load in loads for shard, times in load["done"].items()}
    failed = sum(load["failed"] for load in loads)
    return _figures(done, followed, failed, start, killed_at, suspicion_s)


def _figures(
    done: dict[int, list[float]],
    followed: list[float],
    failed: int,
    start: float,
    killed_at: float,
    suspicion_s: float,
) -> dict[str, Any]:
    ends = min(max(times) for times in done.values())
    windows = int((ends - start) / WINDOW_S)
    counts = {
        shard: [
            sum(start + i * WINDOW_S <= t < start + (i + 1) * WINDOW_S for t in times)
            for i in range(windows)
        ]
        for shard, times in sorted(done.items())
    }
    first = int((killed_at - start) / WINDOW_S)
    others = [sum(counts[s][i] for s in counts if s != 0) for i in range(windows)]
    whole_s = max((b - a for a, b in _gaps(done[0], killed_at)), default=0.0)
    reader_s = max((b - a for a, b in _gaps(followed, killed_at)), default=0.0)
    return {
        "detection_s": suspicion_s,
        "writes_whole_after_s": whole_s,
        "readers_wait_s": reader_s,
        "failed_inserts": failed,
        "others_per_window_before": statistics.median(others[:first]),
        "others_per_window_after": statistics.median(others[first:]),
        "others_lowest_window_before": min(others[5:first], default=0),
        "others_lowest_window_after": min(others[first:], default=0),
        "killed_in_window": first,
        "windows": {str(shard): row for shard, row in counts.items()},
    }


def _gaps(times: list[float], killed_at: float) -> list[tuple[float, float]]:
    """Return the pauses that end after the kill, counted from the kill on."""
    ordered = sorted(times)
    return [
        (max(a, killed_at), b)
        for a, b in pairwise(ordered)
        if b > killed_at
    ]  # fmt: skip


def _load(endpoint: str, shards: list[int], per_s: int, there: Connection) -> None:
    asyncio.run(_insert_steadily(endpoint, shards, per_s, there))


async def _insert_steadily(endpoint: str, shards: list[int], per_s: int, there: Connection) -> None:
    done: dict[int, list[float]] = {shard: [] for shard in shards}
    failed = 0
    running = True

    async def one(shard: int) -> None:
        nonlocal failed
        async with ziplog.aio.connect(endpoint, timeout=20) as log:
            log.set_policy(ziplog.policy.pin(shard))
            pending: set[asyncio.Task[None]] = set()

            async def insert() -> None:
                nonlocal failed
                try:
                    await log.insert_after(_PAYLOAD)
                except ziplog.ZiplogError:
                    failed += 1
                else:
                    done[shard].append(time.monotonic())

            due = time.monotonic()
            while running:
                task = asyncio.ensure_future(insert())
                pending.add(task)
                task.add_done_callback(pending.discard)
                due += 1 / per_s
                await asyncio.sleep(max(due - time.monotonic(), 0))
            await asyncio.gather(*pending)

    clients = [asyncio.ensure_future(one(shard)) for shard in shards]
    while not all(done.values()):  # noqa: ASYNC110 - a look at lists that clients fill
        await asyncio.sleep(0.01)
    there.send(True)
    await asyncio.get_running_loop().run_in_executor(None, there.recv)
    running = False
    await asyncio.gather(*clients)
    there.send({"done": done, "failed": failed})


def _follow(endpoint: str, there: Connection) -> None:
    times: list[float] = []
    with ziplog.connect(endpoint) as log, log.subscribe(ziplog.RID_RECENT) as subscription:
        there.send(True)
        while not there.poll():
            if subscription.fetch(timeout=0.2):
                times.append(time.monotonic())
    there.send(times)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the throughput of all shards around each kill."""
    import matplotlib as mpl  # noqa: PLC0415  optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  optional

    figure, axes = plt.subplots(1, len(results), figsize=(5.5 * len(results), 3.8), squeeze=False)
    for axis, (name, result) in zip(axes[0], results.items(), strict=True):
        rows = list(result["windows"].values())
        total = [sum(column) / WINDOW_S for column in zip(*rows, strict=True)]
        rest = [sum(column) / WINDOW_S for column in zip(*rows[1:], strict=True)]
        kill = result["killed_in_window"]
        at = [(index - kill) * WINDOW_S for index in range(len(total))]
        axis.plot(at, total, color="#2a6f97", label="all shards")
        axis.plot(at, rest, color="#c58b2b", linewidth=1, label="the other shards")
        axis.axvline(0, color="#888888", linestyle=":")
        axis.set_title(f"the {name} of one shard is killed")
        axis.set_xlabel("seconds after the kill")
        axis.set_ylabel("inserts/s")
        axis.set_ylim(0, None)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
