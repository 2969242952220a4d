"""A driver with a fake node, transport and store, and a clock that tests advance."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ziplog import wire
from ziplog.core.node import (
    Effect,
    Event,
    Wakeup,
)
from ziplog.runtime.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.message import Message


def question(number: int) -> Message:
    return wire.Tail(cluster=1, shard=0, view=1, request=number)


def refusal() -> wire.Refused:
    return wire.Refused(cluster=1, shard=0, view=1, server=0, request=1, code="full")


class FakeTransport:
    """Receives frames from a list, and adds sent ones to the common story."""

    def __init__(self, story: list[Any]) -> None:
        self.story = story
        self.incoming: deque[tuple[bytes, bytes]] = deque()
        self.waits: list[int | None] = []
        self.dropped = 0
        #: The lengths of the story when gathered frames were written.
        self.written_at: list[int] = []
        self.on_wait: Callable[[], None] = lambda: None

    def receive(self) -> tuple[bytes, bytes] | None:
        return self.incoming.popleft() if self.incoming else None

    def poll(self) -> None:
        return

    def ready(self) -> bool:
        return bool(self.incoming)

    def send(self, dst: bytes, frame: bytes) -> bool:
        self.story.append((dst, wire.decode(frame)))
        return True

    def flush_gathered(self) -> None:
        self.written_at.append(len(self.story))

    def connect(self, name: bytes, endpoint: str) -> None:
        self.story.append(("connect", name, endpoint))

    def disconnect(self, name: bytes) -> None:
        self.story.append(("disconnect", name))

    def wait(self, timeout_ns: int | None) -> None:
        self.waits.append(timeout_ns)
        self.on_wait()

    def wait_and_receive(self, timeout_ns: int | None) -> tuple[bytes, bytes] | None:
        self.wait(timeout_ns)
        return self.receive()

    def wake(self) -> None:
        self.story.append("wake")


class FakeStore:
    def __init__(self, story: list[Any]) -> None:
        self.story = story
        self.last_fseq = 0
        self.has_room = True

    def append(self, *entries: Any) -> None:
        self.last_fseq += len(entries)
        self.story += [("append", entry) for entry in entries]

    def flush(self) -> bool:
        self.story.append(("flush", self.has_room))
        return self.has_room

    def flush_in_background(self, is_on: bool) -> None:
        self.story.append(("background", is_on))


class FakeNode:
    """Returns the effects that the test gives."""

    def __init__(self, answer: Callable[[Event], list[Effect]] = lambda _: []) -> None:
        self.answer = answer
        self.events: list[Event] = []
        self.deadline: int | None = None

    def step(self, event: Event, now: int) -> list[Effect]:  # noqa: ARG002
        self.events.append(event)
        if isinstance(event, Wakeup):
            self.deadline = None
        return self.answer(event)

    def next_wakeup(self) -> int | None:
        return self.deadline

    def check(self) -> None:
        return


class World:
    """A driver that stops at the n-th sleep."""

    def __init__(
        self, answer: Callable[[Event], list[Effect]] = lambda _: [], **given: Any
    ) -> None:
        self.story: list[Any] = []
        self.halts: list[str] = []
        self.now = 1_000
        self.node = FakeNode(answer)
        self.transport = FakeTransport(self.story)
        self.store = FakeStore(self.story)
        self.driver = Driver(
            self.node,
            self.transport,  # type: ignore[arg-type]
            store=self.store,
            propose=lambda command, term, **_how: self.story.append(("propose", command, term)),
            clock=lambda: self.now,
            on_halt=lambda reason, _: self.halts.append(reason),
            **given,
        )

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.transport.incoming.append((b"peer", wire.encode(question(number))))

    def run(self, sleeps: int = 1) -> None:
        def count() -> None:
            if len(self.transport.waits) >= sleeps:
                self.driver.stop()

        self.transport.on_wait = count
        self.driver.run()
        self.story[:] = [part for part in self.story if part != "wake"]
