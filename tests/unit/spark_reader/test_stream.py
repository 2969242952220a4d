"""Micro-batch source without Spark: its responses to Spark's calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes
from pyspark.sql.types import StructType

from spark_reader import data_source, stream
from spark_reader.options import parse
from spark_reader.planning import Piece
from spark_reader.reading import Pinned
from spark_reader.schema import DEFAULT
from spark_reader.stream import ZiplogStreamReader
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

SERVERS = {"ziplog.bootstrap.servers": "127.0.0.1:7400"}
ALL = ReadAllAvailable()


class FakeLog:
    """A log of two shards, ten bytes a position each; ten positions are the least step."""

    def __init__(self) -> None:
        self.tail = 100
        self.now = 0.0
        self.asked = 0
        self.is_open = False
        #: All before it was trimmed.
        self.trim = 1
        self.cluster = ""

    def open(self) -> FakeLog:
        self.is_open = True
        return self

    def close(self) -> None:
        self.is_open = False

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def latest(self) -> int:
        self.asked += 1
        return self.tail + 1

    def latest_decided(self) -> int:
        # Not what `latest` returns: it shows which of them was asked.
        return self.tail + 3

    def pin(self) -> Pinned:
        return Pinned(5, self.tail + 1, "demo")

    def topic(self) -> str:
        return "demo"

    def cluster_id(self) -> str:
        return self.cluster

    def for_tasks(self) -> str:
        return "the demo's source"

    def pieces_of(self, start: int, stop: int) -> list[Piece]:
        step, start = max((stop - start) // 8, 10), max(start, self.trim)
        return [
            Piece(shard, at, min(at + step, stop), 10 * (min(at + step, stop) - at))
            for shard in (0, 1)
            for at in range(start, stop, step)
        ]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    fake = FakeLog()
    monkeypatch.setattr(stream, "source_of", lambda _options: fake)
    monkeypatch.setattr(stream.time, "monotonic", lambda: fake.now)
    monkeypatch.setattr(stream.time, "sleep", fake.sleep)
    return fake


def reader(**options: str) -> ZiplogStreamReader:
    return ZiplogStreamReader(parse(SERVERS | options, "stream"), DEFAULT)


def covered(tasks: list[Any]) -> dict[int, list[tuple[int, int]]]:
    """Return what tasks read of each shard, joined."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for piece in sorted(piece for task in tasks for piece in spans_of(task)):
        shard, start, stop = piece
        mine = spans.setdefault(shard, [])
        if mine and mine[-1][1] == start:
            mine[-1] = mine[-1][0], stop
        else:
            mine.append((start, stop))
    return spans


def spans_of(task: Any) -> list[tuple[int, int, int]]:
    return [(piece.shard, piece.start, piece.stop) for piece in task.pieces]


def test_a_query_starts_at_the_option(log: FakeLog) -> None:
    assert reader().initialOffset() == {"gsn": 5}
    assert reader(startingOffsets="latest").initialOffset() == {"gsn": 103}


def test_the_initial_offset_is_stable(log: FakeLog) -> None:
    source = reader(startingOffsets="latest")
    first = source.initialOffset()
    log.tail = 300
    assert source.initialOffset() == first == {"gsn": 103}


def test_a_micro_batch_has_all_new_rows_once(log: FakeLog) -> None:
    source = reader()
    start = source.initialOffset()
    end = source.latestOffset(start, ALL)
    assert end["gsn"] == 101
    tasks = source.partitions(start, end)
    assert covered(tasks) == {0: [(5, 101)], 1: [(5, 101)]}
    assert {task.topic for task in tasks} == {"demo"}
    assert source.latestOffset(end, ALL) == end
    assert source.partitions(end, end) == []


