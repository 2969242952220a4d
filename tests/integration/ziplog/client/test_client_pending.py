"""Inserts that are pending: what `flush` and their futures report."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import ziplog
from tests.unit.ziplog.client.served import ServedCluster
from tests.waiting import wait_until
from ziplog import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_TEXT = "still pending after 0.05 s, and may still happen: call flush again or wait"
_NAMES = pytest.mark.parametrize("name", ["insert_nowait", "append_nowait"])


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


def test_flush_that_ends_early_reports_inserts_that_may_happen(cluster: ServedCluster) -> None:
    with ziplog.connect(cluster.endpoint) as log:
        cluster.silent.add(wire.Insert)
        future = log.insert_nowait(b"x")
        with pytest.raises(ziplog.DeadlineError, match=_TEXT):
            log.flush(0.05)
        assert not future.done(), "the insert is under way"
        cluster.silent.clear()
        log.flush()
        assert future.result(0)
        with log.subscribe(follow=False) as records:
            assert [record.payload for record in records] == [b"x"]


def test_flush_does_not_wait_for_inserts_that_begin_later(cluster: ServedCluster) -> None:
    """While threads insert without a pause, some insert is always pending."""
    with ziplog.connect(cluster.endpoint) as log, ThreadPoolExecutor(1) as pool:
        log.insert_nowait(b"before").result(10)
        cluster.silent.add(wire.Insert)
        future = log.insert_nowait(b"x")
        flushed = pool.submit(log.flush, 30)
        wait_until(lambda: log._engine._futures._waiters, "flush waits")
        log.set_policy(lambda _payload, _key, _live: 9)
        later = log.insert_nowait(b"y", timeout=20)
        cluster.silent.clear()
        flushed.result(10)
        assert future.done()
        assert not later.done(), "there is no shard 9"
        with pytest.raises(ziplog.DeadlineError, match="1 inserts were still pending"):
            log.flush(0.01)
        log.close()


def test_asyncio_flush_that_ends_early_reports_inserts_that_may_happen(
    cluster: ServedCluster,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), ziplog.aio.connect(cluster.endpoint) as log:
            cluster.silent.add(wire.Insert)
            future = log.insert_nowait(b"x")
            with pytest.raises(ziplog.DeadlineError, match=_TEXT):
                await log.flush(0.05)
            assert not future.done(), "the insert is under way"
            cluster.silent.clear()
            await log.flush()
            assert future.result()
            assert [record.payload async for record in log.subscribe(follow=False)] == [b"x"]

    asyncio.run(main())


@_NAMES
def test_future_with_an_unknown_outcome_is_not_retriable(cluster: ServedCluster, name: str) -> None:
    with ziplog.connect(cluster.endpoint) as log:
        cluster.silent.add(wire.Insert)
        future = getattr(log, name)(b"x", timeout=0.05)
        error = future.exception(10)
        assert isinstance(error, ziplog.OutcomeUnknownError)
        assert not isinstance(error, ziplog.UnavailableError)
        assert not error.retriable
        with pytest.raises(ziplog.OutcomeUnknownError):
            log.flush()


@_NAMES
def test_asyncio_future_with_an_unknown_outcome_is_not_retriable(
    cluster: ServedCluster, name: str
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), ziplog.aio.connect(cluster.endpoint) as log:
            cluster.silent.add(wire.Insert)
            with pytest.raises(ziplog.OutcomeUnknownError) as caught:
                await getattr(log, name)(b"x", timeout=0.05)
            assert not isinstance(caught.value, ziplog.UnavailableError)
            assert not caught.value.retriable
            with pytest.raises(ziplog.OutcomeUnknownError):
                await log.flush()

    asyncio.run(main())


def _noting(asked: list[bytes]) -> Callable[[bytes, bytes | None, Sequence[int]], int]:
    """Return a policy that notes what it is asked for."""

    def policy(payload: bytes, _key: bytes | None, live: Sequence[int]) -> int:
        asked.append(payload)
        return live[0]

    return policy


def test_a_new_policy_does_not_affect_inserts_before_it(cluster: ServedCluster) -> None:
    former: list[bytes] = []
    later: list[bytes] = []
    with ziplog.connect(cluster.endpoint, policy=_noting(former)) as log:
        for payload in (b"x", b"y", b"z"):
            log.insert_nowait(payload)
        log.set_policy(_noting(later))
        log.insert_nowait(b"later")
        log.flush()
    assert (former, later) == ([b"x", b"y", b"z"], [b"later"])


def test_asyncio_a_new_policy_does_not_affect_inserts_before_it(cluster: ServedCluster) -> None:
    former: list[bytes] = []
    later: list[bytes] = []

    async def main() -> None:
        async with (
            asyncio.timeout(30),
            ziplog.aio.connect(cluster.endpoint, policy=_noting(former)) as log,
        ):
            for payload in (b"x", b"y", b"z"):
                log.insert_nowait(payload)
            log.set_policy(_noting(later))
            log.insert_nowait(b"later")
            await log.flush()

    asyncio.run(main())
    assert (former, later) == ([b"x", b"y", b"z"], [b"later"])


_RAISED = pytest.mark.parametrize("raised", [SystemExit(1), KeyboardInterrupt(), StopIteration()])
_FAILED = "the policy raised .*; it must return the id of a shard"


def _policy(raised: BaseException) -> Callable[[bytes, object, Sequence[int]], int]:
    """Return a policy that raises for some payloads."""

    def choose(payload: bytes, _key: object, live: Sequence[int]) -> int:
        if payload == b"bad":
            raise raised
        return live[0]

    return choose


@_RAISED
def test_insert_fails_whatever_its_policy_raises(
    cluster: ServedCluster, raised: BaseException
) -> None:
    with ziplog.connect(cluster.endpoint) as log:
        log.set_policy(_policy(raised))
        with pytest.raises(RuntimeError, match=_FAILED):
            log.insert_after(b"bad")
        futures = [log.insert_nowait(payload) for payload in (b"a", b"bad", b"b")]
        with pytest.raises(RuntimeError, match=_FAILED):
            futures[1].result(10)
        assert [future.result(10).gsn for future in (futures[0], futures[2])] == [1, 2]
        with pytest.raises(RuntimeError, match=_FAILED):
            log.flush()


@_RAISED
def test_asyncio_insert_fails_whatever_its_policy_raises(
    cluster: ServedCluster, raised: BaseException
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), ziplog.aio.connect(cluster.endpoint) as log:
            log.set_policy(_policy(raised))
            with pytest.raises(RuntimeError, match=_FAILED):
                await log.insert_after(b"bad")
            futures = [log.insert_nowait(payload) for payload in (b"a", b"bad", b"b")]
            with pytest.raises(RuntimeError, match=_FAILED):
                await futures[1]
            assert [(await future).gsn for future in (futures[0], futures[2])] == [1, 2]
            with pytest.raises(RuntimeError, match=_FAILED):
                await log.flush()

    asyncio.run(main())


@pytest.mark.parametrize("raised", [SystemExit(1), KeyboardInterrupt(), ValueError()])
def test_callback_that_raises_does_not_delay_other_futures(
    cluster: ServedCluster, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:
    def fail(_: object) -> None:
        raise raised

    called: list[object] = []
    with ziplog.connect(cluster.endpoint) as log:
        cluster.silent.add(wire.Insert)
        future = log.insert_nowait(b"x")
        future.add_done_callback(fail)
        future.add_done_callback(called.append)
        cluster.silent.clear()
        assert log.insert_nowait(b"y").result(10)
        assert called == [future]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        str(raised)
    ]
