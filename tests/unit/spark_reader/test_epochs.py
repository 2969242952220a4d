"""Starts of epochs: the search in a few blocks equals a scan of all records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_reader.epochs import Epochs, ShardEpochs
from spark_reader.planning import Piece
from tests.unit.spark_reader.blocks import Draft, cut, drafts, placed
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.core.entries import Unit
    from ziplog.segments.blocks import Block

STOP = 300


class Kept:
    """A shard's blocks, and how often one was looked at."""

    def __init__(self, units: list[Unit], sizes: list[int]) -> None:
        self.found = cut(units, sizes)
        self.looked = 0
        ends = [block.stop for block in self.found[:-1]] + [STOP]
        starts = [1, *ends[:-1]]
        pieces = [Piece(0, start, stop, 1) for start, stop in zip(starts, ends, strict=True)]
        self.epochs = ShardEpochs(pieces, self.blocks)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        for block in self.found:
            if block.start < stop and start < block.stop:
                self.looked += 1
                yield block


logs = st.lists(drafts, max_size=12).map(placed)
sizes = st.lists(st.integers(1, 3), max_size=12)


@given(st.lists(st.tuples(logs, sizes), min_size=1, max_size=3), st.integers(0, 20))
def test_the_start_of_an_epoch_equals_a_scan_of_all_records(
    made: list[tuple[list[Unit], list[int]]], epoch: int
) -> None:
    found = Epochs([Kept(*each).epochs for each in made], STOP)
    rows = [(gsn, unit.epoch) for units, _ in made for unit in units for gsn in unit.gsns]
    last = max((epoch for _, epoch in rows), default=-1)
    if epoch > last:
        with pytest.raises(
            ConfigError, match=f"at most {last}" if rows else "left out for an empty log"
        ):
            found.epoch_start(epoch)
        with pytest.raises(ConfigError):
            found.epoch_stop(epoch)
        return
    first = min(gsn for gsn, _ in rows)
    for asked, reported in (
        (epoch, found.epoch_start(epoch)),
        (epoch + 1, found.epoch_stop(epoch)),
    ):
        start = min((gsn for gsn, its in rows if its >= asked), default=STOP)
        assert reported == (start if start > first else 1)


def test_few_blocks_are_read() -> None:
    units = placed([Draft(1, [b"value"], None, 0, None) for _ in range(256)])
    kept = Kept(units, [1] * 256)
    assert kept.epochs.last() == 25
    assert kept.epochs.start_of(17) == 170
    assert kept.looked <= 1 + 9 + 2
