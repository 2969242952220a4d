"""The blocking engine, without a cluster."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.ziplog.client.fakes import CLIENT, SERVICE
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import Counters, Preferences, ReadRequest, Request
from ziplog.client.engines.blocking_engine import BlockingEngine
from ziplog.core.node import Cancelled, Effect, Event, Wakeup
from ziplog.core.units import NEVER

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

    def step_call(self, number: int, request: Request, _now: int) -> list[Effect]:
        if number:
            self.open.append(number)
        else:
            self.ended.append(request)
        return []

    def step(self, event: Event, _now: int) -> list[Effect]:
        if isinstance(event, Cancelled):
            self.cancelled.append(event.id)
        self.wakeups += isinstance(event, Wakeup)
        return []

    def step_ack(self, *_: object) -> list[Effect]:
        return []

    def next_wakeup(self) -> int:
        return 0


@pytest.fixture(name="late")
def _late(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BlockingEngine, LateCore]]:
    core = LateCore()
    engine = BlockingEngine(core)

    def receive_all() -> None:
        while core.open:
            engine._on_complete(core.open.pop(), None)

    monkeypatch.setattr(engine.engine, "_receive_all", receive_all)
    yield engine, core
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
