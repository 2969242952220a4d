"""Inserts of Arrow rows: complete, in order, in bounded chunks, and recognized when repeated."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_reader import inserting
from spark_reader.inserting import CHUNK_BYTES, ROW_BYTES, chunk_bytes, insert_batches
from spark_reader.placement import RowPlacement
from spark_reader.write_options import Columns
from ziplog.core.entries import Origin
from ziplog.core.writer_table import WriterTable
from ziplog.errors import ConfigError, RecordTooLargeError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Row = tuple[bytes | None, bytes]
#: Few distinct keys; some values are larger than a chunk in these tests.
rows_of_tasks = st.lists(
    st.tuples(st.none() | st.binary(max_size=1), st.binary(max_size=60)), max_size=60
)
policies = st.sampled_from(["partition", "key", 1])


class RecordingLog:
    """Records its calls; refuses long records, and all records after a limit."""

    def __init__(self, limit: int = 1 << 30, key_limit: int = 1 << 30) -> None:
        #: Of each shard, in order: writer, batch, row, record.
        self.stored: dict[int, list[tuple[bytes, int, int, Row]]] = defaultdict(list)
        #: Bytes of each call.
        self.chunks: list[int] = []
        self.room = 1 << 30
        self._limit, self._key_limit = limit, key_limit
        self._lock = threading.Lock()

    def insert_rows(
        self,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[bytes | None] | None = None,
        shard: int,
        writer: bytes,
        batch: int,
        row: int,
    ) -> None:
        for index, payload in enumerate(payloads):
            if len(payload) > self._limit:
                raise RecordTooLargeError(len(payload), self._limit, index=index)
        for index, key in enumerate(keys or ()):
            if key is not None and len(key) > self._key_limit:
                raise RecordTooLargeError(len(key), self._key_limit, "key", index)
        self.chunks.append(sum(map(len, payloads)) + ROW_BYTES * len(payloads))
        with self._lock:
            rows = zip(keys or [None] * len(payloads), payloads, strict=True)
            for number, record in enumerate(rows, row):
                if not self.room:
                    raise UnavailableError("full")
                self.room -= 1
                self.stored[shard].append((writer, batch, number, record))

    def seen(self, shard: int) -> list[Row]:
        """Return what readers see of a shard."""
        writers = WriterTable()
        return [
            record
            for writer, batch, row, record in self.stored[shard]
            if not writers.first_new_row(Origin(writer, batch, row), 1)
        ]

    def all_seen(self) -> list[Row]:
        return [row for shard in list(self.stored) for row in self.seen(shard)]


def place_of(policy: object, partition: int = 7) -> RowPlacement:
    return RowPlacement("q", partition, policy, (0, 1, 2))  # type: ignore[arg-type]


def record_batch(rows: Sequence[Row], kind: pa.DataType | None = None) -> pa.RecordBatch:
    keys = pa.array([key for key, _ in rows], pa.binary())
    values = pa.array([value for _, value in rows], pa.binary())
    return pa.record_batch([values.cast(kind or pa.binary()), keys], ["value", "key"])


def cut(rows: list[Row], *at: int) -> list[pa.RecordBatch]:
    """Return rows in batches that end at some of them."""
    bounds = [0, *sorted(min(index, len(rows)) for index in at), len(rows)]
    whole = record_batch(rows)
    return [whole.slice(start, stop - start) for start, stop in pairwise(bounds)]


def insert(
    log: RecordingLog, batches: Sequence[pa.RecordBatch], place: RowPlacement, *, batch: int = 4
) -> int:
    return insert_batches(log, iter(batches), Columns(0, 1), place, batch=batch, partition=7)


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> object:
    """Chunks of a kilobyte or less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inserting, "CHUNK_BYTES", 1024)
        yield


