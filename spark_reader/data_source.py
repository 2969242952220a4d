"""`format("ziplog")`: the data source class that Spark calls to read and write the log.

Spark creates one object of the class for each `load()` or `save()`, and sends it to the planning
processes. Rule: the constructor fixes the end of a load, and the end travels with the object. A
DataFrame therefore has the same rows however often Spark plans it. Invariant: sockets are open only
while a method runs, never in a pickled object (docs/spark.md, section 1.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_reader.clean_errors import without_traceback
from spark_reader.options import parse
from spark_reader.reading import require_cluster
from spark_reader.schema import DEFAULT, projection
from spark_reader.sources import source_of
from spark_reader.tasks import Share, plan_tasks, read_task
from spark_reader.worker_state import freeze_gc
from ziplog.errors import ConfigError, UnavailableError, ZiplogError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    import pyarrow as pa
    from pyspark.sql.datasource import (
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
        InputPartition,
    )

    from spark_reader.options import Options
    from spark_reader.reading import Pinned
    from spark_reader.schema import Field

_TYPES: Final[dict[str, DataType]] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
}


class ZiplogDataSource(DataSource):
    """One load, or one save."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "ziplog"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        """Fix the end of the range.

        Spark does not report whether a batch read, a stream or a write follows. An error is
        therefore raised later, by the method for which it matters.
        """
        super().__init__(dict(options))
        self._pinned: Pinned | None = None
        self._fault: ZiplogError | None = None
        try:
            self._pinned = _pin(parse(self.options))
        except ZiplogError as error:
            self._fault = error

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the error: the receiving process tries again."""
        return {**self.__dict__, "_fault": None}

    @without_traceback
    def schema(self) -> StructType:
        """Return all columns."""
        if isinstance(self._fault, UnavailableError):
            raise self._fault
        _check(self.options)
        return StructType(
            [StructField(field.name, _TYPES[field.type], nullable=True) for field in DEFAULT]
        )

    @without_traceback
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader for these columns."""
        options = parse(self.options)
        return Reader(options, self._pinned or _pin(options), _fields(schema))

    @without_traceback
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Return the stream reader for these columns, or one that refuses them."""
        from spark_reader.stream import (  # noqa: PLC0415 - few programs need it
            RefusedStreamReader,
            ZiplogStreamReader,
        )

        try:
            return ZiplogStreamReader(parse(self.options, "stream"), _fields(schema))
        except ZiplogError as error:
            return RefusedStreamReader(error)

    @without_traceback
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a DataFrame."""
        from spark_reader.writer import ZiplogWriter  # noqa: PLC0415 - as above

        return ZiplogWriter(self.options, schema, overwrite=overwrite)

    @without_traceback
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return the writer of a stream."""
        from spark_reader.writer import ZiplogStreamWriter  # noqa: PLC0415 - as above

        return ZiplogStreamWriter(self.options, schema, overwrite=overwrite)


class Reader(DataSourceReader):
    """Batch reader of one load.

    It does not push filters down: Spark 4.3 keeps the plan of a query with pushed filters, and uses
    that plan for later queries of the same DataFrame without filters.
    """

    def __init__(self, options: Options, pinned: Pinned, fields: tuple[Field, ...]) -> None:
        self._options: Final = options
        self._pinned: Final = pinned
        self._fields: Final = fields

    @without_traceback
    def partitions(self) -> list[InputPartition]:
        """Return the share of each task."""
        freeze_gc()
        pinned = self._pinned
        with source_of(self._options).open() as session:
            require_cluster("load", pinned.cluster, session.cluster_id())
            pieces = session.pieces_of(pinned.start, pinned.stop)
            source = session.for_tasks()
        # Spark requires at least one.
        tasks = plan_tasks(self._options, pieces) or [[]]
        return [
            Share(task_index, task, source, pinned.topic) for task_index, task in enumerate(tasks)
        ]

    @without_traceback
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the share of one task, in batches."""
        yield from read_task(self._options, self._fields, partition)


def _fields(schema: StructType) -> tuple[Field, ...]:
    """Return the requested columns of a schema."""
    return projection((f.name, f.dataType.simpleString(), f.nullable) for f in schema.fields)


def _pin(options: Options) -> Pinned:
    with source_of(options).open() as session:
        return session.pin()


def _check(options: Mapping[str, str]) -> None:
    """Refuse options that are valid neither for a batch nor for a stream."""
    try:
        parse(options)
    except ConfigError:
        try:
            parse(options, "stream")
        except ConfigError:
            pass
        else:
            return
        raise
