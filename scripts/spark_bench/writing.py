"""Write benchmark: Spark writes rows into a log, beside `insert_many` from equally many processes.

Rule: a round writes the same number of rows once with Spark and once without, to the same shards,
with two concurrent writers each. Spark also reads its input once without a write (`noop`). The
first round does not count; the result is the median of the ratios within rounds. Invariant: at the
end the log has all rows of all rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from metrics.setup import Progress
from metrics.setup import cluster as new_cluster
from metrics.spark import session
from metrics.workers import Workers

import ziplog
from spark_bench.cluster_setup import values
from spark_bench.reading import rotated, timed
from ziplog import policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from ziplog.local import Cluster

    Figures = dict[str, Any]

#: Policies of the write.
Policy = Literal["partition", "key"]

READ: Final = "read only"
SPARK: Final = "Spark"
MANY: Final = "insert_many"
TARGETS: Final = (READ, SPARK, MANY)
#: Tasks and processes at a time.
CORES: Final = 2
SHARDS: Final = 2
#: Bytes of a value, and rows at scale 1.
SIZES: Final = ((4096, 32_768), (100, 600_000))
_MAX_ROUNDS: Final = 3
#: Number of distinct keys.
_KEYS: Final = 1000
_FILES: Final = 4
#: One call of `insert_many`.
_CALL_BYTES: Final = 2 << 20
_TIMEOUT_S: Final = 120.0
#: Estimated duration of a shape at scale 1, in seconds.
_SHAPE_S: Final = 25.0


class Rows(NamedTuple):
    """Shape of the written rows."""

    count: int
    #: Bytes of a value.
    size: int
    policy: Policy


def measure(scale: float) -> Figures:
    """Measure all shapes; `scale` 1: 128 MiB of 4 KB, 60 MB of 100 B, three rounds."""
    shapes = [
        Rows(max(_FILES, int(count * scale)), size, how)
        for size, count in SIZES
        for how in ("partition", "key")
    ]
    progress = Progress("spark-write", len(shapes), len(shapes) * _SHAPE_S * min(scale, 1))
    points = []
    with (
        new_cluster(shards=SHARDS, f=0, name="bench") as cluster,
        session("bulk", CORES) as spark,
    ):
        for number, rows in enumerate(shapes):
            parquet = cluster.config.data_dir.parent / f"rows-{number}"
            put_down(rows, parquet)
            points.append(of_rows(spark, cluster, rows, parquet))
            progress.step(label(points[-1]))
        found = _in_log(spark, cluster).count()
        expected = sum(2 * (1 + _MAX_ROUNDS) * rows.count for rows in shapes)
        if found != expected:
            raise RuntimeError(f"the log has {found} rows, not {expected}")
    return {"rounds": _MAX_ROUNDS, "points": points}


def _in_log(spark: SparkSession, cluster: Cluster) -> DataFrame:
    reader = spark.read.format("ziplog").option("ziplog.bootstrap.servers", cluster.endpoint)
    return reader.schema("offset long").load()


def put_down(rows: Rows, folder: Path) -> None:
    """Write the rows as Parquet files, of each of which a task is made."""
    import pyarrow as pa  # noqa: PLC0415  optional
    from pyarrow import parquet  # noqa: PLC0415  optional

    folder.mkdir()
    for number in range(_FILES):
        drawn, keys = draw(rows, number, _FILES)
        columns = {"value": pa.array(drawn, pa.binary())}
        if keys is not None:
            columns["key"] = pa.array(keys, pa.binary())
        file = folder / f"{number}.parquet"
        parquet.write_table(pa.table(columns), file, compression="none", use_dictionary=False)


def draw(rows: Rows, number: int, parts: int) -> tuple[list[bytes], list[bytes] | None]:
    """Draw the values of one part, and the keys if they select the shard."""
    rng = random.Random(number)  # noqa: S311 - no secret
    count = rows.count // parts + (number < rows.count % parts)
    drawn = values(rng, count, rows.size, "random")
    if rows.policy == "partition":
        return drawn, None
    return drawn, [b"key-%d" % rng.randrange(_KEYS) for _ in range(count)]


def of_rows(spark: SparkSession, cluster: Cluster, rows: Rows, parquet: Path) -> Figures:
    """Write as much in each way, round by round."""
    frame = spark.read.parquet(str(parquet))
    writes = {
        READ: lambda: timed(frame),
        SPARK: lambda: by_spark(frame, cluster.endpoint, rows),
        MANY: lambda: by_clients(cluster.endpoint, rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in TARGETS}
    for number in range(1 + _MAX_ROUNDS):
        for name in rotated(list(TARGETS), number):
            took = writes[name]()
            if number:
                seconds[name].append(took)
    return rows._asdict() | summary(rows.count, seconds)


def by_spark(frame: DataFrame, bootstrap: str, rows: Rows) -> float:
    """Write all of a frame; return the seconds."""
    writer = frame.write.format("ziplog").option("ziplog.bootstrap.servers", bootstrap)
    began = time.perf_counter()
    writer.option("policy", rows.policy).option("timeout", _TIMEOUT_S).mode("append").save()
    return time.perf_counter() - began


def by_clients(bootstrap: str, rows: Rows) -> float:
    """Write as much by `insert_many`; return the seconds from when all clients are ready."""
    with Workers(_insert, [(bootstrap, rows, number) for number in range(CORES)]) as workers:
        workers.receive()
        began = time.perf_counter()
        workers.send("go")
        workers.receive()
        return time.perf_counter() - began


def _insert(bootstrap: str, rows: Rows, number: int, pipe: Connection) -> None:
    """Insert a share of the rows round robin (in a client process)."""
    drawn, keys = draw(rows, number, CORES)
    call = max(1, _CALL_BYTES // rows.size)
    with ziplog.connect(bootstrap, policy=policy.round_robin(), timeout=_TIMEOUT_S) as log:
        pipe.send("ready")
        pipe.recv()
        for at in range(0, len(drawn), call):
            named = None if keys is None else keys[at : at + call]
            log.insert_many(drawn[at : at + call], keys=named)
        pipe.send("done")


def summary(count: int, seconds: Mapping[str, list[float]]) -> Figures:
    """Return rates, and how Spark compares, as medians over the rounds."""
    spark, many, read = seconds[SPARK], seconds[MANY], seconds[READ]
    return {
        "rows_per_s": {name: count / statistics.median(took) for name, took in seconds.items()},
        "to_insert_many": statistics.median(b / a for a, b in zip(spark, many, strict=True)),
        "read_task": statistics.median(b / a for a, b in zip(spark, read, strict=True)),
    }


# --- output ---


def lines(result: Figures) -> Iterator[str]:
    """Yield the lines of the output."""
    heads = "".join(f"{name:>13}" for name in TARGETS)
    yield f"{f'rows/s, local[{CORES}]':<24}{heads}{'x insert_many':>15}{'reading':>9}"
    for point in result["points"]:
        rates = "".join(f"{point['rows_per_s'][name]:>13,.0f}" for name in TARGETS)
        ratios = f"{point['to_insert_many']:>14.2f}x{point['read_task']:>9.0%}"
        yield f"{label(point):<24}{rates}{ratios}"


def label(point: Figures) -> str:
    """Return a point's name."""
    return f"{point['size']} B, by {point['policy']}"
