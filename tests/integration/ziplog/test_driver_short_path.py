"""The driver and a short path for inserts (docs/protocol.md, section 4.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

from tests.integration.ziplog.driver_world import (
    World,
    question,
)
from ziplog import wire
from ziplog.core.node import (
    BatchEnd,
    Effect,
    Persist,
    Persisted,
    Received,
    Send,
    StorageChanged,
    Wakeup,
)

if TYPE_CHECKING:
    from ziplog.core.message import Message


class FakePath:
    """Accepts all inserts and forwards; a forward acks an earlier unit."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        #: What `end_batch` returns.
        self.batch_end_due = 10**18
        self.ends = 0

    def insert(self, _route: bytes, message: wire.Insert, _now: int) -> wire.InsertAck:
        self.effects.append(Persist(message.seq))
        return ack(message.seq)

    @property
    def messages(self) -> tuple[type[Message], ...]:
        return (wire.Forward, wire.Ahead)

    def receive(self, _route: bytes, message: Message, _now: int) -> bool:
        if isinstance(message, wire.Forward):
            self.effects += [Persist(message.first), Send(b"client", ack(message.first))]
        else:
            assert isinstance(message, wire.Ahead)
            self.effects.append(Persist(message.gsn))
        return True

    @property
    def has_effects(self) -> bool:
        return bool(self.effects)

    def end_batch(self, _now: int) -> int:
        self.ends += 1
        if self.effects:
            self.effects.append(Send(b"reader", question(self.ends)))
        return self.batch_end_due

    def pop_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects


def ack(seq: int) -> wire.InsertAck:
    return wire.InsertAck(1, 0, 1, 0, 1, seq, 1, True, [seq], False)


def on_short_path(*messages: Message) -> tuple[World, FakePath]:
    """Return a world with these messages on the short path."""
    path = FakePath()
    world = World(insert_path=path, store_delay_ns=2_000)
    world.driver._deadline = 10**18
    for message in messages:
        world.transport.incoming.append((b"client", wire.encode(message)))
    return world, path


def plain(seq: int) -> wire.Insert:
    return wire.Insert(1, 0, 1, b"c" * 16, seq, 1, 0, 0, 1, b"body")


def forward(first: int) -> wire.Forward:
    return wire.Forward(1, 0, 1, 1, first, [], 0, 0, False)


def test_short_path_sends_before_it_stores() -> None:
    world, path = on_short_path(plain(1), plain(2))
    world.driver.run_once()
    assert path.ends == 1
    assert world.node.events == []
    assert world.story == [
        (b"client", ack(1)),
        (b"client", ack(2)),
        (b"reader", question(1)),
    ]
    assert world.transport.waits == [2_000]
    world.now += 1_999
    world.driver.run_once()
    assert len(world.story) == 3
    world.now += 1
    world.driver.run_once()
    assert world.story[3:] == [("append", 1), ("append", 2)]
    assert world.transport.waits == [2_000, 1, 10**18 - world.now]
    assert world.node.events == []


def test_short_path_gets_hints() -> None:
    world, path = on_short_path(wire.Ahead(1, 1, 7))
    world.driver.run_once()
    assert path.ends == 1
    assert world.node.events == []
    assert world.story == [(b"reader", question(1))]
    world.driver.stop()
    world.driver.run()
    assert world.story[2:] == [("append", 7)]


def test_stop_stores_the_entries_of_the_short_path() -> None:
    world, _ = on_short_path(plain(1))
    world.driver.run_once()
    world.driver.stop()
    world.driver.run()
    assert world.story[2:] == ["wake", ("append", 1)]


def test_batch_end_finds_the_entries_of_the_short_path() -> None:
    world, path = on_short_path(plain(1))
    world.driver.run_once()
    path.batch_end_due = world.now
    world.driver.run_once()
    assert world.story[2:] == [("append", 1)]
    assert world.node.events == [BatchEnd()]


def test_store_gets_32_entries_of_the_short_path_together() -> None:
    world, _ = on_short_path(*map(plain, range(1, 32)))
    world.driver.run_once()
    assert [entry for what, entry in world.story if what == "append"] == []
    world.transport.incoming.append((b"client", wire.encode(plain(32))))
    world.driver.run_once()
    appended = [entry for what, entry in world.story if what == "append"]
    assert appended == list(range(1, 33))
    assert world.node.events == []


