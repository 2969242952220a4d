"""Speculation against real servers: early records, confirmed by the log."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import ziplog
import ziplog.aio
from tests.waiting import wait_until
from ziplog.errors import ClosedError, ConfigError, DeadlineError, TrimmedError, ZiplogError
from ziplog.local import Cluster
from ziplog.speculation import Confirmed, Delivery, Failed, aprocess, process
from ziplog.types import RID_GENESIS, RID_RECENT, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.types import Event

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), shards=2) as running:
        yield running


@contextmanager
def inserting(cluster: Cluster) -> Iterator[list[RecordId]]:
    """Insert one record after the other, whatever fails."""
    rids: list[RecordId] = []
    stopped = threading.Event()

    def insert() -> None:
        with cluster.connect(timeout=TIMEOUT_S) as log:
            while not stopped.is_set():
                try:
                    rids.append(log.insert_after(b"%d" % len(rids)))
                except ZiplogError:
                    continue

    thread = threading.Thread(target=insert)
    thread.start()
    try:
        yield rids
    finally:
        stopped.set()
        thread.join()


class Follower:
    """What an application has of the events: final records, and open ones."""

    def __init__(self) -> None:
        self.final: list[Record] = []
        self.open: list[Record] = []
        self.early = 0

    def add(self, event: Event) -> None:
        match event:
            case Delivery(record, speculative):
                assert not self.open or record.rid > self.open[-1].rid
                self.open.append(record)
                self.early += speculative
            case Confirmed(upto):
                count = sum(record.rid.gsn <= upto.gsn for record in self.open)
                self.final += self.open[:count]
                del self.open[:count]
            case Failed(after):
                kept = [record for record in self.open if record.rid.gsn <= after.gsn]
                assert len(kept) < len(self.open)
                self.open = kept


def log_from(log: ziplog.Log, first: RecordId, last: RecordId) -> list[Record]:
    records: list[Record] = []
    for record in log.subscribe(first, timeout=TIMEOUT_S):
        if record.rid > last:
            return records
        records.append(record)
        if record.rid == last:
            return records
    return records


def test_confirmed_deliveries_are_the_log(cluster: Cluster) -> None:
    follower = Follower()
    with cluster.connect(timeout=TIMEOUT_S) as log:
        start = log.append(b"start")
        with inserting(cluster), log.speculate(start, timeout=TIMEOUT_S) as events:
            for event in events:
                follower.add(event)
                if len(follower.final) > 500 and follower.early > 100:
                    break
            assert events.pending == len(follower.open)
            assert events.position.gsn > follower.final[-1].rid.gsn
        assert follower.final == log_from(log, start, follower.final[-1].rid)
        stats = log.stats()
        assert stats["speculated"] >= follower.early
        assert stats["failures"] == 0
        assert events.position.gsn > follower.final[-1].rid.gsn, "it stays after the end"


def test_later_run_continues_where_output_ended(cluster: Cluster) -> None:
    output: list[Record] = []

    def run(position: RecordId, count: int) -> RecordId:
        stop = len(output) + count
        with cluster.connect(timeout=TIMEOUT_S) as log:
            return process(
                log.speculate(position, timeout=TIMEOUT_S, max_pending=50),
                apply=lambda records: records,
                undo=lambda *_: None,
                emit=lambda _, effect: output.append(effect),
                until=lambda _: len(output) == stop,
            )

    with cluster.connect(timeout=TIMEOUT_S) as log:
        start = log.append(b"start")
        with inserting(cluster):
            position = run(start, 200)
            for count in (1, 50, 100):
                position = run(position, count)
        assert output == log_from(log, start, output[-1].rid)


def test_asyncio(cluster: Cluster) -> None:
    output: list[bytes] = []

    async def emit(record: Record, _effect: object) -> None:
        output.append(record.payload)

    async def apply(records: list[Record]) -> list[None]:
        return [None] * len(records)

    async def main() -> None:
        async with ziplog.aio.connect(cluster.endpoint, timeout=TIMEOUT_S) as log:
            start = await log.append(b"first")
            events = await log.speculate(start)
            task = asyncio.ensure_future(
                aprocess(
                    events, apply=apply, undo=lambda *_: None, emit=emit,
                    until=lambda record: record.payload == b"last",
                )
            )  # fmt: skip
            await log.append(b"last")
            assert (await task).gsn > start.gsn
            async with log.speculate(start, shards=[start.shard]) as some:
                async for event in some:
                    assert isinstance(event, Delivery)
                    assert event.record.payload == b"first"
                    break
            assert some.is_closed
            with pytest.raises(ClosedError, match="this speculation is closed"):
                await some.fetch()

    asyncio.run(main())
    assert output == [b"first", b"last"]


def test_bad_arguments(cluster: Cluster) -> None:
    with cluster.connect(timeout=TIMEOUT_S) as log:
        for wrong in (0, -1, 1_000_001, True, "5", 1.5):
            with pytest.raises(ConfigError, match="max_pending"):
                log.speculate(max_pending=wrong)  # type: ignore[arg-type]
        for shards in ([], [0, 0]):
            with pytest.raises(ConfigError, match="one or more different shard ids"):
                log.speculate(shards=shards)
        with pytest.raises(ConfigError, match="shards"):
            log.speculate(shards=[9])
        with pytest.raises(TypeError):
            log.speculate("3@0")  # type: ignore[arg-type]
        with log.speculate(log.append(b"x"), timeout=0.05) as events:
            with pytest.raises(ConfigError, match="max_events"):
                events.fetch(0)
            assert [type(event) for event in events.fetch(1)] == [Delivery]
            with pytest.raises(DeadlineError, match="no event came within"):
                list(events)
        assert list(events) == []
        with pytest.raises(ClosedError, match="this speculation is closed"):
            events.fetch()
        events.close()
        log.trim(log.append(b"y"))
        with pytest.raises(TrimmedError):
            log.speculate(RID_GENESIS)
        events = log.speculate()
    with pytest.raises(ClosedError):
        events.fetch()
    with pytest.raises(ClosedError):
        log.speculate(RID_RECENT)


def test_killed_primary_neither_loses_nor_changes_output(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    output: list[Record] = []
    state: list[Record] = []

    def apply(records: list[Record]) -> list[Record]:
        state.extend(records)
        return records

    def undo(record: Record, _effect: Record) -> None:
        assert state.pop() == record

    with (
        Cluster(tmp_path_factory.mktemp("killed"), shards=2) as cluster,
        cluster.connect(timeout=TIMEOUT_S) as log,
        inserting(cluster) as rids,
    ):
        start = log.append(b"start")
        until = threading.Event()
        done: list[RecordId] = []

        def run() -> None:
            events = log.speculate(start, timeout=TIMEOUT_S)
            done.append(
                process(
                    events, apply=apply, undo=undo, emit=lambda record, _: output.append(record),
                    until=lambda _: until.is_set(),
                )
            )  # fmt: skip

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: len(output) > 100, "records are emitted")
        cluster.kill("shard-0-0")
        cluster.restart("shard-0-0")
        count = len(rids)
        wait_until(lambda: len(rids) > count + 100, "inserts flow again", TIMEOUT_S)
        after = log.append(b"after")
        wait_until(lambda: output[-1].rid >= after, "the log goes on", TIMEOUT_S)
        until.set()
        thread.join()
        assert state == output
        assert done[0].gsn == output[-1].rid.gsn + 1
        assert output == log_from(log, start, output[-1].rid)
