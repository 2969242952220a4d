"""Reading a range, independent of where its blocks are: interfaces and the common part.

A `Source` describes the log and can be pickled, a `Session` is an open source, and `Replicas` serve
the blocks of one shard. Rule: replicas return blocks in the order of the log, without gaps; this
module removes duplicates and makes batches. Invariant: the same range gives the same rows, whatever
fails meanwhile (docs/spark.md, section 1.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from spark_reader.deduplication import Deduplicator
from spark_reader.options import FIRST_EPOCH, LAST_EPOCH
from spark_reader.records import records_of
from ziplog.errors import ConfigError, TrimmedError
from ziplog.segments.blocks import BLOCK_BYTES, Block, block_of_units
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    import pyarrow as pa

    from spark_reader.options import Options
    from spark_reader.planning import Piece
    from spark_reader.projection import Projection
    from ziplog.core.entries import Unit
    from ziplog.core.writer_table import WriterTable
    from ziplog.segments.buffer_pool import BufferPool
    from ziplog.types import Record

_Rows = TypeVar("_Rows")


class Pinned(msgspec.Struct, frozen=True):
    """The fixed range of a load, positions [start, stop), and the cluster's name and id."""

    start: int
    stop: int
    topic: str
    cluster: str = ""


class HasEpochs(Protocol):
    """An object that knows the start of epochs, such as `ziplog.Extents`."""

    def epoch_start(self, epoch: int) -> int:
        """Return a position before an epoch's records and after those of earlier epochs.

        Raises:
            ConfigError: there is no such epoch.
            TrimmedError: it was trimmed.

        """
        ...

    def epoch_stop(self, epoch: int) -> int:
        """Return the same for the next epoch; errors are those of `epoch_start`."""
        ...


class Source(Protocol):
    """Description of the log that a load reads; can be sent to another process."""

    def open(self, memory: BufferPool | None = None) -> Session:
        """Open a session; the caller closes it.

        Args:
            memory: the buffer pool for blocks; None: the session creates one.

        """
        ...


class Replicas(ABC):
    """The replicas of a shard, as servers or as directories."""

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @abstractmethod
    def block(self, gsn: int) -> Block | int:
        """Return the block that contains a position, or the start of the next one; 0: none."""

    @abstractmethod
    def scanned(self, start: int, stop: int) -> Iterator[Block]:
        """Yield blocks made from the stored entries of [start, stop), in order, up to `stop`.

        Raises:
            TrimmedError: the start was trimmed meanwhile, and `failOnDataLoss` is true.
            UnavailableError: no replica has the entries, or no replica answers.

        """

    @abstractmethod
    def table(self, gsn: int) -> tuple[int, WriterTable]:
        """Return a position at or before `gsn`, and the shard's writer table there.

        Raises:
            TrimmedError: everything up to `gsn` was trimmed, and no replica has the table any more.

        """

    @abstractmethod
    def known_table(self, gsn: int) -> tuple[int, WriterTable]:
        """Return the last table that a replica still has at or before `gsn`, and its position.

        Records between the two may be trimmed. At worst the table is empty.
        """

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Yield the blocks that cover [start, stop), in order.

        The first and the last may extend beyond the range, and adjacent blocks may overlap.
        """
        at = start
        while at < stop:
            found = self.block(at)
            if isinstance(found, Block):
                assert found.start <= at < found.stop, "the replica returned another block"
                yield found
                at = found.stop
            else:
                until = min(found, stop) if found else stop
                yield from self.scanned(at, until)
                at = until


def first_block(answers: Iterable[Block | int]) -> Block | int:
    """Combine the results of `Replicas.block` of several replicas.

    Return the first block, without reading further results; otherwise the least start; 0: none.
    """
    starts: list[int] = []
    for found in answers:
        if isinstance(found, Block):
            return found
        if found:
            starts.append(found)
    return min(starts, default=0)


def blocks_from_units(steps: Iterable[tuple[list[Unit], int]], start: int) -> Iterator[Block]:
    """Yield blocks of about `BLOCK_BYTES` made from units.

    Args:
        steps: the units from `start` on, some at a time, each with the position up to which the
            units are complete.
        start: the start of the first block.

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


def require_cluster(what: str, expected: str, found: str) -> None:
    """Refuse positions of another cluster.

    Args:
        what: the positions' origin: a checkpoint, or a load.
        expected: the id of its cluster; "": unknown.
        found: the id of the cluster in the options; "": unknown.

    Raises:
        ConfigError: both ids are known, and differ.

    """
    if expected and found and found != expected:
        problem = (
            f"this {what} is of cluster {expected}, but the options name cluster {found}:"
            f" use that cluster, or another {what}"
        )
        raise ConfigError("the cluster", found, expected, message=problem)


