"""Puts the rows of a task into the log: from Arrow columns to `insert_rows`, in bounded chunks.

Rows take lanes (`spark_reader.placement`). While a chunk of a lane is under way, the next one is
converted; lanes do not wait for each other.

Rule: a lane's rows go in the order in which they come, numbered without gaps, one chunk after the
other. So what the log has of a task is the beginning of each lane: of one that fails, too, and of
one whose rows ended too early, as they seem to do when something before it fails in the same task
(Spark tells its Python nothing else). See docs/protocol.md, section 14.3.
Invariant: besides a batch, no more than two chunks a lane are held, 32 MiB or so in all.
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

#: A chunk ends with the row that makes it as large as this; smaller, if there are many lanes.
CHUNK_BYTES: Final = 2 * 1024 * 1024
#: What a row counts besides its bytes: so chunks of short rows end, too.
ROW_BYTES: Final = 16
#: Rows of a chunk that have the time-out of a call to themselves.
_CALL_ROWS: Final = 2048
_MAX_THREADS: Final = 16


class RowLog(Protocol):
    """What inserting needs of a `ziplog.Log`."""

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
    """Insert all rows; returns their number.

    Args:
        log: where to.
        batches: the rows.
        columns: where value and key stand in them.
        place: where to in the log, and under which name.
        batch: the number of the query's batch.
        partition: whose rows these are, for messages.

    Raises:
        ConfigError: a value is null; what came before it may be in the log.
        RecordTooLargeError: a value or key is; likewise.
        UnavailableError: a shard does not take it; likewise.

    """
    threads = min(len(place.lanes), _MAX_THREADS)
    row = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="ziplog-insert") as pool:
        lanes = [
            _RowWriter(log, pool, place, lane, batch, partition) for lane in range(len(place.lanes))
        ]
        try:
            for rows in batches:
                _distribute(rows, columns, place, lanes, row, partition)
                row += rows.num_rows
            for lane in lanes:
                lane.send()
            for lane in lanes:
                lane.wait()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return row


def _distribute(
    rows: pa.RecordBatch,
    columns: Columns,
    place: RowPlacement,
    lanes: list[_RowWriter],
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
        lanes[0].put(values, keys, numbers)
        return
    theirs = _lanes_of(keys, place)
    for number, lane in enumerate(lanes):
        at = pc.indices_nonzero(pc.equal(theirs, number))
        lane.put(values.take(at), keys.take(at), [numbers[index] for index in at.to_pylist()])


def _as_binary(column: pa.Array) -> pa.Array:
    if pa.types.is_string(column.type):
        return column.cast(pa.binary())
    if pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary())
    return column


def _ends(values: pa.Array, keys: pa.Array | None) -> Sequence[int]:
    """Return how many bytes all rows up to each one have, itself included."""
    sizes = pc.add(pc.binary_length(values).cast(pa.int64()), ROW_BYTES)
    if keys is not None:
        sizes = pc.add(sizes, pc.fill_null(pc.binary_length(keys).cast(pa.int64()), 0))
    ends: list[int] = pc.cumulative_sum(sizes).to_pylist()
    return ends


def _lanes_of(keys: pa.Array, place: RowPlacement) -> pa.Array:
    """Return the lane of each key; each key is hashed once."""
    coded = keys.dictionary_encode()
    theirs = pa.array([place.lane_of(key) for key in coded.dictionary.to_pylist()], pa.int64())
    return pc.fill_null(theirs.take(coded.indices), place.lane_of(None))


def chunk_bytes(lanes: int) -> int:
    """Return how large a chunk is, if there are so many lanes."""
    return min(CHUNK_BYTES, max(4 * CHUNK_BYTES // lanes, CHUNK_BYTES // 32))


class _RowWriter:
    """Rows of one partition on their way to one shard."""

    def __init__(
        self,
        log: RowLog,
        pool: ThreadPoolExecutor,
        place: RowPlacement,
        lane: int,
        batch: int,
        partition: int,
    ) -> None:
        self._log: Final = log
        self._pool: Final = pool
        self._shard: Final = place.lanes[lane]
        self._writer: Final = place.writer(lane)
        self._largest: Final = chunk_bytes(len(place.lanes))
        self._batch: Final = batch
        self._partition: Final = partition
        #: How many rows were sent.
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
        """Take rows; send each chunk that they make whole."""
        ends = _ends(values, keys)
        start = consumed = 0
        while start < len(ends):
            stop = bisect_left(ends, consumed + self._largest - self._size, start) + 1
            stop = min(stop, len(ends))
            self._payloads += values[start:stop].to_pylist()
            if keys is not None:
                self._keys = (self._keys or []) + keys[start:stop].to_pylist()
            self._rows += rows[start:stop]
            self._size += ends[stop - 1] - consumed
            start, consumed = stop, ends[stop - 1]
            if self._size >= self._largest:
                self.send()

    def send(self) -> None:
        """Send what was put, when what was sent before is in the log."""
        self.wait()
        if self._payloads:
            chunk = self._sent, self._payloads, self._keys, self._rows
            self._pending = self._pool.submit(self._insert, *chunk)
            self._sent += len(self._payloads)
            self._empty()

    def wait(self) -> None:
        """Wait until what was sent is in the log; raise why it is not."""
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
                    raise  # a server refused them together
                what = "value" if error.what == "payload" else error.what
                text = f"the {what} of row {rows[at + error.index]} of partition {self._partition}"
                raise RecordTooLargeError(error.size, error.limit, text) from None
