"""Epochs of the log's records: the last one, and the first position of each.

Rule: epochs never decrease from record to record, so a binary search reads only a few blocks.
Invariant: results cover only records before the given end, because later ones may still change
(docs/spark.md, section 1.1).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from spark_reader.deduplication import gsns_of
from ziplog.errors import ConfigError
from ziplog.segments.blocks import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spark_reader.planning import Piece
    from ziplog.segments.blocks import Block

#: Larger than every epoch.
_NO_EPOCH: Final = 2**64


class ShardEpochs:
    """The epochs of one shard's records."""

    def __init__(
        self, pieces: Sequence[Piece], blocks: Callable[[int, int], Iterable[Block]]
    ) -> None:
        """Use the records of a range.

        Args:
            pieces: of the range, in order, as small as possible; at least one.
            blocks: returns the blocks that cover positions [start, stop), in order; they may
                extend beyond both ends.

        """
        self._pieces: Final = pieces
        self._blocks: Final = blocks
        self._stop: Final = pieces[-1].stop

    def last(self) -> int:
        """Return the epoch of the last record; -1: there is no record."""
        for piece in reversed(self._pieces):
            last = -1
            for _, epochs in self._columns(piece.start, piece.stop):
                last = epochs[-1]
            if last >= 0:
                return last
        return -1

    def start_of(self, epoch: int) -> int | None:
        """Return the position of the first record of this epoch or a later one; None: no record."""
        at = bisect_left(self._pieces, epoch, key=self._first_epoch)
        for gsns, epochs in self._columns(self._pieces[max(at - 1, 0)].start, self._stop):
            place = bisect_left(epochs, epoch)
            if place < len(gsns):
                return gsns[place]
        return None

    def _first_epoch(self, piece: Piece) -> int:
        """Return the epoch of the first record at or after a piece's start."""
        for _, epochs in self._columns(piece.start, self._stop):
            return epochs[0]
        return _NO_EPOCH

    def _columns(self, start: int, stop: int) -> Iterator[tuple[memoryview[int], memoryview[int]]]:
        """Yield positions and epochs of the records of [start, stop), block by block."""
        for block in self._blocks(start, stop):
            gsns = gsns_of(block)
            place = layout(block.rows, has_keys=block.has_keys).epochs
            epochs = memoryview(block.columns)[place].cast("q")
            low, high = bisect_left(gsns, start), bisect_left(gsns, stop)
            if low < high:
                yield gsns[low:high], epochs[low:high]


class Epochs:
    """Epochs of all shards, with the methods of `ziplog.Extents`."""

    def __init__(self, shards: Sequence[ShardEpochs], stop: int) -> None:
        """Use all records before `stop`."""
        self._shards: Final = shards
        self._stop: Final = stop

    def epoch_start(self, epoch: int) -> int:
        """Return where an epoch's records start; 1: before all stored records.

        It is 1 for the epoch of the first stored record too, because trimmed records may belong to
        that epoch.

        Raises:
            ConfigError: there is no record of this epoch or a later one.

        """
        self._check(epoch)
        return self._start_of(epoch)

    def epoch_stop(self, epoch: int) -> int:
        """Return where the records of the next epoch start; errors are those of `epoch_start`."""
        self._check(epoch)
        return self._start_of(epoch + 1)

    def _check(self, epoch: int) -> None:
        last = max((shard.last() for shard in self._shards), default=-1)
        if epoch > last:
            known = f"at most {last}, the end of the files of all shards"
            raise ConfigError("epoch", epoch, known if last >= 0 else "left out for an empty log")

    def _start_of(self, epoch: int) -> int:
        first, found = self._first_from(0), self._first_from(epoch)
        return found if found > first else 1

    def _first_from(self, epoch: int) -> int:
        starts = [shard.start_of(epoch) for shard in self._shards]
        return min((start for start in starts if start is not None), default=self._stop)
