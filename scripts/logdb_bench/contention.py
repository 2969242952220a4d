"""Contention benchmark: throughput and aborts of clients on ten keys (thesis, Fig. 4.8 and 4.9).

The variants are LogDB on Ziplog, and on the same log with inserts as slow as Scalog's
(`logdb_bench.delayed_inserts`), each with small writes in the commit record, and, as in the thesis,
with one record per write; LogDB behind an ordering layer (`scalog`); and Redis (WATCH, MULTI), with
and without a wait for its replica. They alternate in rounds. After each, the counters must equal
the number of commits.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from log_bench.other_systems import Redis
from metrics.closed_loop import PROCESSES, ClientProcesses, Outcome, medians
from metrics.picture import BLUE, OCHRE, RED, axes
from metrics.setup import Progress

import logdb
from logdb_bench import delayed_inserts
from logdb_bench.cluster_setup import bench_setup
from logdb_bench.delayed_inserts import SCALOG_US
from logdb_bench.workloads import COUNTERS, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Figures = dict[str, Any]

CLIENTS: Final = (1, 2, 4, 8, 16, 32)
_OPTIONS: Final = ("--no-checkpoints",)


class Line(NamedTuple):
    """One line of the figures."""

    target: str
    is_inline: bool = True
    hold_us: int = 0
    #: The nodes of an ordering layer, and its interval in ms.
    gate: tuple[int, float] | None = None
    is_waiting: bool = False


LINES: Final = {
    "Ziplog": Line("logdb"),
    "Ziplog, a record per write": Line("logdb", is_inline=False),
    f"{SCALOG_US} µs": Line("logdb", hold_us=SCALOG_US),
    f"{SCALOG_US} µs, a record per write": Line("logdb", is_inline=False, hold_us=SCALOG_US),
    "gate, 3 nodes, 1 ms": Line("logdb", gate=(3, 1.0)),
    "Redis, WAIT 1": Line("redis", is_waiting=True),
    "Redis": Line("redis"),
}


def measure(scale: float, shards: int) -> Figures:
    """Measure all lines; `scale` 1: three rounds with three seconds a point."""
    rounds, seconds = max(1, round(3 * scale)), min(max(0.5, 3 * scale), 3.0)
    warm_s = seconds / 3
    lines = {n: line for n, line in LINES.items() if line.target != "redis" or Redis.is_installed()}
    progress = Progress("contention", rounds * len(lines))
    runs: dict[str, list[list[Outcome]]] = {name: [] for name in lines}
    for number in range(rounds):
        for name, line in lines.items():
            runs[name].append(_run(line, shards, seconds, warm_s, seed=number + 1))
            best = max(len(of.all.took_us) for of in runs[name][-1]) / seconds
            progress.step(f"{name}: up to {best:,.0f}/s")
    return {
        "shards": shards,
        "keys": COUNTERS,
        "client_processes": PROCESSES,
        "seconds": seconds,
        "rounds": rounds,
        "lines": {name: _points(of) for name, of in runs.items()},
    }


def _points(rounds: list[list[Outcome]]) -> list[Figures]:
    return [
        {"clients": clients} | point([of[index] for of in rounds])
        for index, clients in enumerate(CLIENTS)
    ]


def point(outcomes: list[Outcome]) -> Figures:
    """Return the medians of several rounds of one point."""
    rounds = [
        of.all.figures(of.seconds) | {"client_us": of.cpu_s * 1e6 / max(of.done, 1)}
        for of in outcomes
    ]
    return medians(rounds, ("per_s", "abort_share", "p50_us", "p99_us", "client_us"))


def _run(line: Line, shards: int, seconds: float, warm_s: float, seed: int) -> list[Outcome]:
    """Run one line's points."""
    with _target(line, shards) as (endpoint, layer, total):
        plan = Plan(
            line.target,
            endpoint,
            is_inline=line.is_inline,
            hold_us=line.hold_us,
            layer=layer,
            is_waiting=line.is_waiting,
            seed=seed,
        )
        with ClientProcesses(plan) as crew:
            outcomes = [crew.run(clients, seconds, warm_s) for clients in CLIENTS]
        done, counted = sum(of.done for of in outcomes), total()
    if done != counted:
        raise RuntimeError(f"{done} transactions were committed, the counters say {counted}")
    return outcomes


@contextmanager
def _target(line: Line, shards: int) -> Iterator[tuple[str, tuple[str, ...], Callable[[], int]]]:
    """Run the system of a line; yield its endpoint, its layer, and the sum of the counters."""
    keys = [str(number) for number in range(COUNTERS)]
    if line.target == "redis":
        with Redis() as redis:
            yield str(redis.port), (), lambda: sum(int(value or 0) for value in redis.values(keys))
        return
    command = [sys.executable, "-m", "logdb"]
    if line.hold_us:
        command = [sys.executable, delayed_inserts.__file__, str(line.hold_us)]
    with (
        bench_setup(shards, _OPTIONS, command=command, gate=line.gate) as setup,
        logdb.connect(setup.endpoint) as db,
    ):
        yield setup.endpoint, setup.layer, lambda: sum(db.multi_get(keys, 0))


# --- the picture ---------------------------------------------------------------------------------

_STYLES: Final = {
    "Ziplog": (BLUE, "o-"),
    "Ziplog, a record per write": (BLUE, "o--"),
    f"{SCALOG_US} µs": (OCHRE, "s-"),
    f"{SCALOG_US} µs, a record per write": (OCHRE, "s--"),
    "gate, 3 nodes, 1 ms": (OCHRE, "D:"),
    "Redis, WAIT 1": (RED, "^-"),
    "Redis": (RED, "^:"),
}


def draw(result: Figures, path: Path) -> None:
    """Draw Fig. 4.8 and Fig. 4.9."""
    with axes(path, size=(11, 4.6)) as (left, right):
        for name, points in result["lines"].items():
            colour, style = _STYLES[name]
            rates = [of["per_s"] for of in points]
            left.plot([of["clients"] for of in points], rates, style, color=colour, label=name)
            shares = [100 * of["abort_share"] for of in points]
            right.plot(rates, shares, style, color=colour, label=name)
        left.set(xlabel="clients", ylabel="commits/s", yscale="log")
        left.set_xscale("log", base=2)
        left.set_xticks(CLIENTS, list(map(str, CLIENTS)))
        _label(left.yaxis)
        left.legend(fontsize="small")
        right.set(xlabel="commits/s (1 to 32 clients)", xscale="log")
        right.set(ylabel="aborted, % of the attempts", ylim=(0, None))
        _label(right.xaxis)


def _label(axis: Any) -> None:
    """Set a few plain numbers as labels of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_minor_formatter(NullFormatter())
