"""Spark writes to real clusters: each row is there once, whatever tasks had to be run again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.spark_reader.logs import TIMEOUT_S, placed, subscribed, tail
from ziplog import policy
from ziplog.errors import ConfigError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from ziplog import RecordId

pytestmark = pytest.mark.timeout(300)

SERVERS = "ziplog.bootstrap.servers"
PATIENT = {"timeout": str(TIMEOUT_S)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("log"), shards=2) as running:
        yield running


@pytest.fixture
def begin(cluster: Cluster) -> RecordId:
    """Return the position at which a test's writes start."""
    return tail(cluster)


def loaded(spark: SparkSession, cluster: Cluster, begin: RecordId) -> list[bytes]:
    options = PATIENT | {SERVERS: cluster.endpoint, "startingOffsets": str(begin)}
    frame = spark.read.format("ziplog").options(**options).schema("value binary").load()
    return [bytes(row.value) for row in frame.collect()]


def save(frame: DataFrame, cluster: Cluster, **options: str) -> None:
    """Write rows; with an `identity`, to all shards, also those that are away just now."""
    named = PATIENT | {SERVERS: cluster.endpoint} | options
    frame.write.format("ziplog").options(**named).mode("append").save()


def identity(query: str) -> dict[str, str]:
    """Return the options of a write that its user names."""
    return {"queryId": query, "batchId": "0"}


def failing_once(mark: Path) -> Callable[[DataFrame, str, int], DataFrame]:
    """Return what lets the first task that comes to a row die there, once."""
    from pyspark.sql.functions import udf  # noqa: PLC0415 - may be missing

    path = str(mark)

    def through(value: str, number: int, fatal: int) -> str:
        if number == fatal:
            import os  # noqa: PLC0415 - in another process

            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return value
            raise RuntimeError("dies once")
        return value

    passing = udf(through, "string", useArrow=False).asNondeterministic()

    def at(frame: DataFrame, column: str, fatal: int) -> DataFrame:
        from pyspark.sql.functions import lit  # noqa: PLC0415 - as above

        return frame.withColumn(column, passing(column, "id", lit(fatal)))

    return at


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Let Python get rows soon."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    usual = spark.conf.get(name)
    spark.conf.set(name, 500)
    yield
    spark.conf.set(name, usual)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("keyed", [False, True])
def test_a_repeated_task_leaves_no_duplicates(
    spark: SparkSession, cluster: Cluster, begin: RecordId, tmp_path: Path, keyed: bool
) -> None:
    """The rows before the failing row were written, as if the input had ended there."""
    rows, mark = 4_000, tmp_path / "died"
    columns = ["id", "concat(id, repeat('.', 700)) as value"]
    frame = spark.range(0, rows, 1, 2).selectExpr(
        *columns, *["cast(id % 7 as string) as key"] * keyed
    )
    save(failing_once(mark)(frame, "value", 1_900), cluster)
    assert mark.exists(), "a task died"
    values = [f"{number}{'.' * 700}".encode() for number in range(rows)]
    assert placed(cluster, begin) > rows, "its rows are in the log twice"
    assert Counter(record.payload for record in subscribed(cluster, begin)) == Counter(values)
    assert Counter(loaded(spark, cluster, begin)) == Counter(values)


@pytest.mark.usefixtures("small_batches")
def test_without_exactly_once_a_repeated_task_writes_duplicates(
    spark: SparkSession, cluster: Cluster, begin: RecordId, tmp_path: Path
) -> None:
    columns = ["id", "concat(id, repeat(' ', 700)) as value"]
    frame = spark.range(0, 2_000, 1, 1).selectExpr(*columns)
    save(failing_once(tmp_path / "died")(frame, "value", 1_900), cluster, exactlyOnce="false")
    seen = Counter(int(record.payload) for record in subscribed(cluster, begin))
    assert seen.keys() == set(range(2_000))
    assert seen.total() == placed(cluster, begin) > 2_000


def test_rows_of_a_task_are_at_one_shard_in_order(
    spark: SparkSession, cluster: Cluster, begin: RecordId
) -> None:
    frame = spark.range(0, 1000, 1, 2).selectExpr("cast(id as string) as value")
    save(frame, cluster, **identity("in order"))
    records = subscribed(cluster, begin)
    for rows in (range(500), range(500, 1000)):
        mine = [record for record in records if int(record.payload) in rows]
        assert [int(record.payload) for record in mine] == list(rows)
        assert len({record.rid.shard for record in mine}) == 1
    assert {record.rid.shard for record in records} == {0, 1}, "neighbours go to different ones"


