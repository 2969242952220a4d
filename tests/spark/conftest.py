"""One Spark session for all modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spark_reader.catalog import session
from tests.unit.spark_reader.copying import RETRYING, SHORT_LIVED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two cores and little of everything. A module that uses it is marked `spark`."""
    settings = {
        "spark.master": RETRYING,
        "spark.sql.shuffle.partitions": "2",
        "spark.log.level": "OFF",
        "spark.driver.extraJavaOptions": SHORT_LIVED,
        "spark.sql.session.timeZone": "UTC",
    }
    running = session("tests", 2, "1g", settings)
    yield running
    running.stop()
