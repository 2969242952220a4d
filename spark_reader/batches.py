"""Arrow batches made from blocks of records, column by column; no Python code runs per record.

The 64-bit columns of a block are used as Arrow arrays without a copy. Payloads and keys become an
array by one `take` each. Rules: rows outside the range, duplicates and filtered rows are removed
before anything is copied; only requested columns are built. Invariant: a batch has exactly the
schema of its fields, at most 65,536 rows, and at most 32 MiB of keys that many rows share
(docs/spark.md, section 1.3).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import compute

from spark_reader import schema
from spark_reader.deduplication import gsns_of
from ziplog.errors import ConfigError
from ziplog.segments.blocks import layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spark_reader.projection import Projection
    from ziplog.segments.blocks import Block, ColumnLayout

MAX_ROWS: Final = 65_536
#: Limit for the keys of a batch, in bytes: a batch repeats a key that the block stores once.
MAX_KEY_BYTES: Final = 32 * 1024 * 1024

_TYPES: Final[dict[str, pa.DataType]] = {
    "binary": pa.binary(),
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
_ALL: Final = 2**63 - 1
_LOW_HALF: Final = pa.scalar(2**32 - 1, pa.int64())


def arrow_schema(fields: Sequence[schema.Field]) -> pa.Schema:
    """Return the schema of batches with these columns."""
    return pa.schema(
        [pa.field(field.name, _TYPES[field.type], nullable=field.is_nullable) for field in fields]
    )


class Batches:
    """Converts the blocks of one shard to batches."""

    def __init__(self, shard: int, projection: Projection) -> None:
        self._projection: Final = projection
        self._schema: Final = arrow_schema(projection.fields)
        #: Columns with the same value in each row, at full length.
        self._constants: Final = {
            schema.TOPIC: pa.repeat(pa.scalar(projection.topic), MAX_ROWS),
            schema.PARTITION: pa.repeat(pa.scalar(shard, pa.int32()), MAX_ROWS),
            schema.TIMESTAMP_TYPE: pa.repeat(pa.scalar(0, pa.int32()), MAX_ROWS),
        }

    def from_block(
        self, block: Block, start: int, stop: int, repeats: Sequence[tuple[int, int]]
    ) -> Iterator[pa.RecordBatch]:
        """Return the selected rows of a block, in order; no batch if none is selected.

        Args:
            block: of this shard.
            start: the first position,
            stop: and the end (exclusive).
            repeats: index ranges of duplicate rows.

        """
        view = _BlockColumns(block)
        low, high = view.bounds(start, stop, self._projection)
        step = self._most_rows(view) if low < high else MAX_ROWS
        for at in range(low, high, step):
            chosen = view.select(at, min(at + step, high), repeats, self._projection)
            if chosen.rows:
                columns = [self._column(field, chosen) for field in self._projection.fields]
                yield pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _most_rows(self, view: _BlockColumns) -> int:
        """Return the maximum number of rows in a batch of a block."""
        has_keys = view.block.has_keys and any(
            f.column == schema.KEY for f in self._projection.fields
        )
        longest = view.longest_key() if has_keys else 0
        return min(MAX_ROWS, max(MAX_KEY_BYTES // max(longest, 1), 1))

    def _column(self, field: schema.Field, chosen: _SelectedRows) -> pa.Array:
        constant = self._constants.get(field.column)
        if constant is not None:
            return constant.slice(0, chosen.rows)
        match field.column:
            case schema.VALUE:
                return _as_type(chosen.values(), field, chosen)
            case schema.KEY:
                return _as_type(chosen.keys(), field, chosen)
            case schema.OFFSET:
                return chosen.integers(chosen.view.places.gsns)
            case schema.EPOCH:
                return chosen.integers(chosen.view.places.epochs)
        assert field.column == schema.TIMESTAMP, f"no such column: {field.column}"
        return chosen.integers(chosen.view.places.timestamps, _TYPES["timestamp"])


class _BlockColumns:
    """A block's columns as Arrow arrays."""

    def __init__(self, block: Block) -> None:
        self.block: Final = block
        self.places: Final[ColumnLayout] = layout(block.rows, has_keys=block.has_keys)
        self._columns: Final = memoryview(block.columns)

    def buffer(self, place: slice) -> pa.Buffer:
        return pa.py_buffer(self._columns[place])

    def integers(self, place: slice, kind: pa.DataType | None = None) -> pa.Array:
        return pa.Array.from_buffers(
            kind or pa.int64(), self.block.rows, [None, self.buffer(place)]
        )

    def even_elements(self, place: slice, rows: int) -> pa.Array:
        """Return an array with the values of the first `rows` rows as its even elements."""
        buffers = [None, self.buffer(place), pa.py_buffer(self.block.data)]
        return pa.Array.from_buffers(pa.binary(), 2 * rows - 1, buffers)

    def longest_key(self) -> int:
        """Return the length of the block's longest key, in bytes."""
        pairs = self.integers(self.places.keys)
        starts, ends = compute.bit_wise_and(pairs, _LOW_HALF), compute.shift_right(pairs, 32)
        length: int = compute.max(compute.subtract(ends, starts)).as_py()
        return length

    def bounds(self, start: int, stop: int, projection: Projection) -> tuple[int, int]:
        """Return the row indexes [low, high) that lie in the range and in its epochs."""
        gsns = gsns_of(self.block)
        low, high = bisect_left(gsns, start), bisect_left(gsns, stop)
        if projection.first_epoch is not None or projection.last_epoch is not None:
            epochs = self._columns[self.places.epochs].cast("q")
            low = max(low, bisect_left(epochs, projection.first_epoch or 0))
            last = _ALL if projection.last_epoch is None else min(projection.last_epoch + 1, _ALL)
            high = min(high, bisect_left(epochs, last))
        return low, high

    def select(
        self, low: int, high: int, repeats: Sequence[tuple[int, int]], projection: Projection
    ) -> _SelectedRows:
        """Select rows of [low, high)."""
        mask = _mask_without(repeats, low, high)
        times = None
        for limit, compare in (
            (projection.since_us, compute.greater_equal), (projection.until_us, compute.less),
        ):  # fmt: skip
            if limit is not None:
                if times is None:
                    times = self.integers(self.places.timestamps).slice(low, high - low)
                found = compare(times, pa.scalar(_in_range(limit), pa.int64()))
                mask = found if mask is None else compute.and_(mask, found)
        return _SelectedRows(self, low, high, mask)


