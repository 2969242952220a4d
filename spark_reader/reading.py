"""One way to read, whatever the blocks come from: servers, or files.

A `Source` is a description that travels to tasks, a `Session` is what it opens there, and
`Replicas` are those that have a shard. Rule: blocks come in the order of the log, complete, from
wherever they are found; what is left out of them and how they become batches is decided here, once.
Invariant: the same range gives the same rows, whatever failed meanwhile (docs/spark.md, 1.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from spark_reader.batches import Batches
from spark_reader.deduplication import Deduplicator
from spark_reader.options import FIRST_EPOCH, LAST_EPOCH
from ziplog.errors import ConfigError, TrimmedError
from ziplog.segments.blocks import BLOCK_BYTES, Block, block_of_units
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    import pyarrow as pa

    from spark_reader.batches import Projection
    from spark_reader.options import Options
    from spark_reader.planning import Piece
    from ziplog.core.entries import Unit
    from ziplog.core.writer_table import WriterTable
    from ziplog.segments.buffer_pool import ReadMemory


class Pinned(msgspec.Struct, frozen=True):
    """The positions [start, stop) that a load is about, for good, and the cluster's name."""

    start: int
    stop: int
    topic: str


class HasEpochs(Protocol):
    """Whoever knows where epochs begin, as `ziplog.Extents`."""

    def epoch_start(self, epoch: int) -> int:
        """Return a position before an epoch's records and behind those of earlier ones.

        Raises:
            ConfigError: there is no such epoch.
            TrimmedError: it was trimmed.

        """
        ...

    def epoch_stop(self, epoch: int) -> int:
        """Return the same of the next one; errors are those of `epoch_start`."""
        ...


class Source(Protocol):
    """Where a load reads; may be sent to another process."""

    def open(self, memory: ReadMemory | None = None) -> Session:
        """Open it; close what is returned.

        Args:
            memory: where blocks are read to; None: some of the session's own.

        """
        ...


