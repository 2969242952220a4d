"""Calls of a blocking client from code that its calls run: policies, callbacks, signal handlers."""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import ziplog
from tests.unit.ziplog.client.served import ServedCluster
from tests.waiting import wait_until
from ziplog import RecordId
from ziplog.client.engines import blocking_engine, pending_futures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(name="cluster")
def _cluster() -> Iterator[ServedCluster]:
    with ServedCluster() as cluster:
        yield cluster


@pytest.fixture(name="log")
def _log(cluster: ServedCluster) -> Iterator[ziplog.Log]:
    with ziplog.connect(cluster.endpoint) as log:
        yield log


@pytest.fixture(autouse=True)
def _no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make polling so rare that a waiting thread must be handed the driver role."""
    for module in (blocking_engine, pending_futures):
        monkeypatch.setattr(module, "_POLL_S", 3600.0)


@pytest.mark.parametrize("name", ["check_tail", "close"])
def test_a_policy_that_calls_its_own_client_is_refused(log: ziplog.Log, name: str) -> None:
    raised = []

    def choose(_payload: bytes, _key: bytes | None, _live: Sequence[int]) -> int:
        try:
            getattr(log, name)()
        except ziplog.errors.LocalProtocolError as error:
            raised.append(str(error))
        return 0

    log.set_policy(choose)
    rid = log.insert_after(b"x")
    assert log.read_record(rid).payload == b"x"
    assert len(raised) == 1
    assert "called the client in the middle of one of its calls" in raised[0]


def test_a_futures_callback_may_use_the_client(log: ziplog.Log) -> None:
    done: Future[RecordId] = Future()
    log.insert_nowait(b"x").add_done_callback(
        lambda future: done.set_result(log.insert_after(b"y", future.result()))
    )
    assert done.result(10).gsn > 0


def test_a_callback_that_waits_holds_up_no_insert(log: ziplog.Log, cluster: ServedCluster) -> None:
    """Its thread is the one that sends inserts without a blocking call."""
    sent: Future[None] = Future()

    def insert_and_wait(_: Future[RecordId]) -> None:
        log.insert_nowait(b"next")
        cluster.wait_for_inserts(b"next", 2)
        sent.set_result(None)

    futures = [log.insert_nowait(b"%d" % number) for number in range(60)]
    futures[-1].add_done_callback(insert_and_wait)
    sent.result(10)


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("call", ["flush", "result"])
def test_signal_handler_may_wait_for_inserts(log: ziplog.Log, call: str, *, is_alone: bool) -> None:
    """The interrupted call waits, for its result or for another thread, which then leaves."""
    done: list[RecordId] = []

    def insert(*_: object) -> None:
        if not is_alone:
            wait_until(lambda: not log._engine._role.locked(), "the other thread has left")
        future = log.insert_nowait(b"x")
        if call == "flush":
            log.flush(10)
        done.append(future.result(10))

    following, other = log.subscribe(), log.subscribe()
    former = signal.signal(signal.SIGALRM, insert)
    try:
        with ThreadPoolExecutor(1) as pool:
            if not is_alone:
                pool.submit(other.fetch, timeout=0.3)
                wait_until(log._engine._role.locked, "the other thread drives")
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            (record,) = following.fetch(timeout=20)
    finally:
        signal.signal(signal.SIGALRM, former)
    assert [record.rid] == done
