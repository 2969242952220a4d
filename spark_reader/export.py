"""A range of the log written to a file, in the total order, without Spark.

Each shard is read as Spark reads it, all at once, and their batches are merged by position. What
the range is and what belongs to it is as in Spark (docs/spark.md, section 1.2).
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

#: The output that is a stream, not a file.
STDOUT: Final = Path("-")


class Exported(msgspec.Struct, frozen=True):
    """What was written: the rows of the positions [start, stop)."""

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
    """Write a range of the log to a file; if it fails, there is no file, or the former one.

    Args:
        options: the range and where it is, as Spark's options (docs/spark.md, section 1.1).
        output: the file, or `STDOUT`: into the pipe.
        kind: the format.
        compression: one that the format has.
        progress: told how many stored bytes are done, and of how many, about.
        pipe: where `STDOUT` goes.

    Raises:
        ConfigError: an option is not allowed, or the output is no file.
        TrimmedError: the range begins below the first position that is there.
        UnavailableError: the cluster, or the directory, can't be read.
        OSError: the file can't be written.

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
            counted.through(merged(streams)), arrow_schema(DEFAULT), sink, kind, compression,
            is_pipe=output == STDOUT,
        )  # fmt: skip
    return Exported(counted.rows, pinned.start, pinned.stop)


class _ProgressCounter:
    """Counts the rows that pass, and tells how far they are in bytes: positions lie unevenly."""

    def __init__(self, pieces: list[Piece], progress: Callable[[int, int], None]) -> None:
        ordered = sorted(pieces, key=attrgetter("stop"))
        self._stops: Final = [piece.stop for piece in ordered]
        self._sums: Final = list(itertools.accumulate((p.size for p in ordered), initial=0))
        self._progress: Final = progress
        self.rows = 0

    def through(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            self.rows += batch.num_rows
            reached = batch.column(OFFSET)[-1].as_py() + 1
            self._progress(self._sums[bisect_right(self._stops, reached)], self._sums[-1])
        self._progress(self._sums[-1], self._sums[-1])