def test_batch_continues_with_the_frame_that_ends_a_wait() -> None:
    world, path = on_short_path(plain(1))
    arrivals = [[plain(2)], [plain(3), plain(4)]]

    def arrive() -> None:
        for message in arrivals.pop(0) if arrivals else []:
            world.transport.incoming.append((b"client", wire.encode(message)))

    world.transport.on_wait = arrive
    world.driver.run_once()
    assert [message.seq for dst, message in world.story if dst == b"client"] == [1, 2, 3, 4]
    assert path.ends == 3  # the first, the second, and the last two together
    assert world.node.events == []


def test_acks_on_the_short_path_stay_in_order() -> None:
    world, _ = on_short_path(plain(1), forward(7), plain(2))
    world.driver.run_once()
    acks = [message for dst, message in world.story if dst == b"client"]
    assert acks == [ack(1), ack(7), ack(2)]


def test_many_messages_of_the_short_path_are_gathered() -> None:
    world, path = on_short_path()
    gathered: list[bool] = []
    send = world.transport.send

    def record(dst: bytes, frame: bytes) -> bool:
        gathered.append(world.transport.gathers)
        return send(dst, frame)

    for count in (7, 8):
        path.effects = [Send(b"reader", question(number)) for number in range(count)]
        with patch.object(world.transport, "send", record):
            world.driver._carry_out_short_path()
    assert gathered == 7 * [False] + 8 * [True]
    assert not world.transport.gathers


def test_batch_end_follows_the_short_path_if_it_is_due() -> None:
    world, path = on_short_path(plain(1))
    path.batch_end_due = world.now
    world.driver.run_once()
    assert world.node.events == [BatchEnd()]
    world, path = on_short_path(plain(1))
    world.driver._deadline = world.now
    world.driver.run_once()
    assert path.ends == 0
    assert world.node.events == [Wakeup(), BatchEnd()]


def test_persisted_waits_for_the_next_batch_end_of_a_driver_on_the_short_path() -> None:
    world, path = on_short_path(plain(1))
    world.transport.on_wait = lambda: world.driver.post(Persisted(1))
    world.driver.run_once()
    assert "wake" not in world.story
    assert world.node.events == []
    path.batch_end_due = world.now
    world.transport.on_wait = lambda: None
    world.driver.run_once()
    assert world.node.events == [Persisted(1), BatchEnd()]


def test_persisted_wakes_a_driver_that_waits_for_a_step() -> None:
    world, path = on_short_path(plain(1))
    path.batch_end_due = 0
    world.transport.on_wait = lambda: world.driver.post(Persisted(1))
    world.driver.run_once()
    assert world.story[-1] == "wake"


def test_other_events_end_the_short_path_at_once() -> None:
    world, _ = on_short_path(plain(1))
    world.driver.run_once()
    world.driver.post(Persisted(1))
    world.driver.post(StorageChanged(full=True))
    assert world.story[-1] == "wake"
    world.driver.run_once()
    assert world.node.events == [Persisted(1), StorageChanged(full=True), BatchEnd()]


def test_step_finds_the_entries_of_the_short_path() -> None:
    world, _ = on_short_path(plain(1), question(9))
    world.node.answer = lambda event: [Persist("step")] if isinstance(event, Received) else []
    world.driver.run_once()
    assert [entry for what, entry in world.story if what == "append"] == [1, "step"]


def test_one_iteration_and_one_insert_in_64_are_timed() -> None:
    world, _ = on_short_path()
    driver = world.driver
    for seq in range(1, 129):
        world.now += 1
        world.transport.incoming.append((b"client", wire.encode(plain(seq))))
        driver.run_once()
    assert (sum(driver.iterations.counts), sum(driver.short_acks.counts)) == (2, 2)
    for _ in range(64):  # Iterations with a `BatchEnd` are timed, too.
        world.now += 1
        driver._deadline = 0
        driver.run_once()
    assert sum(driver.iterations.counts) == 3
