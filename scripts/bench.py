"""Benchmarks of Ziplog beside baselines and other systems, in one run on one machine.

    python scripts/bench.py latency      insert latency beside raw TCP, pyzmq, Redis and NATS
    python scripts/bench.py cpu          where an insert's CPU time goes, beside the pyzmq floor
    python scripts/bench.py paths        fast and slow path; share of the fast path over load
    python scripts/bench.py clients      16 to 1,000 clients, each with one insert at a time
    python scripts/bench.py throughput   pipelined insert_many into one shard
    python scripts/bench.py sequential   from insert to delivery: pauses, rates, bursts, no-ops
    python scripts/bench.py failure      throughput around the kill of a storage server
    python scripts/bench.py reconfigure  throughput while a shard is added and one removed
    python scripts/bench.py idle         CPU of an idle cluster
    python scripts/bench.py mms          the membership service with thousands of emulated shards
    python scripts/bench.py all          everything above
    python scripts/bench.py logdb        transactions: the four kinds that follow
    python scripts/bench.py logdb-contention  clients that fight for ten keys, beside Redis
    python scripts/bench.py logdb-ycsb   YCSB's workloads A, B, C, F
    python scripts/bench.py logdb-restart     a million commits, and a coordinator's start
    python scripts/bench.py logdb-cpu    CPU, frames and system calls of a read-modify-write
    python scripts/bench.py spark        Spark reads from servers and files, beside Parquet
    python scripts/bench.py spark-layers      time per row on its way to Spark, by layer
    python scripts/bench.py spark-write  Spark writes, beside insert_many

Targets alternate in rounds, so a drift of the machine's speed affects all of them; what counts
are the ratios, each the median over rounds. `--json FILE` keeps the figures (beside those of other
kinds that it has), `--picture FILE` (SVG or PNG, with matplotlib) draws those of `latency` and
`paths`, or those of the one that is named.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import failure
import psutil
import reconfigure
import sequential
from baselines import TcpFloor, ZmqFloor
from hdrh.histogram import HdrHistogram
from logdb_bench import report
from metrics import crowd
from metrics.cpu import spent
from other_systems import Nats, Redis
from spark_bench import report as bulk

import ziplog
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

Figures = dict[str, Any]

_SPAWN = multiprocessing.get_context("spawn")


class Target(Protocol):
    """Something that takes a payload and returns when it is safe."""

    name: str

    def insert(self, payload: bytes) -> None:
        """Put one payload."""
        ...


class ZiplogTarget:
    """One blocking client of one shard."""

    name = "Ziplog insert_after"

    def __init__(self, log: ziplog.Log) -> None:
        self.log = log

    def insert(self, payload: bytes) -> None:
        """Insert one record."""
        self.log.insert_after(payload)


@contextmanager
def cluster(shards: int = 1, f: int = 1, **options: Any) -> Iterator[Cluster]:
    """Run a cluster in a temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="ziplog-bench-") as folder,
        Cluster(folder, shards=shards, f=f, **options) as running,
    ):
        yield running


def histogram() -> HdrHistogram:
    """Return an empty one, of nanoseconds up to a minute, three digits."""
    return HdrHistogram(1, 60_000_000_000, 3)


def micros(recorded: HdrHistogram) -> Figures:
    """Return the percentiles of a histogram, in microseconds."""
    return {f"p{p:g}_us": recorded.get_value_at_percentile(p) / 1000 for p in (50, 99, 99.9)} | {
        "count": recorded.get_total_count()
    }


def timed(target: Target, payload: bytes, count: int, into: HdrHistogram) -> float:
    """Insert `count` times; return the median in microseconds."""
    values = []
    clock = time.perf_counter_ns
    for _ in range(count):
        start = clock()
        target.insert(payload)
        values.append(clock() - start)
    for value in values:
        into.record_value(value)
    return statistics.median(values) / 1000


# --- latency -----------------------------------------------------------------------------------


