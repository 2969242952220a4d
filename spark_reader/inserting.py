"""Inserts the rows of a task: from Arrow columns to `insert_rows`, in bounded chunks.

Each writer of the task (`spark_reader.placement`) sends its rows to one shard. It converts the next
chunk during the insert of the current one. Writers do not wait for each other.

Rule: a writer inserts its rows in order, numbered without gaps, one chunk after the other. The log
therefore holds a prefix of each writer's rows, even if the task fails or its input ends early. The
input ends early when an earlier step of the same task fails; Spark reports no error to Python then
(docs/protocol.md, section 14.3).
Invariant: a task holds one batch and at most two chunks per writer, about 32 MiB in all.
"""

from __future__ import annotations

from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ziplog.errors import ConfigError, RecordTooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from spark_reader.placement import RowPlacement
    from spark_reader.write_options import Columns

#: Size at which a chunk ends, in bytes; smaller if a task has many writers.
CHUNK_BYTES: Final = 2 * 1024 * 1024
#: Bytes that a row counts in addition to its value and key, so that chunks of short rows end too.
ROW_BYTES: Final = 16
#: Maximum number of rows in one `insert_rows` call; the timeout applies to each call.
_CALL_ROWS: Final = 2048
_MAX_THREADS: Final = 16


class RowLog(Protocol):
    """The method of `ziplog.Log` that inserts need."""

    def insert_rows(
        self,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[bytes | None] | None = None,
        shard: int,
        writer: bytes,
        batch: int,
        row: int,
    ) -> object:
        """Insert rows of a writer, in order."""


def insert_batches(
    log: RowLog,
    batches: Iterable[pa.RecordBatch],
    columns: Columns,
    place: RowPlacement,
    *,
    batch: int,
    partition: int,
) -> int:
    """Insert all rows and return their number.

    Args:
        log: the log.
        batches: the rows.
        columns: the indexes of the value and key columns.
        place: shards and writer ids of the rows.
        batch: the number of the query's batch.
        partition: the number of the partition, for error messages.

    Raises:
        ConfigError: a value is null; earlier rows may be in the log.
        RecordTooLargeError: a value or key is too large; likewise.
        UnavailableError: a shard does not accept a row; likewise.

    """
    threads = min(len(place.shards), _MAX_THREADS)
    row = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="ziplog-insert") as pool:
        writers = [
            _RowWriter(log, pool, place, index, batch, partition)
            for index in range(len(place.shards))
        ]
        try:
            for rows in batches:
                _distribute(rows, columns, place, writers, row, partition)
                row += rows.num_rows
            for writer in writers:
                writer.send()
            for writer in writers:
                writer.wait()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return row


def _distribute(
    rows: pa.RecordBatch,
    columns: Columns,
    place: RowPlacement,
    writers: list[_RowWriter],
    row: int,
    partition: int,
) -> None:
    values = _as_binary(rows.column(columns.value))
    keys = None if columns.key is None else _as_binary(rows.column(columns.key))
    if values.null_count:
        at = row + pc.index(values.is_null(), value=True).as_py()
        what = f"the value of row {at} of partition {partition}"
        raise ConfigError(what, None, "bytes or text, which may be empty")
    numbers = range(row, row + len(values))
    if not place.by_key or keys is None:
        writers[0].put(values, keys, numbers)
        return
    indexes = _writers_of(keys, place)
    for number, writer in enumerate(writers):
        at = pc.indices_nonzero(pc.equal(indexes, number))
        writer.put(values.take(at), keys.take(at), [numbers[index] for index in at.to_pylist()])


def _as_binary(column: pa.Array) -> pa.Array:
    if pa.types.is_string(column.type):
        return column.cast(pa.binary())
    if pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary())
    return column


def _ends(values: pa.Array, keys: pa.Array | None) -> Sequence[int]:
    """Return, for each row, the bytes of all rows up to and including it."""
    sizes = pc.add(pc.binary_length(values).cast(pa.int64()), ROW_BYTES)
    if keys is not None:
        sizes = pc.add(sizes, pc.fill_null(pc.binary_length(keys).cast(pa.int64()), 0))
    ends: list[int] = pc.cumulative_sum(sizes).to_pylist()
    return ends


def _writers_of(keys: pa.Array, place: RowPlacement) -> pa.Array:
    """Return the writer's index for each key; each distinct key is hashed once."""
    coded = keys.dictionary_encode()
    indexes = pa.array([place.writer_of(key) for key in coded.dictionary.to_pylist()], pa.int64())
    return pc.fill_null(indexes.take(coded.indices), place.writer_of(None))


def chunk_bytes(writers: int) -> int:
    """Return the size of a chunk in bytes, for a task with this number of writers."""
    return min(CHUNK_BYTES, max(4 * CHUNK_BYTES // writers, CHUNK_BYTES // 32))


class _RowWriter:
    """Sends rows of one partition to one shard, a chunk at a time."""

    def __init__(
        self,
        log: RowLog,
        pool: ThreadPoolExecutor,
        place: RowPlacement,
        index: int,
        batch: int,
        partition: int,
    ) -> None:
        self._log: Final = log
        self._pool: Final = pool
        self._shard: Final = place.shards[index]
        self._writer: Final = place.writer_id(index)
        self._chunk_bytes: Final = chunk_bytes(len(place.shards))
        self._batch: Final = batch
        self._partition: Final = partition
        #: Number of rows sent.
        self._sent = 0
        self._pending: Future[None] | None = None
        self._empty()

    def _empty(self) -> None:
        self._payloads: list[bytes] = []
        self._keys: list[bytes | None] | None = None
        #: Their numbers in the partition.
        self._rows: list[int] = []
        self._size = 0

    def put(self, values: pa.Array, keys: pa.Array | None, rows: Sequence[int]) -> None:
        """Add rows; send each chunk that is complete."""
        ends = _ends(values, keys)
        start = consumed = 0
        while start < len(ends):
            stop = bisect_left(ends, consumed + self._chunk_bytes - self._size, start) + 1
            stop = min(stop, len(ends))
            self._payloads += values[start:stop].to_pylist()
            if keys is not None:
                self._keys = (self._keys or []) + keys[start:stop].to_pylist()
            self._rows += rows[start:stop]
            self._size += ends[stop - 1] - consumed
            start, consumed = stop, ends[stop - 1]
            if self._size >= self._chunk_bytes:
                self.send()

    def send(self) -> None:
        """Send the added rows once the previous chunk is in the log."""
        self.wait()
        if self._payloads:
            chunk = self._sent, self._payloads, self._keys, self._rows
            self._pending = self._pool.submit(self._insert, *chunk)
            self._sent += len(self._payloads)
            self._empty()

    def wait(self) -> None:
        """Wait until the chunk sent last is in the log; raise its error."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _insert(
        self,
        first: int,
        payloads: list[bytes],
        keys: list[bytes | None] | None,
        rows: list[int],
    ) -> None:
        for at in range(0, len(payloads), _CALL_ROWS):
            try:
                self._log.insert_rows(
                    payloads[at : at + _CALL_ROWS],
                    keys=None if keys is None else keys[at : at + _CALL_ROWS],
                    shard=self._shard,
                    writer=self._writer,
                    batch=self._batch,
                    row=first + at,
                )
            except RecordTooLargeError as error:
                if error.index is None:
                    raise  # a server refused all rows of the call
                what = "value" if error.what == "payload" else error.what
                text = f"the {what} of row {rows[at + error.index]} of partition {self._partition}"
                raise RecordTooLargeError(error.size, error.limit, text) from None
