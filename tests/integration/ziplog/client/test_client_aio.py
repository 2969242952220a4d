"""The asyncio API on real sockets: the same promises as the blocking one."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.unit.ziplog.client.served import ServedCluster
from ziplog import RecordId, wire

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


def run(
    cluster: ServedCluster, body: Callable[[ziplog.aio.AsyncLog], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), ziplog.aio.connect(cluster.endpoint) as log:
            await body(log)

    asyncio.run(main())


def test_all_operations(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        first = await log.insert_after(b"first")
        second = await log.insert_after(bytearray(b"second"), first, key="k")
        rids = await log.insert_many([b"x", b"y"], after=second)
        assert await log.insert_many([]) == []
        assert first < second < rids[0] < rids[1]
        assert (await log.read_record(second)).key == b"k"
        async with log.subscribe(follow=False) as subscription:
            got = [record.payload async for record in subscription]
        assert got == [b"first", b"second", b"x", b"y"]
        assert await log.check_tail() == rids[-1]
        assert await log.cluster() == {"cluster": "fake"}
        assert log.stats()["inserts"] == 4
        log.set_policy(ziplog.policy.pin(0))
        await log.trim(second)
        with pytest.raises(ziplog.TrimmedError):
            await log.subscribe()
        with pytest.raises(ziplog.TrimmedError):
            async for _ in log.subscribe():
                pass

    run(cluster, body)


def test_a_call_in_another_event_loop_or_thread_is_refused_and_inserts_nothing(
    cluster: ServedCluster,
) -> None:
    async def elsewhere(log: ziplog.aio.AsyncLog) -> None:
        for call in (log.insert_after, log.insert_nowait):
            with pytest.raises(RuntimeError, match="the event loop in which it was connected"):
                await call(b"lost")
        with pytest.raises(RuntimeError, match="another one runs here"):
            await log.flush()

    async def body(log: ziplog.aio.AsyncLog) -> None:
        await asyncio.to_thread(lambda: asyncio.run(elsewhere(log)))
        with pytest.raises(RuntimeError, match="another thread called it"):
            await asyncio.to_thread(log.insert_nowait, b"lost")
        await log.insert_after(b"kept")
        assert [record.payload async for record in log.subscribe(follow=False)] == [b"kept"]

    run(cluster, body)


def test_connecting_by_await(cluster: ServedCluster) -> None:
    async def main() -> None:
        log = await ziplog.aio.connect(cluster.endpoint)
        rid = await log.insert_after(b"x")
        assert rid == RecordId(1, 0)
        await log.close()
        await log.close()
        for call in (
            log.insert_after(b"x"), log.insert_many([]), log.append_many([]), log.flush(),
            log.__aenter__(),
        ):  # fmt: skip
            with pytest.raises(ziplog.ClosedError):
                await call
        with pytest.raises(ziplog.ClosedError):
            log.set_policy(ziplog.policy.random())
        with pytest.raises(ziplog.UnavailableError):
            await ziplog.aio.connect("127.0.0.1:1", timeout=0.1)
        with pytest.raises(ziplog.ConfigError):
            await ziplog.aio.connect("nonsense")

    asyncio.run(main())


def test_a_following_subscription(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        subscription = await log.subscribe(timeout=0.01)
        with pytest.raises(ziplog.DeadlineError):
            await anext(subscription)
        waiting = asyncio.create_task(subscription.fetch(timeout=10))
        await asyncio.sleep(0)
        rids = await log.insert_many([b"%d" % i for i in range(5)])
        assert [r.rid for r in await waiting] == rids
        assert subscription.position.gsn == rids[-1].gsn + 1
        assert subscription.caught_up
        assert subscription.blocked_on is None
        assert await subscription.fetch(timeout=0) == []
        waiting = asyncio.create_task(subscription.fetch(timeout=10))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        last = await log.insert_after(b"z")
        assert (await anext(subscription)).rid == last
        await subscription.close()
        with pytest.raises(ziplog.ClosedError, match="this subscription is closed"):
            await subscription.fetch()
        assert [record async for record in subscription] == []

    run(cluster, body)


def test_many_tasks_at_once(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        rids = await asyncio.gather(*(log.insert_after(b"%d" % i) for i in range(2000)))
        assert len(set(rids)) == 2000
        futures = [log.insert_nowait(b"x") for _ in range(2000)]
        await log.flush()
        assert all(future.done() for future in futures)
        assert len([r async for r in log.subscribe(follow=False)]) == 4000

    run(cluster, body)


def test_flush_raises_the_first_failure_once(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        cluster.silent.add(wire.Insert)
        future = log.insert_nowait(b"x", timeout=0.05)
        with pytest.raises(ziplog.OutcomeUnknownError):
            await log.flush()
        with pytest.raises(ziplog.OutcomeUnknownError):
            await future
        await log.flush()

    run(cluster, body)


def test_close_fails_pending_calls(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        cluster.silent.add(wire.Insert)
        subscription = await log.subscribe()
        tasks = [
            asyncio.create_task(log.insert_after(b"x")),
            asyncio.create_task(subscription.fetch()),
        ]
        future = log.insert_nowait(b"x")
        await asyncio.sleep(0)
        await log.close()
        for result in await asyncio.gather(*tasks, future, return_exceptions=True):
            assert isinstance(result, ziplog.ClosedError)

    run(cluster, body)


def test_an_unknown_outcome_can_be_resolved(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        cluster.silent.add(wire.Insert)
        with pytest.raises(ziplog.OutcomeUnknownError) as caught:
            await log.insert_after(b"x", timeout=0.05)
        with pytest.raises(ziplog.OutcomeUnknownError) as again:
            await caught.value.resolve(0.05)
        cluster.silent.clear()
        rid = await again.value.resolve()
        assert (await log.read_record(rid)).payload == b"x"
        cluster.silent.add(wire.Insert)
        with pytest.raises(ziplog.OutcomeUnknownError) as lost:
            await log.insert_many([b"y", b"z"], timeout=0.05)
        with pytest.raises(ziplog.OutcomeUnknownError) as nowait:
            await log.insert_nowait(b"w", timeout=0.05)
        cluster.views[0] = 2
        cluster.silent.clear()
        assert await lost.value.resolve() == lost.value.results == [None, None]
        assert await nowait.value.resolve() is None
        assert await caught.value.resolve() == rid
        await log.close()
        with pytest.raises(ziplog.ClosedError):
            await caught.value.resolve()

    run(cluster, body)


def test_sync(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        assert await log.sync() == ziplog.RID_GENESIS
        rids = await log.insert_many([b"x", b"y"])
        assert await log.sync() == rids[-1]
        cluster.silent.add(wire.Sync)
        assert await log.sync(timeout=0.05) == rids[-1], "nothing was inserted since"
        await log.insert_after(b"z")
        with pytest.raises(ziplog.DeadlineError):
            await log.sync(timeout=0.05)

    run(cluster, body)


def test_a_cancelled_insert_leaves_the_client_usable(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        cluster.silent.add(wire.Insert)
        task = asyncio.create_task(log.insert_after(b"x"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cluster.silent.clear()
        assert await log.insert_after(b"y")
        log._core.check()

    run(cluster, body)


def test_the_same_names_and_arguments_as_the_blocking_api() -> None:
    blocking = {n: m for n, m in vars(ziplog.Log).items() if not n.startswith("_")}
    asynchronous = {n: m for n, m in vars(ziplog.aio.AsyncLog).items() if not n.startswith("_")}
    assert blocking.keys() == asynchronous.keys()
    for name, method in blocking.items():
        if isinstance(method, property):
            assert isinstance(asynchronous[name], property)
            continue
        expected = inspect.signature(method).parameters
        found = inspect.signature(asynchronous[name]).parameters
        assert list(expected) == list(found)
        assert [p.default for p in expected.values()] == [p.default for p in found.values()]


def test_shards_are_added_and_removed(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        await log.add_shard(3, {"a": "127.0.0.1:1", "b": "127.0.0.1:2"})
        await log.remove_shard(3, timeout=5)
        await log.finalize_shard(3)
        asked = [m for m in cluster.received if isinstance(m, wire.ChangeShard)]
        assert [(m.shard, m.change, [r.name for r in m.replicas]) for m in asked] == [
            (3, "add", ["a", "b"]), (3, "remove", []), (3, "finalize", []),
        ]  # fmt: skip
        cluster.refusal = "no-such-shard"
        with pytest.raises(ziplog.ConfigError, match="must be one of"):
            await log.remove_shard(9)

    run(cluster, body)
