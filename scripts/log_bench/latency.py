"""Latency and CPU of an insert, beside baselines and other systems; throughput of one client."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import psutil
from metrics.cpu import pinned, servers_of, spent
from metrics.rounds import alternate, ratio
from metrics.setup import cluster
from metrics.steady_state import steady_cluster
from metrics.windows import percentile

from log_bench.baselines import TcpFloor, ZmqFloor
from log_bench.other_systems import Nats, Redis

if TYPE_CHECKING:
    import ziplog

Figures = dict[str, Any]


class Target(Protocol):
    """Something that takes a payload and returns when it is safe."""

    name: str

    @property
    def pids(self) -> list[int]:
        """Its servers, the one that orders records first."""
        ...

    def insert(self, payload: bytes) -> None:
        """Put one payload."""
        ...


class ZiplogTarget:
    """One blocking client of one shard."""

    name = "Ziplog insert_after"

    def __init__(self, log: ziplog.Log) -> None:
        self.log = log
        self.pids = [replica["pid"] for replica in log.cluster()["shards"][0]["replicas"]]

    def insert(self, payload: bytes) -> None:
        """Insert one record."""
        self.log.insert_after(payload)


def micros(times_ns: list[int]) -> Figures:
    """Return percentiles in microseconds, 0 if there are no times, and the number of times."""
    return {f"p{p:g}_us": (percentile(times_ns, p) or 0) / 1000 for p in (50, 99, 99.9)} | {
        "count": len(times_ns)
    }


def timed(target: Target, payload: bytes, count: int) -> list[int]:
    """Insert `count` times; return the duration of each insert in nanoseconds."""
    times = []
    clock = time.perf_counter_ns
    for _ in range(count):
        start = clock()
        target.insert(payload)
        times.append(clock() - start)
    return times


# --- latency -----------------------------------------------------------------------------------


def latency(rounds: int, count: int, size: int) -> Figures:
    """Insert latency, f=1, one client, beside the baselines and the installed other systems.

    First the system places all processes, then they are pinned (`metrics.cpu.pinned`).
    """
    payload = os.urandom(size)
    with ExitStack() as stack:
        running = stack.enter_context(steady_cluster())
        log = stack.enter_context(running.connect())
        targets: list[Target] = [
            ZiplogTarget(log),
            stack.enter_context(TcpFloor(size)),
            stack.enter_context(ZmqFloor(size)),
        ]
        targets += [stack.enter_context(p()) for p in (Redis, Nats) if p.is_installed()]
        placed = compare(targets, payload, rounds, count)
        with pinned(target.pids for target in targets):
            pinned_ones = compare(targets, payload, rounds, count)
        share = fast_share(log.stats())
    return {"size": size, "fast_path_share": share, "targets": placed, "pinned": pinned_ones}


def compare(targets: list[Target], payload: bytes, rounds: int, count: int) -> Figures:
    """Time all targets in turns; `ratio`: of the first one's medians to the target's."""
    times: dict[str, list[int]] = {target.name: [] for target in targets}

    def median(target: Target) -> float:
        taken = timed(target, payload, count)
        times[target.name] += taken
        return statistics.median(taken)

    for target in targets:
        timed(target, payload, count)
    medians = alternate({target.name: partial(median, target) for target in targets}, rounds, 0)
    ours = medians[targets[0].name]
    return {
        name: micros(times[name]) | {"ratio": ratio(ours, theirs)}
        for name, theirs in medians.items()
    }


def fast_share(stats: dict[str, Any]) -> float:
    """Return which share of a client's inserts took the fast path."""
    fast, slow = stats["fast_path"], stats["slow_path"]
    return fast / max(fast + slow, 1)


# --- CPU ---------------------------------------------------------------------------------------


def cpu_of(target: Target, processes: dict[str, psutil.Process], count: int) -> Figures:
    """Return the CPU time of each process, and of its busiest threads, in µs an insert."""
    payload = os.urandom(4096)
    timed(target, payload, count // 10)
    return spent(processes, lambda times: timed(target, payload, times), count)


def cpu(count: int) -> Figures:
    """CPU time of an insert by process: one client, 4 KB, f=1, beside the pyzmq baseline.

    First the system places all processes, then they are pinned.
    """
    with steady_cluster() as running, running.connect() as log, ZmqFloor(4096) as floor:
        ours, own = ZiplogTarget(log), {"client": psutil.Process()}
        echoes = {f"echo {number}": psutil.Process(pid) for number, pid in enumerate(floor.pids)}

        def both() -> Figures:
            return {
                ours.name: cpu_of(ours, own | servers_of(running), count),
                floor.name: cpu_of(floor, own | echoes, count),
            }

        placed = both()
        with pinned(target.pids for target in (ours, floor)):
            return placed | {"pinned": both()}


# --- throughput --------------------------------------------------------------------------------


def throughput(seconds: float) -> Figures:
    """`insert_many` of one client into one shard, f=1, and the same read back."""
    result: Figures = {}
    for size, batch in ((4096, 2048), (100, 16384)):
        with cluster() as running, running.connect(timeout=60) as log:
            payloads = [os.urandom(size) for _ in range(batch)]
            log.insert_many(payloads)
            rates = []
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                start = time.perf_counter()
                log.insert_many(payloads)
                rates.append(batch / (time.perf_counter() - start))
            total = batch * (len(rates) + 1)
            start = time.perf_counter()
            with log.subscribe(follow=False) as subscription:
                read = sum(1 for _ in subscription)
            assert read == total, f"{read} records came back of {total}"
            result[f"{size} B"] = {
                "insert_per_s": statistics.median(rates),
                "subscribe_per_s": read / (time.perf_counter() - start),
            }
    return result
