"""Output files of an export: Parquet, Arrow IPC, and the JSON lines of `ziplog tail --json`.

Rule: memory holds one group of rows, however long the range is. Invariant: the file name always
refers to a complete file, the new or the former one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

from spark_reader import schema as columns
from ziplog.cli.rendering import as_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa

    import ziplog

#: Errors of a write to a disk or file that may not grow.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
Format = Literal["parquet", "arrow", "jsonl"]
Compression = Literal["none", "snappy", "gzip", "brotli", "lz4", "zstd"]

#: Compressions of each format; the first is its default.
COMPRESSIONS: Final[dict[Format, tuple[Compression, ...]]] = {
    "parquet": ("snappy", "zstd", "gzip", "brotli", "lz4", "none"),
    "arrow": ("none", "lz4", "zstd"),
    "jsonl": ("none",),
}
#: Size of a row group: about 64 MiB before encoding, and at most 1,048,576 rows.
_GROUP_BYTES: Final = 64 * 1024 * 1024
_GROUP_ROWS: Final = 1024 * 1024
#: Size of an Arrow batch: about 4 MiB, and at most 65,536 rows.
_BATCH_BYTES: Final = 4 * 1024 * 1024
_BATCH_ROWS: Final = 64 * 1024
#: Columns with few distinct values (dictionary encoding), and columns that get statistics.
_FEW: Final = [columns.KEY, columns.TOPIC, columns.PARTITION, columns.TIMESTAMP_TYPE, columns.EPOCH]
_RANGES: Final = [columns.PARTITION, columns.OFFSET, columns.TIMESTAMP, columns.EPOCH]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when it is complete and on stable storage.

    Raises:
        OSError: it cannot be written; names `path`.

    """
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        # The caller did not name the temporary file, and a write names none.
        if error.filename == str(part) or (error.filename is None and error.errno in _NO_ROOM):
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def write(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    sink: BinaryIO,
    kind: Format,
    compression: Compression,
    *,
    is_pipe: bool = False,
) -> None:
    """Write all batches to a binary file; there may be none.

    Args:
        batches: in the order of their offsets.
        schema: of all batches.
        sink: the open file; it stays open.
        kind: the format, not JSON lines.
        compression: one of the format's `COMPRESSIONS`.
        is_pipe: the reader cannot seek, so Arrow batches use the stream format.

    """
    assert compression in COMPRESSIONS[kind], f"{kind} compressed with {compression}"
    match kind:
        case "parquet":
            _write_parquet(batches, schema, sink, compression)
        case "arrow":
            _write_arrow(batches, schema, sink, compression, is_pipe=is_pipe)
        case "jsonl":
            raise AssertionError("JSON lines are written from records")


def write_lines(records: Iterable[ziplog.Record], sink: BinaryIO) -> None:
    """Write records as JSON lines."""
    sink.writelines(map(as_json, records))


def _write_parquet(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, sink: BinaryIO, compression: Compression
) -> None:
    import pyarrow as pa  # noqa: PLC0415  `ziplog` starts without it
    from pyarrow import parquet  # noqa: PLC0415

    place = schema.get_field_index(columns.OFFSET)
    with parquet.ParquetWriter(
        sink,
        schema,
        compression=compression,
        use_dictionary=_FEW,
        write_statistics=_RANGES,
        sorting_columns=[parquet.SortingColumn(place)],
    ) as writer:
        for group in _groups(batches, _GROUP_BYTES, _GROUP_ROWS):
            table = pa.Table.from_batches(group, schema)
            writer.write_table(table, row_group_size=table.num_rows)


def _write_arrow(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    sink: BinaryIO,
    compression: Compression,
    *,
    is_pipe: bool,
) -> None:
    import pyarrow as pa  # noqa: PLC0415  `ziplog` starts without it
    from pyarrow import ipc  # noqa: PLC0415

    make = ipc.new_stream if is_pipe else ipc.new_file
    options = ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    with make(sink, schema, options=options) as writer:
        for group in _groups(batches, _BATCH_BYTES, _BATCH_ROWS):
            writer.write_batch(pa.concat_batches(group))


def _groups(
    batches: Iterable[pa.RecordBatch], max_bytes: int, max_rows: int
) -> Iterator[list[pa.RecordBatch]]:
    """Return the batches in lists of about `max_bytes`, and at most `max_rows` rows."""
    group: list[pa.RecordBatch] = []
    size = rows = 0
    for whole in batches:
        for start in range(0, whole.num_rows, max_rows):
            batch = whole.slice(start, max_rows)
            if group and (rows + batch.num_rows > max_rows or size >= max_bytes):
                yield group
                group, size, rows = [], 0, 0
            group.append(batch)
            size += batch.nbytes
            rows += batch.num_rows
    if group:
        yield group
