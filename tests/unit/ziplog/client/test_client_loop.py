"""Readable events of the asyncio engine, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from ziplog.client.common.requests import InsertRequest, TailRequest
from ziplog.client.engines import asyncio_engine as loops
from ziplog.client.engines.asyncio_engine import AsyncioEngine
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError, LocalProtocolError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST = TailRequest(NEVER)
INSERT = InsertRequest(NEVER, [b"record"], RecordId(0, 0), None, 0)


class Fake:
    """An engine with its transport and node; `frames` holds arrivals, `sign` makes it readable.

    As with the transport, frames that arrive are received after `poll` only. `has_batch`: the node
    acts at the end of the batch.
    """

    def __init__(
        self, _core: Any, answer: Callable[[int, Any], None], _fail: Any, **_: Any
    ) -> None:
        self._answer = answer
        self.core = self.transport = self
        self.arrived: list[int] = []
        self.frames: list[int] = []
        self.received = self.batches = self.polls = 0
        #: The numbers of the submitted and of the cancelled calls.
        self.submitted: list[int] = []
        self.cancelled: list[int] = []
        #: The calls whose submission raises.
        self.refused: list[int] = []
        self.has_batch = True
        #: The next timer of the node.
        self.due: int | None = None
        #: Frames that arrive during a send.
        self.on_submit: list[int] = []
        self._read, self._write = os.pipe2(os.O_NONBLOCK)

    def arrive(self, *frames: int) -> None:
        self.arrived += frames
        os.write(self._write, b"\0")

    def fileno(self) -> int:
        return self._read

    def submit(self, number: int, _request: Any) -> None:
        self.submitted.append(number)
        if number in self.refused:
            raise RuntimeError
        if self.on_submit:
            self.arrive(*self.on_submit)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def receive(self) -> tuple[bytes, int] | None:
        self.received += 1
        return (b"server", self.frames.pop(0)) if self.frames else None

    def wait_and_receive(self, timeout_ns: int) -> tuple[bytes, int] | None:
        assert timeout_ns == 0, "the loop waits, not the engine"
        self.poll()
        return self.receive()

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

    def next_wakeup(self) -> int | None:
        return self.due

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


def test_acks_on_the_short_path_end_no_batch() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        engine.has_batch = False
        _, first = driver.submit(REQUEST)
        _, second = driver.submit(REQUEST)
        engine.arrive(1, 2)
        assert [await first, await second] == ["answer", "answer"]
        await rounds()
        assert engine.polls == 1
        assert engine.batches == 0

    run(body)


def test_message_after_an_ack_on_the_short_path_ends_the_batch() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        engine.has_batch = False
        _, first = driver.submit(REQUEST)
        _, second = driver.submit(REQUEST)
        first.add_done_callback(lambda _: setattr(engine, "has_batch", True))
        engine.arrive(1)
        await first
        engine.arrive(2)
        await second
        assert engine.batches == 1

    run(body)


def test_timer_of_an_insert_on_the_short_path_steps_the_node() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        engine.has_batch = False
        engine.due = 1
        driver.submit(REQUEST)
        await rounds()
        assert engine.batches > 0

    run(body)


def test_collected_subscription_is_closed_after_an_ack_on_the_short_path() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        engine.has_batch = False
        owner = asyncio.Event()
        driver.owners.add(owner, lambda: [REQUEST])
        _, future = driver.submit(REQUEST)
        del owner
        engine.arrive(1)
        await future
        assert len(engine.submitted) == 2

    run(body)


# --- inserts of one iteration of the loop ---


def test_inserts_after_the_first_are_submitted_together_before_the_batch_ends() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        for _ in range(3):
            driver.submit(INSERT)
        assert engine.submitted == [1]
        await rounds()
        assert engine.submitted == [1, 2, 3]
        assert engine.batches == 1

    run(body)


def test_other_calls_do_not_overtake_gathered_inserts() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        for request in (INSERT, INSERT, REQUEST, INSERT):
            driver.submit(request)
        assert engine.submitted == [1, 2, 3]
        await rounds()
        assert engine.submitted == [1, 2, 3, 4]

    run(body)


def test_a_batch_with_several_results_ends_after_the_next_inserts_of_their_tasks() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        seen: list[list[int]] = []
        engine.end_batch = lambda: seen.append([*engine.submitted])  # type: ignore[method-assign]

        async def insert_twice() -> None:
            await driver.call(INSERT)
            await driver.call(INSERT)

        tasks = [asyncio.create_task(insert_twice()) for _ in range(3)]
        await rounds()
        seen.clear()
        engine.arrive(1, 2, 3)
        await rounds(10)
        assert seen == [[1, 2, 3, 4, 5, 6]]
        engine.arrive(4, 5, 6)
        await asyncio.gather(*tasks)

    run(body)


def test_half_of_the_inserts_are_sent_while_the_other_tasks_run() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        seen: list[int] = []
        engine.end_batch = lambda: seen.append(len(engine.submitted))  # type: ignore[method-assign]

        async def insert(times: int) -> None:
            for _ in range(times):
                await driver.call(INSERT)

        tasks = [asyncio.create_task(insert(3)) for _ in range(40)]
        await rounds()
        seen.clear()
        engine.arrive(*range(1, 41))
        await rounds(10)
        assert seen == [60, 80]
        seen.clear()
        engine.arrive(*range(41, 61))
        await rounds(10)
        assert seen == [100, 100], "20 are half of all: the other 20 are in flight"
        for first in (61, 81, 101):
            engine.arrive(*range(first, first + 20))
            await rounds(10)
        await asyncio.gather(*tasks)

    run(body)


def test_a_batch_ends_at_the_latest_one_iteration_after_its_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loops, "_BATCH", 2)

    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        futures = [driver.submit(REQUEST)[1] for _ in range(40)]
        await rounds()
        before = engine.batches
        engine.arrive(*range(1, 41))
        await futures[-1]
        assert engine.batches >= before + 5, "results in every iteration do not hold it up"

    run(body)


def test_a_cancelled_gathered_insert_is_not_submitted() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        tasks = [asyncio.create_task(driver.call(INSERT)) for _ in range(3)]
        asyncio.get_running_loop().call_soon(tasks[1].cancel)
        await rounds()
        assert engine.submitted == [1, 3]
        assert tasks[1].cancelled()
        assert engine.cancelled == [2], "it does not know this call"
        engine.arrive(1, 3)
        assert [await tasks[0], await tasks[2]] == ["answer", "answer"]

    run(body)


def test_close_fails_gathered_inserts() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        _, first = driver.submit(INSERT)
        _, second = driver.submit(INSERT)
        driver.close()
        for future in (first, second):
            with pytest.raises(ClosedError):
                await future
        assert engine.submitted == [1]
        assert not driver._gathered, "their payloads are released"

    run(body)


def test_a_gathered_insert_that_cannot_be_submitted_fails_alone() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        engine.refused = [3]
        futures = [driver.submit(INSERT)[1] for _ in range(4)]
        await rounds()
        assert engine.submitted == [1, 2, 3, 4], "none of them twice"
        with pytest.raises(RuntimeError):
            await futures[2]
        engine.arrive(1, 2, 4)
        assert [await futures[index] for index in (0, 1, 3)] == ["answer"] * 3

    run(body)


def test_flush_waits_for_an_insert_of_a_cancelled_future() -> None:
    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        driver.submit_insert(INSERT).cancel()
        flush = asyncio.ensure_future(driver.flush(10))
        await rounds()
        assert not flush.done()
        engine.arrive(1)
        await flush

    run(body)


# --- input ---


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


def test_an_internal_error_fails_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop logs the error, and the client goes on."""

    async def body(driver: AsyncioEngine, engine: Fake) -> None:
        logged: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(str(context["exception"])))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "end_batch", Mock(side_effect=AssertionError("broken")))
            with pytest.raises(LocalProtocolError, match="AssertionError: broken"):
                await driver.call(REQUEST)
        assert logged == ["broken"]
        _, future = driver.submit(REQUEST)
        engine.arrive(2)
        assert await future == "answer"

    run(body)