def latency(rounds: int, count: int, size: int) -> Figures:
    """Insert latency, f=1, one client, beside the baselines and the installed other systems."""
    payload = os.urandom(size)
    with ExitStack() as stack:
        running = stack.enter_context(cluster())
        log = stack.enter_context(running.connect())
        targets: list[Target] = [
            ZiplogTarget(log),
            stack.enter_context(TcpFloor(size)),
            stack.enter_context(ZmqFloor(size)),
        ]
        targets += [stack.enter_context(p()) for p in (Redis, Nats) if p.is_installed()]
        recorded = {target.name: histogram() for target in targets}
        medians: dict[str, list[float]] = {target.name: [] for target in targets}
        for target in targets:
            timed(target, payload, count, histogram())
        for _ in progress(rounds, "latency"):
            for target in targets:
                medians[target.name].append(timed(target, payload, count, recorded[target.name]))
        share = fast_share(log.stats())
    ours = medians[ZiplogTarget.name]
    return {
        "size": size,
        "fast_path_share": share,
        "targets": {
            name: micros(recorded[name])
            | {"ratio": statistics.median(a / b for a, b in zip(ours, of, strict=True))}
            for name, of in medians.items()
        },
    }


def fast_share(stats: dict[str, Any]) -> float:
    """Return which share of a client's inserts took the fast path."""
    fast, slow = stats["fast_path"], stats["slow_path"]
    return fast / max(fast + slow, 1)


# --- CPU ---------------------------------------------------------------------------------------