class _SelectedRows:
    """Some rows of a block: an index range, and an optional mask over it."""

    def __init__(self, view: _BlockColumns, low: int, high: int, mask: pa.Array | None) -> None:
        self.view: Final = view
        self._low, self._count, self._mask = low, high - low, mask
        self.rows: int = self._count if mask is None else (mask.true_count)

    def integers(self, place: slice, kind: pa.DataType | None = None) -> pa.Array:
        return self._cut(self.view.integers(place, kind))

    def values(self) -> pa.Array:
        rows = self.view.block.rows
        return self.view.even_elements(self.view.places.values, rows).take(self._cut(_evens(rows)))

    def keys(self) -> pa.Array:
        block, places = self.view.block, self.view.places
        if not block.has_keys:
            return pa.nulls(self.rows, pa.binary())
        bits = self.view.buffer(places.key_bits)
        rows = block.rows
        evens = pa.Array.from_buffers(pa.int32(), rows, [bits, _evens(rows).buffers()[1]])
        # After the last row with a key, the bounds fall back to 0, which Arrow does not allow.
        last = int.from_bytes(bits, "little").bit_length()
        return self.view.even_elements(places.keys, last).take(self._cut(evens))

    def _cut(self, column: pa.Array) -> pa.Array:
        column = column.slice(self._low, self._count)
        return column if self._mask is None else column.filter(self._mask)


@lru_cache(maxsize=4)
def _evens_up_to(bits: int) -> pa.Buffer:
    return pa.py_buffer(array("i", range(0, 2 << bits, 2)))


def _evens(rows: int) -> pa.Array:
    """Return 0, 2, 4, ...: one number per row."""
    return pa.Array.from_buffers(pa.int32(), rows, [None, _evens_up_to(max(rows.bit_length(), 16))])


def _mask_without(repeats: Sequence[tuple[int, int]], low: int, high: int) -> pa.Array | None:
    """Return the mask of the rows of [low, high) that are not duplicates; None: there are none."""
    marks: bytearray | None = None
    for first, end in repeats:
        start, stop = max(first, low), min(end, high)
        if start < stop:
            if marks is None:
                marks = bytearray(b"\1") * (high - low)
            marks[start - low : stop - low] = bytes(stop - start)
    if marks is None:
        return None
    column = pa.Array.from_buffers(pa.uint8(), high - low, [None, pa.py_buffer(marks)])
    return column.cast(pa.bool_())


def _in_range(number: int) -> int:
    return max(-_ALL, min(number, _ALL))


def _as_type(column: pa.Array, field: schema.Field, chosen: _SelectedRows) -> pa.Array:
    """Return the column in the requested type.

    Raises:
        ConfigError: a value is not valid UTF-8 text; the error names the first such row.

    """
    if field.type != "string":
        return column
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        gsn, value = _first_invalid_text(column, chosen)
        raise ConfigError(
            f"{field.column} at gsn {gsn}", _short(value), "UTF-8, or be requested as binary"
        ) from None


def _first_invalid_text(column: pa.Array, chosen: _SelectedRows) -> tuple[int, bytes]:
    gsns = chosen.integers(chosen.view.places.gsns)
    for gsn, value in zip(gsns, column, strict=True):
        found: Any = value.as_py()
        try:
            (found or b"").decode()
        except UnicodeDecodeError:
            return gsn.as_py(), found
    raise AssertionError("Arrow rejects a column of valid UTF-8")


def _short(value: bytes) -> bytes:
    return value if len(value) <= 32 else value[:32] + b"..."
