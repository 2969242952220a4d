"""A node in a thread of the program: its end, whether or not the thread could start."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ziplog.core.node import BatchEnd
from ziplog.errors import UnavailableError
from ziplog.runtime.driver import Driver
from ziplog.runtime.node_thread import NodeThread
from ziplog.runtime.transport import Transport


class Idle:
    """A node that does nothing; its first event comes with `post`."""

    cluster = 0

    def __init__(self) -> None:
        self.stepped: Any = threading.Event()

    def step(self, event: Any, _now: int) -> list[Any]:
        if not isinstance(event, BatchEnd):
            self.stepped.set()
        return []

    def next_wakeup(self) -> int | None:
        return None

    def check(self) -> None:
        pass


def of(node: Idle, ends: list[str]) -> NodeThread:
    transport = Transport("127.0.0.1:0")
    driver = Driver(node, transport, on_halt=lambda reason, _: ends.append(reason))
    return NodeThread("idle", driver, transport, lambda: ends.append(str(transport.endpoint)))


def test_a_node_runs_until_it_is_stopped_and_its_end_is_reported_once() -> None:
    node, ends = Idle(), []
    thread = of(node, ends)
    endpoint = thread.endpoint
    thread.start("cannot run")
    thread.post("an event")  # type: ignore[arg-type]
    assert node.stepped.wait(30)
    assert ends == []
    thread.stop()
    thread.stop()
    assert ends == [str(endpoint)]


@pytest.mark.parametrize("error", [RuntimeError("no thread"), KeyboardInterrupt()])
def test_a_thread_that_cannot_start_has_ended(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise error

    ends: list[str] = []
    thread = of(Idle(), ends)
    endpoint = thread.endpoint
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises((UnavailableError, KeyboardInterrupt)):
            thread.start("cannot run")
    assert len(ends) == 1
    Transport(endpoint).close()  # its port is free
    thread.stop()
    assert len(ends) == 1
