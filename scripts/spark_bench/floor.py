"""Baseline of Spark's Python data sources: a source that reads nothing.

Every process creates one Arrow batch, with the columns and about the size of the log's batches, and
yields it repeatedly.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from spark_reader.batches import arrow_schema
from spark_reader.schema import DEFAULT
from spark_reader.worker_state import freeze_gc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.types import StructType

_BATCH_BYTES: Final = 4 << 20
_COLUMNS: Final = {field.name: field for field in DEFAULT}


class Floor(DataSource):
    """Options `rows`, `size` (bytes of a value) and `tasks`."""

    @classmethod
    def name(cls) -> str:
        """Return what `format` takes."""
        return "floor"

    def schema(self) -> str:
        """Return the columns of the log, in the same order."""
        return ", ".join(f"{field.name} {field.type}" for field in _COLUMNS.values())

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of some of the columns."""
        rows, size, tasks = (int(self.options[name]) for name in ("rows", "size", "tasks"))
        return _Reader(schema.fieldNames(), rows, size, tasks)


class _Reader(DataSourceReader):
    def __init__(self, columns: list[str], rows: int, size: int, tasks: int) -> None:
        self._columns, self._rows, self._size, self._tasks = columns, rows, size, tasks

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self._rows // self._tasks) for _ in range(self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows = max(1, _BATCH_BYTES // (self._size + 64))
        batch = batch_of(tuple(self._columns), rows, self._size)
        freeze_gc()
        whole_number, rest = divmod(partition.value, batch.num_rows)
        for _ in range(whole_number):
            yield batch
        if rest:
            yield batch.slice(0, rest)


@cache
def batch_of(columns: tuple[str, ...], rows: int, size: int) -> pa.RecordBatch:
    """Return a batch as the log's would be: random values, numbers, no keys."""
    data = os.urandom(rows * size)
    values: dict[str, Any] = {
        "key": pa.nulls(rows, pa.binary()),
        "value": pa.array([data[at : at + size] for at in range(0, rows * size, size)]),
        "topic": pa.array(["bench"] * rows),
        "partition": pa.array([0] * rows, pa.int32()),
        "offset": pa.array(range(rows), pa.int64()),
        "timestamp": pa.array(range(rows), pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        "timestampType": pa.array([0] * rows, pa.int32()),
        "epoch": pa.array(range(rows), pa.int64()),
    }
    schema = arrow_schema([_COLUMNS[column] for column in columns])
    return pa.RecordBatch.from_arrays([values[column] for column in columns], schema=schema)