def test_requests_for_the_tail_are_rate_limited(log: FakeLog) -> None:
    source = reader()
    end = source.latestOffset({"gsn": 5}, ALL)
    log.tail = 200
    assert source.latestOffset({"gsn": 50}, ALL)["gsn"] == 101, "there are rows to read"
    assert source.reportLatestOffset() == {"gsn": 101}
    assert (log.asked, log.now) == (1, 0)
    for _ in range(10):
        end = source.latestOffset(end, ALL)
    assert source.reportLatestOffset() == {"gsn": 201}
    assert log.asked == 11
    assert log.now == pytest.approx(10 * stream._LATEST_INTERVAL_S)


def test_a_response_without_new_rows_is_never_out_of_date(log: FakeLog) -> None:
    """`processAllAvailable` ends at the first such response."""
    source = reader()
    end = source.latestOffset({"gsn": 5}, ALL)
    assert source.latestOffset(end, ALL) == end
    log.tail = 200
    assert source.latestOffset(end, ALL)["gsn"] == 201


def test_offsets_never_decrease(log: FakeLog) -> None:
    """A checkpoint may know more than servers that were away."""
    source = reader()
    ahead = {"gsn": 150, "tasks": "0:1-150"}
    assert source.latestOffset(ahead, ALL) is ahead
    log.tail, log.now = 50, 1.0
    assert source.latestOffset(ahead, ALL) is ahead


def test_available_now_ends_at_the_end_of_the_log_at_its_start(log: FakeLog) -> None:
    source = reader(maxBytesPerBatch="400")
    source.prepareForTriggerAvailableNow()
    log.tail, log.now = 500, 1.0
    limit = source.getDefaultReadLimit()
    assert limit == ReadMaxBytes(400)
    offset, batches = source.initialOffset(), []
    while (end := source.latestOffset(offset, limit)) != offset:
        batches.append(covered(source.partitions(offset, end)))
        offset = end
    assert offset["gsn"] == 101
    assert len(batches) > 3
    for shard in (0, 1):
        ends = [span for batch in batches for span in batch[shard]]
        assert ends[0][0] == 5
        assert ends[-1][1] == 101
        assert [stop for _, stop in ends[:-1]] == [start for start, _ in ends[1:]]


def test_a_limit_is_met_as_closely_as_the_outline_allows(log: FakeLog) -> None:
    """The first outline has steps of 1,250 positions; the limit is one of 50."""
    log.tail = 10_004
    source = reader()
    end = source.latestOffset({"gsn": 5}, ReadMaxBytes(1000))
    assert 5 + 30 <= end["gsn"] <= 5 + 50
    assert source.latestOffset({"gsn": 5}, ALL)["gsn"] == 10_005


def test_a_step_larger_than_the_limit_is_still_read(log: FakeLog) -> None:
    end = reader().latestOffset({"gsn": 5}, ReadMaxBytes(1))
    assert end["gsn"] == 15


@pytest.mark.parametrize("options", [{}, {"maxBytesPerBatch": "200"}])
def test_a_stream_continues_after_a_trim_of_its_whole_range(
    log: FakeLog, options: dict[str, str]
) -> None:
    source = reader(failOnDataLoss="false", **options)
    limit = source.getDefaultReadLimit()
    start = source.initialOffset()
    source.prepareForTriggerAvailableNow()
    log.tail, log.trim = 300, 200
    end = source.latestOffset(start, limit)
    assert end["gsn"] == 101
    assert source.partitions(start, end) == []
    assert source.latestOffset(end, limit) == end
    later = reader(failOnDataLoss="false", **options)
    following = later.latestOffset(end, limit)
    assert covered(later.partitions(end, following))[0][0][0] == 200


