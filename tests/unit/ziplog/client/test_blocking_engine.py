"""The blocking engine, without a cluster."""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.unit.ziplog.client.fakes import CLIENT, SERVICE
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import Preferences
from ziplog.client.engines.blocking_engine import BlockingEngine


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