def cpu_of(target: Target, processes: dict[str, psutil.Process], count: int) -> Figures:
    """Return the CPU time of each process, and of its busiest threads, in µs an insert."""
    payload = os.urandom(4096)
    timed(target, payload, count // 10, histogram())
    return spent(processes, lambda times: timed(target, payload, times, histogram()), count)


def cpu(count: int) -> Figures:
    """CPU time of an insert by process: one client, 4 KB, f=1, beside the pyzmq baseline."""
    with cluster() as running, running.connect() as log, ZmqFloor(4096) as floor:
        shard = log.cluster()["shards"][0]
        servers = {r["name"]: psutil.Process(r["pid"]) for r in shard["replicas"]}
        echoes = {f"echo {pid}": psutil.Process(pid) for pid in floor.pids}
        own = {"client": psutil.Process()}
        return {
            ZiplogTarget.name: cpu_of(ZiplogTarget(log), own | servers, count),
            floor.name: cpu_of(floor, own | echoes, count),
        }


# --- fast and slow path ------------------------------------------------------------------------


def insert_openly(
    endpoint: str, rate_per_s: float, seconds: float, size: int, pipe: Connection
) -> None:
    """Insert at random times, `rate_per_s` on average (0: as fast as one call at a time goes)."""
    rng = random.Random(os.getpid())  # noqa: S311  only arrival times
    payload = rng.randbytes(size)
    fast: list[int] = []
    slow: list[int] = []
    with ziplog.connect(endpoint) as log:
        log.insert_after(payload)
        pipe.send("ready")
        pipe.recv()
        stats = log.stats()
        end = time.monotonic() + seconds
        due = sorted(
            time.monotonic() + rng.random() * seconds for _ in range(int(rate_per_s * seconds))
        )
        while time.monotonic() < end:
            if rate_per_s:
                if not due:
                    break
                time.sleep(max(0.0, due.pop(0) - time.monotonic()))
            start = time.perf_counter_ns()
            log.insert_after(payload)
            took = time.perf_counter_ns() - start
            now = log.stats()
            (slow if now["slow_path"] > stats["slow_path"] else fast).append(took)
            stats = now
    pipe.send((fast, slow))


def load(endpoint: str, clients: int, rate_per_s: float, seconds: float) -> Figures:
    """Run client processes against one shard; return what both paths took."""
    workers = []
    for _ in range(clients):
        here, there = _SPAWN.Pipe()
        arguments = (endpoint, rate_per_s / clients, seconds, 4096, there)
        worker = _SPAWN.Process(target=insert_openly, args=arguments)
        worker.start()
        workers.append((worker, here))
    for _, pipe in workers:
        pipe.recv()
    for _, pipe in workers:
        pipe.send("go")
    fast, slow = histogram(), histogram()
    for worker, pipe in workers:
        for recorded, values in zip((fast, slow), pipe.recv(), strict=True):
            for value in values:
                recorded.record_value(value)
        worker.join()
    total = fast.get_total_count() + slow.get_total_count()
    return {
        "clients": clients,
        "target_per_s": rate_per_s or None,
        "per_s": total / seconds,
        "fast_share": fast.get_total_count() / max(total, 1),
        "fast": micros(fast),
        "slow": micros(slow),
    }


def paths(seconds: float) -> Figures:
    """The share of the fast path over clients and load, as thesis Fig. 4.4; slow / fast."""
    points = []
    with cluster() as running:
        plan = [(n, rate) for n in (1, 2, 4, 8) for rate in (250, 1000, 2000, 0)]
        for clients, rate in progress(plan, "paths"):
            points.append(load(running.endpoint, clients, rate, seconds))
    contended = [p for p in points if p["slow"]["count"] >= 50 and p["fast"]["count"] >= 50]
    ratios = [p["slow"]["p50_us"] / p["fast"]["p50_us"] for p in contended]
    return {"points": points, "slow_to_fast": statistics.median(ratios) if ratios else None}


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


def clients(seconds: float) -> Figures:
    """Goodput, copies, times, views and memory of more and more clients, 2 shards, f=1."""
    steps = []
    for count in progress(crowd.STEPS, "clients"):
        with cluster(shards=2) as running:
            steps.append(crowd.step(running, count, seconds))
    return crowd.summary(steps)


# --- failure -----------------------------------------------------------------------------------


def kills(seconds: float) -> Figures:
    """Throughput of 6 shards, f=1, around the kill of a backup and of a primary."""
    return {
        role: failure.measure(seconds, shards=6, per_s=100, victim=victim)
        for role, victim in (("backup", 1), ("primary", 0))
    }


# --- idle --------------------------------------------------------------------------------------


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
        before = sum(sum(p.cpu_times()[:2]) for p in processes)
        start = time.monotonic()
        time.sleep(seconds)
        used = sum(sum(p.cpu_times()[:2]) for p in processes) - before
        return {"processes": len(processes), "core_share": used / (time.monotonic() - start)}


def membership(seconds: float) -> Figures:
    """The membership service with emulated shards: without sockets, and for real."""
    import emulation  # noqa: PLC0415  nothing else here needs it
    from metrics.service_emulation import measure  # noqa: PLC0415  the same

    return {
        "without_sockets": {str(shards): measure(shards, seconds) for shards in (100, 1000, 4000)},
        "real": {
            str(shards): emulation.measure(shards, 2 * seconds)
            for shards in progress((100, 500, 1000, 1500), "mms")
        },
    }


def draw_membership(results: Figures, path: Path) -> None:
    """Draw what the service costs, and how exact its epochs are, over the number of shards."""
    import matplotlib as mpl  # noqa: PLC0415  optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  optional

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for name, label in (("real", "its process"), ("without_sockets", "without sockets and disk")):
        shards = [int(count) for count in results[name]]
        left.plot(shards, [of["cpu_share"] for of in results[name].values()], "o-", label=label)
    left.axhline(1, color="#888888", linestyle=":")
    left.set_ylabel("share of one core")
    for key, line in (("p50", "-"), ("p99", "--"), ("max", ":")):
        for name, label, colour in (
            ("jitter_ms", "off its time at a server", "#2a6f97"),
            ("spread_ms", "first to last server", "#c58b2b"),
        ):
            row = {int(count): of[name][key] for count, of in results["real"].items()}
            right.plot(row.keys(), row.values(), line, color=colour, label=f"{label}, {key}")
    right.set_yscale("log")
    right.set_ylabel("ms, begin of a lease of 16 epochs of 10 ms")
    for axis in (left, right):
        axis.set_xlabel("emulated shards")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


# --- output ---------------------------------------------------------------------------


def progress(what: Any, name: str) -> Iterator[Any]:
    """Go through `what` (or a range) with a progress bar on a terminal."""
    from rich.progress import track  # noqa: PLC0415  only a terminal needs it

    items = list(range(what)) if isinstance(what, int) else what
    return iter(track(items, name, disable=not sys.stderr.isatty(), transient=True))


def table(name: str, figures: Figures, indent: str = "") -> None:
    """Print figures as indented lines."""
    print(f"{indent}{name}")
    for key, value in figures.items():
        if key == "windows":
            continue  # for the picture
        if isinstance(value, dict):
            table(str(key), value, indent + "  ")
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):  # other rows are for the picture
                    table(str(key), item, indent + "  ")
        else:
            shown = f"{value:,.3f}" if isinstance(value, float) else value
            print(f"{indent}  {key:<18} {shown}")


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


