"""Spark streams from and to real clusters: each record once, across restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from tests.unit.spark_reader.copying import SMALL, copy
from tests.unit.spark_reader.logs import TIMEOUT_S, fill_named, placed, subscribed, tail
from tests.waiting import wait_until
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from ziplog import RecordId

pytestmark = pytest.mark.timeout(400)

SERVERS = "ziplog.bootstrap.servers"
PATIENT = {"timeout": str(TIMEOUT_S)}
#: Generous: starting Spark takes minutes on a machine that is busy with the other tests.
WAIT_S = 280
#: How often a query is started, and why again.
STARTS = 5
TOO_SLOW = "Python worker failed to connect back"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("log"), shards=2) as running:
        yield running


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("copy"), shards=2) as running:
        yield running


def source(spark: SparkSession, cluster: Cluster, **options: str) -> DataFrame:
    named = PATIENT | {SERVERS: cluster.endpoint} | options
    return spark.readStream.format("ziplog").options(**named).load()


def run(start: Callable[[], StreamingQuery]) -> None:
    """Run a query to its end.

    Spark gives the Python process of a source 10 s to start, and does not try again. On a busy
    machine that fails, so the query is started again.
    """
    for _ in range(STARTS):
        query = start()
        try:
            assert query.awaitTermination(WAIT_S), "it ends"
        except StreamingQueryException as error:
            if TOO_SLOW not in str(error):
                raise
        else:
            return
        finally:
            query.stop()
    pytest.fail(f"the Python process of the source did not start in time, {STARTS} times")


@contextmanager
def running(start: Callable[[], StreamingQuery]) -> Iterator[StreamingQuery]:
    """Run a query that has looked at the log; start it again as `run` does."""
    for _ in range(STARTS):
        query = start()
        try:
            wait_until(
                lambda query=query: query.lastProgress is not None or query.exception() is not None,
                "it has looked at the log",
                deadline_s=WAIT_S,
            )
            error = query.exception()
            if error is None:
                yield query
                return
            if TOO_SLOW not in str(error):
                raise error
        finally:
            query.stop()
    pytest.fail(f"the Python process of the source did not start in time, {STARTS} times")


class Kept:
    """The rows of each micro-batch, by its number."""

    def __init__(self) -> None:
        self.batches: dict[int, list[bytes]] = {}

    def keep(self, frame: DataFrame, batch: int) -> None:
        self.batches[batch] = [bytes(row.value) for row in frame.collect()]

    @property
    def rows(self) -> Counter[bytes]:
        return Counter(row for rows in self.batches.values() for row in rows)


def test_available_now_runs_several_batches_and_a_restart_continues(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    begin = tail(cluster)
    first = fill_named(cluster, "first", 1500, 1000)
    kept = Kept()

    def batches() -> int:
        before = len(kept.batches)
        frame = source(spark, cluster, startingOffsets=str(begin), maxBytesPerBatch="500k")
        writing = frame.writeStream.foreachBatch(kept.keep).trigger(availableNow=True)
        run(writing.option("checkpointLocation", str(tmp_path)).start)
        return len(kept.batches) - before

    assert batches() >= 3
    assert kept.rows == Counter(first)
    assert batches() == 0, "nothing new is no micro-batch"
    second = fill_named(cluster, "second", 10)
    assert batches() == 1
    assert kept.rows == Counter(first + second)


def test_a_stream_follows_the_log_from_latest(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    fill_named(cluster, "old", 10)
    kept = Kept()
    frame = source(spark, cluster, startingOffsets="latest").select("value")
    writing = frame.writeStream.foreachBatch(kept.keep)
    with running(writing.option("checkpointLocation", str(tmp_path)).start):
        for number in range(3):
            fill_named(cluster, f"new {number}", 6)
            expected = 6 * (number + 1)
            wait_until(
                lambda expected=expected: kept.rows.total() >= expected,
                "it follows",
                deadline_s=WAIT_S,
            )
    assert set(kept.rows.values()) == {1}
    assert {row.split()[0] for row in kept.rows} == {b"new"}


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Let Python get rows soon."""
    usual = {name: spark.conf.get(name) for name in SMALL}
    for name in SMALL:
        spark.conf.set(name, SMALL[name])
    yield
    for name in SMALL:
        spark.conf.set(name, usual[name])


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("policy", ["partition", pytest.param("key", marks=pytest.mark.nightly)])
def test_a_copy_that_dies_in_the_middle_of_a_batch_has_each_record_once(
    spark: SparkSession, cluster: Cluster, target: Cluster, tmp_path: Path, policy: str
) -> None:
    begin, there = tail(cluster), tail(target)
    payloads = fill_named(cluster, policy, 3_000, 200)
    asked = copying(cluster, target, tmp_path, begin, policy)
    with pytest.raises(StreamingQueryException, match="dies"):
        run(lambda: copy(spark, **asked, fatal=2_800))
    written = len(subscribed(target, there))
    assert 0 < written < len(payloads), "it died in the middle"
    # The current outlines would lead to another plan.
    payloads += fill_named(cluster, policy + "2", 100)
    run(lambda: copy(spark, **asked))
    assert Counter(record.payload for record in subscribed(target, there)) == Counter(payloads)
    options = PATIENT | {SERVERS: target.endpoint, "startingOffsets": str(there)}
    loaded = spark.read.format("ziplog").options(**options).load().select("value").collect()
    assert Counter(bytes(row.value) for row in loaded) == Counter(payloads)


