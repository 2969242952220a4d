"""Spark read tasks: the share of a range that one task reads, in batches and in streams.

Rule: a share says what a task reads; options and fields say which rows and columns it returns. A
source is open only while a task reads it (docs/spark.md, section 1.3).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from spark_reader.planning import pack
from spark_reader.prefetch import prefetch
from spark_reader.projection import projection_of
from spark_reader.worker_state import freeze_gc, read_memory

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    import pyarrow as pa

    from spark_reader.options import Options
    from spark_reader.planning import Piece
    from spark_reader.reading import Source
    from spark_reader.schema import Field


class Share(InputPartition):
    """The share of one task: its number, its pieces of the range, and the source."""

    def __init__(self, task_index: int, pieces: list[Piece], source: Source, topic: str) -> None:
        super().__init__(task_index)
        self.pieces = pieces
        self.source = source
        self.topic = topic


def plan_tasks(options: Options, pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces of each task; `minPartitions` or this machine's cores set the number."""
    return pack(pieces, options.min_partitions, len(os.sched_getaffinity(0)))


def read_task(
    options: Options, fields: tuple[Field, ...], partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """Read the share of one task, in batches."""
    assert isinstance(partition, Share), "Spark gives back the shares that it was given"
    if not partition.pieces:
        return
    freeze_gc()
    yield from prefetch(_read(options, fields, partition))


def _read(options: Options, fields: tuple[Field, ...], share: Share) -> Generator[pa.RecordBatch]:
    projection = projection_of(options, fields, share.topic)
    with share.source.open(read_memory()) as session:
        yield from session.read(share.pieces, projection, share.value)
