"""Speculation beside a subscription and a gate: from the insert to delivery, and to output.

A writer inserts 4 KB at any of 2 shards (f=1), with a random pause after each insert. In another
process, an application computes for some time on each batch of records, and has output once a
record is final. The kinds take turns: `gate` (a subscription behind an ordering layer, 3 nodes,
1 ms), `subscribe`, `speculate`. (S Fig. 7 to 9.) At level `disk` each flush takes 3 ms longer than
the disk itself. The computing time is spent asleep, because servers and clients share two cores.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fault_injection.nodes import LAUNCHER, Nodes
from metrics.picture import BLUE, GREY, OCHRE, axes
from metrics.rounds import alternate, ratio
from metrics.setup import Progress
from metrics.setup import cluster as new_cluster
from metrics.windows import latency_ms, percentile
from metrics.workers import Workers
from scalog import gated
from scalog.layer import Layer

import ziplog
from ziplog import speculation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from ziplog.local import Cluster

Figures = dict[str, Any]
#: Seconds of each record: to its delivery, and to its output.
Delays = tuple[list[float], list[float]]

_SHARDS: Final = 2
_SIZE: Final = 4096
_STAMP: Final = struct.Struct("<q")
_LEVELS: Final = ("memory", "disk")
#: Computing times of a batch in milliseconds.
_COMPUTE_MS: Final = (0.5, 1.5, 4.0, 50.0)
_SLOW_FLUSH_MS: Final = 3.0
_KINDS: Final = ("gate", "subscribe", "speculate")
#: The ordering layer of the gate: nodes, and milliseconds between two cuts.
_LAYER: Final = (3, 1.0)
_MEAN_PAUSE_S: Final = 0.004
_ROUNDS: Final = 5
_WARM_UP: Final = 30
_FETCH: Final = 1000


def measure(scale: float) -> Figures:
    """Measure all levels and computing times; `scale` 1 takes about ten minutes."""
    count, rounds = max(60, int(250 * scale)), max(2, round(_ROUNDS * scale))
    progress = Progress("speculation", len(_LEVELS) * len(_COMPUTE_MS) * rounds * len(_KINDS))
    figures: Figures = {}
    for level in _LEVELS:
        with new_cluster(shards=_SHARDS, durability=level, launcher=[LAUNCHER]) as cluster:
            if level == "disk":
                _slow_down(cluster)
            with Workers(_application, [(cluster.endpoint,)]) as application:
                figures[level] = {
                    f"{compute_ms:g} ms": _in_turns(
                        cluster.endpoint, application, compute_ms, count, rounds, progress
                    )
                    for compute_ms in _COMPUTE_MS
                }
    return figures


def _slow_down(cluster: Cluster) -> None:
    nodes = Nodes(cluster.config.data_dir)
    for shard in cluster.config.shards:
        for node in shard.replicas:
            nodes.slow(node.name, flush_ms=_SLOW_FLUSH_MS)


def _in_turns(
    endpoint: str,
    application: Workers,
    compute_ms: float,
    count: int,
    rounds: int,
    progress: Progress,
) -> Figures:
    """Return the delays of each kind, and the ratios of their p50."""
    parts = ("insert", "delivery", "output")
    took: dict[str, dict[str, list[float]]] = {k: {part: [] for part in parts} for k in _KINDS}
    p50s: dict[str, dict[str, list[float]]] = {k: {part: [] for part in parts} for k in _KINDS}

    def run(kind: str) -> float:
        for part, some in _turn(endpoint, application, kind, compute_ms, count).items():
            took[kind][part] += some
            p50s[kind][part].append(percentile(some, 50) or 0.0)
        progress.step(f"{kind}, {compute_ms:g} ms")
        return 0.0

    alternate({kind: partial(run, kind) for kind in _KINDS}, rounds, warm=0)
    figures: Figures = {
        kind: {part: latency_ms(values) for part, values in took[kind].items()} for kind in _KINDS
    }
    for part in parts:
        for kind, other in (
            ("gate", "subscribe"),
            ("gate", "speculate"),
            ("subscribe", "speculate"),
        ):
            name = f"{part}_{kind}_{other}_ratio"
            figures[name] = ratio(p50s[kind][part], p50s[other][part])
    return figures


def _turn(
    endpoint: str, application: Workers, kind: str, compute_ms: float, count: int
) -> dict[str, list[float]]:
    """Insert beside the application; return the seconds of each insert, delivery and output."""
    filler, took = bytes(_SIZE - _STAMP.size), []
    chance = random.Random(1)  # noqa: S311 - only pauses
    with contextlib.ExitStack() as stack:
        layer = stack.enter_context(Layer(endpoint, *_LAYER)) if kind == "gate" else None
        log = stack.enter_context(ziplog.connect(endpoint))
        # An insert alone may get a position before records of earlier turns.
        start = log.insert_after(_STAMP.pack(0) + filler, log.check_tail())
        layer_endpoints = layer.endpoints if layer is not None else []
        application.send((kind, layer_endpoints, start, compute_ms, _WARM_UP + count))
        application.receive()
        for _ in range(_WARM_UP + count):
            begin = time.monotonic()
            log.insert_after(_STAMP.pack(time.monotonic_ns()) + filler)
            took.append(time.monotonic() - begin)
            time.sleep(chance.expovariate(1 / _MEAN_PAUSE_S))
        ((delivered, emitted),) = application.receive()
    return {
        "insert": took[_WARM_UP:],
        "delivery": delivered[_WARM_UP:],
        "output": emitted[_WARM_UP:],
    }


# --- the application -----------------------------------------------------------------------------


def _application(endpoint: str, pipe: Connection) -> None:
    """Run applications as the pipe requests; send the delays of each."""
    while True:
        kind, layer, start, compute_ms, count = pipe.recv()
        with _gate(layer), ziplog.connect(endpoint) as log:
            run = _speculate if kind == "speculate" else _subscribe
            pipe.send(run(log, start, compute_ms / 1000, count, pipe))


def _gate(layer: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    return gated.installed(layer) if layer else contextlib.nullcontext()


def _subscribe(
    log: ziplog.Log, start: ziplog.RecordId, compute_s: float, count: int, pipe: Connection
) -> Delays:
    delivered: list[float] = []
    emitted: list[float] = []
    with log.subscribe(start) as records:
        next(records)
        pipe.send("ready")
        while len(emitted) < count:
            batch = records.fetch(_FETCH)
            delivered += map(_age_s, batch)
            time.sleep(compute_s)
            emitted += map(_age_s, batch)
    return delivered, emitted


def _speculate(
    log: ziplog.Log, start: ziplog.RecordId, compute_s: float, count: int, pipe: Connection
) -> Delays:
    delivered: dict[ziplog.RecordId, float] = {}
    ages: list[tuple[float, float]] = []

    def apply(records: list[ziplog.Record]) -> list[None]:
        delivered.update((record.rid, _age_s(record)) for record in records)
        if records[0].rid != start:
            time.sleep(compute_s)
        return [None] * len(records)

    def emit(record: ziplog.Record, _effect: None) -> None:
        if record.rid == start:
            pipe.send("ready")
        else:
            ages.append((delivered[record.rid], _age_s(record)))

    with log.speculate(start) as events:
        speculation.process(
            events,
            apply=apply,
            undo=lambda _record, _effect: None,
            emit=emit,
            until=lambda _record: len(ages) >= count,
        )
    return [age for age, _ in ages], [age for _, age in ages]


def _age_s(record: ziplog.Record) -> float:
    stamp: int = _STAMP.unpack_from(record.payload)[0]
    return (time.monotonic_ns() - stamp) / 1e9


# --- the picture ---------------------------------------------------------------------------------


def draw(figures: Figures, path: Path) -> None:
    """Draw the p50 from the insert to the output, over the computing time, for each level."""
    with axes(path) as pair:
        for plot, level in zip(pair, _LEVELS, strict=True):
            for kind, colour in zip(_KINDS, (GREY, BLUE, OCHRE), strict=True):
                p50s = [row[kind]["output"]["p50_ms"] for row in figures[level].values()]
                plot.plot(_COMPUTE_MS, p50s, color=colour, marker="o", label=kind)
            plot.set(xscale="log", yscale="log", title=f"level {level}")
            plot.set(xlabel="ms to compute a batch", ylabel="ms from insert to output (p50)")
            plot.legend()
