"""`read_range`: a range of the log as Arrow batches without Spark, from the same options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_reader.options import parse
from spark_reader.planning import joined
from spark_reader.projection import projection_of
from spark_reader.schema import DEFAULT
from spark_reader.sources import source_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from spark_reader.schema import Field


def read_range(
    options: Mapping[str, str], fields: tuple[Field, ...] = DEFAULT
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a load in batches, shard after shard, by position within a shard.

    Args:
        options: the options of `spark.read`.
        fields: the columns, all by default; `spark_reader.schema.projection` selects some.

    Raises:
        ConfigError: an option is not allowed.
        TrimmedError: the range begins below the trim point, and `failOnDataLoss` is true.
        NoSuchRecordError: a position of the range was never assigned.
        UnavailableError: the cluster does not answer.

    """
    asked = parse(options)
    with source_of(asked).open() as session:
        pinned = session.pin()
        pieces = joined(session.pieces_of(pinned.start, pinned.stop))
        yield from session.read(pieces, projection_of(asked, fields, pinned.topic))