@given(rows_of_tasks, st.integers(0, 60))
def test_a_partitions_rows_go_to_one_shard_in_their_order(rows: list[Row], at: int) -> None:
    log, place = RecordingLog(), place_of("partition")
    assert insert(log, cut(rows, at), place) == len(rows)
    assert log.seen(place.default_shard) == rows
    assert set(log.stored) <= {place.default_shard}


@given(rows_of_tasks, st.integers(0, 60))
def test_by_key_each_keys_rows_go_to_its_shard_in_their_order(rows: list[Row], at: int) -> None:
    log, place = RecordingLog(), place_of("key")
    insert(log, cut(rows, at), place)
    assert Counter(log.all_seen()) == Counter(rows)
    for key in {key for key, _ in rows}:
        shard = place.shards[place.writer_of(key)]
        assert [row for row in log.seen(shard) if row[0] == key] == [
            row for row in rows if row[0] == key
        ]


@given(rows_of_tasks, policies, st.integers(0, 60), st.lists(st.integers(0, 60)))
def test_a_repeated_task_leaves_no_duplicates(
    rows: list[Row], policy: object, room: int, at: list[int]
) -> None:
    """Wherever it failed, and however its rows are cut into batches the next time."""
    log = RecordingLog()
    log.room = room
    try:
        insert(log, cut(rows, 20), place_of(policy))
    except UnavailableError:
        log.room = 1 << 30
        insert(log, cut(rows, *at), place_of(policy))
    assert Counter(log.all_seen()) == Counter(rows)


@given(rows_of_tasks, policies, st.integers(0, 60), st.integers(0, 60))
def test_an_input_that_ended_early_leaves_no_duplicates(
    rows: list[Row], policy: object, early: int, at: int
) -> None:
    """As when an earlier step of the same task fails."""
    log = RecordingLog()
    insert(log, cut(rows[:early]), place_of(policy))
    insert(log, cut(rows, at), place_of(policy))
    assert Counter(log.all_seen()) == Counter(rows)


@given(rows_of_tasks, st.integers(0, 60), st.sampled_from([(0, 1), (0, 1, 2, 3), (1, 2)]))
def test_a_change_of_the_shards_loses_nothing(
    rows: list[Row], room: int, shards: tuple[int, ...]
) -> None:
    for policy in ("partition", "key"):
        log = RecordingLog()
        log.room = room
        with contextlib.suppress(UnavailableError):
            insert(log, cut(rows), place_of(policy))
        log.room = 1 << 30
        insert(log, cut(rows), RowPlacement("q", 7, policy, shards))  # type: ignore[arg-type]
        assert not Counter(rows) - Counter(log.all_seen())


@given(rows_of_tasks, st.integers(0, 60))
def test_two_concurrent_attempts_leave_each_row_once(rows: list[Row], first: int) -> None:
    log, place = RecordingLog(), place_of(1)
    insert(log, cut(rows[:first]), place)
    zombie = list(log.stored[1])
    insert(log, cut(rows), place)
    log.stored[1] += zombie
    assert log.seen(1) == rows


@given(rows_of_tasks, policies)
def test_equal_rows_of_other_batches_and_partitions_are_kept(
    rows: list[Row], policy: object
) -> None:
    log = RecordingLog()
    insert(log, cut(rows), place_of(policy), batch=4)
    insert(log, cut(rows), place_of(policy), batch=5)
    insert(log, cut(rows), place_of(policy, partition=8), batch=5)
    assert Counter(log.all_seen()) == Counter(rows * 3)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary()])
def test_text_is_encoded_as_utf_8(kind: pa.DataType) -> None:
    log, rows = RecordingLog(), [(b"k", "grün".encode()), (None, b"")]
    insert(log, [record_batch(rows, kind)], place_of(0))
    assert log.seen(0) == rows


@pytest.mark.parametrize("policy", ["partition", "key"])
def test_chunks_are_bounded_and_filled_whatever_the_batches(policy: str) -> None:
    log, place = RecordingLog(), place_of(policy)
    largest = chunk_bytes(len(place.shards))
    rows: list[Row] = [(b"%d" % n, b"x" * 40) for n in range(2000)]
    insert(log, cut(rows, *range(0, 2000, 7)), place)
    assert max(log.chunks) < largest + 100
    full = [size for size in log.chunks if size > largest / 2]
    assert len(log.chunks) - len(full) <= len(place.shards), "but for each lane's last"


