"""Benchmarks of Ziplog beside baselines and other systems, in one run on one machine.

    python scripts/bench.py KIND [--scale 0.2] [--json FILE] [--picture FILE]

    latency          insert latency beside raw TCP, pyzmq, Redis and NATS
    disk             insert latency at level `disk`, beside the flush of two disks and Redis
    cpu              where an insert's CPU time goes, beside the pyzmq floor
    paths            fast and slow path; share of the fast path over load
    clients          16 to 1,000 clients, each with one insert at a time
    concurrency      1 to 64 tasks or threads of one client
    connections      1 to 64 clients with connections of their own, beside Redis and NATS
    throughput       pipelined insert_many into one shard
    sequential       from insert to delivery: pauses, rates, bursts, no-ops
    append           appends beside inserts and deliveries
    scalog           inserts behind an ordering layer (--t-ord, --nodes), beside inserts and appends
    speculation      deliveries and output of an application: gate, subscribe, speculate
    cursors          claims, commits and takeovers of cursors; the cost of 1,000
    failure          throughput around the kill of a storage server
    reconfigure      throughput while a shard is added and one removed
    idle             CPU of an idle cluster
    mms              the membership service with thousands of emulated shards
    all              everything above
    player           delays and rates of players (--only L1 L6), beside other systems
    regions          three regions 40, 80 and 120 ms apart (--only W1 W11), beside other systems
    logdb            transactions: the four kinds that follow
    logdb-contention clients that fight for ten keys, beside Redis
    logdb-ycsb       YCSB's workloads A, B, C, F
    logdb-restart    a million commits, and a coordinator's start
    logdb-cpu        CPU, frames and system calls of a read-modify-write
    spark            Spark reads from servers and files, beside Parquet
    spark-layers     time per row on its way to Spark, by layer

Targets alternate in rounds, so a drift of the machine's speed affects all of them; what counts
are the ratios, each the median over rounds. `--json FILE` keeps the figures (beside those of other
kinds that it has), with the date, commit and machine of each kind under `runs`; with `--only`,
those of figures that were not measured again under `kept`. `--picture FILE` (SVG or PNG, with
matplotlib) draws those of `latency` and `paths`, or those of the one that is named.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fault_injection.options import count as whole
from fault_injection.options import positive
from log_bench import (
    append,
    clients,
    concurrency,
    connections,
    cursors,
    disk,
    failure,
    gate,
    latency,
    membership,
    paths,
    reconfigure,
    sequential,
    speculation,
)
from logdb_bench import contention, restart, ycsb
from logdb_bench import cpu as logdb_cpu
from metrics import tables
from metrics.environment import environment
from player_bench import measure as player
from player_bench import picture
from region_bench import measure as regions
from region_bench import picture as region_picture
from spark_bench import reading

if TYPE_CHECKING:
    from collections.abc import Callable

Figures = dict[str, Any]


class Measurement(NamedTuple):
    """One kind of measurement."""

    #: Measures, with the options of the command.
    measure: Callable[[argparse.Namespace], Figures]
    #: Draws, of the results of all kinds.
    draw: Callable[[Figures, Path], None] | None = None


def _scaled(
    measure: Callable[[float], Figures], least: float = 0.0, whole: float = 1.0
) -> Callable[[argparse.Namespace], Figures]:
    """Return a measurement that takes `whole` times the scale, at least `least`."""
    return lambda options: measure(max(least, whole * options.scale))


def _sharded(measure: Callable[[float, int], Figures]) -> Callable[[argparse.Namespace], Figures]:
    """Return a measurement with the scale, and with a number of shards of LogDB's log."""
    return lambda options: measure(options.scale, options.shards)


def _own(kind: str, draw: Callable[[Figures, Path], None]) -> Callable[[Figures, Path], None]:
    """Return a drawing of the results of one kind."""
    return lambda results, path: draw(results[kind], path)


def _layers(scale: float) -> Figures:
    from spark_bench import layers  # noqa: PLC0415 - imports pyspark

    return layers.measure(scale)


