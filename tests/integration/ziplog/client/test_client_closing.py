"""Clients that are closed while an insert begins, or after the end of their event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.unit.ziplog.client.served import ServedCluster
from tests.waiting import wait_until
from ziplog import RID_GENESIS, wire
from ziplog.client.common.requests import InsertRequest
from ziplog.client.engines.tickets import FutureTicket
from ziplog.core.units import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

_REQUEST = InsertRequest(NEVER, [b"x"], RID_GENESIS, None, 0)


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


@pytest.fixture(name="log")
def _log(cluster: ServedCluster) -> Iterator[ziplog.Log]:
    with ziplog.connect(cluster.endpoint) as log:
        yield log


def test_insert_that_waits_for_room_ends_with_its_client(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    cluster.silent.add(wire.Insert)
    for _ in range(16):
        log.insert_nowait(bytes(1 << 20))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(log.insert_nowait, b"x")
        wait_until(lambda: log._engine._futures._waiters, "the insert waits")
        log.close()
        with pytest.raises(ziplog.ClosedError):
            waiting.result(10).result(10)


def test_insert_that_begins_as_its_client_was_closed_raises_closed_error(log: ziplog.Log) -> None:
    """The client was open when the insert checked that."""
    log.insert_nowait(b"first").result(10)
    engine: Any = log._engine
    log.close()
    engine.check_open = lambda: None
    with pytest.raises(ziplog.ClosedError):
        engine.submit_insert(_REQUEST)
    assert engine._futures.open == 0


def test_insert_whose_call_was_interrupted_ends_with_its_client(
    cluster: ServedCluster, log: ziplog.Log
) -> None:
    """A signal handler raised just after the submission, while another thread closed the client."""
    cluster.silent.add(wire.Insert)
    log.insert_nowait(b"first")
    engine, ticket = log._engine, FutureTicket(1)
    cluster.wait_for_inserts(b"first", 2)
    engine._futures.wait_for_room(NEVER, (engine.next_number(), _REQUEST, ticket))
    engine._is_closed = True
    engine.engine.transport.wake()
    assert isinstance(ticket.future.exception(10), ziplog.ClosedError)


@pytest.mark.parametrize("claims", [False, True])
def test_asyncio_client_is_closed_after_the_end_of_its_event_loop(
    cluster: ServedCluster, *, claims: bool
) -> None:
    async def main() -> tuple[ziplog.aio.AsyncLog, object]:
        log = await ziplog.aio.connect(cluster.endpoint)
        cluster.silent.update({wire.Insert, wire.CursorClaim})
        cursor = log.cursor("x") if claims else None
        return log, (log.insert_nowait(b"x"), cursor)

    log, _pending = asyncio.run(main())
    assert log._core.has_cursor_calls == claims
    asyncio.run(log.close())
    assert log._engine.engine.transport.is_closed
    assert not log._engine._futures
