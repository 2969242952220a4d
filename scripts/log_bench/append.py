"""Appends beside inserts and deliveries: what the order of real time costs.

1, 2 and 6 shards, f=1. `one_client`: a blocking client, random shards; inserts, appends, and
inserts from the call to the delivery at a follower. `tasks`: 64 tasks of one asyncio client;
`followed` are inserts while the client has the streams of appends, as if the log had a reader.
`beside`: a client's inserts alone, and beside another client that inserts, or appends, at a fixed
rate. The kinds of each part take turns. Each turn has a client of its own, and one of inserts
begins when no shard has readers any more.
"""

from __future__ import annotations

import asyncio
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from metrics.closed_loop import medians
from metrics.cpu import cpu_s, servers_of
from metrics.picture import BLUE, GREY, OCHRE, axes
from metrics.rounds import alternate, ratio
from metrics.setup import progress
from metrics.steady_state import steady_cluster
from metrics.windows import latency_ms, percentile
from metrics.workers import Workers

import ziplog
import ziplog.aio

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from ziplog.local import Cluster

Figures = dict[str, Any]

_SHARDS: Final = (1, 2, 6)
_STAMP: Final = struct.Struct("<q")
_SIZE: Final = 4096
_ROUNDS: Final = 9
#: Time after which a shard without subscriptions has no readers (shard/state/replica_state.py).
_REST_S: Final = 1.1
#: Calls of each turn before those that count.
_WARM_UP: Final = 30
_TASKS: Final = 64
_TASK_SIZES: Final = (4096, 100)
_TASK_ROUNDS: Final = 5
_KINDS: Final = ("inserts", "followed", "appends")
#: Calls a second of the client beside which others insert.
_BESIDE_PER_S: Final = 50
_INSERT: Final = "insert_after"
_APPEND: Final = "append"


def measure(scale: float) -> Figures:
    """Run all parts; `scale` 1 takes about seven minutes."""
    count, seconds = max(50, int(300 * scale)), min(max(0.5, 1.5 * scale), 4.0)
    figures = {}
    for shards in progress(_SHARDS, "append"):
        with steady_cluster(shards=shards) as cluster:
            figures[f"{shards} shards"] = {
                "one_client": one_client(cluster.endpoint, count),
                "tasks": {f"{size} B": tasks(cluster, size, seconds) for size in _TASK_SIZES},
                "beside": beside(cluster.endpoint, count),
            }
    return figures


def _in_turns(
    kinds: dict[str, Callable[[], list[float]]],
) -> tuple[Figures, dict[str, list[float]]]:
    """Return the latency of each kind over all rounds, and its p50s, one a round."""
    took: dict[str, list[float]] = {kind: [] for kind in kinds}

    def run(kind: str) -> float:
        some = kinds[kind]()
        took[kind] += some
        return percentile(some, 50) or 0.0

    p50s = alternate({kind: partial(run, kind) for kind in kinds}, _ROUNDS, warm=0)
    return {kind: latency_ms(values) for kind, values in took.items()}, p50s


def _calls(endpoint: str, name: str, count: int) -> list[float]:
    """Make calls one after the other; return how long each took, in seconds."""
    payload, took = bytes(_SIZE), []
    if name == _INSERT:
        time.sleep(_REST_S)
    with ziplog.connect(endpoint) as log:
        call = getattr(log, name)
        for number in range(_WARM_UP + count):
            start = time.monotonic()
            call(payload)
            if number >= _WARM_UP:
                took.append(time.monotonic() - start)
    return took


# --- one client ----------------------------------------------------------------------------------


def one_client(endpoint: str, count: int) -> Figures:
    """Return the latency of inserts, appends and deliveries, and the ratios of p50."""
    with Workers(_follow, [(endpoint,)]) as follower:
        latency, p50s = _in_turns(
            {
                "insert": partial(_calls, endpoint, _INSERT, count),
                "append": partial(_calls, endpoint, _APPEND, count),
                "delivery": partial(_deliveries, endpoint, follower, count),
            }
        )
    return {
        **latency,
        "append_insert_ratio": ratio(p50s["append"], p50s["insert"]),
        "append_delivery_ratio": ratio(p50s["append"], p50s["delivery"]),
    }


def _deliveries(endpoint: str, follower: Workers, count: int) -> list[float]:
    """Insert beside a follower; return how long each record took to it, in seconds."""
    filler = bytes(_SIZE - _STAMP.size)
    with ziplog.connect(endpoint) as log:
        # An insert alone may get a position before records of earlier turns.
        start = log.insert_after(_STAMP.pack(0) + filler, log.check_tail())
        follower.send((start, _WARM_UP + count))
        follower.receive()
        for _ in range(_WARM_UP + count):
            log.insert_after(_STAMP.pack(time.monotonic_ns()) + filler)
        (delays,) = follower.receive()
    return list(delays[_WARM_UP:])


