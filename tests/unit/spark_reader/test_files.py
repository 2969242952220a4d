"""Output files: round trip, bounded groups, and atomic replacement."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

import ziplog
from spark_reader import files
from spark_reader.files import COMPRESSIONS
from ziplog.cli.rendering import as_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spark_reader.files import Compression, Format

SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
        ("epoch", pa.int64()),
    ]
)
BINARY = [(kind, how) for kind in ("parquet", "arrow") for how in COMPRESSIONS[kind]]


def record(gsn: int) -> ziplog.Record:
    key = None if gsn % 3 else b"key-%d" % (gsn % 5)
    payload = b"\xff\x00" * (gsn % 4) + b"%d" % gsn
    time_us = 1_700_000_000_000_000 + gsn * (1 if gsn % 2 else 1_000_000)
    return ziplog.Record(ziplog.RecordId(gsn, gsn % 2), payload, key, time_us, gsn // 10)


def batch(start: int, stop: int) -> pa.RecordBatch:
    records = [record(gsn) for gsn in range(start, stop)]
    rows = [
        {
            "key": each.key,
            "value": each.payload,
            "topic": "t",
            "partition": each.rid.shard,
            "offset": each.rid.gsn,
            "timestamp": each.timestamp,
            "timestampType": 0,
            "epoch": each.epoch,
        }
        for each in records
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def batches(count: int, at_once: int = 7) -> Iterator[pa.RecordBatch]:
    for start in range(1, count + 1, at_once):
        yield batch(start, min(start + at_once, count + 1))


def written(kind: Format, compression: Compression, count: int, *, is_pipe: bool = False) -> bytes:
    sink = io.BytesIO()
    files.write(batches(count), SCHEMA, sink, kind, compression, is_pipe=is_pipe)
    return sink.getvalue()


@pytest.mark.parametrize("count", [0, 100])
@pytest.mark.parametrize(("kind", "compression"), BINARY)
def test_written_rows_are_read_back(kind: Format, compression: Compression, count: int) -> None:
    source = pa.BufferReader(written(kind, compression, count))
    found = parquet.read_table(source) if kind == "parquet" else ipc.open_file(source).read_all()
    assert found == pa.Table.from_batches(batches(count), SCHEMA)


def test_a_pipe_gets_a_stream_of_arrow_batches() -> None:
    with ipc.open_stream(written("arrow", "none", 20, is_pipe=True)) as reader:
        assert reader.read_all() == pa.Table.from_batches(batches(20), SCHEMA)


def test_json_lines_have_the_format_of_tail() -> None:
    sink = io.BytesIO()
    files.write_lines(map(record, range(1, 101)), sink)
    lines = sink.getvalue().splitlines(keepends=True)
    assert lines == [as_json(record(gsn)) for gsn in range(1, 101)]
    assert (
        json.loads(lines[1])["timestamp"]
        == datetime(2023, 11, 14, 22, 13, 22, tzinfo=UTC).isoformat()
    )


@pytest.mark.parametrize(("most_bytes", "most_rows"), [(1, 1000), (10**9, 5), (400, 9)])
def test_row_groups_are_bounded_and_the_file_records_its_sort_order(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, most_rows: int
) -> None:
    monkeypatch.setattr(files, "_GROUP_BYTES", most_bytes)
    monkeypatch.setattr(files, "_GROUP_ROWS", most_rows)
    file = parquet.ParquetFile(pa.BufferReader(written("parquet", "snappy", 50)))
    groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
    assert all(group.num_rows <= most_rows for group in groups)
    sizes = [file.read_row_group(at).nbytes for at in range(len(groups))]
    assert all(size < most_bytes + batch(1, 8).nbytes * 2 for size in sizes)
    place = SCHEMA.get_field_index("offset")
    assert {group.sorting_columns for group in groups} == {(parquet.SortingColumn(place),)}
    ranges = [group.column(place).statistics for group in groups]
    assert all(one.max < next_one.min for one, next_one in itertools.pairwise(ranges))
    assert file.read() == pa.Table.from_batches(batches(50), SCHEMA)


def test_memory_holds_at_most_one_group() -> None:
    taken = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for each in batches(30, 1):
            taken += 1
            yield each

    for held in files._groups(counted(), 10**9, 3):
        assert sum(each.num_rows for each in held) == 3
        assert taken <= 3 * (held[0]["offset"][0].as_py() // 3 + 1) + 1


def test_a_file_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"former")
    with pytest.raises(ValueError, match="half-way"), files.replacing(target) as file:  # noqa: PT012
        file.write(b"part")
        file.flush()
        assert target.read_bytes() == b"former"
        raise ValueError("half-way")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert target.read_bytes() == b"former"
    with target.open("rb") as reader:
        with files.replacing(target) as file:
            file.write(b"whole")
        assert reader.read() == b"former"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert target.read_bytes() == b"whole"


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(OSError, match="No space") as caught, files.replacing(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(target)
    assert not list(tmp_path.iterdir())


def test_a_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with files.replacing(tmp_path / "link") as file:
        file.write(b"whole")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"whole"
