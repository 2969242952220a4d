"""Batches hold what decoding record by record gives, and not a row more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_reader.batches import MAX_KEY_BYTES, MAX_ROWS, Batches, arrow_schema
from spark_reader.projection import Projection
from spark_reader.records import records_of
from spark_reader.schema import DEFAULT, projection
from tests.unit.spark_reader.blocks import Draft, drafts, placed
from tests.unit.ziplog.segments.blocks import Row, rows_of_units
from ziplog.core.entries import Body, Unit, encode_body
from ziplog.errors import ConfigError
from ziplog.segments.blocks import Block, block_of_units

if TYPE_CHECKING:
    from ziplog.types import Record

SHARD = 3


def read(
    block: Block, start: int, stop: int, repeats: list[tuple[int, int]], what: Projection
) -> list[dict[str, Any]]:
    batches = list(Batches(SHARD, what).from_block(block, start, stop, repeats))
    assert all(batch.num_rows for batch in batches)
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(arrow_schema(what.fields))
    rows = [row for batch in batches for row in batch.to_pylist()]
    if what.fields == DEFAULT:
        records = list(records_of(block, start, stop, repeats, SHARD, what))
        assert [as_row(record, what.topic) for record in records] == with_microseconds(rows)
    return rows


def as_row(record: Record, topic: str) -> dict[str, Any]:
    return {
        "key": record.key, "value": record.payload, "topic": topic,
        "partition": record.rid.shard, "offset": record.rid.gsn,
        "timestamp": record.timestamp_us, "timestampType": 0, "epoch": record.epoch,
    }  # fmt: skip


def as_asked(row: Row) -> dict[str, Any]:
    return {
        "key": row.key, "value": row.payload, "topic": "flights", "partition": SHARD,
        "offset": row.gsn, "timestamp": row.timestamp_us, "timestampType": 0, "epoch": row.epoch,
    }  # fmt: skip


def with_microseconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    unit = pa.timestamp("us", tz="UTC")
    return [
        row | {"timestamp": pa.scalar(row["timestamp"], unit).cast(pa.int64()).as_py()}
        for row in rows
    ]


def unit_of(payloads: list[bytes], key: bytes | None = None, first: int = 1) -> Unit:
    gsns = list(range(first, first + len(payloads)))
    return Unit(0, gsns, encode_body(Body(7, key, payloads)))


some = st.lists(drafts, min_size=1, max_size=12)


@given(
    some,
    st.integers(0, 20),
    st.integers(1, 60) | st.just(10_000),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=3),
)
def test_rows_equal_the_decoded_records(
    found: list[Draft], start: int, stop: int, repeats: list[tuple[int, int]]
) -> None:
    units = placed(found)
    expected = [
        as_asked(row)
        for at, row in enumerate(rows_of_units(units))
        if start <= row.gsn < stop and not any(low <= at < high for low, high in repeats)
    ]
    block = block_of_units(units, 1, 10_000)
    rows = read(block, start, stop, repeats, Projection(DEFAULT, "flights"))
    assert with_microseconds(rows) == expected


times = st.none() | st.integers(-3, 3)
epochs = st.none() | st.integers(0, 2)


@given(some, st.tuples(times, times), st.tuples(epochs, epochs))
def test_filters_select_times_and_epochs(
    found: list[Draft],
    between: tuple[int | None, int | None],
    within: tuple[int | None, int | None],
) -> None:
    units = placed(found)
    (since, until), (first, last) = between, within
    expected = [
        as_asked(row)
        for row in rows_of_units(units)
        if (since is None or row.timestamp_us >= since)
        and (until is None or row.timestamp_us < until)
        and (first is None or row.epoch >= first)
        and (last is None or row.epoch <= last)
    ]
    what = Projection(DEFAULT, "flights", since, until, first, last)
    rows = read(block_of_units(units, 1, 10_000), 1, 10_000, [], what)
    assert with_microseconds(rows) == expected


def test_only_requested_columns_are_built() -> None:
    block = block_of_units([unit_of([b"x", "ü".encode()], b"k"), unit_of([b"y"], None, 9)], 1, 20)
    fields = projection([
        ("gsn", "bigint", True), ("value", "string", False), ("Key", "string", True),
    ])  # fmt: skip
    assert read(block, 1, 20, [], Projection(fields, "flights")) == [
        {"gsn": 1, "value": "x", "Key": "k"},
        {"gsn": 2, "value": "ü", "Key": "k"},
        {"gsn": 9, "value": "y", "Key": None},
    ]


@pytest.mark.parametrize("keys", [[b"k", None], [None, b"k"], [None, b"k", None], [None, None]])
def test_some_records_have_keys(keys: list[bytes | None]) -> None:
    units = [unit_of([b"p" * 50], key, 1 + at) for at, key in enumerate(keys)]
    fields = projection([("key", "binary", True)])
    rows = read(block_of_units(units, 1, 9), 1, 9, [], Projection(fields, "flights"))
    assert [row["key"] for row in rows] == keys


def test_invalid_utf_8_fails_with_its_position() -> None:
    units = [unit_of([b"fine"], b"\xff\xfe", 1), unit_of([b"fine", b"\xc3" * 100], None, 5)]
    block = block_of_units(units, 1, 20)
    for column, said in (("key", "key at gsn 1 is"), ("value", "value at gsn 6 is")):
        fields = projection([(column, "string", True)])
        with pytest.raises(ConfigError, match=said) as refused:
            read(block, 1, 20, [], Projection(fields, "flights"))
        assert len(str(refused.value)) < 300


def test_a_large_block_is_split_into_batches() -> None:
    count = MAX_ROWS + MAX_ROWS // 2
    units = [unit_of([b""] * min(4096, count - at), None, at + 1) for at in range(0, count, 4096)]
    what = Projection(
        projection([("offset", "bigint", True), ("value", "binary", True)]), "flights"
    )
    block = block_of_units(units, 1, count + 1)
    batches = list(Batches(SHARD, what).from_block(block, 1, count + 1, []))
    assert [batch.num_rows for batch in batches] == [MAX_ROWS, MAX_ROWS // 2]
    gsns = [gsn for batch in batches for gsn in batch.column("offset").to_pylist()]
    assert gsns == list(range(1, count + 1))


def test_an_empty_block_has_no_batch() -> None:
    block = block_of_units([], 1, 100)
    assert list(Batches(SHARD, Projection(DEFAULT, "flights")).from_block(block, 1, 100, [])) == []


def test_integers_are_not_copied() -> None:
    block = block_of_units([unit_of([b"x"] * 100)], 1, 200)
    what = Projection(projection([("gsn", "bigint", True)]), "flights")
    (batch,) = Batches(SHARD, what).from_block(block, 1, 200, [])
    source = pa.py_buffer(memoryview(block.columns))
    at = batch.column("gsn").buffers()[1].address - source.address
    assert 0 <= at < source.size


def test_a_key_that_many_rows_share_does_not_make_a_batch_large() -> None:
    units = [
        unit_of([b"%d" % at] * 256, bytes([at]) * 65_536 if at % 2 else None, 1 + 256 * at)
        for at in range(8)
    ]
    block = block_of_units(units, 1, 10_000)
    keys, values = (projection([(name, "binary", True)]) for name in ("key", "value"))
    batches = list(Batches(SHARD, Projection(keys, "demo")).from_block(block, 1, 10_000, []))
    assert all(0 < batch.nbytes <= MAX_KEY_BYTES + 16_384 for batch in batches)
    lengths = [len(key.as_py() or b"") for batch in batches for key in batch.column("key")]
    assert lengths == [65_536 * (at // 256 % 2) for at in range(8 * 256)]
    without = list(Batches(SHARD, Projection(values, "demo")).from_block(block, 1, 10_000, []))
    assert [batch.num_rows for batch in without] == [8 * 256], "keys were not requested"