MEASUREMENTS: Final[dict[str, Measurement]] = {
    "latency": Measurement(
        lambda options: latency.latency(max(3, int(10 * options.scale)), 400, 4096), paths.draw
    ),
    "disk": Measurement(
        lambda options: disk.measure(max(3, int(10 * options.scale)), int(100 * options.scale))
    ),
    "cpu": Measurement(lambda options: latency.cpu(max(2000, int(10_000 * options.scale)))),
    "paths": Measurement(_scaled(paths.paths, 1.0, 3), paths.draw),
    "clients": Measurement(_scaled(clients.measure, 3.0, 10), _own("clients", clients.draw)),
    "concurrency": Measurement(
        _scaled(concurrency.measure, 1.0, 3), _own("concurrency", concurrency.draw)
    ),
    "connections": Measurement(
        _scaled(connections.measure, 1.0, 2), _own("connections", connections.draw)
    ),
    "throughput": Measurement(_scaled(latency.throughput, 2.0, 6)),
    "sequential": Measurement(_scaled(sequential.measure), _own("sequential", sequential.draw)),
    "append": Measurement(_scaled(append.measure), _own("append", append.draw)),
    "scalog": Measurement(
        lambda options: gate.measure(options.scale, options.t_ord, options.nodes),
        _own("scalog", gate.draw),
    ),
    "speculation": Measurement(_scaled(speculation.measure), _own("speculation", speculation.draw)),
    "cursors": Measurement(_scaled(cursors.measure)),
    "failure": Measurement(_scaled(failure.kills, 4.0, 6), _own("failure", failure.draw)),
    "reconfigure": Measurement(
        _scaled(reconfigure.measure, 4.0, 11), _own("reconfigure", reconfigure.draw)
    ),
    "idle": Measurement(_scaled(membership.idle, 3.0, 10)),
    "mms": Measurement(_scaled(membership.measure, 2.0, 5), _own("mms", membership.draw)),
    "player": Measurement(
        lambda options: player.measure(options.scale, options.only), _own("player", picture.draw)
    ),
    "regions": Measurement(
        lambda options: regions.measure(options.scale, options.only),
        _own("regions", region_picture.draw),
    ),
    "logdb-contention": Measurement(
        _sharded(contention.measure), _own("logdb-contention", contention.draw)
    ),
    "logdb-ycsb": Measurement(_sharded(ycsb.measure)),
    "logdb-restart": Measurement(_sharded(restart.measure)),
    "logdb-cpu": Measurement(_scaled(logdb_cpu.measure)),
    "spark": Measurement(_scaled(reading.measure), _own("spark", reading.draw)),
    "spark-layers": Measurement(_scaled(_layers)),
}
#: Several kinds; the first one has the picture.
GROUPS: Final = {
    "all": [
        kind
        for kind in MEASUREMENTS
        if not kind.startswith(("logdb", "player", "regions", "spark"))
    ],
    "logdb": [kind for kind in MEASUREMENTS if kind.startswith("logdb")],
}


# --- output ---------------------------------------------------------------------------


def as_text(figures: Any, indent: str = "") -> str:
    """Return figures as JSON; a list of plain values stays in one line."""
    deeper = indent + " "
    if isinstance(figures, dict) and figures:
        rows = [f"{json.dumps(key)}: {as_text(value, deeper)}" for key, value in figures.items()]
        edges = "{}"
    elif isinstance(figures, list) and any(isinstance(value, dict) for value in figures):
        rows = [as_text(value, deeper) for value in figures]
        edges = "[]"
    else:
        return json.dumps(figures)
    between = f",\n{deeper}"
    return f"{edges[0]}\n{deeper}{between.join(rows)}\n{indent}{edges[1]}"


def run_of(measured: list[str], kept: list[str], former: Figures) -> Figures:
    """Return where and when figures were measured, with the runs of those that are kept.

    Args:
        measured: the figures of this run.
        kept: all figures of the file before.
        former: the run in the file before.

    """
    runs: Figures = former.get("kept", {})
    whole = {key: value for key, value in former.items() if key != "kept"}
    left = {name: runs.get(name, whole) for name in kept if name not in measured}
    return environment() | ({"kept": left} if left else {})


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=[*MEASUREMENTS, *GROUPS])
    parser.add_argument("--scale", type=positive, default=1.0, help="longer (2) or shorter (0.2)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw the figures here")
    parser.add_argument("--shards", type=whole, default=2, help="of LogDB's log (the thesis: 6)")
    parser.add_argument(
        "--t-ord", type=positive, nargs="+", default=gate.T_ORD_MS,
        help="scalog: ms between two cuts",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", type=whole, nargs="+", default=gate.NODES, help="scalog: nodes of the layer"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*player.MEASUREMENTS, *regions.MEASUREMENTS], default=[],
        help="player, regions: these measurements; the file keeps the figures of the others",
    )  # fmt: skip
    arguments = parser.parse_args()
    results: Figures = {}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    kinds = GROUPS.get(arguments.kind, [arguments.kind])
    for kind in kinds:
        kept = results.get(kind, {}) if arguments.only else {}
        measured = MEASUREMENTS[kind].measure(arguments)
        results[kind] = kept | measured
        runs = results.setdefault("runs", {})
        runs[kind] = run_of(list(measured), list(kept), runs.get(kind, {}))
        if arguments.json:
            arguments.json.write_text(as_text(results) + "\n")
        print(*tables.lines(kind, measured), sep="\n")
    draw = MEASUREMENTS[kinds[0]].draw
    if arguments.picture and draw is not None:
        draw(results, arguments.picture)


if __name__ == "__main__":
    main()
