"""Spark reads a real cluster: every load has the rows of a subscription."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.spark_reader.logs import (
    TIMEOUT_S,
    Key,
    as_key,
    await_archives,
    fill,
    small_cluster,
    subscribed,
)
from ziplog import Record, RecordId, policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from ziplog import Log
    from ziplog.local import Cluster

pytestmark = pytest.mark.timeout(300)

SERVERS = "ziplog.bootstrap.servers"
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with sealed segments and later records."""
    with small_cluster(tmp_path_factory.mktemp("reads") / "log") as running:
        with running.connect(timeout=TIMEOUT_S) as log:
            fill(running, 500)
            await_archives(log)
        yield running


@pytest.fixture(scope="module")
def log(cluster: Cluster) -> Iterator[Log]:
    with cluster.connect(timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="module")
def records(cluster: Cluster) -> list[Record]:
    return subscribed(cluster)


def load(spark: SparkSession, cluster: Cluster, schema: str = "", **options: Any) -> DataFrame:
    reader = spark.read.format("ziplog").option(SERVERS, cluster.endpoint)
    reader = reader.option("timeout", str(TIMEOUT_S))
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return (reader.schema(schema) if schema else reader).load()


def keys(frame: DataFrame) -> list[Key]:
    asked = frame.select("offset", "partition", "value", "key", "epoch")
    return sorted(
        (gsn, shard, bytes(value), None if key is None else bytes(key), epoch)
        for gsn, shard, value, key, epoch in asked.collect()
    )


def test_repeated_loads_equal_a_subscription(
    spark: SparkSession, cluster: Cluster, records: list[Record]
) -> None:
    frame = load(spark, cluster, minPartitions=4)
    expected = [as_key(record) for record in records]
    assert keys(frame) == expected
    assert frame.rdd.getNumPartitions() >= 4
    assert frame.count() == frame.count() == len(expected)
    joined = frame.alias("a").join(frame.alias("b"), "offset")
    assert joined.count() == len(expected)


def test_each_column_has_its_content(
    spark: SparkSession, cluster: Cluster, records: list[Record]
) -> None:
    record = next(record for record in records if record.key is not None)
    frame = load(spark, cluster)
    assert [(name, kind) for name, kind in frame.dtypes] == [
        ("key", "binary"), ("value", "binary"), ("topic", "string"), ("partition", "int"),
        ("offset", "bigint"), ("timestamp", "timestamp"), ("timestampType", "int"),
        ("epoch", "bigint"),
    ]  # fmt: skip
    asked = frame.filter(f"offset = {record.rid.gsn}")
    (row,) = asked.selectExpr("*", "unix_micros(timestamp) AS micros").collect()
    assert (bytes(row.key), bytes(row.value)) == (record.key, record.payload)
    assert (row.topic, row.partition, row["offset"]) == ("local", record.rid.shard, record.rid.gsn)
    assert (row.micros, row.timestampType) == (record.timestamp_us, 0)
    assert row.epoch == record.epoch


def test_a_schema_is_the_projection(
    spark: SparkSession, cluster: Cluster, records: list[Record]
) -> None:
    start = records[-100].rid.gsn
    frame = load(
        spark, cluster, "gsn long, shard int, key string, value string", startingOffsets=start
    )
    texts = [record for record in records if record.rid.gsn >= start and record.key]
    rows = frame.filter("key IS NOT NULL").orderBy("gsn").collect()
    assert [tuple(row) for row in rows] == [
        (r.rid.gsn, r.rid.shard, (r.key or b"").decode(), r.payload.decode()) for r in texts
    ]


def test_a_string_column_with_invalid_utf_8_fails_with_its_position(
    spark: SparkSession, cluster: Cluster, records: list[Record]
) -> None:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - it may be missing

    with pytest.raises(PySparkException, match=r"value at gsn \d+ is .*; it must be UTF-8"):
        load(spark, cluster, "value string").collect()
    assert records


