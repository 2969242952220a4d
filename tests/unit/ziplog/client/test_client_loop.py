"""Readable events of the asyncio engine, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from ziplog.client.common.requests import NEVER, TailRequest
from ziplog.client.engines import asyncio_engine as loops
from ziplog.client.engines.asyncio_engine import AsyncioEngine

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST = TailRequest(NEVER)


class Fake:
    """An engine with its transport and node; `frames` holds arrivals, `sign` makes it readable.

    As with the transport, frames that arrive are received after `poll` only.
    """

    def __init__(
        self, _core: Any, answer: Callable[[int, Any], None], _fail: Any, **_: Any
    ) -> None:
        self._answer = answer
        self.core = self.transport = self
        self.arrived: list[int] = []
        self.frames: list[int] = []
        self.received = self.batches = self.polls = 0
        #: Frames that arrive during a send.
        self.on_submit: list[int] = []
        self._read, self._write = os.pipe2(os.O_NONBLOCK)

    def arrive(self, *frames: int) -> None:
        self.arrived += frames
        os.write(self._write, b"\0")

    def fileno(self) -> int:
        return self._read

    def submit(self, _number: int, _request: Any) -> None:
        if self.on_submit:
            self.arrive(*self.on_submit)

    def receive(self) -> tuple[bytes, int] | None:
        self.received += 1
        return (b"server", self.frames.pop(0)) if self.frames else None

    def handle(self, _src: bytes, frame: int) -> None:
        self._answer(frame, "answer")

    def end_batch(self) -> None:
        self.batches += 1

    def ready(self) -> bool:
        return bool(self.frames)

    def poll(self) -> None:
        self.polls += 1
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        self.frames += self.arrived
        self.arrived = []

    def next_wakeup(self) -> None:
        return None

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "Engine", Fake)


def run(body: Callable[[AsyncioEngine, Any], Any]) -> None:
    async def main() -> None:
        driver = AsyncioEngine(None)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(10):
                await body(driver, driver.engine)
        finally:
            driver.close()

    asyncio.run(main())


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_frames_that_arrive_during_a_send_are_received() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        engine.on_submit = [1]
        assert await driver.call(REQUEST) == "answer"

    run(body)


def test_submitted_request_is_stepped_without_input() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        driver.submit(REQUEST)
        await rounds()
        assert engine.batches == 1
        assert not engine.polls

    run(body)


def test_frames_that_arrive_are_received() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        _, future = driver.submit(REQUEST)
        await rounds()
        engine.arrive(1)
        assert await future == "answer"
        assert engine.polls == 1

    run(body)


def test_event_without_a_frame_is_cleared_once() -> None:
    async def body(_driver: AsyncioEngine, engine: Fake) -> None:
        engine.arrive()
        await rounds(20)
        assert engine.polls == 1

    run(body)


def test_loop_does_other_work_between_batches_of_frames() -> None:
    async def body(_driver: AsyncioEngine, engine: Fake) -> None:
        engine.arrive(*range(1000))
        await rounds(3)
        assert 0 < len(engine.frames) < 1000
        await rounds(5)
        assert not engine.frames
        assert engine.polls == 1

    run(body)