def test_memory_is_bounded_for_any_number_of_writers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inserting, "CHUNK_BYTES", CHUNK_BYTES)
        assert chunk_bytes(1) == CHUNK_BYTES
        assert 2 * max(writers * chunk_bytes(writers) for writers in range(1, 257)) <= 32 << 20


def test_a_record_larger_than_a_chunk_ends_its_chunk() -> None:
    log, rows = RecordingLog(), [(None, b"a"), (None, b"b" * 5000), (None, b"c")]
    insert(log, cut(rows), place_of(0))
    assert log.seen(0) == rows


def test_a_null_value_is_refused_by_its_row() -> None:
    first = record_batch([(None, b"a")] * 10).select(["value"])
    second = pa.record_batch([pa.array([b"", None], pa.binary())], ["value"])
    batches = iter([first, second])
    with pytest.raises(ConfigError, match="value of row 11 of partition 7 is None"):
        insert_batches(RecordingLog(), batches, Columns(0, None), place_of(0), batch=0, partition=7)


@pytest.mark.parametrize("policy", ["partition", "key"])
@pytest.mark.parametrize(
    ("log", "said"),
    [
        (RecordingLog(limit=28), "the value of row 29 of partition 7 has 29 bytes"),
        (RecordingLog(key_limit=10), "the key of row 23 of partition 7 has 11 bytes"),
    ],
)
def test_a_record_that_is_too_large_is_named(policy: str, log: RecordingLog, said: str) -> None:
    """Also where something else is just as long, but may be."""
    rows: list[Row] = [(b"%d" % n, b"v" * n) for n in range(30)]
    rows[23] = (b"k" * 11, b"v")
    with pytest.raises(RecordTooLargeError, match=said):
        insert(log, cut(rows, 9), place_of(policy))


def test_a_servers_too_large_error_is_passed_on() -> None:
    class Stricter(RecordingLog):
        def insert_rows(self, payloads: Sequence[bytes], **_: object) -> None:  # type: ignore[override]
            raise RecordTooLargeError(len(payloads), 1)

    with pytest.raises(RecordTooLargeError, match="payload has 2 bytes"):
        insert(Stricter(), cut([(None, b"a"), (None, b"b")]), place_of(0))


def test_a_refusal_ends_the_task_and_leaves_a_prefix() -> None:
    log, rows = RecordingLog(), [(None, bytes([n]) * 400) for n in range(50)]
    log.room = 20
    with pytest.raises(UnavailableError, match="full"):
        insert(log, cut(rows), place_of(0))
    assert log.seen(0) == rows[:20]


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    insert(RecordingLog(), cut([(b"a", b"b")]), place_of("key"))
    assert threading.active_count() == before


def test_a_writer_waits_for_its_chunk_before_the_next() -> None:
    """Else a later one could be in the log alone, and any number of them in memory."""
    asked_for_more = threading.Event()
    sent: list[int] = []

    class Slow(RecordingLog):
        def insert_rows(self, payloads: Sequence[bytes], **named: object) -> None:  # type: ignore[override]
            asked_for_more.wait(0.2)
            super().insert_rows(payloads, **named)  # type: ignore[arg-type]
            sent.append(len(payloads))

    def batches() -> Iterator[pa.RecordBatch]:
        chunk: list[Row] = [(b"k", b"x" * CHUNK_BYTES)]
        yield record_batch(chunk)
        yield record_batch(chunk)
        asked_for_more.set()
        assert sent, "the first chunk is in the log before a third one is asked for"

    insert_batches(Slow(), batches(), Columns(0, 1), place_of("key"), batch=0, partition=7)
    assert sent == [1, 1]
