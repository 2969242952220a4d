"""Export: writes a range of the log to a file, in the total order, without Spark.

All shards are read at once, by the code that Spark's tasks use, and their batches are merged by
position. The range has the same rows as in Spark (docs/spark.md, section 1.2).
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from spark_reader import files
from spark_reader.batches import arrow_schema, projection_of
from spark_reader.merge import merged
from spark_reader.options import parse
from spark_reader.planning import joined
from spark_reader.schema import DEFAULT, OFFSET
from spark_reader.sources import source_of
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pyarrow as pa

    from spark_reader.files import Compression, Format
    from spark_reader.planning import Piece

#: The output path that means stdout.
STDOUT: Final = Path("-")


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
        streams = [
            session.read(joined(of_shard), columns)
            for _, of_shard in itertools.groupby(pieces, attrgetter("shard"))
        ]
        sink = pipe if output == STDOUT else stack.enter_context(files.replacing(output))
        counted = _ProgressCounter(pieces, progress)
        files.write(
            counted.count(merged(streams)), arrow_schema(DEFAULT), sink, kind, compression,
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
            reached = batch.column(OFFSET)[-1].as_py() + 1
            self._progress(self._sums[bisect_right(self._stops, reached)], self._sums[-1])
        self._progress(self._sums[-1], self._sums[-1])
