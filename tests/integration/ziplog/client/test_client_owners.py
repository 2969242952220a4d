"""Abandoned subscriptions, scans and clients are closed when they are garbage-collected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
import ziplog.aio
from tests.forking import in_child
from tests.unit.ziplog.client.served import ServedCluster
from tests.waiting import explicit_collections, until, wait_until
from ziplog import wire
from ziplog.client.engines import blocking_engine
from ziplog.client.engines.asyncio_engine import AsyncioEngine
from ziplog.client.engines.signals import SHIELD

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def explicit() -> Iterator[None]:
    with explicit_collections():
        yield


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


@pytest.fixture(name="log")
def _log(cluster: ServedCluster) -> Iterator[ziplog.Log]:
    with ziplog.connect(cluster.endpoint) as log:
        log.insert_many([b"%d" % number for number in range(5)])
        yield log


def open_counts(log: Any) -> tuple[int, int, int]:
    """Return the numbers of open subscriptions, scans and owners after the next call."""
    core = log._core
    owners = log._engine.owners
    return len(core._subscriptions._open), len(core._scans._open), len(owners)


def ended(cluster: ServedCluster) -> bool:
    """Whether each stream that was opened at the servers was closed there."""
    with cluster.arrived:
        opened = {m.subscription for m in cluster.received if isinstance(m, wire.Subscribe)}
        closed = {m.subscription for m in cluster.received if isinstance(m, wire.Unsubscribe)}
    return opened == closed


def test_loop_to_the_end_leaves_nothing_open(cluster: ServedCluster, log: ziplog.Log) -> None:
    for _ in range(3):
        for _record in log.subscribe(follow=False):
            pass
        while subscription := log.subscribe(follow=False):
            while subscription.fetch():
                pass
            assert subscription.caught_up
            break
        for _units in log.scan(0, 1, 6):
            pass
        assert open_counts(log)[:2] == (0, 0)
    wait_until(lambda: ended(cluster), "the servers got an Unsubscribe")


def test_finished_iterator_is_closed_although_it_is_referenced(log: ziplog.Log) -> None:
    subscription, fetched = log.subscribe(follow=False), log.subscribe(follow=False)
    assert len(list(subscription)) == 5
    assert len(fetched.fetch()) == 5
    assert fetched.fetch() == []
    scan = log.scan(0, 1, 6)
    assert list(scan)
    assert open_counts(log) == (0, 0, 0)
    assert subscription.position == fetched.position
    assert list(subscription) == fetched.fetch() == list(scan) == []


def test_abandoned_loop_leaves_nothing_open(cluster: ServedCluster, log: ziplog.Log) -> None:
    for _ in range(3):
        for _record in log.subscribe():
            break
        for _units in log.scan(0, 1, 60):
            break
        log.check_tail()
        assert open_counts(log) == (0, 0, 0)
    wait_until(lambda: ended(cluster), "the servers got an Unsubscribe")


def test_iterator_that_failed_to_open_leaves_nothing_open(log: ziplog.Log) -> None:
    log.trim(log.check_tail())
    # (The result of `pytest.raises` would keep them alive.)
    with contextlib.suppress(ziplog.TrimmedError):
        pytest.fail(f"{log.subscribe()} was opened")
    with contextlib.suppress(ziplog.ConfigError):
        pytest.fail(f"{log.scan(7, 1, 2)} was opened")

    def is_closed() -> bool:
        gc.collect()  # a traceback holds it in a cycle, and another thread may still hold that
        log.check_tail()
        return open_counts(log) == (0, 0, 0)

    wait_until(is_closed, "nothing is open")


def test_iterator_in_a_cycle_is_closed_when_another_thread_collects_it(log: ziplog.Log) -> None:
    cycle: list[Any] = [log.subscribe()]
    cycle.append(cycle)
    del cycle
    collecting = threading.Thread(target=gc.collect)
    collecting.start()
    collecting.join()
    log.check_tail()
    assert open_counts(log) == (0, 0, 0)


def test_changes_to_a_fetched_list_do_not_affect_the_subscription(log: ziplog.Log) -> None:
    subscription = log.subscribe(follow=False)
    got = []
    while records := subscription.fetch():
        while records:
            got.append(records.pop(0).payload)
    assert got == [b"0", b"1", b"2", b"3", b"4"]


def test_asyncio_iterators_leave_nothing_open(cluster: ServedCluster) -> None:
    async def main() -> None:
        async with ziplog.aio.connect(cluster.endpoint) as log:
            await log.insert_many([b"%d" % number for number in range(5)])
            for _ in range(3):
                assert len([r async for r in log.subscribe(follow=False)]) == 5
                async for _record in log.subscribe():
                    break
                assert len([s async for s in log.scan(0, 1, 6)]) >= 1
                async for _units in log.scan(0, 1, 60):
                    break
                never = log.subscribe()
                del never
                await log.check_tail()
                assert open_counts(log) == (0, 0, 0)

    asyncio.run(main())
    wait_until(lambda: ended(cluster), "the servers got an Unsubscribe")


def descriptors() -> set[tuple[str, str]]:
    """Return the number and the target of each open socket, pipe and the like.

    Directories are left out: the cluster's thread opens one while it counts its descriptors.
    """
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Closed meanwhile.
            target = str(link.readlink())
            if not target.startswith("/proc/"):
                found.add((link.name, target))
    return found


def test_dropped_clients_leave_neither_threads_nor_descriptors(cluster: ServedCluster) -> None:
    def drop() -> None:
        log = ziplog.connect(cluster.endpoint)
        log.insert_nowait(b"x").result(10)
        threads_before.append(log._engine._futures._thread)

    threads_before: list[Any] = []
    gc.collect()
    before = descriptors()
    for _ in range(5):
        drop()
    gc.collect()
    for thread in threads_before:
        thread.join(10)
        assert not thread.is_alive()
    gc.collect()
    wait_until(lambda: descriptors() <= before, "the descriptors are closed")


def test_future_completes_after_its_client_was_dropped(cluster: ServedCluster) -> None:
    log = ziplog.connect(cluster.endpoint)
    future = log.insert_nowait(b"x")
    del log
    gc.collect()
    assert future.result(10).gsn > 0


def test_dropped_clients_of_asyncio_leave_no_descriptors(cluster: ServedCluster) -> None:
    async def main() -> None:
        async def drop() -> weakref.ref[Any]:
            log = await ziplog.aio.connect(cluster.endpoint)
            await log.insert_after(b"x")
            return weakref.ref(log._engine)

        before = descriptors()
        refs = [await drop() for _ in range(5)]
        log = await ziplog.aio.connect(cluster.endpoint)
        future = log.insert_nowait(b"y")
        del log
        gc.collect()
        assert not any(ref() for ref in refs)
        assert (await future).gsn > 0
        del future
        while descriptors() > before:
            await asyncio.sleep(0)
            gc.collect()

    asyncio.run(main())


def test_clients_of_loops_that_ended_leave_no_descriptors(cluster: ServedCluster) -> None:
    async def leave() -> None:
        cluster.silent = {wire.Insert}
        log = await ziplog.aio.connect(cluster.endpoint)
        log.insert_nowait(b"x")

    async def work() -> None:
        async with ziplog.aio.connect(cluster.endpoint) as log:
            await log.insert_after(b"y")

    before = descriptors()
    for _ in range(5):
        asyncio.run(leave())
    cluster.silent = set()
    asyncio.run(work())
    gc.collect()
    wait_until(lambda: descriptors() <= before, "the descriptors are closed")


def test_background_thread_starts_again(cluster: ServedCluster, log: ziplog.Log) -> None:
    assert [log.insert_nowait(b"x").result(10).gsn for _ in range(3)] == [6, 7, 8]
    log.flush()
    assert log.insert_nowait(b"x").result(10).gsn == 9


def test_forked_child_does_not_affect_its_parent(cluster: ServedCluster, log: ziplog.Log) -> None:
    subscription, scan = log.subscribe(), log.scan(0, 1, 6)
    assert next(subscription).payload == b"0"

    def act() -> str:
        subscription.close()
        scan.close()
        log.close()
        assert next(subscription, None) is None
        gc.collect()
        return "closed"

    assert in_child(act) == "closed"
    assert log.insert_after(b"x").gsn == 6
    assert not any(isinstance(each, wire.Unsubscribe) for each in cluster.received)
    assert [next(subscription).payload for _ in range(4)] == [b"1", b"2", b"3", b"4"]
    assert len(list(scan)) >= 1


def test_forked_child_returns_nothing_that_its_parent_read_ahead(log: ziplog.Log) -> None:
    following, ending = log.subscribe(timeout=10), log.subscribe(follow=False)
    events = log.speculate(ziplog.RID_GENESIS)
    for stream in (following, ending, events):
        next(stream)

    def act() -> str:
        for call in (
            following.fetch, lambda: next(following), lambda: next(ending), ending.fetch,
            events.fetch, lambda: next(events), lambda: following.position,
        ):  # fmt: skip
            with pytest.raises(ziplog.ClosedError, match="in its child, is closed"):
                call()
        return "refused"

    assert in_child(act) == "refused"
    assert [record.payload for record in following.fetch()] == [b"1", b"2", b"3", b"4"]
    assert len(list(ending)) == 4


def test_forked_child_does_not_touch_its_parents_event_loop(
    cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without timers, the client receives only what the loop's selector reports.
    monkeypatch.setattr(AsyncioEngine, "_timed_out", lambda _: None)

    async def main() -> None:
        async with ziplog.aio.connect(cluster.endpoint) as log:
            await log.insert_after(b"x")
            assert in_child(lambda: log._engine.close() or "closed") == "closed"
            future = log.insert_nowait(b"y")
            await until(future.done, "the parent's loop reports the acks", 5.0)
            assert future.result().gsn == 2

    asyncio.run(main())


def test_forked_child_does_not_use_an_asyncio_client_of_its_parent(cluster: ServedCluster) -> None:
    async def main() -> None:
        async with ziplog.aio.connect(cluster.endpoint) as log:
            subscription = await log.subscribe()
            await log.insert_after(b"x")

            def act() -> str:
                with pytest.raises(ziplog.ClosedError, match="in its child, is closed"):
                    log.insert_nowait(b"child")
                for coroutine in (log.insert_after(b"child"), subscription.fetch(1)):
                    with pytest.raises(ziplog.ClosedError):
                        coroutine.send(None)
                for coroutine in (subscription.close(), log.close()):
                    with pytest.raises(StopIteration):
                        coroutine.send(None)
                return "refused"

            assert in_child(act) == "refused"
            await log.insert_after(b"y", timeout=10)
            inserts = [each for each in cluster.received if isinstance(each, wire.Insert)]
            assert not any(b"child" in each.body for each in inserts)
            async with asyncio.timeout(10):
                assert (await subscription.fetch(1))[0].payload == b"x"

    asyncio.run(main())


def test_shield_follows_changes_of_signal_handlers(log: ziplog.Log) -> None:

    seen = []

    def second(*_: object) -> None:
        seen.append("second")

    def first(*_: object) -> None:
        # As a handler that runs only once does.
        signal.signal(signal.SIGUSR2, second)
        seen.append("first")

    former = signal.signal(signal.SIGUSR2, first)
    try:

        def policy(*_: object) -> int:
            signal.raise_signal(signal.SIGUSR2)
            assert not seen
            return 0

        log.set_policy(policy)
        log.insert_after(b"x")
        assert seen == ["first"]
        assert signal.getsignal(signal.SIGUSR2) is second
        seen.clear()
        log.insert_after(b"x")
        assert seen == ["second"]
        # A replacement that an exception left in place; it runs the original handler.
        signal.signal(signal.SIGUSR2, SHIELD._note)
        signal.raise_signal(signal.SIGUSR2)
        assert seen == ["second", "second"]
        log.check_tail()
        assert signal.getsignal(signal.SIGUSR2) is second
    finally:
        signal.signal(signal.SIGUSR2, former)


@pytest.fixture(autouse=True)
def _no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_engine, "_POLL_S", 3600.0)
