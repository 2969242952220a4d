"""`df.write` and `df.writeStream`: inserts rows as records (docs/spark.md, section 3).

Rule: the driver creates the writer, reads the list of shards, and sends the writer to the tasks.
Every attempt of a task inserts the same rows with the same writer id into the same shards. Readers
drop duplicates, so there is no commit and no rollback.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

import ziplog
from spark_reader import write_options
from spark_reader.clean_errors import without_traceback
from spark_reader.inserting import insert_batches
from spark_reader.placement import RowPlacement, check_policy, members
from spark_reader.worker_state import freeze_gc
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql.types import StructType

#: Spark's local properties of a task: the ids of its query and its micro-batch.
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


class RowsWritten(WriterCommitMessage):
    """Commit message of a task: the number of rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class _Job:
    """Common part of a write's tasks: options, columns, and the shards at the start."""

    def __init__(
        self, options: Mapping[str, str], schema: StructType, *, overwrite: bool, stream: bool
    ) -> None:
        if overwrite:
            given = "complete" if stream else "overwrite"
            raise ConfigError("the mode", given, "append, because a log only grows")
        self.options: Final = write_options.parse(options, stream=stream)
        types = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        self._columns: Final = write_options.columns(self.options, types)
        by_default: Any = "partition" if self._columns.key is None else "key"
        self._policy: Final = self.options.policy if self.options.policy is not None else by_default
        with ziplog.connect(self.options.servers, timeout=self.options.timeout_s) as log:
            status = log.cluster()
        is_repeatable = stream or self.options.identity is not None
        # The insert waits for a shard that the user names.
        include_absent = is_repeatable or isinstance(self._policy, int)
        self._shards: Final = members(status, include_absent=include_absent)
        # An invalid policy fails here, and not in every task.
        check_policy(self._policy, self._shards)

    def write(self, batches: Iterator[pa.RecordBatch], query: str, batch: int) -> RowsWritten:
        """Insert a task's rows; returns when all are on all replicas of their shards."""
        freeze_gc()
        partition = _task().partitionId()
        if not self.options.exactly_once:
            # Each attempt gets its own writer ids, so readers drop nothing.
            query = os.urandom(16).hex()
        place = RowPlacement(query, partition, self._policy, self._shards)
        with ziplog.connect(self.options.servers, timeout=self.options.timeout_s) as log:
            rows = insert_batches(
                log, batches, self._columns, place, batch=batch, partition=partition
            )
        return RowsWritten(rows)


class ZiplogWriter(DataSourceArrowWriter):
    """Writer of one DataFrame."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._job: Final = _Job(options, schema, overwrite=overwrite, stream=False)
        #: The user's identity of the write, or a random one.
        self._identity: Final = self._job.options.identity or (os.urandom(16).hex(), 0)

    @without_traceback
    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:
        """Write the rows of a task."""
        return self._job.write(iterator, *self._identity)


class ZiplogStreamWriter(DataSourceStreamArrowWriter):
    """Writer of one micro-batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._job: Final = _Job(options, schema, overwrite=overwrite, stream=True)

    @without_traceback
    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsWritten:
        """Write the rows of a task."""
        query = _task().getLocalProperty(_QUERY_ID)
        batch = _task().getLocalProperty(_BATCH_ID)
        assert query is not None, "Spark sets the query id of a stream's tasks"
        assert batch is not None, "Spark sets the micro-batch id of a stream's tasks"
        return self._job.write(iterator, query, int(batch))


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "rows are written by tasks"
    return task
