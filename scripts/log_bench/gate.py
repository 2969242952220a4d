"""Gated inserts beside inserts and appends: what a separate ordering layer costs (T 3, T 4.4.1).

2 shards, f=1. `latency`: a blocking client inserts 4 KB, appends, or inserts behind gates with
layers of several sizes and intervals, in turns. It pauses for a random time before each call, so a
report may come at any time of an interval. A layer runs during its own turns only. `failure`: two
clients insert at a steady pace, one of them behind a gate; the layer's leader is killed in the
middle (T Fig. 3.4). The layer's files of consensus are in memory.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from metrics.cpu import cpu_s
from metrics.picture import BLUE, GREY, OCHRE, axes
from metrics.rounds import alternate, ratio
from metrics.setup import Progress
from metrics.setup import cluster as new_cluster
from metrics.windows import counts, latency_ms, longest_pause, percentile
from metrics.workers import Workers, exact_loop
from scalog import gated
from scalog.layer import Layer

import ziplog
import ziplog.aio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection
    from pathlib import Path

    import psutil

Figures = dict[str, Any]

#: Intervals of the thesis (T 3.5.3) and of the SpecLog paper (S 4.9), and a longer one, in ms.
T_ORD_MS: Final = (0.1, 1.0, 5.0)
NODES: Final = (1, 3)
_SHARDS: Final = 2
_BYTES: Final = 4096
_ROUNDS: Final = 7
#: Calls of each turn before those that count.
_WARM_UP: Final = 30
#: Time after which a shard without subscriptions has no readers (shard/state/replica_state.py).
_REST_S: Final = 1.1
WINDOW_S: Final = 0.1
#: The layer whose leader is killed, and inserts a second of each client.
_KILLED: Final = (3, 1.0)
_PER_S: Final = 100
#: Longest time from the kill until a new leader has answered everything.
_MOST_S: Final = 30.0


def measure(scale: float, t_ord_ms: Sequence[float], nodes: Sequence[int]) -> Figures:
    """Measure both parts; `scale` 1 with six layers takes about seven minutes."""
    with new_cluster(shards=_SHARDS) as cluster:
        layers = [(number, interval) for number in nodes for interval in t_ord_ms]
        count, rounds = max(40, int(200 * scale)), max(2, round(_ROUNDS * scale))
        return {
            "latency": latency(cluster.endpoint, layers, count, rounds),
            "failure": failure(cluster.endpoint, max(2.0, 4 * scale)),
        }


# --- latency -------------------------------------------------------------------------------------


def latency(endpoint: str, layers: Sequence[tuple[int, float]], count: int, rounds: int) -> Figures:
    """Return the latency of each kind, ratios of p50, and the CPU of each layer."""
    progress = Progress("scalog", rounds * (2 + len(layers)))
    longest_s = max(interval for _, interval in layers) / 1000
    kinds: dict[str, Callable[[], tuple[list[float], float]]] = {
        "insert": partial(_calls, endpoint, "insert_after", count, longest_s),
        "append": partial(_calls, endpoint, "append", count, longest_s),
    }
    for nodes, interval in layers:
        name = f"gate, {nodes} {'node' if nodes == 1 else 'nodes'}, {interval:g} ms"
        kinds[name] = partial(_gated, endpoint, nodes, interval, count, longest_s)
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    cores: dict[str, list[float]] = {kind: [] for kind in kinds}

    def run(kind: str) -> float:
        some, share = kinds[kind]()
        took[kind] += some
        cores[kind].append(share)
        progress.step(kind)
        return percentile(some, 50) or 0.0

    p50s = alternate({kind: partial(run, kind) for kind in kinds}, rounds, warm=0)
    return {
        kind: latency_ms(took[kind])
        | {f"{other}_ratio": ratio(p50s[kind], p50s[other]) for other in ("insert", "append")}
        | {"layer_cpu_share": percentile(cores[kind], 50)}
        for kind in kinds
    }


def _gated(
    endpoint: str, nodes: int, interval: float, count: int, longest_s: float
) -> tuple[list[float], float]:
    """Insert behind a new layer."""
    with Layer(endpoint, nodes, interval) as layer, gated.installed(layer.endpoints):
        return _calls(endpoint, "insert_after", count, longest_s, layer.processes)


def _calls(
    endpoint: str,
    name: str,
    count: int,
    longest_s: float,
    processes: Sequence[psutil.Process] = (),
) -> tuple[list[float], float]:
    """Make calls one after the other, after pauses of up to `longest_s`.

    Returns how long each took, in seconds, and which share of a core the processes used.
    """
    payload, took, chance = bytes(_BYTES), [], random.Random(1)  # noqa: S311 - only pauses
    if not processes:
        time.sleep(_REST_S)
    with ziplog.connect(endpoint) as log:
        call = getattr(log, name)
        for _ in range(_WARM_UP):
            call(payload)
        before, began = cpu_s(processes), time.monotonic()
        for _ in range(count):
            time.sleep(chance.uniform(0, longest_s))
            start = time.monotonic()
            call(payload)
            took.append(time.monotonic() - start)
        share = (cpu_s(processes) - before) / (time.monotonic() - began)
    return took, share


# --- the death of the leader ---------------------------------------------------------------------


def failure(endpoint: str, seconds: float) -> Figures:
    """Return the answers around the kill of the leader, which comes after half of `seconds`."""
    with Layer(endpoint, *_KILLED) as layer:
        with gated.installed(layer.endpoints), ziplog.connect(endpoint) as log:
            log.insert_after(b"")
            leader = log._core.leader.decode()  # type: ignore[attr-defined]  # noqa: SLF001
        arguments = [(endpoint, (), seconds), (endpoint, layer.endpoints, seconds)]
        with Workers(_insert_steadily, arguments) as clients:
            clients.receive()
            begin = time.monotonic() + WINDOW_S
            clients.send(begin)
            time.sleep(begin + seconds / 2 - time.monotonic())
            layer.kill(leader)
            plain, held = clients.receive()
    return {
        "nodes": _KILLED[0],
        "t_ord_ms": _KILLED[1],
        "killed_after_s": seconds / 2,
        "plain": _answers(plain, seconds),
        "gate": _answers(held, seconds),
    }


def _answers(done: list[float], seconds: float) -> Figures:
    """Return the longest pause after the kill, the busiest window, and all windows."""
    times, kill = sorted(done), seconds / 2
    windows = counts(times, 0, max([seconds, *times[-1:]]) + WINDOW_S, WINDOW_S)
    return {
        "answers": len(done),
        "longest_pause_s": longest_pause(times, kill, seconds),
        "most_in_a_window": max(windows),
        "windows": windows,
    }


def _insert_steadily(endpoint: str, layer: Sequence[str], seconds: float, pipe: Connection) -> None:
    """Insert at a steady pace, and send when each insert was answered, from the begin on."""
    gate: AbstractContextManager[None] = gated.installed(layer) if layer else nullcontext()
    with gate, asyncio.Runner(loop_factory=exact_loop) as runner:
        pipe.send(runner.run(_open_loop(endpoint, seconds, pipe)))


async def _open_loop(endpoint: str, seconds: float, pipe: Connection) -> list[float]:
    payload, done, clock = bytes(_BYTES), [], time.monotonic
    async with await ziplog.aio.connect(endpoint, timeout=_MOST_S) as log:
        await log.insert_after(payload)
        pipe.send("ready")
        begin = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        for number in range(round(seconds * _PER_S)):
            await asyncio.sleep(max(begin + number / _PER_S - clock(), 0))
            future = log.insert_nowait(payload)
            future.add_done_callback(lambda future: future.result() and done.append(clock()))
        await log.flush()
    return [at - begin for at in done]


# --- the picture ---------------------------------------------------------------------------------


def draw(figures: Figures, path: Path) -> None:
    """Draw the p50 of each kind, and the answers around the kill of the leader."""
    rows, failed = figures["latency"], figures["failure"]
    with axes(path) as (left, right):
        colours = {"insert": GREY, "append": BLUE}
        left.barh(
            list(rows),
            [row["p50_ms"] for row in rows.values()],
            color=[colours.get(kind, OCHRE) for kind in rows],
        )
        left.invert_yaxis()
        left.set(xlabel="p50 in ms", title="one client, 4 KB, 2 shards")
        kill = failed["killed_after_s"]
        for kind, colour in (("plain", GREY), ("gate", OCHRE)):
            per_s = [count / WINDOW_S for count in failed[kind]["windows"]]
            at = [index * WINDOW_S - kill for index in range(len(per_s))]
            right.plot(at, per_s, color=colour, label="inserts" if kind == "plain" else kind)
        right.axvline(0, color=GREY, linestyle=":")
        right.set(xlabel="seconds after the kill", ylabel="answers/s")
        right.set(title="the layer's leader is killed", ylim=(0, None))
        right.legend()
