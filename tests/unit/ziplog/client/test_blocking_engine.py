"""The blocking engine, without a cluster."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.ziplog.client.fakes import CLIENT, SERVICE
from tests.waiting import wait_until
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import (
    Counters,
    InsertRequest,
    Preferences,
    ReadRequest,
    Request,
)
from ziplog.client.engines.blocking_engine import BlockingEngine
from ziplog.core.node import Cancelled, Complete, Effect, Event, Wakeup
from ziplog.core.units import NEVER, NS_PER_S
from ziplog.errors import LocalProtocolError
from ziplog.runtime.clock import now_ns
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator


class Contested(deque[Any]):
    """Calls of which another thread takes the last one first."""

    def popleft(self) -> Any:
        self.clear()
        return super().popleft()


def test_close_while_another_thread_ends_the_last_call() -> None:
    core = ClientCore(CLIENT, [SERVICE], Preferences(lambda _p, _k, live: live[0]))
    engine = BlockingEngine(core)
    engine._incoming = Contested([(1, None, None)])  # type: ignore[misc]
    engine.close()
    assert engine.engine.transport.is_closed


class LateCore:
    """A core with a timer that is always due; replies arrive before each step of the driver."""

    is_batch_open = False
    has_claims = False

    def __init__(self) -> None:
        self.counters = Counters()
        self.open: list[int] = []
        self.cancelled: list[int] = []
        self.ended: list[Request] = []
        self.wakeups = 0
        self.is_broken = self.is_refusing = False
        self.failures = 0
        self.result: Any = [RecordId(7, 0)]

    def step_call(self, number: int, request: Request, _now: int) -> list[Effect]:
        assert not self.is_refusing, "refused"
        if number:
            self.open.append(number)
        else:
            self.ended.append(request)
        return []

    def step(self, event: Event, _now: int) -> list[Effect]:
        self._fail_if_broken()
        if isinstance(event, Cancelled):
            self.cancelled.append(event.id)
        if not isinstance(event, Wakeup):
            return []
        self.wakeups += 1
        completed, self.open = self.open, []
        return [Complete(number, self.result) for number in completed]

    def _fail_if_broken(self) -> None:
        if self.is_broken:
            self.failures += 1
            raise AssertionError("broken")

    def step_ack(self, *_: object) -> list[Effect]:
        return []

    def next_wakeup(self) -> int:
        return 0


@pytest.fixture(name="late")
def _late(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BlockingEngine, LateCore]]:
    core = LateCore()
    engine = BlockingEngine(core)

    def receive_all() -> None:
        while core.open and not core.is_broken:
            engine._on_complete(core.open.pop(), core.result)

    monkeypatch.setattr(engine.engine, "_receive_all", receive_all)
    yield engine, core
    core.is_broken = False
    engine.close()


def test_a_late_client_ends_what_was_dropped(late: tuple[BlockingEngine, LateCore]) -> None:
    """Also if the replies of all its calls arrive before it waits for one."""
    engine, core = late
    owner, ending = LateCore(), ReadRequest(NEVER, 1)
    engine.owners.add(owner, lambda: [ending])
    del owner
    engine._abandon(77)
    engine.call(ReadRequest(NEVER, 2))
    assert core.cancelled == [77]
    assert core.ended == [ending]


def test_a_late_client_runs_its_timers(late: tuple[BlockingEngine, LateCore]) -> None:
    engine, core = late
    engine.call(ReadRequest(NEVER, 2))
    assert core.wakeups == 1


def insert() -> InsertRequest:
    return InsertRequest(now_ns() + 60 * NS_PER_S, [b"x"], RID_GENESIS, None, 0)


def test_an_internal_error_fails_the_futures(late: tuple[BlockingEngine, LateCore]) -> None:
    """The thread that met the error goes on, and completes later futures."""
    engine, core = late
    core.is_broken = True
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match=r"AssertionError: broken.*may have happened"):
            engine.submit_insert(insert()).result(30)
    core.is_broken = False
    assert engine.submit_insert(insert()).result(30) == RecordId(7, 0)


def test_a_call_that_cannot_start_fails(late: tuple[BlockingEngine, LateCore]) -> None:
    """Whichever thread starts it."""
    engine, core = late
    core.is_refusing = True
    future = engine.submit_insert(insert())
    with pytest.raises(AssertionError, match="refused"):
        future.result(30)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(engine.submit_insert, insert()).result(30)
    with pytest.raises(AssertionError, match="refused"):
        future.result(30)


def test_an_internal_error_does_not_end_the_timers(late: tuple[BlockingEngine, LateCore]) -> None:
    engine, core = late
    core.has_claims = core.is_broken = True
    engine.drive_timers()
    wait_until(lambda: core.failures > 1, "the timers ran again after an error")
    core.is_broken = False
    wait_until(lambda: core.wakeups > 0, "the timers run again")
