"""How fast a player fills SQLite, PostgreSQL, files and a mirror, beside the same without one.

The log is full before the player starts. A rate is that from the start of the first step of the
target to the end of the last one. Beside SQL stands `executemany` of the same rows in the same
batches, from memory, in transactions of the same durability; beside files `ziplog export` as JSON
lines, in this process.
"""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from metrics.rounds import alternate, ratio
from metrics.setup import cluster as new_cluster

from logplayer import targets
from logplayer.targets import tables
from logplayer.targets.sqlite_target import open_file
from player_bench.timing import play
from tests import postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ziplog.local import Cluster
    from ziplog.types import Record, RecordId

Figures = dict[str, Any]
Row = tuple[Any, ...]

#: Bytes of a payload, and records at scale 1; the large ones exceed the memory of a player.
_SIZES: Final = ((100, 30_000), (4096, 24_000))
_ROUNDS: Final = 3
_FILES: Final = (100, 200_000)
_MIRRORED: Final = (100, 60_000)
_SQL_GOAL: Final = 0.7
_FILES_GOAL: Final = 0.7
_MIRROR_GOAL_PER_S: Final = 20_000
_COLUMNS: Final = ("gsn", "shard", "epoch", "timestamp_us", "key", "payload")


def fill(cluster: Cluster, size: int, count: int) -> RecordId:
    """Insert records with random payloads; return the last one's rid."""
    with cluster.connect(timeout=60.0) as log:
        rids: list[RecordId] = []
        for start in range(0, count, 2000):
            payloads = [os.urandom(size) for _ in range(min(2000, count - start))]
            rids += log.insert_many(
                payloads, keys=[b"key-%d" % (n % 100) for n in range(len(payloads))]
            )
    return max(rids)


def rows_of(cluster: Cluster) -> list[Row]:
    """Return all records as rows of the table `records`."""
    with cluster.connect() as log, log.subscribe(follow=False) as records:
        return [_row(record) for record in records]


def _row(record: Record) -> Row:
    rid = record.rid
    return (rid.gsn, rid.shard, record.epoch, record.timestamp_us, record.key, record.payload)


def in_batches(rows: Sequence[Row], sizes: Sequence[int]) -> Iterator[list[Row]]:
    """Yield the rows in batches of these sizes."""
    left = iter(rows)
    for size in sizes:
        yield list(islice(left, size))


# --- SQL ---------------------------------------------------------------------------------------


def sql(scale: float) -> Figures:
    """Records a second into SQLite and PostgreSQL; `ratio`: over `executemany`."""
    found: Figures = {}
    with tempfile.TemporaryDirectory(prefix="ziplog-bench-") as folder:
        for size, count in _SIZES:
            with new_cluster() as cluster:
                last = fill(cluster, size, max(2000, int(count * scale)))
                found[f"SQLite, {size} B"] = _sqlite(cluster, Path(folder), size, last)
                if not postgres.why_not():
                    found[f"PostgreSQL, {size} B"] = _postgres(cluster, size, last)
    return {"L6": found}


def _sqlite(cluster: Cluster, folder: Path, size: int, last: RecordId) -> Figures:
    numbers = iter(range(1000))

    def target(name: str) -> Any:
        return targets.sqlite("copy", folder / f"{size}-{name}.db")

    def floor(batches: Sequence[list[Row]]) -> float:
        with closing(open_file(os.fspath(folder / f"{size}-floor-{next(numbers)}.db"))) as database:
            database.execute(tables.RECORDS.format(key="key", blob="BLOB"))
            began = time.monotonic()
            for batch in batches:
                database.execute("BEGIN IMMEDIATE")
                database.executemany(_insert("?"), batch)
                database.execute("COMMIT")
            return sum(map(len, batches)) / (time.monotonic() - began)

    return _compare(cluster, f"sqlite-{size}", target, floor, last)


