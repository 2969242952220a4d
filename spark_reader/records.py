"""Records made from blocks, one by one and without Arrow.

The rows are the same as in the Arrow batches of the same blocks (`spark_reader.batches`).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from spark_reader.deduplication import gsns_of
from ziplog.segments.blocks import layout
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spark_reader.projection import Projection
    from ziplog.segments.blocks import Block


def records_of(
    block: Block,
    start: int,
    stop: int,
    repeats: Sequence[tuple[int, int]],
    shard: int,
    projection: Projection,
) -> Iterator[Record]:
    """Yield the selected records of a block, in order.

    Args:
        block: of the shard.
        start: the first position,
        stop: and the end (exclusive).
        repeats: index ranges of duplicate rows.
        shard: the block's shard.
        projection: the row filters; its columns do not matter.

    """
    places = layout(block.rows, has_keys=block.has_keys)
    columns, data = memoryview(block.columns), memoryview(block.data)
    gsns = gsns_of(block)
    epochs, times = columns[places.epochs].cast("q"), columns[places.timestamps].cast("q")
    values, keys = columns[places.values].cast("i"), columns[places.keys].cast("i")
    key_bits = columns[places.key_bits]
    repeated = {index for first, end in repeats for index in range(first, end)}
    for index in range(bisect_left(gsns, start), bisect_left(gsns, stop)):
        if index in repeated or not _is_selected(projection, times[index], epochs[index]):
            continue
        key = None
        if key_bits and key_bits[index // 8] >> index % 8 & 1:
            key = bytes(data[keys[2 * index] : keys[2 * index + 1]])
        payload = bytes(data[values[2 * index] : values[2 * index + 1]])
        yield Record(RecordId(gsns[index], shard), payload, key, times[index], epochs[index])


def _is_selected(projection: Projection, timestamp_us: int, epoch: int) -> bool:
    since, until = projection.since_us, projection.until_us
    first, last = projection.first_epoch, projection.last_epoch
    return (
        (since is None or timestamp_us >= since)
        and (until is None or timestamp_us < until)
        and (first is None or epoch >= first)
        and (last is None or epoch <= last)
    )
