"""The feed, and what a task reads for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logplayer.context import PlayerContext
from logplayer.feed import PROGRESS_NS
from logplayer.partitions import partition_of
from logplayer.ring import RECORD_BYTES
from logplayer.task_reader import TaskReader
from logplayer.turns import IDLE_NS, MAX_TURNS, TURN_NS
from tests.sim.player.targets import Store
from tests.unit.logplayer.service import PlayerCore, Service
from tests.unit.logplayer.world import World, spec
from ziplog.client.common.requests import Blocked, Progress, ProgressRequest, SubscribeRequest
from ziplog.client.log_tasks import LogTasks
from ziplog.core.node import BatchEnd, Wakeup
from ziplog.core.units import NEVER
from ziplog.types import RecordId

if TYPE_CHECKING:
    import pytest

    from tests.unit.logdb.fakelog import FakeLog

SMALL = spec(Store("db"), batch_records=5)


class Bench:
    """A feed on a log in memory."""

    def __init__(self, records: int = 20, memory_bytes: int = 10**6) -> None:
        world = World([Store("db")], memory_bytes=memory_bytes)
        self.log: FakeLog = world.log
        world.fill(records)
        self.core = PlayerCore(Service(self.log), b"client")
        self.calls = LogTasks(self.core, 10**9)  # type: ignore[arg-type]
        self.changes = 0
        self.context = PlayerContext(self.calls, world.settings, "owner", self._on_change)
        self.feed = self.context.feed

    def poll(self, *positions: int, turns: int = 1) -> None:
        for _ in range(turns):
            self.calls.step(Wakeup(), self.calls.now)
            self.calls.step(BatchEnd(), self.calls.now)
            self.feed.on_batch_end(self.calls.now, is_urgent=True)
            self.feed.poll(positions)
            self.feed.check()

    def _on_change(self) -> None:
        self.changes += 1

    @property
    def starts(self) -> list[int]:
        requests = self.core.requests
        return [one.start.gsn for one in requests if isinstance(one, SubscribeRequest)]


def test_a_feed_learns_from_time_to_time_which_positions_have_no_record() -> None:
    bench = Bench()
    bench.poll(3, turns=2)
    feed, now = bench.feed, bench.calls.now
    asked = len(bench.core.requests)
    for step_ns in range(0, 10 * PROGRESS_NS, PROGRESS_NS // 10):
        feed.on_batch_end(now + step_ns, is_urgent=False)
    assert len(bench.core.requests) - asked in {9, 10}


def test_a_feed_that_no_task_is_with_is_not_due() -> None:
    bench = Bench()
    bench.poll(17, turns=2)
    feed, now = bench.feed, bench.calls.now
    feed.on_batch_end(now + 1, is_urgent=False)
    feed.poll([1])
    feed.on_batch_end(now + PROGRESS_NS, is_urgent=False)
    assert feed.next_wakeup() == NEVER


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


def test_a_feed_reads_half_its_memory_ahead_of_the_quickest_task() -> None:
    bench = Bench(records=9000, memory_bytes=4000 * RECORD_BYTES)
    ring, gsns = bench.feed.ring, bench.log.gsns
    bench.poll(1, turns=20)
    half, stop = 2000 * RECORD_BYTES, ring.stop
    assert half <= ring.ahead(1) <= ring.memory_bytes, "no record is dropped unread"
    bench.poll(1, turns=20)
    assert ring.stop == stop
    bench.poll(1, gsns[1500], turns=20)
    assert ring.stop > stop
    assert ring.ahead(gsns[1500]) >= half


def test_a_feed_passes_positions_without_records(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def progress(*_: Any) -> Progress:
        return Progress(RecordId(10_000, 0), caught_up=True, blocked_on=None)

    monkeypatch.setitem(bench.core._answer, ProgressRequest, progress)
    bench.poll(1, turns=4)
    assert bench.feed.ring.stop == 10_000


def test_a_feed_names_the_shard_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    answers = [Blocked(shard=3, epoch=7), None]

    def progress(*_: Any) -> Progress:
        return Progress(RecordId(1, 0), caught_up=False, blocked_on=answers[0])

    monkeypatch.setitem(bench.core._answer, ProgressRequest, progress)
    bench.poll(1, turns=4)
    assert bench.feed.blocked_on == "shard 3"
    del answers[0]
    bench.poll(1, turns=1)
    assert bench.feed.blocked_on == ""


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
    reader, position, seen = TaskReader(bench.context, SMALL, 0), bench.log.gsns[0], 0
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


def test_a_task_keeps_one_fetch_although_its_target_is_slow() -> None:
    """The next records are fetched during each step; the task looks at them after it."""
    bench = Bench(records=100)
    tail = bench.log.tail.gsn
    bench.poll(tail)
    reader, position, seen = TaskReader(bench.context, SMALL, 0), bench.log.gsns[0], 0
    reader.ring(position)
    for _ in range(10):
        bench.poll(tail, position)
        ring = reader.ring(position)
        assert ring is not None
        assert 0 < len(ring) <= 5
        seen += len(ring)
        position = ring.stop
        reader.poll(position, is_batch_end=True)
    assert seen == 50


def test_a_task_that_leaves_out_rows_never_uses_the_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.poll(1)
    assert bench.feed.covers(1)
    skipping = spec(Store("db"), batch_records=5, skip_writers=(b"writer",))
    reader = TaskReader(bench.context, skipping, 0)
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


def test_a_task_that_reads_for_itself_keeps_no_record_of_other_partitions() -> None:
    bench = Bench(records=100)
    bench.poll(bench.log.tail.gsn)
    target = spec(Store("db"), partitions=7, batch_records=1000)
    reader, first = TaskReader(bench.context, target, 3), bench.log.gsns[0]
    reader.ring(first)
    reader.poll(first, is_batch_end=True)
    ring = reader.ring(first)
    assert ring is not None
    assert ring.stop > bench.log.gsns[-1]
    assert ring.records
    assert {partition_of(one, 7) for one in ring.records} == {3}


def test_subscriptions_limit_what_shards_may_send_ahead() -> None:
    for memory, feed, own in [(2**20, 2**16, 2**16), (2**26, 2**22, 2**20), (2**30, 2**22, 2**22)]:
        bench = Bench(memory_bytes=memory)
        bench.poll(bench.log.tail.gsn)
        TaskReader(bench.context, SMALL, 0).ring(bench.log.gsns[0])
        requests = [one for one in bench.core.requests if isinstance(one, SubscribeRequest)]
        assert [one.window_bytes for one in requests] == [feed, own]


def test_so_many_tasks_at_once_read_for_themselves() -> None:
    bench = Bench()
    bench.poll(bench.log.tail.gsn)
    first, now = bench.log.gsns[0], bench.calls.now
    readers = [TaskReader(bench.context, SMALL, 0) for _ in range(MAX_TURNS + 2)]
    reads_now = [reader.ring(first) is not None for reader in readers]
    assert reads_now == [True] * MAX_TURNS + [False] * 2
    *_, second, last = readers
    assert len(bench.core.subscriptions) == MAX_TURNS + 1
    assert not second.is_next
    readers[0].close()
    assert second.is_next
    assert not last.is_next, "the one that has waited longest has the next turn"
    second.stop_waiting()
    assert last.ring(first) is not None
    # A holder that needs records keeps its turn longer than one whose target hangs.
    assert second.ring(first) is None
    hangs, reads = readers[1], readers[2]
    for seconds, is_held in [(0, True), (IDLE_NS, False)]:
        bench.calls.now = now + seconds
        hangs.poll(first - 1, is_batch_end=False)
        reads.poll(2**40, is_batch_end=False)
        assert (hangs.source is not None) == is_held
        assert reads.source is not None
    assert second.ring(first) is not None
    assert hangs.ring(first) is None
    assert reads.next_wakeup(2**40) <= now + TURN_NS
    bench.calls.now = now + TURN_NS
    reads.poll(2**40, is_batch_end=False)
    assert reads.source is None
    bench.context.turns.check()


def test_a_change_of_turns_wakes_the_readers_that_it_concerns() -> None:
    bench = Bench()
    bench.poll(bench.log.tail.gsn)
    first, due = bench.log.gsns[0], bench.context.due
    targets = [spec(Store(f"db-{number}"), batch_records=5) for number in range(MAX_TURNS + 2)]
    *readers, second, last = (TaskReader(bench.context, one, 0) for one in targets)
    for reader in readers:
        reader.ring(first)
    due.clear()
    assert second.ring(first) is None
    assert len(due) == MAX_TURNS + 1, "turns end once a reader waits"
    assert last.ring(first) is None
    due.clear()
    readers[0].close()
    assert "orders/db-8/0" in due, "its turn begins"
    due.clear()
    second.stop_waiting()
    assert "orders/db-9/0" in due, "its turn begins in place of the other one's"


def test_a_task_whose_target_went_back_reads_from_there() -> None:
    bench = Bench(records=50)
    bench.poll(bench.log.tail.gsn)
    reader, gsns = TaskReader(bench.context, SMALL, 0), bench.log.gsns
    assert reader.ring(gsns[30]) is not None
    ring = reader.ring(gsns[3])
    assert ring is not None
    assert ring.covers(gsns[3])
