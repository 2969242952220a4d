"""A signal handler raises at every step of the blocking client: nothing is lost or left over."""

from __future__ import annotations

import gc
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.interrupts import Struck, interrupted
from tests.unit.ziplog.client.served import ServedCluster
from tests.waiting import explicit_collections
from ziplog import RecordId
from ziplog.client.engines import timer_thread
from ziplog.client.engines.signals import SHIELD
from ziplog.runtime.descriptors import start_thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from ziplog import Record, Subscription

_COUNT = 3


@pytest.fixture(autouse=True)
def explicit() -> Iterator[None]:
    with explicit_collections():
        yield


@pytest.fixture(name="log")
def _log() -> Iterator[ziplog.Log]:
    with ServedCluster() as cluster, ziplog.connect(cluster.endpoint) as log:
        yield log


def assert_nothing_open(log: ziplog.Log) -> None:
    """Assert that earlier calls left nothing open."""
    gc.collect(0)
    log.check_tail()
    core = log._core
    core.check()
    assert not core._subscriptions._open, "a subscription was left open"
    assert not core._scans._open, "a scan was left open"
    assert not core._is_waiting(), "a call is still pending"
    assert not log._engine._tickets
    assert not log._engine._waiting_threads
    assert not log._engine._incoming
    assert not log._engine._role.locked()
    assert not SHIELD.noted
    assert SHIELD._owner is None
    former = signal.getsignal(signal.SIGINT)
    assert former is not SHIELD._note


class Reading:
    """A reader that continues after every exception."""

    def __init__(self, log: ziplog.Log, rids: list[RecordId], step: Any) -> None:
        self._log, self._rids, self._step = log, rids, step
        self.got: list[RecordId] = []
        self.struck = 0

    def run(self) -> None:
        self.got, subscription = [], None
        while True:
            try:
                if subscription is None:
                    subscription = self._log.subscribe(self._rids[0], follow=False)
                records: list[Record] = self._step(subscription)
            except Struck:
                self.struck += 1
                if subscription is not None:
                    self._check_position(subscription)
                continue
            if not records:
                return
            self.got += [record.rid for record in records]
            self._check_position(subscription)

    def _check_position(self, subscription: Subscription) -> None:
        while True:
            with suppress(Struck):
                position = subscription.position
                break
        count = len(self.got)
        low = self.got[-1].gsn if self.got else 0
        assert low < position.gsn
        assert count == len(self._rids) or position <= self._rids[count]

    def check(self) -> None:
        assert self.got == self._rids
        assert_nothing_open(self._log)


def _by_next(subscription: Subscription) -> list[Record]:
    for record in subscription:
        return [record]
    return []


def _by_fetch(subscription: Subscription) -> list[Record]:
    return subscription.fetch(3)


@pytest.mark.parametrize("step", [_by_next, pytest.param(_by_fetch, marks=pytest.mark.nightly)])
def test_a_subscription_loses_and_repeats_nothing(log: ziplog.Log, step: Any) -> None:
    rids = [log.insert_after(b"%d" % number) for number in range(_COUNT)]
    reading = Reading(log, rids, step)
    steps = interrupted(reading.run, reading.check)
    assert steps > 200
    assert reading.struck > 100


def test_a_scan_loses_and_repeats_nothing(log: ziplog.Log) -> None:
    rids = [log.insert_after(b"%d" % number) for number in range(_COUNT)]
    gsns: list[int] = []

    def run() -> None:
        gsns.clear()
        scan: Any = None
        while True:
            with suppress(Struck):
                scan = scan or log.scan(0, rids[0].gsn, rids[-1].gsn + 1)
                for units, _ in scan:
                    gsns.extend(gsn for unit in units for gsn in unit.gsns)
                return

    def check() -> None:
        assert gsns == [rid.gsn for rid in rids]
        assert_nothing_open(log)

    assert interrupted(run, check) > 100


def _payloads(log: ziplog.Log) -> list[bytes]:
    return [record.payload for record in log.subscribe(follow=False)]


def test_interrupted_insert_is_in_the_log_at_most_once(log: ziplog.Log) -> None:
    done: list[bytes] = []
    begun: list[bytes] = []

    def run() -> None:
        for _ in range(2):
            payload = b"%d" % len(begun)
            begun.append(payload)
            with suppress(Struck):
                log.insert_after(payload)
                done.append(payload)

    assert interrupted(run, lambda: assert_nothing_open(log)) > 100
    found = _payloads(log)
    assert len(set(found)) == len(found)
    assert set(done) <= set(found) <= set(begun)


def test_futures_complete_once_despite_interruptions(log: ziplog.Log) -> None:
    done: list[bytes] = []
    begun: list[bytes] = []

    def run() -> None:
        for _ in range(2):
            payload = b"%d" % len(begun)
            begun.append(payload)
            future: Any = None
            with suppress(Struck):
                future = log.insert_nowait(payload)
            while future is not None and payload not in done:
                # CPython's own `Condition.wait` raises RuntimeError after an interruption.
                with suppress(Struck, RuntimeError):
                    future.result(10)
                    done.append(payload)
        for _ in range(2):
            with suppress(Struck):
                log.flush(10)

    def check() -> None:
        assert log._engine._futures.open == 0
        assert log._engine._futures._bytes == 0
        assert_nothing_open(log)

    assert interrupted(run, check) > 100
    found = _payloads(log)
    assert len(set(found)) == len(found)
    assert set(done) <= set(found) <= set(begun)


def test_signal_handler_may_call_the_interrupted_client(log: ziplog.Log) -> None:
    rids: list[ziplog.RecordId] = []
    former = signal.signal(signal.SIGALRM, lambda *_: rids.append(log.insert_after(b"alarm")))
    try:
        subscription = log.subscribe()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert next(subscription).rid == rids[0]
    finally:
        signal.signal(signal.SIGALRM, former)


def test_signal_handler_may_close_the_interrupted_client(log: ziplog.Log) -> None:
    former = signal.signal(signal.SIGALRM, lambda *_: log.close())
    try:
        log.insert_nowait(b"the background thread ends, too").result()
        subscription = log.subscribe()
        next(subscription)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(ziplog.ClosedError):
            next(subscription)
    finally:
        signal.signal(signal.SIGALRM, former)


@pytest.mark.timeout(60)
def test_signal_handler_may_insert_while_an_insert_begins(log: ziplog.Log) -> None:
    rids: list[ziplog.RecordId] = []
    former = signal.signal(
        signal.SIGALRM, lambda *_: rids.append(log.insert_nowait(b"alarm").result())
    )
    try:
        found = -1
        while len(rids) < 100:
            if len(rids) > found:
                found = len(rids)
                signal.setitimer(signal.ITIMER_REAL, 0.001 + found * 1e-5)
            log.insert_nowait(b"x")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    log.flush()
    assert len(set(rids)) == 100


@pytest.mark.timeout(60)
def test_signal_handler_may_claim_while_the_timer_thread_starts(
    log: ziplog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def handle(*_: object) -> None:
        log._engine.drive_timers()
        calls.append("handled")

    def start(thread: threading.Thread, what: str) -> threading.Thread:
        if not calls:
            signal.raise_signal(signal.SIGALRM)
        calls.append("started")
        return start_thread(thread, what)

    monkeypatch.setattr(timer_thread, "start_thread", start)
    former = signal.signal(signal.SIGALRM, handle)
    try:
        log._engine.drive_timers()
    finally:
        signal.signal(signal.SIGALRM, former)
    # The thread may end before the handler runs, which then starts it again.
    assert (calls[0], calls[-1]) == ("started", "handled")
