"""Query that copies one log to another, and fails at a given row on request.

`python -m tests.unit.spark_reader.copying JSON` runs it as a separate process that a test can kill:
all processes of Spark are in its process group, or end with it.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from spark_reader.catalog import session
from spark_reader.options import SERVERS, TIMEOUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

#: Java is to compile quickly rather than well: for what tests ask of it, that is half the CPU.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: Two cores; a task that fails is run again, three times. Spark waits 10 s for a Python worker to
#: start, which may take longer on a busy machine.
RETRYING = "local[2,4]"
#: Rows that Python gets at a time: soon.
SMALL = {"spark.sql.execution.arrow.maxRecordsPerBatch": "200"}


def copy(
    spark: SparkSession,
    servers: str,
    target: str,
    folder: str,
    begin: str,
    *,
    fatal: int = -1,
    mark: str = "",
    **more: str,
) -> StreamingQuery:
    """Copy all records from `begin` on.

    Args:
        spark: the session.
        servers: of the source log.
        target: of the target log.
        folder: the checkpoint.
        begin: a position.
        fatal: the number of the row at which a task fails.
        mark: instead of failing, the task creates this file and hangs.
        more: options of the writer.

    """
    from pyspark.sql.functions import udf  # noqa: PLC0415 - may be missing

    def through(value: bytes) -> bytes:
        if int(value.split()[1]) != fatal:
            return bytes(value)
        if mark:
            import threading  # noqa: PLC0415 - in another process
            from pathlib import Path  # noqa: PLC0415 - likewise

            Path(mark).touch()
            threading.Event().wait(300)
        raise RuntimeError("dies")

    passing = udf(through, "binary", useArrow=False).asNondeterministic()
    # Generous: a shard may be unavailable for some seconds.
    patient = {TIMEOUT: "60"}
    named = {SERVERS: servers, "startingOffsets": begin, "minPartitions": "4"} | patient
    frame = spark.readStream.format("ziplog").options(**named).load()
    frame = frame.select(passing("value").alias("value"), "key")
    asked = {SERVERS: target} | patient | more
    writing = frame.writeStream.format("ziplog").options(**asked)
    return writing.option("checkpointLocation", folder).trigger(availableNow=True).start()


if __name__ == "__main__":
    settings = {
        "spark.master": RETRYING,
        "spark.log.level": "ERROR",
        "spark.driver.extraJavaOptions": SHORT_LIVED,
        **SMALL,
    }
    mine = session("copy", 2, "512m", settings)
    copy(mine, **json.loads(sys.argv[1])).awaitTermination()
