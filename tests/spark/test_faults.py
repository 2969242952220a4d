"""Errors in Spark reach the user as one line that says what to do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from spark_reader.catalog import register_view
from tests.unit.spark_reader.logs import small_cluster
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)

SERVERS = "ziplog.bootstrap.servers"
#: No process listens there: it is the port of the discard service.
NOBODY = "127.0.0.1:9"
#: Suffix that Spark adds to an error on the driver.
STATE = re.compile(r"\s*SQLSTATE: \w+\s*$")


def reported(act: Callable[[], object]) -> tuple[str, str]:
    """Return what Spark calls the error, and its last line: ours."""
    from pyspark.errors import PySparkException  # noqa: PLC0415 - may be missing

    with pytest.raises(PySparkException) as caught:
        act()
    text = STATE.sub("", str(caught.value))
    assert len([line for line in text.splitlines() if line.startswith("  File ")]) == 1, text
    return type(caught.value).__name__, text.splitlines()[-1]


def fault(spark: SparkSession, **options: str) -> tuple[str, str]:
    return reported(lambda: spark.read.format("ziplog").options(**options).load().collect())


def test_an_option_that_does_not_exist(spark: SparkSession) -> None:
    kind, line = fault(spark, **{SERVERS: NOBODY, "startingOfsets": "3"})
    assert kind == "AnalysisException"
    assert re.fullmatch(
        r"ziplog\.errors\.ConfigError: unknown option 'startingofsets' is '3'; "
        "it must be left out, or 'startingOffsets' is meant",
        line,
    )


def test_an_invalid_value_and_a_contradiction(spark: SparkSession) -> None:
    _, line = fault(spark, **{SERVERS: NOBODY, "startingOffsets": "soon"})
    assert "startingOffsets is 'soon'; it must be 'earliest', a gsn, or '<gsn>@<shard>'" in line
    _, line = fault(spark, **{SERVERS: NOBODY, "path": "/x"})
    assert "path is '/x'; it must be left out" in line


@pytest.mark.parametrize("trigger", [{"availableNow": True}, {"processingTime": "1 second"}])
def test_a_stream_with_an_end_is_refused(
    spark: SparkSession, tmp_path: Path, trigger: dict[str, Any]
) -> None:
    from pyspark.errors import StreamingQueryException  # noqa: PLC0415 - may be missing

    with small_cluster(tmp_path / "log", f=0) as cluster:
        options = {SERVERS: cluster.endpoint, "endingEpoch": "3"}
        frame = spark.readStream.format("ziplog").options(**options).load()
        query = frame.writeStream.format("noop").trigger(**trigger).start()
        with pytest.raises(StreamingQueryException) as caught:
            query.awaitTermination(240)
    text = str(caught.value)
    assert "ConfigError: endingEpoch is 3; it must be left out, because a stream has no end" in text
    assert "another exception" not in text


def test_an_absent_server_is_named(spark: SparkSession) -> None:
    kind, line = fault(spark, **{SERVERS: NOBODY, "timeout": "1"})
    assert kind == "AnalysisException"
    assert line == (
        "ziplog.errors.UnavailableError: no membership service answered at 127.0.0.1:9 "
        "(connection refused); check the address, and that the cluster runs"
    )


def test_a_missing_directory_is_named(spark: SparkSession, tmp_path: Path) -> None:
    _, line = fault(spark, path=str(tmp_path / "away"))
    assert str(tmp_path / "away") in line


def test_a_load_after_a_trim_reports_the_loss(spark: SparkSession, tmp_path: Path) -> None:
    with small_cluster(tmp_path / "log", f=0) as cluster:
        with cluster.connect() as log:
            rids = log.insert_many([b"%d" % n for n in range(5)])
            rows = register_view(spark, "events", cluster.endpoint)
            log.insert_after(b"later")
            found = spark.sql("SELECT string(value) FROM events ORDER BY offset").collect()
            assert [row[0] for row in found] == ["0", "1", "2", "3", "4"]

            none = register_view(
                spark, "nothing", cluster.endpoint,
                startingOffsets=rids[2].gsn, endingOffsets=rids[2].gsn,
            )  # fmt: skip
            assert (none.count(), none.columns[:2]) == (0, ["key", "value"])

            here = {SERVERS: cluster.endpoint}
            odd = log.insert_after(b"\xff")
            text = spark.read.format("ziplog").options(**here).schema("value string").load()
            kind, line = reported(text.collect)
            assert kind == "PythonException"
            assert re.match(rf"ziplog\.errors\.ConfigError: .*\b{odd.gsn}\b", line), line

            log.trim(rids[3])
            wait_until(lambda: log.extents(1, None).trim >= rids[3].gsn, "nothing was trimmed")
        kind, line = fault(spark, **here, startingOffsets="1")
        trimmed = f"the records before {rids[3]} were trimmed; read from there"
        assert (kind, line) == ("AnalysisException", f"ziplog.errors.TrimmedError: {trimmed}")
    kind, line = reported(rows.collect)
    assert re.fullmatch(r"ziplog\.errors\.\w+: no membership service answered at .*", line), line
