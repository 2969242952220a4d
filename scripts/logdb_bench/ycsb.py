"""YCSB's core workloads A, B, C and F on LogDB: 100,000 keys, values of 100 bytes.

A value is one field of 100 bytes (YCSB's default is ten of them). A read is a single `get`, so it
sees everything that completed before; an update is a blind `put`; what reads, modifies and writes
is an interactive transaction, begun again with the same key until it is committed. Keys are drawn
by YCSB's scrambled zipfian, and uniformly. Workloads take turns in rounds on one database, with one
coordinator that makes checkpoints as usual.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final

from metrics.closed_loop import PROCESSES, ClientProcesses, Outcome, medians
from metrics.setup import Progress

import logdb.aio
from logdb_bench.cluster_setup import bench_setup
from logdb_bench.workloads import DISTRIBUTIONS, MIXES, YCSB_BYTES, YCSB_KEYS, Plan, key_of

if TYPE_CHECKING:
    from logdb_bench.cluster_setup import BenchSetup

    Figures = dict[str, Any]

CLIENTS: Final = 16
_LOADED_AT_ONCE: Final = 100
_LOADERS: Final = 16


def measure(scale: float, shards: int) -> Figures:
    """Measure all workloads; `scale` 1: three rounds with five seconds each."""
    rounds, seconds = max(1, round(3 * scale)), min(max(1.0, 5 * scale), 5.0)
    keys = max(1000, min(YCSB_KEYS, int(YCSB_KEYS * scale)))
    warm_s = seconds / 5
    names = [f"{mix} {distribution}" for mix in MIXES for distribution in DISTRIBUTIONS]
    progress = Progress("ycsb", rounds * len(names))
    runs: dict[str, list[Outcome]] = {name: [] for name in names}
    with bench_setup(shards) as setup:
        asyncio.run(load(setup, keys))
        for number in range(rounds):
            for name in names:
                plan = Plan("logdb", setup.endpoint, name, keys=keys, seed=number + 1)
                with ClientProcesses(plan) as crew:
                    runs[name].append(crew.run(CLIENTS, seconds, warm_s))
                rate = len(runs[name][-1].all.took_us) / seconds
                progress.step(f"{name}: {rate:,.0f}/s")
    return {
        "shards": shards,
        "clients": CLIENTS,
        "client_processes": PROCESSES,
        "keys": keys,
        "value_bytes": YCSB_BYTES,
        "seconds": seconds,
        "rounds": rounds,
        "workloads": {name: figures(of) for name, of in runs.items()},
    }


def figures(outcomes: list[Outcome]) -> Figures:
    """Return the medians of several rounds of one workload, of all operations and of each kind."""
    rows = [
        {"all": of.all.figures(of.seconds)}
        | {name: tally.figures(of.seconds) for name, tally in of.tallies.items()}
        for of in outcomes
    ]
    keys = ("per_s", "p50_us", "p99_us", "aborted")
    return {name: medians([row[name] for row in rows if name in row], keys) for name in rows[0]}


async def load(setup: BenchSetup, keys: int) -> None:
    """Write all keys, a hundred in one transaction."""
    rng = random.Random(0)  # noqa: S311 - no secret
    starts = iter(range(0, keys, _LOADED_AT_ONCE))
    async with logdb.aio.connect(setup.endpoint, timeout=60) as db:

        async def put_some() -> None:
            for start in starts:
                some = range(start, min(start + _LOADED_AT_ONCE, keys))
                await db.multi_put({key_of(key): rng.randbytes(YCSB_BYTES) for key in some})

        await asyncio.gather(*(put_some() for _ in range(_LOADERS)))
