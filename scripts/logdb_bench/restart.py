"""Restart benchmark: start time of a coordinator and size of the log, with and without checkpoints.

Commits are blind puts of 100 bytes over 100,000 keys, by one client process with 512 asyncio tasks
on one connection; each task runs one put at a time. A coordinator with `--no-checkpoints` writes
them; its restart replays everything. Then a coordinator with checkpoints runs until its round is
complete, and starts are timed again. A start lasts from the execution of `python -m logdb` until
its ready message.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from fault_injection.coordinators import Coordinators
from metrics.setup import Progress
from metrics.setup import cluster as new_cluster

import logdb
import logdb.aio
from logdb_bench.workloads import YCSB_BYTES, key_of

if TYPE_CHECKING:
    from ziplog.local import Cluster

    Figures = dict[str, Any]

COMMITS: Final = 1_000_000
_KEYS: Final = 100_000
_TASKS: Final = 512
_STARTS: Final = 3
_REPORT_INTERVAL_S: Final = 10.0
_READY_S: Final = 600.0
_ROUND_S: Final = 300.0
#: The log has its final size when it has not changed for this time, in seconds.
_CALM_S: Final = 5.0
_POLL_S: Final = 0.25
_MIB: Final = 2**20


def measure(scale: float, shards: int) -> Figures:
    """Measure; `scale` 1: a million commits. There are ten times as many commits as keys."""
    commits = int(COMMITS * min(scale, 1.0))
    keys = max(_KEYS * commits // COMMITS, 1)
    progress = Progress("restart", 5)
    with new_cluster(shards, supervise=False) as cluster:
        segment_mib = cluster.config.segment_bytes / _MIB
        empty = _starts(cluster)
        progress.step("starts with an empty log")
        with _coordinator(cluster, "--no-checkpoints") as running:
            per_s = asyncio.run(_write(running.endpoints, commits, keys, progress))
            before = {"after_writing_rss_mib": _rss(running)} | _sizes(cluster, running)
        progress.step(f"{commits:,} commits, {per_s:,.0f}/s")
        replay = _starts(cluster)
        progress.step("starts by replay")
        every = str(max(commits // 10, 1))
        with _coordinator(cluster, "--checkpoint-every", every) as running:
            after = _clean(cluster, running)
        progress.step("a checkpoint, and the cleaner")
        checkpoint = _starts(cluster)
        progress.step("starts from the checkpoint")
    return {
        "shards": shards,
        "commits": commits,
        "keys": keys,
        "value_bytes": YCSB_BYTES,
        "segment_mib": segment_mib,
        "tasks": _TASKS,
        "writes_per_s": per_s,
        "replayed_per_s": commits / max(replay["seconds"] - empty["seconds"], 1e-3),
        "starts": {"empty": empty, "by replay": replay, "from a checkpoint": checkpoint},
        "before": before,
        "after": after,
    }


def _coordinator(cluster: Cluster, *options: str) -> Coordinators:
    folder = cluster.config.data_dir.parent / "coordinators"
    return Coordinators(folder, cluster.endpoint, 1, options=options, ready_s=_READY_S)


def _starts(cluster: Cluster) -> Figures:
    """Start a coordinator some times; return how long it takes, and how large it is then."""
    times, sizes = [], []
    for _ in range(_STARTS):
        begin = time.monotonic()
        with _coordinator(cluster, "--no-checkpoints") as running:
            times.append(time.monotonic() - begin)
            sizes.append(_rss(running))
    return {
        "seconds": statistics.median(times),
        "rss_mib": statistics.median(sizes),
        "all_seconds": [round(value, 3) for value in times],
    }


def _rss(running: Coordinators) -> float:
    return running.process(0).memory_info().rss / _MIB


async def _write(endpoint: str, commits: int, keys: int, progress: Progress) -> float:
    """Run `commits` puts; return the number per second."""
    rng = random.Random(1)  # noqa: S311 - no secret
    numbers = iter(range(commits))
    begin = reported = time.monotonic()
    async with logdb.aio.connect(endpoint, timeout=120) as db:

        async def put_some() -> None:
            nonlocal reported
            for number in numbers:
                # Each key once in a while: first all of them, then by chance.
                key = number if number < keys else rng.randrange(keys)
                await db.put(key_of(key), rng.randbytes(YCSB_BYTES))
                if time.monotonic() - reported > _REPORT_INTERVAL_S:
                    reported = time.monotonic()
                    progress.report(f"{number:,} of {commits:,} commits written")

        await asyncio.gather(*(put_some() for _ in range(_TASKS)))
    return commits / (time.monotonic() - begin)


def _clean(cluster: Cluster, running: Coordinators) -> Figures:
    """Wait until a coordinator has made a checkpoint and the log does not shrink any more."""
    begin = time.monotonic()
    with logdb.connect(running.endpoints) as db:
        while not (cleaner := db.status()["cleaner"])["rounds"]:
            if time.monotonic() > begin + _ROUND_S:
                raise RuntimeError(f"no round was completed in {_ROUND_S:g} s: {cleaner}")
            time.sleep(_POLL_S)
    took = time.monotonic() - begin
    size, calm = _disk(cluster), time.monotonic()
    while time.monotonic() < calm + _CALM_S:
        time.sleep(_POLL_S)
        if (now := _disk(cluster)) != size:
            size, calm = now, time.monotonic()
    return {"round_s": took} | _sizes(cluster, running)


def _sizes(cluster: Cluster, running: Coordinators) -> Figures:
    """Return how large the log is, by its files and by the coordinator's count."""
    with logdb.connect(running.endpoints) as db:
        status = db.status()
    cleaner = status["cleaner"]
    return {
        "disk_mib": _disk(cluster) / _MIB,
        "log_mib": status["log_bytes"] / _MIB,
        "dead_mib": status["dead_bytes"] / _MIB,
        "live_mib": status["data_bytes"] / _MIB,
        "moved_mib": cleaner.get("moved_bytes", 0) / _MIB,
        "checkpoint_mib": cleaner.get("checkpoint_bytes", 0) / _MIB,
        "trimmed": status["trimmed"],
        "rss_mib": _rss(running),
    }


def _disk(cluster: Cluster) -> int:
    """Return the bytes on disk of one server of each shard."""
    folders = [cluster.config.data_dir / shard.replicas[0].name for shard in cluster.config.shards]
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):  # it was trimmed just now
                total += path.stat().st_blocks * 512
    return total