def _postgres(cluster: Cluster, size: int, last: RecordId) -> Figures:
    import psycopg  # noqa: PLC0415 - optional

    server = postgres.Server()

    def target(_name: str) -> Any:
        _drop(server.dsn)
        return targets.postgres("copy", server.dsn)

    def floor(batches: Sequence[list[Row]]) -> float:
        _drop(server.dsn)
        with psycopg.connect(server.dsn) as database:
            database.execute(tables.RECORDS.format(key="key", blob="BYTEA"))
            database.commit()
            began = time.monotonic()
            for batch in batches:
                database.cursor().executemany(_insert("%s"), batch)
                database.commit()
            return sum(map(len, batches)) / (time.monotonic() - began)

    try:
        return _compare(cluster, f"postgres-{size}", target, floor, last)
    finally:
        server.stop()


def _insert(mark: str) -> str:
    marks = ", ".join([mark] * len(_COLUMNS))
    return f"INSERT INTO records ({', '.join(_COLUMNS)}) VALUES ({marks})"  # noqa: S608 - our names


def _drop(dsn: str) -> None:
    import psycopg  # noqa: PLC0415 - optional

    with psycopg.connect(dsn) as database:
        for table in ("records", *tables.TABLES):
            database.execute(f"DROP TABLE IF EXISTS {table}")


def _compare(
    cluster: Cluster,
    name: str,
    target: Callable[[str], Any],
    floor: Callable[[Sequence[list[Row]]], float],
    last: RecordId,
) -> Figures:
    """Compare a player with the same rows, in the batches of its first run."""
    first = play(cluster, f"{name}-first", target("first"), last)
    batches = list(in_batches(rows_of(cluster), first.batches))
    numbers = iter(range(1000))

    def ours() -> float:
        number = next(numbers)
        return play(cluster, f"{name}-{number}", target(str(number)), last).per_s()

    rates = alternate({"player": ours, "floor": partial(floor, batches)}, _ROUNDS, warm=0)
    return {
        "player_per_s": statistics.median(rates["player"]),
        "executemany_per_s": statistics.median(rates["floor"]),
        "ratio": ratio(rates["player"], rates["floor"]),
        "goal_ratio": _SQL_GOAL,
        "records_per_batch": statistics.median(first.batches),
    }


# --- files, a mirror ---------------------------------------------------------------------------


def files(scale: float) -> Figures:
    """Records a second into files, over `ziplog export`; and into a mirror of one shard."""
    with tempfile.TemporaryDirectory(prefix="ziplog-bench-") as folder, new_cluster() as cluster:
        size, count = _FILES
        last = fill(cluster, size, max(5000, int(count * scale)))
        return {"L7": {"files": _files(cluster, Path(folder), last), "mirror": _mirror(scale)}}


def _files(cluster: Cluster, folder: Path, last: RecordId) -> Figures:
    numbers = iter(range(1000))

    def ours() -> float:
        number = next(numbers)
        return play(
            cluster, f"files-{number}", targets.files("copy", folder / str(number)), last
        ).per_s()

    rates = alternate({"player": ours, "export": partial(_export, cluster, folder)}, _ROUNDS)
    return {
        "player_per_s": statistics.median(rates["player"]),
        "export_per_s": statistics.median(rates["export"]),
        "ratio": ratio(rates["player"], rates["export"]),
        "goal_ratio": _FILES_GOAL,
    }


def _export(cluster: Cluster, folder: Path) -> float:
    from spark_reader import options  # noqa: PLC0415 - slow to import
    from spark_reader.export import export  # noqa: PLC0415

    asked = {options.SERVERS: cluster.endpoint}
    began = time.monotonic()
    done = export(asked, folder / "export.jsonl", "jsonl", "none", lambda *_: None, io.BytesIO())
    return done.rows / (time.monotonic() - began)


def _mirror(scale: float) -> Figures:
    size, count = _MIRRORED
    rates = []
    with new_cluster() as source, new_cluster() as mirror:
        last = fill(source, size, max(2000, int(count * scale)))
        for number in range(_ROUNDS):
            spec = targets.log("copy", mirror.endpoint)
            rates.append(play(source, f"mirror-{number}", spec, last).per_s())
    return {"player_per_s": statistics.median(rates), "goal_per_s": _MIRROR_GOAL_PER_S}
