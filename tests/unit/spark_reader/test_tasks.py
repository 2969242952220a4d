"""Read tasks: each reads its share from the planned source, one batch ahead of Spark."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest

from spark_reader import tasks
from spark_reader.options import SERVERS, parse
from spark_reader.planning import Piece
from spark_reader.schema import DEFAULT
from spark_reader.tasks import Share, read_task
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from spark_reader.projection import Projection
    from ziplog.segments.buffer_pool import BufferPool

OPTIONS = parse({SERVERS: "127.0.0.1:1"})
PIECES = [Piece(0, 1, 50, 10), Piece(1, 1, 60, 10)]


class Source:
    """A source and its session; gives numbers where others give batches."""

    def __init__(self) -> None:
        self.memories: list[BufferPool | None] = []
        self.asked: list[tuple[list[Piece], str, int]] = []
        self.threads: set[int] = set()
        self.made = 0
        self.is_open = False

    @contextmanager
    def open(self, memory: BufferPool | None = None) -> Iterator[Source]:
        self.memories.append(memory)
        self.is_open = True
        yield self
        self.is_open = False

    def read(self, pieces: list[Piece], what: Projection, task_index: int) -> Iterator[int]:
        self.asked.append((pieces, what.topic, task_index))
        for number in range(1, 5):
            self.threads.add(threading.get_ident())
            self.made = number
            yield number


@pytest.fixture
def spared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Calls of `freeze_gc`."""
    calls: list[bool] = []
    monkeypatch.setattr(tasks, "freeze_gc", lambda: calls.append(True))
    return calls


def run(source: Source, pieces: list[Piece], task_index: int = 3) -> Iterator[pa.RecordBatch]:
    return read_task(OPTIONS, DEFAULT, Share(task_index, pieces, cast("Any", source), "log"))


def test_a_task_reads_its_pieces_from_its_source(spared: list[bool]) -> None:
    source = Source()
    assert list(run(source, PIECES)) == [1, 2, 3, 4]  # type: ignore[comparison-overlap]
    assert source.asked == [(PIECES, "log", 3)]
    assert not source.is_open
    assert spared == [True]


@pytest.mark.usefixtures("spared")
def test_the_next_batch_is_read_while_spark_consumes_one() -> None:
    source = Source()
    batches = run(source, PIECES)
    next(batches)
    wait_until(lambda: source.made == 2, "nothing is read ahead")
    list(batches)
    assert threading.get_ident() not in source.threads


@pytest.mark.usefixtures("spared")
def test_tasks_of_a_process_share_a_buffer_pool() -> None:
    source = Source()
    for task_index in range(2):
        list(run(source, PIECES, task_index))
    first, second = source.memories
    assert first is second is not None


def test_a_task_without_pieces_opens_no_source(spared: list[bool]) -> None:
    source = Source()
    assert list(run(source, [])) == []
    assert (source.memories, spared) == ([], [])