class Session(ABC):
    """An open source. Not thread-safe, but several `read` calls may be interleaved."""

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
    def cluster_id(self) -> str:
        """Return the cluster's id; "" if it is unknown."""

    @abstractmethod
    def pin(self) -> Pinned:
        """Return the range of the options; without an end option it ends now.

        Raises:
            TrimmedError: it begins below the trim point, and `failOnDataLoss` is true.
            NoSuchRecordError: a position in it was never assigned.
            ConfigError: there is no such epoch, or the end is not reached yet.
            UnavailableError: a shard does not answer, or none of its files can be read.

        """

    @abstractmethod
    def latest(self) -> int:
        """Return a position after every completed insert.

        A later insert may still get a position below it, if a shard has not decided all of its
        positions there.
        """

    @abstractmethod
    def latest_decided(self) -> int:
        """Return the same once all positions below are decided; later inserts come after it.

        Raises:
            DeadlineError: a shard did not decide in time.

        """

    @abstractmethod
    def for_tasks(self) -> Source:
        """Return the source for tasks, with the facts that this session found, such as archives.

        A task repeats the search if a fact is outdated.
        """

    @abstractmethod
    def pieces_of(self, start: int, stop: int) -> list[Piece]:
        """Return the range in the smallest known pieces, shard by shard, in order within a shard.

        Without `failOnDataLoss`, a range that begins below the trim point is cut there.

        Raises:
            TrimmedError: it begins below the trim point, and `failOnDataLoss` is true.

        """

    @abstractmethod
    def replicas(self, shard: int, start: int, stop: int, task_index: int) -> Replicas:
        """Return the replicas for a shard's positions [start, stop).

        The task index selects the replica to try first, so that tasks spread over all replicas.
        """

    @abstractmethod
    def close(self) -> None:
        """Close it. May be called again."""

    def read(
        self, pieces: Iterable[Piece], projection: Projection, task_index: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of pieces in batches, in the order of the log within a piece.

        Args:
            pieces: of the range of a `pin`.
            projection: the columns and row filters.
            task_index: the number of the task; tasks spread over all replicas.

        """
        from spark_reader.batches import Batches  # noqa: PLC0415 - needs pyarrow

        for piece in pieces:
            yield from self._read(piece, Batches(piece.shard, projection).from_block, task_index)

    def records(self, pieces: Iterable[Piece], projection: Projection) -> Iterator[Record]:
        """Yield the same rows one by one, without Arrow; arguments are those of `read`."""
        for piece in pieces:
            convert = partial(records_of, shard=piece.shard, projection=projection)
            yield from self._read(piece, convert, 0)

    def _read(
        self,
        piece: Piece,
        convert: Callable[[Block, int, int, Sequence[tuple[int, int]]], Iterator[_Rows]],
        task_index: int,
    ) -> Iterator[_Rows]:
        at = piece.start
        with self.replicas(piece.shard, piece.start, piece.stop, task_index) as replicas:
            repeats = Deduplicator(replicas.table, replicas.blocks)
            for block in replicas.blocks(piece.start, piece.stop):
                try:
                    old = repeats.repeated_rows(block)
                except TrimmedError as error:
                    # Records before the block were trimmed: what replicas still know must do.
                    at = self.after_trim(at, error.first.gsn)
                    _, known = replicas.known_table(block.start)
                    old = repeats.reset_at(block, known)
                # Blocks of different servers may overlap.
                yield from convert(block, at, piece.stop, old)
                at = max(at, block.stop)

    def _bounds(self, known: Callable[[], HasEpochs], trim: int) -> tuple[int | None, int | None]:
        """Return the start and end in the options; None: not given.

        Args:
            known: returns the epochs of the log; called only if an option names an epoch.
            trim: the trim point.

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
            # The error names the option.
            raise ConfigError(name, epoch, error.allowed) from None

    def _pinned(self, start: int | None, stop: int | None, latest: int, trim: int) -> Pinned:
        """Return the range from `start` (None: `trim`) to `stop` (None: `latest`)."""
        start = trim if start is None else self.after_trim(max(start, 1), trim)
        stop = max(latest, start) if stop is None else self.after_trim(max(stop, 1), trim)
        return Pinned(start, max(stop, start), self.topic(), self.cluster_id())

    # --- the trim point ---

    def after_trim(self, start: int, trim: int) -> int:
        """Return the start of a range, or the trim point if it is later.

        Raises:
            TrimmedError: the trim point is later, and `failOnDataLoss` is true.

        """
        if start < trim and self._options.fail_on_data_loss:
            raise TrimmedError(self._first(trim))
        return max(start, trim)

    def _first(self, trim: int) -> RecordId:
        """Return the record id of the trim point; shard 0 if its owner is unknown."""
        return RecordId(trim, 0)
