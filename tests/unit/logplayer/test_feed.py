"""The feed, and what a task reads for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logplayer.context import PlayerContext
from logplayer.feed import Feed
from logplayer.task_reader import TaskReader
from tests.sim.player.targets import Store
from tests.unit.logplayer.service import PlayerCore, Service
from tests.unit.logplayer.world import World
from ziplog.client.common.requests import Progress, ProgressRequest, SubscribeRequest
from ziplog.client.log_tasks import LogTasks
from ziplog.core.node import BatchEnd, Wakeup
from ziplog.types import RecordId

if TYPE_CHECKING:
    import pytest

    from tests.unit.logdb.fakelog import FakeLog


class Bench:
    """A feed on a log in memory."""

    def __init__(self, records: int = 20, memory_bytes: int = 10**6) -> None:
        world = World([Store("db")])
        self.log: FakeLog = world.log
        world.fill(records)
        self.core = PlayerCore(Service(self.log), b"client")
        self.calls = LogTasks(self.core, 10**9)  # type: ignore[arg-type]
        self.feed = Feed(self.calls, memory_bytes)
        self.context = PlayerContext(self.calls, world.settings, "owner", self.feed)

    def poll(self, *positions: int, turns: int = 1) -> None:
        for _ in range(turns):
            self.calls.step(Wakeup(), self.calls.now)
            self.calls.step(BatchEnd(), self.calls.now)
            self.feed.poll(positions, is_batch_end=True)
            self.feed.check()

    @property
    def starts(self) -> list[int]:
        requests = self.core.requests
        return [one.start.gsn for one in requests if isinstance(one, SubscribeRequest)]


def test_a_feed_begins_at_the_greatest_position() -> None:
    bench = Bench()
    bench.poll(3, 17, 9)
    assert bench.starts == [17]
    assert bench.feed.covers(17)
    assert not bench.feed.covers(16)


def test_a_feed_is_closed_while_no_task_reads() -> None:
    bench = Bench()
    assert not bench.feed.is_open
    bench.poll(3)
    bench.poll()
    assert not bench.feed.is_open
    assert not bench.core.subscriptions
    bench.poll(8)
    assert bench.starts == [3, 8]


def test_a_feed_begins_again_when_all_tasks_are_ahead_of_it() -> None:
    bench = Bench()
    bench.poll(1)
    bench.poll(2**40)
    assert bench.starts == [1, 2**40]


def test_a_feed_waits_for_tasks_below_it() -> None:
    bench = Bench()
    bench.poll(30)
    stop = bench.feed.ring.stop
    bench.log.insert(b"more")
    bench.poll(5, turns=5)
    assert bench.starts == [30]
    assert bench.feed.ring.stop == stop
    bench.poll(5, 31, turns=5)
    assert bench.feed.ring.stop > stop


def test_a_feed_passes_positions_without_records(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def progress(*_: Any) -> Progress:
        return Progress(RecordId(10_000, 0), caught_up=True, blocked_on=None)

    monkeypatch.setitem(bench.core._answer, ProgressRequest, progress)
    bench.poll(1, turns=4)
    assert bench.feed.ring.stop == 10_000


def test_a_feed_reports_once_that_its_position_was_trimmed() -> None:
    bench = Bench()
    bench.log.trim(bench.log.gsns[10])
    bench.poll(1)
    trimmed = bench.feed.pop_trimmed()
    assert trimmed is not None
    assert trimmed.first.gsn == bench.log.first
    assert bench.feed.pop_trimmed() is None
    assert not bench.feed.is_open


def test_a_task_that_reads_for_itself_keeps_one_fetch() -> None:
    bench = Bench(records=100)
    tail = bench.log.tail.gsn
    bench.poll(tail)
    reader, position, seen = TaskReader(bench.context, 5), bench.log.gsns[0], 0
    while not bench.feed.covers(position):
        ring = reader.ring(position)
        assert ring is not None
        assert len(ring) <= 5
        reader.poll(position, is_batch_end=True)
        bench.poll(tail, position)
        seen += len(ring)
        position = ring.stop
    assert seen == 100
    assert reader.ring(position) is bench.feed.ring
    assert reader.source is None
    assert len(bench.core.subscriptions) == 1


def test_a_task_that_leaves_out_rows_never_uses_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.poll(1)
    assert bench.feed.covers(1)
    reader = TaskReader(bench.context, 5, (b"writer",))
    ring = reader.ring(1)
    assert ring is not None
    assert ring is not bench.feed.ring
    skipped = [one.skip_writers for one in bench.core.requests if isinstance(one, SubscribeRequest)]
    assert skipped == [(), (b"writer",)]

    def progress(*_: Any) -> Progress:
        return Progress(RecordId(10_000, 0), caught_up=True, blocked_on=None)

    monkeypatch.setitem(bench.core._answer, ProgressRequest, progress)
    bench.feed.close()
    for _ in range(4):
        bench.poll()
        reader.poll(ring.stop, is_batch_end=True)
    assert ring.stop == 10_000, "rows that are left out do not keep it"
    assert reader.ring(10_000) is ring, "it needs no feed"


def test_a_task_whose_target_went_back_reads_from_there() -> None:
    bench = Bench(records=50)
    bench.poll(bench.log.tail.gsn)
    reader, gsns = TaskReader(bench.context, 5), bench.log.gsns
    assert reader.ring(gsns[30]) is not None
    ring = reader.ring(gsns[3])
    assert ring is not None
    assert ring.covers(gsns[3])
