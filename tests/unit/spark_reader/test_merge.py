"""K-way merge by position: complete, without duplicates, in order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_reader.merge import merged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCHEMA = pa.schema([pa.field("offset", pa.int64(), nullable=False), pa.field("value", pa.binary())])


def batch(gsns: Sequence[int]) -> pa.RecordBatch:
    values = [None if gsn % 7 == 0 else b"%d" % gsn for gsn in gsns]
    columns = [pa.array(gsns, pa.int64()), pa.array(values, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@st.composite
def streams(draw: st.DrawFn) -> list[list[list[int]]]:
    """Return of each shard its batches: gsns, each on one shard; some batches are empty."""
    owners = draw(st.lists(st.integers(0, 4), max_size=60))
    shards: list[list[list[int]]] = [[[]] for _ in range(5)]
    for gsn, shard in enumerate(owners, 1):
        if draw(st.integers(0, 3)) == 0:
            shards[shard].append([])
        shards[shard][-1].append(gsn)
    return shards


def rows(batches: Iterator[pa.RecordBatch]) -> list[tuple[int, bytes | None]]:
    return [(row["offset"], row["value"]) for each in batches for row in each.to_pylist()]


@given(streams())
def test_all_rows_come_once_and_in_order(shards: list[list[list[int]]]) -> None:
    everything = sorted(itertools.chain(*itertools.chain(*shards)))
    found = rows(merged([[batch(gsns) for gsns in shard] for shard in shards]))
    assert found == rows(iter([batch(everything)]))


@given(streams())
def test_batches_that_are_slices_of_others_are_merged_alike(shards: list[list[list[int]]]) -> None:
    everything = sorted(itertools.chain(*itertools.chain(*shards)))
    sliced = [[batch([0, *gsns, 10_000]).slice(1, len(gsns)) for gsns in shard] for shard in shards]
    assert rows(merged(sliced)) == rows(iter([batch(everything)]))


def test_the_merge_reads_one_batch_ahead_per_stream() -> None:
    taken = [0, 0]

    def stream(shard: int) -> Iterator[pa.RecordBatch]:
        for first in range(100):
            taken[shard] += 1
            yield batch([2 * first + shard])

    given_out = 0
    for each in merged([stream(0), stream(1)]):
        given_out += each.num_rows
        assert sum(taken) <= given_out + 2
    assert given_out == 200


def test_a_stream_out_of_order_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="3 to 3 after 5"):
        rows(merged([[batch([4, 5]), batch([3])]]))
