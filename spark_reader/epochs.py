"""Which epochs there are, and where one begins, as the blocks of the log's shards tell.

Rule: epochs only grow from record to record, so a few blocks are looked at, however many there are.
Invariant: what is told is about records before the end that is given, as what is behind it may
still change (docs/spark.md, section 1.1).
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

#: Behind every epoch.
_NO_EPOCH: Final = 2**64


class ShardEpochs:
    """The epochs of one shard's records."""

    def __init__(
        self, pieces: Sequence[Piece], blocks: Callable[[int, int], Iterable[Block]]
    ) -> None:
        """Look at a range.

        Args:
            pieces: of the range, in order, as small as may be; one at least.
            blocks: gives the blocks that cover positions [start, stop), in order; they may reach
                over both ends.

        """
        self._pieces: Final = pieces
        self._blocks: Final = blocks
        self._stop: Final = pieces[-1].stop

    def last(self) -> int:
        """Return the epoch of the last record; -1: there is none."""
        for piece in reversed(self._pieces):
            last = -1
            for _, epochs in self._columns(piece.start, piece.stop):
                last = epochs[-1]
            if last >= 0:
                return last
        return -1

    def start_of(self, epoch: int) -> int | None:
        """Return the position of the first record of an epoch, or of later ones; None: of none."""
        at = bisect_left(self._pieces, epoch, key=self._first_epoch)
        for gsns, epochs in self._columns(self._pieces[max(at - 1, 0)].start, self._stop):
            place = bisect_left(epochs, epoch)
            if place < len(gsns):
                return gsns[place]
        return None

    def _first_epoch(self, piece: Piece) -> int:
        """Return the epoch of the first record at or behind a piece's start."""
        for _, epochs in self._columns(piece.start, self._stop):
            return epochs[0]
        return _NO_EPOCH

    def _columns(self, start: int, stop: int) -> Iterator[tuple[memoryview[int], memoryview[int]]]:
        """Give positions and epochs of the records of [start, stop), some at a time, in order."""
        for block in self._blocks(start, stop):
            gsns = gsns_of(block)
            place = layout(block.rows, has_keys=block.has_keys).epochs
            epochs = memoryview(block.columns)[place].cast("q")
            low, high = bisect_left(gsns, start), bisect_left(gsns, stop)
            if low < high:
                yield gsns[low:high], epochs[low:high]


class Epochs:
    """Those of all shards, told as `ziplog.Extents` tells a cluster's."""

    def __init__(self, shards: Sequence[ShardEpochs], stop: int) -> None:
        """Look at all records before `stop`."""
        self._shards: Final = shards
        self._stop: Final = stop

    def epoch_start(self, epoch: int) -> int:
        """Return where an epoch's records begin; 1: before all that is there.

        Of the epoch of the first record, too: what is trimmed may be of that epoch.

        Raises:
            ConfigError: there is no record of it, nor of a later one.

        """
        self._check(epoch)
        return self._start_of(epoch)

    def epoch_stop(self, epoch: int) -> int:
        """Return where those of the next one begin; errors are those of `epoch_start`."""
        self._check(epoch)
        return self._start_of(epoch + 1)

    def _check(self, epoch: int) -> None:
        last = max((shard.last() for shard in self._shards), default=-1)
        if epoch > last:
            known = f"at most {last}: so far all shards' files tell"
            raise ConfigError(
                "epoch", epoch, known if last >= 0 else "left out: no record is there"
            )

    def _start_of(self, epoch: int) -> int:
        first, found = self._first_from(0), self._first_from(epoch)
        return found if found > first else 1

    def _first_from(self, epoch: int) -> int:
        starts = [shard.start_of(epoch) for shard in self._shards]
        return min((start for start in starts if start is not None), default=self._stop)
