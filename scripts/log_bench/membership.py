"""Idle clusters, and the membership service with many shards."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psutil
from metrics.cpu import cpu_s
from metrics.picture import BLUE, GREY, OCHRE, axes
from metrics.setup import cluster, progress

from log_bench import emulation

if TYPE_CHECKING:
    from pathlib import Path

Figures = dict[str, Any]


def idle(seconds: float) -> Figures:
    """CPU of all processes of an idle cluster of 2 shards, f=1 (P11)."""
    with cluster(shards=2) as running:
        with running.connect() as log:
            log.insert_after(b"once")
        time.sleep(5)  # until the epochs have grown long
        processes = [
            process
            for process in psutil.Process().children(recursive=True)
            if any(part in ("mms", "shard", "failure_handler") for part in process.cmdline())
        ]
        before = cpu_s(processes)
        start = time.monotonic()
        time.sleep(seconds)
        used = cpu_s(processes) - before
        return {"processes": len(processes), "core_share": used / (time.monotonic() - start)}


def measure(seconds: float) -> Figures:
    """Run the membership service with emulated shards."""
    return {
        str(shards): emulation.measure(shards, 2 * seconds)
        for shards in progress((100, 500, 1000, 2000, 4000), "mms")
    }


def draw(results: Figures, path: Path) -> None:
    """Draw what the service costs, and how exact its epochs are, over the number of shards."""
    with axes(path) as (left, right):
        points = [(int(count), of["cpu_share"]) for count, of in results.items()]
        left.plot(*zip(*points, strict=True), "o-")
        left.axhline(1, color=GREY, linestyle=":")
        left.set(xlabel="emulated shards", ylabel="share of one core")
        for key, line in (("p50", "-"), ("p99", "--"), ("max", ":")):
            for name, label, colour in (
                ("jitter_ms", "off its time at a server", BLUE),
                ("spread_ms", "first to last server", OCHRE),
            ):
                row = {int(count): of[name][key] for count, of in results.items()}
                right.plot(row.keys(), row.values(), line, color=colour, label=f"{label}, {key}")
        right.set(xlabel="emulated shards", ylabel="ms, begin of a lease of 16 epochs of 10 ms")
        right.set_yscale("log")
        right.legend(fontsize="small")
