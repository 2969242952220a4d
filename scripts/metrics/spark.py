"""Spark on this machine, as the scripts use it: quiet, in UTC, and gone afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spark_reader.catalog import session as new_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession


@contextmanager
def session(
    name: str, cores: int, config: Mapping[str, Any] | None = None
) -> Iterator[SparkSession]:
    """Run a session with so many cores; `config` has more settings of Spark's."""
    spark = new_session(
        name,
        cores,
        config={
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": str(2 * cores),
        }
        | dict(config or {}),
    )
    try:
        yield spark
    finally:
        spark.stop()
