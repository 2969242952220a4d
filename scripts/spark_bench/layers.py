"""Time per row from a sealed segment to Spark, by layer; each layer includes those below it.

Blocks from an archive, or from files; blocks as Arrow batches (`spark_reader`); Spark alone, with
prepared batches (`spark_bench.floor`); and the whole path. Also the CPU time of each process while
Spark runs. One shard, one task at a time.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
from metrics.cpu import cpu_s
from metrics.rounds import alternate
from metrics.spark import session

from spark_bench import floor, reading
from spark_bench.cluster_setup import BenchSetup, Shape, bench_setup
from spark_reader.ranges import read_range
from ziplog.archive.client import ArchiveClient
from ziplog.segments.block_reader import BlockReader
from ziplog.segments.blocks import Block

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    Figures = dict[str, Any]

    #: Returns the block that contains a position, or the start of the next one.
    Ask = Callable[[int], Block | int]

_MAX_ROUNDS: Final = 5
#: Two segments of the default size.
_MIN_BYTES: Final = 2 * 64 * 1024 * 1024
_CPU_RUNS: Final = 2
_CORES: Final = 1
_TASKS: Final = 4
#: Spark's Python processes find the floor there.
_SCRIPTS: Final = str(Path(__file__).resolve().parents[1])


def measure(scale: float) -> Figures:
    """Measure rows of both sizes; `scale` 1: 512 MiB of 4 KB, 300 MB of 100 B.

    Archives and files serve sealed segments only, so a small scale has two segments all the same.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_SCRIPTS, os.environ.get("PYTHONPATH")])
    )
    found = {}
    for size, rows in reading.SIZES:
        with (
            bench_setup(Shape(max(_MIN_BYTES // size, int(rows * scale)), size)) as setup,
            session("bulk", _CORES) as spark,
        ):
            found[f"{size} B"] = measure_setup(setup, spark)
    return found


def measure_setup(setup: BenchSetup, spark: SparkSession) -> Figures:
    """Measure one log."""
    spark.dataSource.register(floor.Floor)
    shape, frames = setup.shape, reading.tables(spark, setup)
    ready = spark.read.format("floor").options(rows=shape.rows, size=shape.size, tasks=_TASKS)
    servers = {"ziplog.bootstrap.servers": setup.cluster.endpoint}
    layers: dict[str, Callable[[], int]] = {
        "blocks of an archive": lambda: from_archive(setup),
        "blocks of files": lambda: from_files(setup),
        "Arrow batches of servers": lambda: sum(batch.num_rows for batch in read_range(servers)),
        "Spark, ready batches": lambda: _all(shape, reading.timed(ready.load())),
        "Spark, servers": lambda: _all(shape, reading.timed(frames[reading.SERVERS])),
        "Spark, files": lambda: _all(shape, reading.timed(frames[reading.FILES])),
        "Spark, Parquet": lambda: _all(shape, reading.timed(frames[reading.PARQUET])),
    }
    took = alternate(
        {name: partial(_us_a_row, layer) for name, layer in layers.items()}, _MAX_ROUNDS
    )
    return {
        "us_a_row": {name: statistics.median(of) for name, of in took.items()},
        "cpu_us_a_row": {
            name: cpu(layer, shape.rows)
            for name, layer in layers.items()
            if name.startswith("Spark")
        },
    }


def _all(shape: Shape, _seconds: float) -> int:
    return shape.rows


def _us_a_row(layer: Callable[[], int]) -> float:
    began = time.perf_counter()
    rows = layer()
    return (time.perf_counter() - began) / rows * 1e6


def from_archive(setup: BenchSetup) -> int:
    """Take all blocks of the shard's archive; return how many rows these have."""
    with setup.cluster.connect() as log:
        outline = log.outline(0, 1, log.check_tail().gsn + 1)
        number = log.cluster_number
    with closing(ArchiveClient(*outline.archives[0], number, 0)) as client:
        return _rows(client.block)


def from_files(setup: BenchSetup) -> int:
    """Take all blocks of the shard's files; return how many rows these have."""
    name = setup.cluster.config.shards[0].replicas[0].name
    return _rows(BlockReader(setup.files / name / "segments").block)


def _rows(ask: Ask) -> int:
    at, rows = 1, 0
    while True:
        found = ask(at)
        if isinstance(found, Block):
            at, rows = found.stop, rows + found.rows
        elif found:
            at = found
        else:
            return rows


def cpu(act: Callable[[], object], rows: int) -> Figures:
    """Return the CPU time that each kind of process spends on a row, on average over some runs."""
    before = _spent()
    for _ in range(_CPU_RUNS):
        act()
    return {
        kind: (seconds - before.get(kind, 0.0)) / rows / _CPU_RUNS * 1e6
        for kind, seconds in sorted(_spent().items())
        if seconds > before.get(kind, 0.0)
    }


def _spent() -> dict[str, float]:
    """Return the CPU seconds of this process's descendants, by role."""
    spent: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            kind = _kind(process.cmdline())
            spent[kind] = spent.get(kind, 0.0) + cpu_s([process])
    return spent


def _kind(command: list[str]) -> str:
    if command and Path(command[0]).name == "java":
        return "JVM"
    for module, kind in (
        ("pyspark.daemon", "Spark's Python"),
        ("shard.archive", "archive"),
        ("shard", "storage server"),
    ):
        if module in command:
            return kind
    return "others"
