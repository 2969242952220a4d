"""K-way merge: combines the batches of all shards into the total order, by position.

Each step takes the rows of all streams up to a common position, the least last position of the
current batches, and sorts them at once. No Python code runs per record. Invariant: rows come out
in ascending order; the merge holds one batch per stream.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyarrow import compute

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def merged(
    streams: Iterable[Iterable[pa.RecordBatch]], column: str = "offset"
) -> Iterator[pa.RecordBatch]:
    """Return batches with all rows of all streams in the order of a column.

    Args:
        streams: batches of one schema, the rows of each stream in ascending order.
        column: of 64-bit integers without nulls or duplicates.

    """
    heads = [head for stream in streams if (head := _Head(iter(stream), column)).advance()]
    while len(heads) > 1:
        slowest = min(heads, key=lambda head: head.last)
        border = slowest.last
        parts = [part for head in heads if (part := head.pop_up_to(border)).num_rows]
        yield _sorted(parts, column)
        if not slowest.advance():
            heads.remove(slowest)
    for head in heads:
        yield from head.remaining()


class _Head:
    """Head of one stream: the current batch, and the batches that follow."""

    def __init__(self, stream: Iterator[pa.RecordBatch], column: str) -> None:
        self._stream: Final = stream
        self._column: Final = column
        self._batch: pa.RecordBatch | None = None
        #: The greatest value in the batch.
        self.last = -1

    def advance(self) -> bool:
        """Fetch the next non-empty batch after the current one is used up; False: end of stream."""
        assert self._batch is None, "rows would be left out"
        for batch in self._stream:
            if batch.num_rows:
                first, last = (batch.column(self._column)[at].as_py() for at in (0, -1))
                assert self.last < first <= last, f"{first} to {last} after {self.last}"
                self._batch, self.last = batch, last
                return True
        return False

    def pop_up_to(self, border: int) -> pa.RecordBatch:
        """Return the rows up to the border, inclusive."""
        batch = self._batch
        assert batch is not None
        count = bisect_right(_values(batch, self._column), border)
        self._batch = batch.slice(count) if count < batch.num_rows else None
        return batch.slice(0, count)

    def remaining(self) -> Iterator[pa.RecordBatch]:
        """Yield all remaining batches."""
        while self._batch is not None or self.advance():
            yield self.pop_up_to(self.last)


def _values(batch: pa.RecordBatch, column: str) -> memoryview[int]:
    values = batch.column(column)
    assert not values.null_count, f"a row without {column}"
    buffer = values.buffers()[1]
    return memoryview(buffer).cast("q")[values.offset : values.offset + len(values)]


def _sorted(parts: list[pa.RecordBatch], column: str) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    rows = pa.concat_batches(parts)
    return rows.take(compute.sort_indices(rows.column(column)))