class Replicas(ABC):
    """Whoever has a shard's records, in blocks or only as they are stored."""

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def block(self, gsn: int) -> Block | int:
        """Return the block over a position, or where the next one begins; 0: there is none."""

    @abstractmethod
    def scanned(self, start: int, stop: int) -> Iterator[Block]:
        """Give blocks made of what is stored of [start, stop), in order, up to `stop`.

        Raises:
            TrimmedError: the start was trimmed meanwhile, and data loss is a failure.
            UnavailableError: nobody has it, or can be asked.

        """

    @abstractmethod
    def table(self, gsn: int) -> tuple[int, WriterTable]:
        """Return a position at or before `gsn`, and what is known of the shard's writers there.

        Raises:
            TrimmedError: all up to `gsn` was trimmed, and nobody knows it any more.

        """

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Give the blocks that cover [start, stop), in order.

        The first and the last may reach over the ends, and two that follow each other overlap.
        """
        at = start
        while at < stop:
            found = self.block(at)
            if isinstance(found, Block):
                assert found.start <= at < found.stop, "another block than the one asked for"
                yield found
                at = found.stop
            else:
                until = min(found, stop) if found else stop
                yield from self.scanned(at, until)
                at = until


def first_block(answers: Iterable[Block | int]) -> Block | int:
    """Return what the answers of several replicas to `Replicas.block` come to.

    The first block, and nobody is asked after it; otherwise where the next one begins; 0: nowhere.
    """
    starts: list[int] = []
    for found in answers:
        if isinstance(found, Block):
            return found
        if found:
            starts.append(found)
    return min(starts, default=0)


def nearer_table(
    one: tuple[int, WriterTable], other: tuple[int, WriterTable]
) -> tuple[int, WriterTable]:
    """Return the table that is nearer, of two at one position one that knows somebody.

    At the trim point, who has no table from before tells an empty one.
    """
    return max(one, other, key=lambda table: (table[0], bool(table[1])))


def blocks_from_units(steps: Iterable[tuple[list[Unit], int]], start: int) -> Iterator[Block]:
    """Give blocks of some `BLOCK_BYTES` made of units.

    Args:
        steps: the units from `start` on, and up to where that is all of them, some at a time.
        start: where the first block begins.

    """
    units: list[Unit] = []
    size, reached = 0, start
    for more, reached in steps:
        units += more
        size += sum(len(unit.body) for unit in more)
        if size >= BLOCK_BYTES:
            yield block_of_units(units, start, reached)
            units, start, size = [], reached, 0
    if start < reached:
        yield block_of_units(units, start, reached)


class Session(ABC):
    """An open source. For one thread, but several `read` may be under way in turn."""

    def __init__(self, options: Options) -> None:
        self._options: Final = options

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def topic(self) -> str:
        """Return the cluster's name."""

    @abstractmethod
    def pin(self) -> Pinned:
        """Return the range that the options tell; its end is now, if they tell none.

        Raises:
            TrimmedError: it begins below the trim point, and data loss is a failure.
            NoSuchRecordError: a position in it was never given out.
            ConfigError: there is no such epoch, or such an end.

        """

    @abstractmethod
    def latest(self) -> int:
        """Return a position that every completed insert lies before.

        One that begins later may get a position below it still, where another shard has not decided
        all of its own.
        """

    @abstractmethod
    def latest_decided(self) -> int:
        """Return the same once all below is decided, so that what is inserted later is behind it.

        Raises:
            DeadlineError: a shard did not decide in time.

        """

    @abstractmethod
    def for_tasks(self) -> Source:
        """Return the source for tasks: it carries what this session found, such as archives.

        Tasks look for that themselves where they find it wrong.
        """

    @abstractmethod
    def pieces_of(self, start: int, stop: int) -> list[Piece]:
        """Return the range, shard by shard and each in order, in as small pieces as is known.

        Raises:
            TrimmedError: it begins below the trim point, and data loss is a failure; otherwise it
                begins there.

        """

    @abstractmethod
    def replicas(self, shard: int, start: int, stop: int, task_index: int) -> Replicas:
        """Return what serves a shard's positions [start, stop); `task_index`: which of equals first."""

    @abstractmethod
    def close(self) -> None:
        """Close it. May be called again."""

    def read(
        self, pieces: Iterable[Piece], what: Projection, task_index: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Give the rows of pieces in batches, each piece's in the order of the log.

        Args:
            pieces: of the range of a `pin`.
            what: which columns and rows.
            turn: the number of the task: tasks spread over equal servers.

        """
        for piece in pieces:
            yield from self._read(piece, what, task_index)

    def _read(self, piece: Piece, what: Projection, task_index: int) -> Iterator[pa.RecordBatch]:
        batches, at = Batches(piece.shard, what), piece.start
        with self.replicas(piece.shard, piece.start, piece.stop, task_index) as replicas:
            repeats = Deduplicator(replicas.table, replicas.blocks)
            for block in replicas.blocks(piece.start, piece.stop):
                try:
                    old = repeats.repeated_rows(block)
                except TrimmedError as error:
                    # Nobody tells any more what was before the block: from there on, it does.
                    at, old = self.after_trim(at, error.first.gsn), repeats.reset_at(block)
                # Two blocks of different servers may overlap.
                yield from batches.from_block(block, at, piece.stop, old)
                at = max(at, block.stop)

    def _bounds(self, known: Callable[[], HasEpochs], trim: int) -> tuple[int | None, int | None]:
        """Return where the options say that the range begins and ends; None: they do not.

        Args:
            known: gives the epochs of the log; asked only if an option names one.
            trim: all before it was trimmed.

        """
        options = self._options
        start, stop = options.start, options.stop
        if options.first_epoch is not None:
            start = self._of_epoch(FIRST_EPOCH, known().epoch_start, options.first_epoch, trim)
        if options.last_epoch is not None:
            stop = self._of_epoch(LAST_EPOCH, known().epoch_stop, options.last_epoch, trim)
        return start, stop

    def _of_epoch(self, name: str, of: Callable[[int], int], epoch: int, trim: int) -> int:
        try:
            return of(epoch)
        except TrimmedError:
            return self.after_trim(0, trim)
        except ConfigError as error:
            # So that the error has the option's name.
            raise ConfigError(name, epoch, error.allowed) from None

    def _pinned(self, start: int | None, stop: int | None, latest: int, trim: int) -> Pinned:
        """Return the range from `start` (None: `trim`) to `stop` (None: `latest`)."""
        start = trim if start is None else self.after_trim(max(start, 1), trim)
        stop = max(latest, start) if stop is None else self.after_trim(max(stop, 1), trim)
        return Pinned(start, max(stop, start), self.topic())

    # --- what was trimmed ---

    def after_trim(self, start: int, trim: int) -> int:
        """Return where to begin, if all before `trim` was trimmed.

        Raises:
            TrimmedError: that is behind the start, and data loss is a failure.

        """
        if start < trim and self._options.fail_on_data_loss:
            raise TrimmedError(self._first(trim))
        return max(start, trim)

    def _first(self, trim: int) -> RecordId:
        """Return a position with its owner, as far as that is known."""
        return RecordId(trim, 0)
