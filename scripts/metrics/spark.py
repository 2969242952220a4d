"""Local Spark sessions of the scripts: quiet, in UTC, and stopped at the end."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_reader.catalog import session as new_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@contextmanager
def session(name: str, cores: int) -> Iterator[SparkSession]:
    """Run a session with `cores` cores."""
    spark = new_session(
        name,
        cores,
        config={
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": str(2 * cores),
        },
    )
    try:
        yield spark
    finally:
        spark.stop()
