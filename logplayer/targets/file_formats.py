"""The formats of a target's files, which are those of `ziplog export`.

Parquet and Arrow files have Spark's columns (docs/spark.md, section 1); `topic` is the id of the
cluster. Memory holds one group of rows.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from spark_reader.optional_dependencies import require
from spark_reader.schema import DEFAULT, OFFSET
from ziplog.cli.rendering import fields_as_json
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import BinaryIO

    import pyarrow as pa

    from logplayer.targets.staged_records import Frame

Format = Literal["jsonl", "parquet", "arrow"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
_TAIL_BYTES: Final = 64 * 1024


class _LastLine(msgspec.Struct):
    """What the last line of a file has to have."""

    gsn: int


def require_packages(kind: Format, where: str) -> None:
    """Check that the packages of a format are installed.

    Raises:
        ModuleNotFoundError: one is not; the message says how to install it.

    """
    if kind == "jsonl":
        return
    try:
        require(f"format {kind!r} of {where}", "arrow", "pyarrow")
    except UnavailableError as error:
        raise ModuleNotFoundError(str(error)) from None


def write(frames: Iterable[Frame], sink: BinaryIO, kind: Format, topic: str) -> None:
    """Write records to a binary file, which stays open.

    Args:
        frames: the records, in order.
        sink: the open file.
        kind: its format.
        topic: the column of that name.

    """
    if kind == "jsonl":
        for one in frames:
            sink.writelines(
                map(
                    fields_as_json, one.gsns, one.shards, one.epochs, one.timestamps_us, one.keys,
                    one.payloads,
                )
            )  # fmt: skip
        return
    from spark_reader import files  # noqa: PLC0415 - slow to import
    from spark_reader.batches import arrow_schema  # noqa: PLC0415 - needs pyarrow

    schema = arrow_schema(DEFAULT)
    batches = (_batch(frame, schema, topic) for frame in frames)
    files.write(batches, schema, sink, kind, files.COMPRESSIONS[kind][0])


def _batch(frame: Frame, schema: pa.Schema, topic: str) -> pa.RecordBatch:
    """Return a frame's records in the columns of `DEFAULT`."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    rows = len(frame.gsns)
    columns: list[Any] = [
        frame.keys,
        frame.payloads,
        pa.repeat(pa.scalar(topic), rows),
        frame.shards,
        frame.gsns,
        frame.timestamps_us,
        pa.repeat(pa.scalar(0, pa.int32()), rows),
        frame.epochs,
    ]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def last_gsn(path: Path, kind: Format) -> int:
    """Return the gsn of a file's last record.

    Raises:
        ConfigError: the file is damaged.

    """
    try:
        if kind == "jsonl":
            return _last_line(path).gsn
        return _last_offset(path, kind)
    except (ValueError, msgspec.DecodeError) as error:
        problem = f"the last record of {path} has no gsn, so its position is not known: {error}"
        raise ConfigError("directory", str(path), "as it was written", message=problem) from error


def _last_line(path: Path) -> _LastLine:
    with path.open("rb") as file:
        end, size = file.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            file.seek(max(end - size, 0))
            tail = file.read()
            if size >= end or b"\n" in tail[:-1]:
                break
            size *= 4
    line = tail.removesuffix(b"\n").rpartition(b"\n")[2]
    return msgspec.json.decode(line, type=_LastLine)


def _last_offset(path: Path, kind: Format) -> int:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    from pyarrow import ipc, parquet  # noqa: PLC0415

    if kind == "parquet":
        with parquet.ParquetFile(path) as file:
            offsets = file.read_row_group(file.num_row_groups - 1, [OFFSET]).column(OFFSET)
            return int(offsets[-1].as_py())
    with pa.memory_map(str(path)) as source:
        batches = ipc.open_file(source)
        offsets = batches.get_batch(batches.num_record_batches - 1).column(OFFSET)
        return int(offsets[-1].as_py())
