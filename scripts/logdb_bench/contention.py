"""Contention benchmark: throughput and aborts of clients on ten keys (thesis, Fig. 4.8 and 4.9).

Six variants: LogDB on Ziplog, and on the same log with inserts as slow as Scalog's
(`logdb_bench.delayed_inserts`), each with small writes in the commit record, and, as in the thesis,
with one record per write; and Redis (WATCH, MULTI), with and without a wait for its replica. The
variants alternate in rounds. After each, the counters must equal the number of commits.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from log_bench import other_systems
from metrics.picture import axes
from metrics.setup import Progress

import logdb
from logdb_bench.clients import PROCESSES, ClientProcesses, Outcome
from logdb_bench.cluster_setup import bench_setup
from logdb_bench.delayed_inserts import SCALOG_US
from logdb_bench.plan import Plan
from logdb_bench.workloads import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Figures = dict[str, Any]

CLIENTS: Final = (1, 2, 4, 8, 16, 32)
_DELAYED_COORDINATOR: Final = str(Path(__file__).resolve().parents[1] / "delayed_coordinator.py")
_OPTIONS: Final = ("--no-checkpoints",)
#: Besides the time in which is counted: connecting, and the start and the end of a line.
_CONNECT_S: Final = 0.7
_LINE_S: Final = 5.0


class Line(NamedTuple):
    """One line of the figures."""

    target: str
    is_inline: bool = True
    hold_us: int = 0
    is_waiting: bool = False


LINES: Final = {
    "Ziplog": Line("logdb"),
    "Ziplog, a record per write": Line("logdb", is_inline=False),
    f"{SCALOG_US} µs": Line("logdb", hold_us=SCALOG_US),
    f"{SCALOG_US} µs, a record per write": Line("logdb", is_inline=False, hold_us=SCALOG_US),
    "Redis, WAIT 1": Line("redis", is_waiting=True),
    "Redis": Line("redis"),
}


def measure(scale: float, shards: int) -> Figures:
    """Measure all lines; `scale` 1: three rounds with three seconds a point."""
    rounds, seconds = max(1, round(3 * scale)), min(max(0.5, 3 * scale), 3.0)
    warm_s = seconds / 3
    lines = {n: line for n, line in LINES.items() if line.target != "redis" or _has_redis()}
    expected = rounds * len(lines) * (len(CLIENTS) * (seconds + warm_s + _CONNECT_S) + _LINE_S)
    progress = Progress("contention", rounds * len(lines), expected)
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


def _has_redis() -> bool:
    return other_systems.Redis.is_installed()


def _points(rounds: list[list[Outcome]]) -> list[Figures]:
    return [
        {"clients": clients} | point([of[index] for of in rounds])
        for index, clients in enumerate(CLIENTS)
    ]


def point(outcomes: list[Outcome]) -> Figures:
    """Return the medians of several rounds of one point."""
    figures = [of.all.figures(of.seconds) for of in outcomes]
    keys = ("per_s", "abort_share", "p50_us", "p99_us")
    return {key: median([of[key] for of in figures]) for key in keys} | {
        "client_us": median([of.cpu_s * 1e6 / max(of.done, 1) for of in outcomes]),
    }


def median(values: list[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _run(line: Line, shards: int, seconds: float, warm_s: float, seed: int) -> list[Outcome]:
    """Run one line's points."""
    with _target(line, shards) as (endpoint, total):
        plan = Plan(
            line.target,
            endpoint,
            is_inline=line.is_inline,
            hold_us=line.hold_us,
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
def _target(line: Line, shards: int) -> Iterator[tuple[str, Callable[[], int]]]:
    """Run the system of a line; yield its endpoint, and a function for the sum of the counters."""
    keys = [str(number) for number in range(COUNTERS)]
    if line.target == "redis":
        with other_systems.Redis() as redis:
            yield str(redis.port), lambda: sum(int(value or 0) for value in redis.values(keys))
        return
    command = [sys.executable, "-m", "logdb"]
    if line.hold_us:
        command = [sys.executable, _DELAYED_COORDINATOR, str(line.hold_us)]
    with (
        bench_setup(shards, _OPTIONS, command=command) as setup,
        logdb.connect(setup.endpoint) as db,
    ):
        yield setup.endpoint, lambda: sum(db.multi_get(keys, 0))


# --- output -------------------------------------------------------------------------------


def lines(result: Figures) -> Iterator[str]:
    """Yield the lines of the output."""
    measured = result["lines"]
    width = max(map(len, measured))
    for key, title, scale, form in (
        ("per_s", "commits/s", 1, ",.0f"),
        ("abort_share", "aborted, % of attempts", 100, ".1f"),
        ("p50_us", "µs an attempt that commits, p50", 1, ",.0f"),
        ("p99_us", "µs an attempt that commits, p99", 1, ",.0f"),
        ("client_us", "µs of the clients' CPU a commit", 1, ",.0f"),
    ):
        yield ""
        yield f"{title:<{width}}  " + "".join(f"{clients:>9}" for clients in CLIENTS)
        for name, points in measured.items():
            cells = ("-" if of[key] is None else format(of[key] * scale, form) for of in points)
            yield f"{name:<{width}}  " + "".join(f"{cell:>9}" for cell in cells)


_STYLES: Final = {
    "Ziplog": ("#2a6f97", "o-"),
    "Ziplog, a record per write": ("#2a6f97", "o--"),
    f"{SCALOG_US} µs": ("#c58b2b", "s-"),
    f"{SCALOG_US} µs, a record per write": ("#c58b2b", "s--"),
    "Redis, WAIT 1": ("#b3413a", "^-"),
    "Redis": ("#b3413a", "^:"),
}


def draw(result: Figures, path: Path) -> None:
    """Draw Fig. 4.8 and Fig. 4.9."""
    with axes(path, size=(11, 4.6)) as (left, right):
        _draw(result, left, right)


def _draw(result: Figures, left: Any, right: Any) -> None:
    for name, points in result["lines"].items():
        colour, style = _STYLES[name]
        rates = [of["per_s"] for of in points]
        left.plot([of["clients"] for of in points], rates, style, color=colour, label=name)
        shares = [100 * of["abort_share"] for of in points]
        right.plot(rates, shares, style, color=colour, label=name)
    left.set_xscale("log", base=2)
    left.set_xticks(CLIENTS, list(map(str, CLIENTS)))
    left.set_xlabel("clients")
    left.set_ylabel("commits/s")
    left.set_yscale("log")
    _label(left.yaxis)
    right.set_xlabel("commits/s (1 to 32 clients)")
    right.set_xscale("log")
    _label(right.xaxis)
    right.set_ylabel("aborted, % of the attempts")
    right.set_ylim(0, None)
    left.legend(fontsize="small")


def _label(axis: Any) -> None:
    """Set a few plain numbers as labels of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_minor_formatter(NullFormatter())
