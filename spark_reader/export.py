"""Export: writes a range of the log to a file, in the total order, without Spark.

All shards are read at once, by the code that Spark's tasks use, and merged by position: as Arrow
batches, or one by one for JSON lines, which need no Arrow. The range has the same rows as in Spark
(docs/spark.md, section 1.2).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from bisect import bisect_right
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from spark_reader import files
from spark_reader.options import parse
from spark_reader.planning import joined
from spark_reader.projection import projection_of
from spark_reader.schema import DEFAULT, OFFSET
from spark_reader.sources import source_of
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pyarrow as pa

    from spark_reader.files import Compression, Format
    from spark_reader.planning import Piece
    from ziplog.types import Record

#: The output path that means stdout.
STDOUT: Final = Path("-")
#: Interval between progress reports, in records.
_RECORDS_A_REPORT: Final = 4096


class Exported(msgspec.Struct, frozen=True):
    """Result of an export: the number of rows, and their positions [start, stop)."""

    rows: int
    start: int
    stop: int


def export(
    options: Mapping[str, str],
    output: Path,
    kind: Format,
    compression: Compression,
    progress: Callable[[int, int], None],
    pipe: BinaryIO,
) -> Exported:
    """Write a range of the log to a file. On failure a former file stays, and none is created.

    Args:
        options: the source and the range, as Spark's options (docs/spark.md, section 1.1).
        output: the file, or `STDOUT` for the pipe.
        kind: the format.
        compression: one of the format's `COMPRESSIONS`.
        progress: called with the stored bytes that are done and their total, both estimates.
        pipe: the stream for `STDOUT`.

    Raises:
        ConfigError: an option is not allowed, or the output is not a regular file.
        TrimmedError: the range begins below the first stored position.
        UnavailableError: the cluster or the directory cannot be read.
        OSError: the file cannot be written.

    """
    asked = parse(options)
    if output != STDOUT and output.exists() and not output.is_file():
        raise ConfigError("--output", str(output), "a file, or '-' for stdout")
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(source_of(asked).open())
        pinned = session.pin()
        columns = projection_of(asked, DEFAULT, pinned.topic)
        pieces = session.pieces_of(pinned.start, pinned.stop)
        of_shards = [
            joined(of_shard) for _, of_shard in itertools.groupby(pieces, attrgetter("shard"))
        ]
        sink = pipe if output == STDOUT else stack.enter_context(files.replacing(output))
        counted = _ProgressCounter(pieces, progress)
        if kind == "jsonl":
            records = heapq.merge(
                *(session.records(of_shard, columns) for of_shard in of_shards), key=_position
            )
            files.write_lines(counted.count_records(records), sink)
        else:
            from spark_reader.batches import arrow_schema  # noqa: PLC0415 - needs pyarrow
            from spark_reader.merge import merged  # noqa: PLC0415 - needs pyarrow

            batches = merged([session.read(of_shard, columns) for of_shard in of_shards])
            files.write(
                counted.count(batches), arrow_schema(DEFAULT), sink, kind, compression,
                is_pipe=output == STDOUT,
            )  # fmt: skip
    return Exported(counted.rows, pinned.start, pinned.stop)


class _ProgressCounter:
    """Counts rows, and reports progress in stored bytes: positions are not evenly spaced."""

    def __init__(self, pieces: list[Piece], progress: Callable[[int, int], None]) -> None:
        ordered = sorted(pieces, key=attrgetter("stop"))
        self._stops: Final = [piece.stop for piece in ordered]
        self._sums: Final = list(itertools.accumulate((p.size for p in ordered), initial=0))
        self._progress: Final = progress
        self.rows = 0

    def count(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            self.rows += batch.num_rows
            self._report(batch.column(OFFSET)[-1].as_py() + 1)
        self._progress(self._sums[-1], self._sums[-1])

    def count_records(self, records: Iterable[Record]) -> Iterator[Record]:
        for record in records:
            yield record
            self.rows += 1
            if self.rows % _RECORDS_A_REPORT == 0:
                self._report(record.rid.gsn + 1)
        self._progress(self._sums[-1], self._sums[-1])

    def _report(self, reached: int) -> None:
        self._progress(self._sums[bisect_right(self._stops, reached)], self._sums[-1])


def _position(record: Record) -> int:
    return record.rid.gsn