def _follow(endpoint: str, pipe: Connection) -> None:
    """Receive a position and a number of records, again and again; send their delays."""
    with ziplog.connect(endpoint) as log:
        while True:
            start, count = pipe.recv()
            delays: list[float] = []
            with log.subscribe(start) as subscription:
                next(subscription)
                pipe.send("ready")
                while len(delays) < count:
                    stamp = _STAMP.unpack_from(next(subscription).payload)[0]
                    delays.append((time.monotonic_ns() - stamp) / 1e9)
            pipe.send(delays)


# --- many tasks ----------------------------------------------------------------------------------


def tasks(cluster: Cluster, size: int, seconds: float) -> Figures:
    """Return the calls a second and their CPU, of many tasks of one client, and the ratios."""
    servers, rows = servers_of(cluster).values(), {kind: [] for kind in _KINDS}

    def run(kind: str) -> float:
        if kind == "inserts":
            time.sleep(_REST_S)
        before, own = cpu_s(servers), time.process_time()
        calls = asyncio.run(_run_tasks(cluster.endpoint, kind, size, seconds))
        spent = {"client": time.process_time() - own, "server": cpu_s(servers) - before}
        us = {f"{name}_cpu_us": cpu / calls * 1e6 for name, cpu in spent.items()}
        rows[kind].append({"per_s": calls / seconds, **us})
        return calls / seconds

    rates = alternate({kind: partial(run, kind) for kind in _KINDS}, _TASK_ROUNDS, warm=1)
    result: Figures = {kind: medians(of[1:], list(of[0])) for kind, of in rows.items()}
    result["append_insert_ratio"] = ratio(rates["appends"], rates["inserts"])
    result["append_followed_ratio"] = ratio(rates["appends"], rates["followed"])
    return result


async def _run_tasks(endpoint: str, kind: str, size: int, seconds: float) -> int:
    """Make calls in many tasks; return how many."""
    payload, done = bytes(size), 0
    async with await ziplog.aio.connect(endpoint) as log:
        if kind != "inserts":
            await log.append(payload)  # From then on, the client follows the shards for 5 s.
        call = log.append if kind == "appends" else log.insert_after
        end = time.monotonic() + seconds

        async def run() -> None:
            nonlocal done
            while time.monotonic() < end:
                await call(payload)
                done += 1

        await asyncio.gather(*(run() for _ in range(_TASKS)))
    return done


# --- beside others -------------------------------------------------------------------------------


def beside(endpoint: str, count: int) -> Figures:
    """Return the latency of inserts alone and beside others, and the ratios of p50."""
    with Workers(_disturb, [(endpoint,)]) as other:
        latency, p50s = _in_turns(
            {
                name: partial(_beside, endpoint, other, call, count)
                for name, call in (("alone", ""), ("inserts", _INSERT), ("appends", _APPEND))
            }
        )
    return {
        **latency,
        "appends_alone_ratio": ratio(p50s["appends"], p50s["alone"]),
        "appends_inserts_ratio": ratio(p50s["appends"], p50s["inserts"]),
    }


def _beside(endpoint: str, other: Workers, call: str, count: int) -> list[float]:
    other.send(call)
    other.receive()
    took = _calls(endpoint, _INSERT, count)
    other.send("")
    other.receive()
    return took


def _disturb(endpoint: str, pipe: Connection) -> None:
    """Make calls at a fixed rate from one message to the next one."""
    payload = bytes(_SIZE)
    while True:
        name = pipe.recv()
        with ziplog.connect(endpoint) as log:
            if name:
                getattr(log, name)(payload)
            pipe.send("ready")
            due = time.monotonic()
            while not pipe.poll(max(due - time.monotonic(), 0.0) if name else None):
                getattr(log, name)(payload)
                due += 1 / _BESIDE_PER_S
        pipe.recv()
        pipe.send("done")


# --- the picture ---------------------------------------------------------------------------------


def draw(figures: Figures, path: Path) -> None:
    """Draw the p50 of each kind, and calls a second of many tasks, over the number of shards."""
    names = list(figures)
    with axes(path) as (latency, rates):
        for offset, kind, colour in (
            (-1, "insert", GREY),
            (0, "append", BLUE),
            (1, "delivery", OCHRE),
        ):
            p50s = [figures[name]["one_client"][kind]["p50_ms"] for name in names]
            latency.bar(
                [at + offset / 4 for at in range(len(names))], p50s, 0.22, color=colour, label=kind
            )
        latency.set(ylabel="p50 in ms", title="one client, 4 KB")
        for offset, kind, colour in ((-0.5, "inserts", GREY), (0.5, "appends", BLUE)):
            per_s = [figures[name]["tasks"][f"{_SIZE} B"][kind]["per_s"] for name in names]
            rates.bar(
                [at + offset / 3 for at in range(len(names))], per_s, 0.3, color=colour, label=kind
            )
        rates.set(ylabel="calls/s", title=f"{_TASKS} tasks of one client, 4 KB")
        for panel in (latency, rates):
            panel.set_xticks(range(len(names)), names)
            panel.legend()
