"""A task is cancelled at every await of the asyncio client: nothing is lost or left over."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import ziplog.aio
from tests.cancelling import Canceller, cancelled
from tests.unit.ziplog.client.served import ServedCluster
from tests.waiting import explicit_collections
from ziplog import RecordId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from ziplog.aio import AsyncLog

_COUNT = 4


@pytest.fixture(autouse=True)
def explicit() -> Iterator[None]:
    with explicit_collections():
        yield


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


def with_log(cluster: ServedCluster, test: Callable[[AsyncLog], Awaitable[None]]) -> None:
    async def main() -> None:
        async with ziplog.aio.connect(cluster.endpoint) as log:
            await test(log)

    asyncio.run(main())


async def assert_nothing_open(log: AsyncLog) -> None:
    """Assert that earlier calls left nothing open."""
    gc.collect(0)
    await log.check_tail()
    core = log._core
    core.check()
    assert not core._subscriptions._open, "a subscription was left open"
    assert not core._scans._open, "a scan was left open"
    assert not core._is_waiting(), "a call is still pending"
    assert not log._engine._futures


async def _by_next(subscription: Any, step: Canceller) -> list[Any]:
    try:
        return [await step(anext(subscription))]
    except StopAsyncIteration:
        return []


async def _by_fetch(subscription: Any, step: Canceller) -> list[Any]:
    return await step(subscription.fetch(3))


@pytest.mark.parametrize("read", [_by_next, _by_fetch])
def test_a_subscription_loses_and_repeats_nothing(cluster: ServedCluster, read: Any) -> None:
    async def test(log: AsyncLog) -> None:
        got: list[Any] = []
        rids = [await log.insert_after(b"first")]

        async def run(step: Canceller) -> None:
            got.clear()
            subscription = log.subscribe(RecordId(rids[-1].gsn + 1, 0))
            rids.clear()
            for number in range(_COUNT):
                inserted = log.insert_nowait(b"%d" % number)
                while len(got) == number:
                    with suppress(asyncio.CancelledError):
                        got.extend(await read(subscription, step))
                rids.append(await inserted)
                assert got[-1].rid.gsn < subscription.position.gsn
            rids.append(await log.insert_after(b"last"))
            await subscription.close()

        async def check() -> None:
            assert [record.rid for record in got] == rids[:-1]
            await assert_nothing_open(log)

        assert await cancelled(run, check) >= 2 * _COUNT

    with_log(cluster, test)


def test_a_scan_loses_and_repeats_nothing(cluster: ServedCluster) -> None:
    async def test(log: AsyncLog) -> None:
        rids = [await log.insert_after(b"%d" % number) for number in range(_COUNT)]
        gsns: list[int] = []

        async def run(step: Canceller) -> None:
            gsns.clear()
            scan = log.scan(0, rids[0].gsn, rids[-1].gsn + 1)
            while True:
                with suppress(asyncio.CancelledError):
                    try:
                        units, _ = await step(anext(scan))
                    except StopAsyncIteration:
                        return
                    gsns.extend(gsn for unit in units for gsn in unit.gsns)

        async def check() -> None:
            assert gsns == [rid.gsn for rid in rids]
            await assert_nothing_open(log)

        assert await cancelled(run, check) >= 4

    with_log(cluster, test)


def test_a_subscription_that_is_being_opened_is_not_left_open(cluster: ServedCluster) -> None:
    async def test(log: AsyncLog) -> None:
        async def run(step: Canceller) -> None:
            with suppress(asyncio.CancelledError):
                await step(log.subscribe())
            with suppress(asyncio.CancelledError):
                await step(log.scan(0, 1, 10))

        assert await cancelled(run, lambda: assert_nothing_open(log)) >= 4

    with_log(cluster, test)


def test_cancelled_insert_is_in_the_log_at_most_once(cluster: ServedCluster) -> None:
    async def test(log: AsyncLog) -> None:
        begun, done = [], []

        async def run(step: Canceller) -> None:
            for _ in range(2):
                begun.append(b"%d" % len(begun))
                with suppress(asyncio.CancelledError):
                    await step(log.insert_after(begun[-1]))
                    done.append(begun[-1])

        assert await cancelled(run, lambda: assert_nothing_open(log)) >= 4
        found = [record.payload async for record in log.subscribe(follow=False)]
        assert len(found) == len(set(found))
        assert set(done) <= set(found) <= set(begun)

    with_log(cluster, test)


def test_task_is_cancelled_in_the_iteration_in_which_its_record_arrives(
    cluster: ServedCluster,
) -> None:
    async def test(log: AsyncLog) -> None:
        subscription = await log.subscribe()
        engine = log._engine.engine
        on_complete = engine._on_complete
        waiting: list[asyncio.Task[Any]] = []

        def answered(number: int, result: Any) -> None:
            on_complete(number, result)
            for task in waiting:
                task.cancel()

        engine._on_complete = answered  # type: ignore[misc]
        waiting.append(asyncio.create_task(anext(subscription)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        inserting = asyncio.create_task(log.insert_after(b"x"))
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        waiting.clear()
        rid = await inserting
        assert subscription.position <= rid
        assert (await anext(subscription)).rid == rid

    with_log(cluster, test)


def test_two_tasks_share_a_subscription(cluster: ServedCluster) -> None:
    async def test(log: AsyncLog) -> None:
        subscription = await log.subscribe()
        got: list[int] = []

        async def read() -> None:
            async for record in subscription:
                got.append(record.rid.gsn)
                if record.payload == b"9":
                    await subscription.close()

        tasks = [asyncio.create_task(read()) for _ in range(3)]
        rids = [await log.insert_after(b"%d" % number) for number in range(10)]
        await asyncio.gather(*tasks)
        assert got == [rid.gsn for rid in rids]

    with_log(cluster, test)