def copying(
    cluster: Cluster, target: Cluster, folder: Path, begin: RecordId, policy: str
) -> dict[str, str]:
    """Return the arguments of `copy`."""
    return {
        "servers": cluster.endpoint,
        "target": target.endpoint,
        "folder": str(folder),
        "begin": str(begin),
        "policy": policy,
    }


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_query_that_is_killed_has_each_record_once(
    spark: SparkSession, cluster: Cluster, target: Cluster, tmp_path: Path
) -> None:
    """Between the plan of a micro-batch and its end, when a part of it was written."""
    begin, there = tail(cluster), tail(target)
    payloads = fill_named(cluster, "killed", 3_000, 200)
    checkpoint, mark = tmp_path / "checkpoint", tmp_path / "mark"
    asked = copying(cluster, target, checkpoint, begin, "key")
    arguments = json.dumps(asked | {"fatal": 2_800, "mark": str(mark)})
    command = [sys.executable, "-m", "tests.unit.spark_reader.copying", arguments]
    # A killed process leaves temporary files; the test's directory contains them.
    here = {"TMPDIR": str(tmp_path), "SPARK_LOCAL_DIRS": str(tmp_path)}
    here["JAVA_TOOL_OPTIONS"] = f"-Djava.io.tmpdir={tmp_path}"
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command, env=os.environ | here, start_new_session=True, stderr=stderr
        ) as process,
    ):

        def hangs() -> bool:
            assert process.poll() is None, f"it ended: {errors.read_text()[-4000:]}"
            return mark.exists()

        try:
            wait_until(hangs, "a task hangs", deadline_s=WAIT_S)
            wait_until(lambda: subscribed(target, there), "others have written", deadline_s=WAIT_S)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert (checkpoint / "offsets" / "0").exists()
    assert not (checkpoint / "commits" / "0").exists()
    assert len(subscribed(target, there)) < len(payloads), "it was killed in the middle"
    payloads += fill_named(cluster, "meanwhile", 100)
    run(lambda: copy(spark, **asked))
    assert placed(target, there) > len(payloads), "rows that it had written are stored twice"
    assert Counter(record.payload for record in subscribed(target, there)) == Counter(payloads)


def test_a_micro_batch_without_a_commit_has_each_record_once(
    spark: SparkSession, cluster: Cluster, target: Cluster, tmp_path: Path
) -> None:
    """All of it was written, and is written again."""
    begin, there = tail(cluster), tail(target)
    payloads = fill_named(cluster, "whole", 300)
    asked = copying(cluster, target, tmp_path, begin, "partition")
    run(lambda: copy(spark, **asked))
    for name in ("0", ".0.crc"):
        (tmp_path / "commits" / name).unlink()
    payloads += fill_named(cluster, "meanwhile", 100)
    run(lambda: copy(spark, **asked))
    assert placed(target, there) == 2 * 300 + 100
    assert Counter(record.payload for record in subscribed(target, there)) == Counter(payloads)


def test_a_trim_is_a_data_loss_error_or_allowed(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    begin = tail(cluster)
    fill_named(cluster, "lost", 100)
    kept = Kept()

    def load(**options: str) -> None:
        frame = source(spark, cluster, startingOffsets=str(begin), **options)
        writing = frame.writeStream.foreachBatch(kept.keep).trigger(availableNow=True)
        run(writing.option("checkpointLocation", str(tmp_path)).start)

    load()
    assert kept.rows.total() == 100
    fill_named(cluster, "lost as well", 100)
    point = tail(cluster)
    rest = fill_named(cluster, "rest", 10)
    with cluster.connect(timeout=TIMEOUT_S) as log:
        log.trim(point)
    with pytest.raises(StreamingQueryException, match="TrimmedError"):
        load()
    kept.batches.clear()
    load(failOnDataLoss="false")
    assert kept.rows == Counter(rest)


def test_a_zombie_task_changes_nothing(cluster: Cluster) -> None:
    """Two attempts of a task at a time: each writes the same, in turns."""
    begin = tail(cluster)
    rows = [b"row %d" % number for number in range(100)]
    with (
        cluster.connect(timeout=TIMEOUT_S) as log,
        cluster.connect(timeout=TIMEOUT_S) as zombie,
    ):
        for at, who in ((0, log), (0, zombie), (10, log), (20, log), (10, zombie), (20, zombie)):
            who.insert_rows(rows[at : at + 10], shard=1, writer=b"w" * 16, batch=3, row=at)
        zombie.insert_rows(rows[30:60], shard=1, writer=b"w" * 16, batch=3, row=30)
        log.insert_rows(rows[30:100], shard=1, writer=b"w" * 16, batch=3, row=30)
        zombie.insert_rows(rows[60:70], shard=1, writer=b"w" * 16, batch=3, row=60)
        log.insert_rows(rows[:5], shard=1, writer=b"w" * 16, batch=4, row=0)
        zombie.insert_rows(rows[90:], shard=1, writer=b"w" * 16, batch=3, row=90)
    assert [record.payload for record in subscribed(cluster, begin)] == rows + rows[:5]
