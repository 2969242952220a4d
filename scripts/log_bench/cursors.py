"""Cursors: latency of claims and commits, takeover after a kill, and what 1,000 cursors cost.

One shard, f=1, three nodes of the membership service. `load`: asyncio clients in one process own
cursors, and move each once a second. The CPU is that of all three nodes. Each cursor is a reader of
the log, so the inserts beside them are few: on two cores, many would measure the readers.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psutil
from metrics.cpu import cpu_s
from metrics.setup import Progress
from metrics.setup import cluster as new_cluster
from metrics.windows import latency_ms
from metrics.workers import Workers

import ziplog
import ziplog.aio

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ziplog.local import Cluster

Figures = dict[str, Any]

_LEASE_S: Final = 3.0
_OWNERS: Final = 100
_CURSORS_EACH: Final = 10
_MOVE_INTERVAL_S: Final = 1.0
_INSERT_INTERVAL_S: Final = 0.1


def measure(scale: float) -> Figures:
    """Run all parts; `scale` 1 takes about two minutes."""
    steps = Progress("cursors", 3)
    count, seconds = max(20, int(300 * scale)), max(5.0, 20 * scale)
    with new_cluster(mms=3) as cluster:
        figures = calls(cluster.endpoint, count)
        steps.step("calls")
        figures["takeover_ms"] = takeovers(cluster.endpoint, max(3, int(10 * scale)))
        steps.step("takeovers")
        figures["load"] = load(cluster, seconds)
        steps.step("load")
    return figures


def calls(endpoint: str, count: int) -> Figures:
    """Return the latency of claims, commits and releases, one after the other."""
    took: dict[str, list[float]] = {"claim": [], "commit": [], "close": []}

    def timed(name: str, act: Any) -> Any:
        start = time.monotonic()
        result = act()
        took[name].append(time.monotonic() - start)
        return result

    with ziplog.connect(endpoint) as log:
        for _ in range(count):
            cursor = timed("claim", lambda: log.cursor("calls", hold_s=0))
            timed("commit", cursor.commit)
            timed("close", cursor.close)
    return {name: latency_ms(values) for name, values in took.items()}


def takeovers(endpoint: str, rounds: int) -> Figures:
    """Return the time from the death of an owner to the claim of a client that waits."""
    took = []
    with ziplog.connect(endpoint) as log:
        for number in range(rounds):
            with Workers(_own, [(endpoint, f"takeover/{number}")]) as owner:
                owner.receive()
            start = time.monotonic()
            with log.cursor(f"takeover/{number}", timeout=60.0, hold_s=0):
                took.append(time.monotonic() - start)
    return {"lease_s": _LEASE_S, **latency_ms(took)}


def _own(endpoint: str, name: str, pipe: Connection) -> None:
    with ziplog.connect(endpoint) as log, log.cursor(name, lease_s=_LEASE_S, hold_s=0):
        pipe.send("owned")
        pipe.recv()


def load(cluster: Cluster, seconds: float) -> Figures:
    """Return the CPU of the service and inserts' latency, without cursors and with many."""
    nodes = [psutil.Process(cluster.pid(node.name)) for node in cluster.config.mms]
    figures: Figures = {"owners": _OWNERS, "cursors": _OWNERS * _CURSORS_EACH}
    figures["without"] = _observe(cluster.endpoint, nodes, seconds)
    with Workers(_own_many, [(cluster.endpoint,)]) as owners:
        owners.receive()
        start = time.monotonic()
        figures["with"] = _observe(cluster.endpoint, nodes, seconds)
        owners.send("end")
        (moves,) = owners.receive()
        figures["moves_per_s"] = moves / (time.monotonic() - start)
    return figures


def _observe(endpoint: str, nodes: list[psutil.Process], seconds: float) -> Figures:
    """Return the share of a core that the service uses, and the latency of inserts meanwhile."""
    took = []
    with ziplog.connect(endpoint) as log:
        log.insert_after(b"first")
        before, start = cpu_s(nodes), time.monotonic()
        while time.monotonic() < start + seconds:
            began = time.monotonic()
            log.insert_after(bytes(100))
            took.append(time.monotonic() - began)
            time.sleep(_INSERT_INTERVAL_S)
        share = (cpu_s(nodes) - before) / (time.monotonic() - start)
    return {"core_percent": 100 * share, "insert": latency_ms(took)}


def _own_many(endpoint: str, pipe: Connection) -> None:
    with suppress(EOFError):
        asyncio.run(_move_many(endpoint, pipe))


async def _move_many(endpoint: str, pipe: Connection) -> None:
    """Own many cursors, and move each once an interval until a message; send how many moves."""
    logs = [await ziplog.aio.connect(endpoint, timeout=60.0) for _ in range(_OWNERS)]
    cursors = [
        log.cursor(f"load/{owner}/{number}", start=ziplog.RID_RECENT, hold_s=0)
        for number in range(_CURSORS_EACH)
        for owner, log in enumerate(logs)
    ]
    for cursor in cursors:
        await cursor
    pipe.send("owned")
    moves, due, loop = 0, 0.0, asyncio.get_running_loop()
    while not pipe.poll():
        due = max(due, loop.time() - _MOVE_INTERVAL_S)
        for cursor in cursors:
            due += _MOVE_INTERVAL_S / len(cursors)
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            cursor.commit_soon()
            moves += 1
    pipe.send(moves)
    for log in logs:
        await log.close()