def draw(results: Figures, path: Path) -> None:
    """Draw latency and paths."""
    import matplotlib as mpl  # noqa: PLC0415  optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  optional

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    if "latency" in results:
        targets = results["latency"]["targets"]
        names = list(targets)
        left.barh(names, [targets[n]["p99_us"] for n in names], color="#c6d8e8", label="p99")
        left.barh(names, [targets[n]["p50_us"] for n in names], color="#2a6f97", label="p50")
        left.set_xlabel("µs, one client, 4 KB, f=1")
        left.invert_yaxis()
        left.legend()
    if "paths" in results:
        points = results["paths"]["points"]
        for clients in sorted({p["clients"] for p in points}):
            own = sorted((p["per_s"], p["fast_share"]) for p in points if p["clients"] == clients)
            right.plot(*zip(*own, strict=True), marker="o", label=f"{clients} clients")
        right.set_xlabel("inserts/s into one shard")
        right.set_ylabel("share of the fast path")
        right.set_ylim(0, 1.02)
        right.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds: dict[str, Callable[[float], Figures]] = {
        "latency": lambda scale: latency(max(3, int(10 * scale)), 400, 4096),
        "cpu": lambda scale: cpu(max(2000, int(10_000 * scale))),
        "paths": lambda scale: paths(max(1.0, 3 * scale)),
        "clients": lambda scale: clients(max(3.0, 10 * scale)),
        "throughput": lambda scale: throughput(max(2.0, 6 * scale)),
        "sequential": sequential.measure,
        "failure": lambda scale: kills(max(4.0, 6 * scale)),
        "reconfigure": lambda scale: reconfigure.measure(max(4.0, 11 * scale)),
        "idle": lambda scale: idle(max(3.0, 10 * scale)),
        "mms": lambda scale: membership(max(2.0, 5 * scale)),
    }
    own_kinds = list(kinds)
    kinds |= bulk.KINDS
    tables = report.TABLES | bulk.TABLES | {"clients": crowd.table}
    groups = {"all": own_kinds, "logdb": list(report.KINDS)}
    parser.add_argument("kind", choices=[*kinds, *report.KINDS, *groups])
    parser.add_argument("--scale", type=float, default=1.0, help="longer (2) or shorter (0.2)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw the figures here")
    parser.add_argument("--shards", type=int, default=2, help="of LogDB's log (the thesis: 6)")
    arguments = parser.parse_args()
    results: Figures = {}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    for kind in groups.get(arguments.kind, [arguments.kind]):
        if kind in report.KINDS:
            results[kind] = report.KINDS[kind](arguments.scale, arguments.shards)
        else:
            results[kind] = kinds[kind](arguments.scale)
        if arguments.json:
            arguments.json.write_text(as_text(results) + "\n")
        if kind in tables:
            print(kind, *tables[kind](results[kind]), sep="\n")
        else:
            table(kind, results[kind])
    if arguments.picture:
        own = {
            "clients": crowd.draw,
            "failure": failure.draw,
            "reconfigure": reconfigure.draw,
            "sequential": sequential.draw,
            "mms": draw_membership,
        }
        if arguments.kind == "logdb" or arguments.kind in report.KINDS:
            report.draw(results, arguments.picture)
        elif arguments.kind in bulk.KINDS:
            bulk.draw(results, arguments.picture)
        elif arguments.kind in own:
            own[arguments.kind](results[arguments.kind], arguments.picture)
        else:
            draw(results, arguments.picture)


if __name__ == "__main__":
    main()
