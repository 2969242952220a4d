"""Read benchmark: Spark reads the same rows from a log's servers, from its files, and from Parquet.

Goal: as fast as `spark.read.parquet` with rows of 4 KB, half as fast with rows of 100 bytes. Rule:
a round reads each source once, in the same session, and discards the rows (`noop`). First rounds do
not count; the result is the median of the ratios within rounds. Invariant: before the timing, all
three sources have the same rows, by number and by sums.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from metrics.picture import BLUE, GREY, OCHRE, axes
from metrics.rounds import alternate, ratio
from metrics.setup import Progress
from metrics.spark import session

from spark_bench.cluster_setup import Shape, bench_setup

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from spark_bench.cluster_setup import BenchSetup

    Figures = dict[str, Any]

PARQUET: Final = "parquet"
SERVERS: Final = "servers"
FILES: Final = "files"
CORES: Final = (1, 2)
SHARDS: Final = (1, 2, 4)
#: Bytes of a value, and rows at scale 1.
SIZES: Final = ((4096, 131_072), (100, 3_000_000))
_WARM: Final = 2


def measure(scale: float) -> Figures:
    """Measure all shapes; `scale` 1: 512 MiB of 4 KB, 300 MB of 100 B, five rounds."""
    rounds = max(3, round(5 * scale))
    shapes = list(all_shapes(scale))
    progress = Progress("spark", len(shapes))
    points = []
    for shape in shapes:
        with bench_setup(shape) as setup:
            points.append(measure_setup(setup, rounds))
        progress.step(label(points[-1]))
    return {"rounds": rounds, "points": points}


def all_shapes(scale: float) -> Iterator[Shape]:
    """Yield the shapes: shards; too few rows for a sealed segment; words; one row per call."""
    (large, few), (small, many) = ((size, max(16, int(rows * scale))) for size, rows in SIZES)
    for size, rows in ((large, few), (small, many)):
        for shards in SHARDS:
            yield Shape(rows, size, shards)
    yield Shape(few // 16, large)
    yield Shape(many, small, content="words")
    yield Shape(many // 5, small, how="single")


def measure_setup(setup: BenchSetup, rounds: int) -> Figures:
    """Measure one log with one and two cores."""
    shape = setup.shape
    cores = {}
    for count in CORES:
        with session("bulk", count) as spark:
            cores[str(count)] = of_session(spark, setup, rounds)
    parquet_bytes = sum(path.stat().st_size for path in setup.parquet.glob("*.parquet"))
    return {
        **shape._asdict(),
        "segments": setup.segments,
        "sealed": setup.sealed,
        "insert_s": setup.insert_s,
        "parquet_bytes": parquet_bytes,
        "segment_bytes": setup.segment_bytes,
        "cores": cores,
    }


def of_session(spark: SparkSession, setup: BenchSetup, rounds: int) -> Figures:
    """Measure one log in one session."""
    frames = tables(spark, setup)
    shape = setup.shape
    for name, frame in frames.items():
        check(name, frame, frames[PARQUET], shape)
    reads = {name: partial(timed, frame) for name, frame in frames.items()}
    return summary(shape.rows, alternate(reads, rounds, _WARM))


def tables(spark: SparkSession, setup: BenchSetup) -> dict[str, DataFrame]:
    """Return the three tables; the Parquet files are written of the servers' rows."""
    reader = spark.read.format("ziplog")
    servers = reader.option("ziplog.bootstrap.servers", setup.cluster.endpoint).load()
    files = spark.read.format("ziplog").option("path", str(setup.files)).load()
    path = str(setup.parquet)
    servers.write.mode("overwrite").parquet(path)
    return {PARQUET: spark.read.parquet(path), SERVERS: servers, FILES: files}


def check(name: str, frame: DataFrame, other: DataFrame, shape: Shape) -> None:
    """See that two tables have the same rows.

    Raises:
        RuntimeError: they have not.

    """
    found, expected = (_sums(of) for of in (frame, other))
    if found != expected or found[0] != shape.rows or found[1] != shape.rows * shape.size:
        raise RuntimeError(f"{name} has other rows: {found}, not {expected} of {shape}")


def _sums(frame: DataFrame) -> tuple[int, ...]:
    row = frame.selectExpr(
        "count(*)", "sum(length(value))", "sum(offset)", "sum(crc32(value))"
    ).first()
    assert row is not None
    return tuple(row)


def timed(frame: DataFrame) -> float:
    """Read all of it; return the seconds."""
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began


def summary(rows: int, seconds: Mapping[str, list[float]]) -> Figures:
    """Return rates, and ratios to Parquet, as medians over the rounds."""
    return {
        name: {
            "rows_per_s": rows / statistics.median(took),
            "to_parquet": ratio(seconds[PARQUET], took),
        }
        for name, took in seconds.items()
    }


def label(point: Figures) -> str:
    """Return a point's name."""
    if not point["sealed"]:
        return f"{point['size']} B, not sealed"
    way = ", one a call" if point["how"] == "single" else ""
    way += ", words" if point["content"] == "words" else ""
    return f"{point['size']} B, {point['shards']} shard{'s' * (point['shards'] > 1)}{way}"


def draw(result: Figures, path: Any) -> None:
    """Draw what share of Parquet's rate is reached, by kind of log."""
    with axes(path, sharey=True) as found:
        points = result["points"]
        for axis, cores in zip(found, CORES, strict=True):
            for shift, (name, colour) in enumerate(((SERVERS, BLUE), (FILES, OCHRE))):
                ratios = [point["cores"][str(cores)][name]["to_parquet"] for point in points]
                places = [index + 0.4 * shift for index in range(len(points))]
                axis.barh(places, ratios, height=0.38, color=colour, label=name)
            axis.set_yticks([index + 0.2 for index in range(len(points))], list(map(label, points)))
            axis.axvline(1, color=GREY, linestyle=":")
            axis.set_xlabel(f"rows/s over those from Parquet, local[{cores}]")
        found[0].invert_yaxis()
        found[1].legend()