def test_the_plan_comes_from_the_checkpoint(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    source = reader(minPartitions="4")
    end = source.latestOffset({"gsn": 5}, ALL)
    plan = [spans_of(task) for task in source.partitions({"gsn": 5}, end)]
    assert len(plan) == 4
    monkeypatch.setattr(log, "pieces_of", refuse)
    restarted = reader(minPartitions="2")
    assert [spans_of(task) for task in restarted.partitions({"gsn": 5}, end)] == plan


def test_a_repeated_first_micro_batch_has_the_same_start(log: FakeLog) -> None:
    """`latest` has moved by then; the planned rows lie before it."""
    first = reader(startingOffsets="latest")
    log.tail = 100
    start = first.initialOffset()
    log.tail = 120
    end = first.latestOffset(start, ALL)
    log.tail = 900
    again = reader(startingOffsets="latest")
    tasks = again.partitions(again.initialOffset(), end)
    assert covered(tasks) == {0: [(103, 121)], 1: [(103, 121)]}


def test_a_repeated_first_micro_batch_without_rows_has_none(log: FakeLog) -> None:
    """Spark runs one though the first response contains nothing new."""
    first = reader(startingOffsets="latest")
    end = first.latestOffset(first.initialOffset(), ALL)
    log.tail = 900
    again = reader(startingOffsets="latest")
    assert again.partitions(again.initialOffset(), end) == []
    following = again.latestOffset(end, ALL)
    assert covered(again.partitions(end, following)) == {0: [(103, 901)], 1: [(103, 901)]}


def test_a_restart_ignores_the_new_initial_offset(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be trimmed by then."""
    monkeypatch.setattr(log, "pin", refuse)
    source = reader(startingOffsets="5")
    end = source.latestOffset({"gsn": 50, "tasks": "0:5-50"}, ALL)
    assert covered(source.partitions({"gsn": 50, "tasks": "0:5-50"}, end))[1] == [(50, 101)]


def test_a_checkpoint_of_another_cluster_is_refused(log: FakeLog) -> None:
    """Its positions mean nothing there: rows would be missing, or the stream would wait."""
    log.cluster = "1" * 32
    first = reader()
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    assert reader().latestOffset(end, ALL) is end
    log.cluster = "2" * 32
    for request in (
        lambda: reader().latestOffset(end, ALL),
        lambda: reader().partitions(start, end),
    ):
        with pytest.raises(ConfigError, match="this checkpoint is of cluster 111"):
            request()
    assert reader().initialOffset()["cluster"] == log.cluster


def test_a_checkpoint_without_a_cluster_is_accepted(log: FakeLog) -> None:
    """An earlier release wrote it, or the files did not name their cluster."""
    log.cluster = "2" * 32
    source = reader()
    end = source.latestOffset({"gsn": 5}, ALL)
    assert end["cluster"] == log.cluster
    assert len(source.partitions({"gsn": 5}, {"gsn": 50, "tasks": "0:5-50"})) == 1
    log.cluster = ""
    assert len(reader().partitions({"gsn": 5}, end)) == len(source.partitions({"gsn": 5}, end))


def test_a_pickled_reader_has_no_open_session(log: FakeLog) -> None:
    spark = CloudPickleSerializer()
    source = spark.loads(spark.dumps(reader()))
    assert not log.is_open
    source.latestOffset({"gsn": 5}, ALL)
    assert log.is_open
    source.stop()
    assert not log.is_open
    source.stop()


@pytest.mark.parametrize(
    ("options", "schema", "reason"),
    [
        ({"endingEpoch": "3"}, StructType(), "a stream has no end"),
        ({}, StructType().add("foo", "string"), "column 'foo'"),
    ],
)
def test_a_refused_stream_has_a_reader_whose_every_request_fails(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], schema: StructType, reason: str
) -> None:
    """Spark stops the reader whatever happens, and fails if there is none."""
    monkeypatch.setattr(data_source, "_pin", lambda _options: None)
    spark = CloudPickleSerializer()
    made = data_source.ZiplogDataSource(SERVERS | options).streamReader(schema)
    source = spark.loads(spark.dumps(made))
    requests: list[Callable[[], object]] = [
        source.initialOffset,
        source.getDefaultReadLimit,
        source.prepareForTriggerAvailableNow,
        lambda: source.latestOffset({"gsn": 1}, ALL),
        lambda: source.partitions({"gsn": 1}, {"gsn": 2}),
        lambda: source.read(None),
    ]
    for request in requests:
        with pytest.raises(ConfigError, match=reason):
            request()
    source.stop()


refuse: Callable[..., Any] = pytest.fail