def test_later_inserts_do_not_change_the_end_of_a_load(
    spark: SparkSession, cluster: Cluster, log: Log, records: list[Record]
) -> None:
    stop = threading.Event()
    busy = threading.Event()

    def insert() -> None:
        with cluster.connect(policy=policy.random(), timeout=TIMEOUT_S) as mine:
            for number in count():
                mine.insert_many([b"load %d" % number] * 20)
                busy.set()
                if stop.is_set():
                    return

    start = records[-1].rid.gsn + 1
    writer = threading.Thread(target=insert)
    writer.start()
    try:
        assert busy.wait(2 * TIMEOUT_S)
        frame = load(spark, cluster, startingOffsets=start)
        again = load(spark, cluster, startingOffsets=start)
        found = keys(frame)
        assert keys(frame) == found
        assert frame.filter("offset > 0").count() == len(found)
        others = keys(again)
    finally:
        stop.set()
        writer.join()
    expected = [as_key(record) for record in log.subscribe(RecordId(start, 0), follow=False)]
    assert 0 < len(found) <= len(others) <= len(expected)
    assert found == expected[: len(found)]
    assert others == expected[: len(others)]


def test_a_load_contains_every_insert_completed_before_it(
    spark: SparkSession, cluster: Cluster, log: Log
) -> None:
    for number in range(3):
        rid = log.insert_after(b"done %d" % number)
        frame = load(spark, cluster, startingOffsets=str(rid))
        assert (rid.gsn, rid.shard, b"done %d" % number) in [row[:3] for row in keys(frame)]


def test_offsets_bound_the_range(
    spark: SparkSession, cluster: Cluster, records: list[Record]
) -> None:
    low, high = len(records) // 3, 2 * len(records) // 3
    bounds = {"startingOffsets": records[low].rid, "endingOffsets": records[high].rid.gsn}
    expected = [as_key(record) for record in records[low:high]]
    assert keys(load(spark, cluster, **bounds)) == expected
    same = {"startingOffsets": 7, "endingOffsets": 7}
    assert keys(load(spark, cluster, **same)) == []


def test_epochs_bound_the_range_inclusively(
    spark: SparkSession, cluster: Cluster, records: list[Record]
) -> None:
    epochs = sorted({record.epoch for record in records})
    first, last = epochs[len(epochs) // 3], epochs[2 * len(epochs) // 3]
    frame = load(spark, cluster, startingEpoch=first, endingEpoch=last)
    assert keys(frame) == [as_key(r) for r in records if first <= r.epoch <= last]


def test_timestamps_filter_rows(
    spark: SparkSession, cluster: Cluster, records: list[Record]
) -> None:
    times = sorted({record.timestamp_us for record in records})
    since = times[len(times) // 3] // 1000 * 1000
    until = times[2 * len(times) // 3] // 1000 * 1000
    last = records[-1].rid.gsn + 1
    expected = [as_key(r) for r in records if since <= r.timestamp_us < until]
    assert expected
    milliseconds = {"startingTimestamp": since // 1000, "endingTimestamp": until // 1000}
    assert keys(load(spark, cluster, endingOffsets=last, **milliseconds)) == expected
    texts = [datetime.fromtimestamp(at / 1e6, UTC).isoformat() for at in (since, until)]
    moments = {"startingTimestamp": texts[0], "endingTimestamp": texts[1]}
    assert keys(load(spark, cluster, endingOffsets=last, **moments)) == expected


def test_a_dataframe_has_the_same_rows_when_planned_again(
    spark: SparkSession, cluster: Cluster, log: Log, records: list[Record]
) -> None:
    start, last = records[-1].rid.gsn + 1, records[-1].rid.gsn
    # Spark then plans each filtered query again, and uses that plan for later unfiltered queries.
    spark.conf.set(PUSHDOWN, "true")
    try:
        for schema in ("", "offset long"):
            frame = load(spark, cluster, schema, startingOffsets=start - 100)
            before = frame.filter(f"offset > {last}").count()
            log.insert_after(b"later")
            assert frame.filter(f"offset >= {start}").count() == before
            few = frame.filter(f"offset = {last}")
            assert few.count() == 1
            assert frame.count() > before
    finally:
        spark.conf.set(PUSHDOWN, "false")


def test_spark_reads_the_files_of_a_cluster(
    spark: SparkSession, cluster: Cluster, records: list[Record]
) -> None:
    frame = spark.read.format("ziplog").load(str(cluster.config.data_dir))
    assert frame.count() == frame.count() > 0
    end = frame.agg({"offset": "max"}).collect()[0][0]
    found = [row for row in keys(frame) if row[0] <= records[-1].rid.gsn]
    assert found == [as_key(r) for r in records if r.rid.gsn <= end]