def test_rows_with_keys_go_to_the_shard_that_the_client_would_use(
    spark: SparkSession, cluster: Cluster, begin: RecordId
) -> None:
    columns = [
        "cast(id as string) as payload",
        "if(id % 5 = 0, null, concat('k', id % 11)) as name",
    ]
    frame = spark.range(0, 500, 1, 2).selectExpr(*columns)
    save(frame, cluster, valueColumn="payload", keyColumn="name", **identity("keys"))
    records = subscribed(cluster, begin)
    by_key = policy.by_key_hash()
    for record in records:
        number = int(record.payload)
        assert record.key == (None if number % 5 == 0 else b"k%d" % (number % 11))
        if record.key is not None:
            assert record.rid.shard == by_key(b"", record.key, [0, 1])
    assert sorted(int(record.payload) for record in records) == list(range(500))
    for key in {record.key for record in records} - {None}:
        for part in (range(250), range(250, 500)):
            mine = [int(r.payload) for r in records if r.key == key and int(r.payload) in part]
            assert mine == sorted(mine), "rows of a key keep their order"


def test_a_policy_with_a_shard_sends_all_rows_there(
    spark: SparkSession, cluster: Cluster, begin: RecordId
) -> None:
    columns = ["cast(cast(id as string) as binary) as value", "'k' as key"]
    frame = spark.range(0, 100, 1, 3).selectExpr(*columns)
    save(frame, cluster, policy="1", **identity("one shard"))
    records = subscribed(cluster, begin)
    assert len(records) == 100
    assert {(record.rid.shard, record.key) for record in records} == {(1, b"k")}


def test_a_write_with_a_query_id_is_stored_once(
    spark: SparkSession, cluster: Cluster, begin: RecordId
) -> None:
    frame = spark.range(0, 50, 1, 2).selectExpr("cast(id as string) as value")
    for batch in ("0", "0", "1"):
        save(frame, cluster, queryId="nightly", batchId=batch)
    assert placed(cluster, begin) == 150
    assert len(subscribed(cluster, begin)) == 100
    save(frame, cluster)
    save(frame, cluster)
    assert len(subscribed(cluster, begin)) == 200, "another write is another one"


def test_an_empty_frame_writes_nothing(
    spark: SparkSession, cluster: Cluster, begin: RecordId
) -> None:
    save(spark.range(0).selectExpr("cast(id as string) as value"), cluster)
    assert placed(cluster, begin) == 0


def test_a_stream_in_complete_mode_is_refused() -> None:
    from spark_reader.writer import ZiplogStreamWriter  # noqa: PLC0415 - may be missing

    with pytest.raises(ConfigError, match="the mode is 'complete'; it must be append"):
        ZiplogStreamWriter({SERVERS: "127.0.0.1:9"}, None, overwrite=True)


@pytest.mark.parametrize(
    ("columns", "options", "mode", "says"),
    [
        ("id", {}, "append", "valueColumn is 'value'; it must be the name of a column; there are"),
        ("id as value", {}, "append", "the type of column value is 'bigint'; it must be binary or"),
        ("'a' as value", {}, "overwrite", "the mode is 'overwrite'; it must be append"),
        ("'a' as value", {"keycolum": "k"}, "append", "unknown option 'keycolum'"),
        ("'a' as value", {"policy": "2"}, "append", "policy is 2; it must be a shard that takes"),
        ("'a' as value", {"policy": "key"}, "append", "policy is 'key'; it must be used with"),
        (
            "if(id = 7, null, 'a') as value", {}, "append",
            "the value of row 2 of partition 1 is None; it must be bytes or text",
        ),
        (
            "if(id = 8, repeat('x', 1048577), 'a') as value", {}, "append",
            "the value of row 3 of partition 1 has 1048577 bytes; this cluster takes at most",
        ),
    ],
)  # fmt: skip
def test_an_invalid_option_is_reported_in_one_line(
    spark: SparkSession,
    cluster: Cluster,
    columns: str,
    options: dict[str, str],
    mode: str,
    says: str,
) -> None:
    frame = spark.range(0, 10, 1, 2).selectExpr(columns)
    named: dict[str, Any] = {SERVERS: cluster.endpoint} | options
    with pytest.raises(Exception, match=r"ziplog\.errors\.") as caught:
        frame.write.format("ziplog").options(**named).mode(mode).save()
    lines = [line for line in str(caught.value).splitlines() if "ziplog.errors." in line]
    assert says in lines[0], lines
