"""Streams that do not open: each call ends at its own time-out, not at the client's default."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.unit.ziplog.client.served import ServedCluster
from ziplog import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

pytestmark = pytest.mark.timeout(60)

SHORT_S, LATE_S = 0.05, 30.0
STREAMS = pytest.mark.parametrize("name", ["subscribe", "speculate"])


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


def run(
    cluster: ServedCluster, body: Callable[[ziplog.aio.AsyncLog], Coroutine[Any, Any, None]]
) -> None:
    """Run a program whose client gets no leases and no cursors, and has no default time-out."""

    async def main() -> None:
        async with (
            asyncio.timeout(LATE_S),
            ziplog.aio.connect(cluster.endpoint, timeout=float("inf")) as log,
        ):
            cluster.silent |= {wire.LeaseQuery, wire.CursorClaim}
            await body(log)

    asyncio.run(main())


@STREAMS
def test_an_iteration_of_a_stream_that_is_not_open_has_its_own_time_out(
    cluster: ServedCluster, name: str
) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        with pytest.raises(ziplog.DeadlineError):
            await anext(getattr(log, name)(timeout=SHORT_S))

    run(cluster, body)


@STREAMS
def test_a_fetch_from_a_stream_that_is_not_open_ends_without_records(
    cluster: ServedCluster, name: str
) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        stream = getattr(log, name)(ziplog.RID_GENESIS)
        assert await stream.fetch(timeout=SHORT_S) == []
        rid = await log.insert_after(b"x")
        cluster.silent.clear()
        await stream
        if name == "subscribe":
            assert [record.rid for record in await stream.fetch()] == [rid]

    run(cluster, body)


def test_a_barrier_of_a_subscription_that_is_not_open_has_its_own_time_out(
    cluster: ServedCluster,
) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        with pytest.raises(ziplog.DeadlineError, match="the subscription is not open yet"):
            await log.subscribe().barrier(timeout=SHORT_S)

    run(cluster, body)


def test_calls_of_a_cursor_that_is_not_claimed_end(cluster: ServedCluster) -> None:
    async def body(log: ziplog.aio.AsyncLog) -> None:
        cursor = log.cursor("c")
        assert await cursor.fetch(timeout=SHORT_S) == []
        with pytest.raises(ziplog.DeadlineError, match="the cursor c is not claimed yet"):
            await cursor.commit(timeout=SHORT_S)
        await cursor.close()

    run(cluster, body)
