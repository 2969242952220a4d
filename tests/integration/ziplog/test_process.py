"""The signals that stop a node's process."""

from __future__ import annotations

import os
import signal
from signal import SIGINT, SIGTERM
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ziplog.core.node import StopRequested
from ziplog.runtime import process

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def wake_fd(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(process, "spare_collector", lambda: None)
    handlers = {number: signal.getsignal(number) for number in (SIGTERM, SIGINT)}
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends[1]
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for end in ends:
        os.close(end)


class FakeDriver:
    """Receives signals while it runs."""

    def __init__(self, signals: list[int]) -> None:
        self._signals = signals
        self.story: list[Any] = []

    def post(self, event: Any) -> None:
        self.story.append(event)

    def stop(self) -> None:
        self.story.append("stop")

    def run(self) -> None:
        for number in self._signals:
            os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("asks_node", "signals", "expected"),
    [
        (True, [SIGTERM], [StopRequested()]),
        (True, [SIGTERM, SIGTERM], [StopRequested(), "stop"]),
        (True, [SIGTERM, SIGINT], [StopRequested(), "stop"]),
        (True, [SIGINT], ["stop"]),
        (False, [SIGTERM], ["stop"]),
    ],
)
def test_the_first_sigterm_asks_the_node_and_any_other_signal_stops_it(
    wake_fd: int, asks_node: bool, signals: list[int], expected: list[Any]
) -> None:
    driver = FakeDriver(signals)
    transport = SimpleNamespace(wake_fd=wake_fd, changes={})
    process.run_process(cast("Any", driver), cast("Any", transport), asks_node=asks_node)
    assert driver.story == expected
