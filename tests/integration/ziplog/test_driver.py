"""The driver's order of events and effects, with a transport in memory and on real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

import msgspec
import pytest

from tests.integration.ziplog.driver_world import (
    FakeNode,
    World,
    question,
    refusal,
)
from tests.logged_events import captured_events, events_go_to
from ziplog import wire
from ziplog.core.fields import MAX_FRAME
from ziplog.core.node import (
    BatchEnd,
    Broadcast,
    Complete,
    Connect,
    Disconnect,
    Effect,
    Event,
    FlushBeforeSend,
    Halt,
    LevelRecorded,
    LogWarning,
    Persist,
    Persisted,
    Pressed,
    Propose,
    Publish,
    Received,
    ReceivePublications,
    RecordLevel,
    RecordWire,
    ReportBadMessage,
    Send,
    StorageChanged,
    Wakeup,
    WireRecorded,
)
from ziplog.runtime.driver import Driver
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziplog.core.message import Message


def test_messages_then_posted_events_then_wakeup_then_batch_end() -> None:
    world = World()
    world.put(1, 2)
    world.node.deadline = 500
    world.driver.post(StorageChanged(full=True))
    world.run()
    assert world.node.events == [
        Received(b"peer", question(1)),
        Received(b"peer", question(2)),
        StorageChanged(full=True),
        Wakeup(),
        BatchEnd(),
    ]


def test_no_wakeup_before_its_time_and_sleep_until_it() -> None:
    world = World()
    world.node.deadline = 4_000
    world.run()
    assert Wakeup() not in world.node.events
    assert world.transport.waits == [3_000]


def test_without_a_deadline_it_sleeps_until_input() -> None:
    world = World()
    world.run()
    assert world.transport.waits == [None]


def test_flood_does_not_delay_the_deadline() -> None:
    world = World()
    world.put(*range(1_000))
    world.node.deadline = 0
    world.run()
    kinds = [type(event).__name__ for event in world.node.events]
    assert kinds.index("Wakeup") == 256
    assert kinds.count("Received") == 1_000
    assert kinds.count("BatchEnd") == 4
    assert len(world.transport.waits) == 1


def test_effects_are_carried_out_in_order() -> None:
    effects = [
        Connect(b"a", "127.0.0.1:1"),
        Send(b"a", question(1)),
        Persist("entry"),
        Broadcast((b"b", b"c"), question(2)),
        Propose(b"command", 7),
        Disconnect(b"a"),
    ]
    world = World(lambda event: effects if isinstance(event, Received) else [])
    world.put(0)
    world.run()
    assert world.story == [
        ("connect", b"a", "127.0.0.1:1"),
        (b"a", question(1)),
        ("append", "entry"),
        (b"b", question(2)),
        (b"c", question(2)),
        ("propose", b"command", 7),
        ("disconnect", b"a"),
    ]


@pytest.mark.parametrize(("count", "gathers"), [(7, False), (8, True)])
def test_frames_of_many_effects_are_gathered(count: int, gathers: bool) -> None:
    gathered: list[bool] = []
    effects: list[Effect] = [Complete(number, None) for number in range(count)]
    world = World(
        lambda event: effects if isinstance(event, Received) else [],
        carry_out={Complete: lambda _: gathered.append(world.transport.gathers)},
    )
    world.put(0)
    world.run()
    assert gathered == [gathers] * count
    assert not world.transport.gathers


def test_effects_of_a_further_kind_are_carried_out_in_their_place() -> None:
    effects = [Send(b"a", question(1)), Complete(7, "done"), Send(b"a", question(2))]
    completed: list[Complete] = []
    world = World(
        lambda event: effects if isinstance(event, Received) else [],
        carry_out={Complete: lambda effect: (completed.append(effect), world.story.append(7))},
    )
    world.put(0)
    world.run()
    assert world.story == [(b"a", question(1)), 7, (b"a", question(2))]
    assert completed == [Complete(7, "done")]


def persist_and_ack(event: Event) -> list[Effect]:
    if not isinstance(event, Received):
        return []
    number = event.message.request  # type: ignore[attr-defined]
    return [Persist(number), Send(b"client", question(number)), Send(b"client", refusal())]


def test_at_disk_one_flush_comes_before_the_acks_of_a_batch() -> None:
    world = World(persist_and_ack, flush_before_send=True)
    world.put(1, 2)
    world.run()
    assert world.story == [
        ("append", 1),
        (b"client", refusal()),  # promises nothing
        ("append", 2),
        (b"client", refusal()),
        ("flush", True),
        (b"client", question(1)),
        (b"client", question(2)),
    ]
    assert world.node.events[-2:] == [Persisted(2), BatchEnd()]


def test_at_disk_frames_sent_before_a_persist_are_not_held() -> None:
    world = World(
        lambda event: [Send(b"a", question(1)), Persist(1)] if isinstance(event, Received) else [],
        flush_before_send=True,
    )
    world.put(0)
    world.run()
    assert world.story == [(b"a", question(1)), ("append", 1), ("flush", True)]


def test_at_disk_gathered_frames_are_written_before_the_flush() -> None:
    world = World(persist_and_ack, flush_before_send=True)
    world.put(1)
    world.run()
    assert world.transport.written_at == [world.story.index(("flush", True))]


def test_at_disk_broadcasts_are_held_too() -> None:
    world = World(
        lambda event: (
            [Persist(1), Broadcast((b"a", b"b"), question(1))]
            if isinstance(event, Received)
            else []
        ),
        flush_before_send=True,
    )
    world.put(0)
    world.run()
    assert world.story == [
        ("append", 1),
        ("flush", True),
        (b"a", question(1)),
        (b"b", question(1)),
    ]


def test_at_disk_frames_are_held_while_the_disk_is_full() -> None:
    world = World(persist_and_ack, flush_before_send=True)
    world.put(1)
    world.store.has_room = False

    def later() -> None:
        assert (b"client", question(1)) not in world.story
        assert Persisted(1) not in world.node.events
        world.store.has_room = True
        world.transport.on_wait = world.driver.stop

    world.transport.on_wait = later
    world.driver.run()
    assert world.transport.waits[0] == 50_000_000
    assert world.story.index(("flush", True)) < world.story.index((b"client", question(1)))
    assert Persisted(1) in world.node.events


def test_at_disk_stable_data_is_sent_while_the_disk_is_full() -> None:
    def reply(*, stable: bool) -> wire.ReadReply:
        return wire.ReadReply(1, 0, 1, 0, 1, 7, "record", stable)

    told = [
        wire.Deliver(1, 0, 1, 0, 1, 1, 8, []),
        wire.Early(1, 0, 1, 0, 1, 1, 8, []),
        wire.Trimmed(1, 0, 1, 1, 5),
        wire.TailReply(1, 0, 1, 0, 1, 7, 8),
        wire.Frontier(1, 0, 1, 1, 8),
        reply(stable=True),
    ]
    messages = [*told, reply(stable=False), wire.Report(1, 0, 1, 1, 1, 7, 7)]
    world = World(
        lambda event: (
            [Persist(1), *[Send(b"a", message) for message in messages]]
            if isinstance(event, Received)
            else []
        ),
        flush_before_send=True,
    )
    world.put(0)
    world.store.has_room = False
    world.run()
    assert [part[1] for part in world.story if part[0] == b"a"] == told


def test_bad_messages_and_warnings_of_a_node_are_logged() -> None:
    world = World(
        lambda event: (
            [ReportBadMessage(b"\0abc", "Hello: not requested"), LogWarning("the roof is on fire")]
            if isinstance(event, Received)
            else []
        )
    )
    world.put(1, 2, 3)
    with captured_events() as logs:
        world.run()
    assert world.driver.bad_frames == 3
    assert [log["event"] for log in logs].count("frame dropped") == 1
    assert "Hello: not requested" in str(logs)
    assert [log["event"] for log in logs].count("the roof is on fire") == 3


def test_a_log_that_fails_ends_no_node() -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError("the handler of the program fails")

    seen = []

    def step(event: Event) -> list[Effect]:
        seen.append(type(event))
        return [LogWarning("fire")] if isinstance(event, Received) else []

    world = World(step)
    world.put(1, 2)
    with events_go_to(fail):
        world.run()
    assert seen.count(Received) == 2


def test_at_disk_held_frames_are_bounded() -> None:
    world = World(
        lambda event: (
            [Persist(1), *[Send(b"a", question(1))] * 10_005] if isinstance(event, Received) else []
        ),
        flush_before_send=True,
    )
    world.put(0)
    world.run()
    assert world.transport.dropped == 5
    assert world.story.count((b"a", question(1))) == 10_000


def test_at_disk_entries_caused_by_persisted_are_flushed_without_a_sleep() -> None:
    def answer(event: Event) -> list[Effect]:
        if isinstance(event, Received):
            return [Persist(1)]
        return [Persist("mark"), Send(b"a", question(9))] if event == Persisted(1) else []

    world = World(answer, flush_before_send=True)
    world.put(0)
    world.run(sleeps=2)
    assert world.transport.waits[0] == 0
    flushes = [index for index, part in enumerate(world.story) if part == ("flush", True)]
    assert world.story.index((b"a", question(9))) > flushes[1]


def test_at_memory_nothing_is_flushed_or_held() -> None:
    world = World(persist_and_ack)
    world.put(1)
    world.run()
    assert world.story == [("append", 1), (b"client", question(1)), (b"client", refusal())]


def test_bad_frames_are_counted_and_rarely_logged() -> None:
    world = World()
    world.transport.incoming.extend([(b"\0bad", os.urandom(40)) for _ in range(100)])
    world.put(5)
    with captured_events() as logs:
        world.run()
    assert world.driver.bad_frames == 100
    assert Received(b"peer", question(5)) in world.node.events
    assert [log["src"] for log in logs] == [b"\0bad".hex()]


def test_messages_of_an_unknown_version_are_counted_apart() -> None:
    world = World()
    later = msgspec.msgpack.encode([(wire.VERSION + 1) * 256 + 42, 0, 9])
    unknown = msgspec.msgpack.encode([wire.VERSION * 256 + 255, 0, 9])  # Of this version.
    frames = [later, b"no message", unknown, later]
    world.transport.incoming.extend((b"peer", frame) for frame in frames)
    world.run()
    assert (world.driver.bad_frames, world.driver.other_versions) == (4, 2)


def test_frames_dropped_from_a_full_inbox_are_counted() -> None:
    world = World()
    # The driver handles 256 frames, then reads the others ahead: 256 of them are above 32 MiB.
    frame = wire.encode(question(1)).ljust(160 * 1024, b"\0")
    world.transport.incoming.extend([(b"peer", frame)] * 600)
    world.run()
    assert world.driver.overload_drops == 600 - 256 - 256


def test_a_server_that_begins_to_flush_flushes_what_it_had_not() -> None:
    """The next message that needs the disk comes after a flush, also of earlier entries."""
    effects = {
        1: [Persist(1), Send(b"client", question(1))],
        2: [FlushBeforeSend(True), Send(b"client", question(2))],
        3: [FlushBeforeSend(False), Persist(3), Send(b"client", question(3))],
    }
    world = World(
        lambda event: effects[event.message.request] if isinstance(event, Received) else []  # type: ignore[attr-defined]
    )
    for number in (1, 2, 3):
        world.put(number)
        world.driver.run_once()
    assert world.story == [
        ("append", 1), (b"client", question(1)),
        ("background", False), ("flush", True), (b"client", question(2)),
        ("background", True), ("append", 3), (b"client", question(3)),
    ]  # fmt: skip


def test_the_durability_level_is_recorded_before_the_node_hears_of_it() -> None:
    refusals = [OSError("no space"), None]

    def record(level: str) -> None:
        if (error := refusals.pop(0)) is not None:
            raise error
        world.story.append(("record", level))

    world = World(
        lambda event: [RecordLevel("disk")] if isinstance(event, Received) else [],
        record_level=record,
    )
    world.put(1)
    with captured_events() as logs:
        world.driver.run_once()
    assert [log["error"] for log in logs] == ["no space"]
    world.put(2)
    world.driver.run_once()
    world.driver.run_once()
    assert world.story == [("record", "disk"), "wake"]
    assert world.node.events.count(LevelRecorded("disk")) == 1


def test_the_wire_version_is_recorded_before_the_node_uses_it() -> None:
    refusals = [OSError("no space"), None]

    def record(version: int) -> None:
        if (error := refusals.pop(0)) is not None:
            raise error
        world.story.append(("record", version))

    world = World(
        lambda event: [RecordWire(2)] if isinstance(event, Received) else [], record_wire=record
    )
    world.put(1)
    with captured_events() as logs:
        world.driver.run_once()
    assert [log["error"] for log in logs] == ["no space"]
    world.driver.run_once()
    assert WireRecorded(2) not in world.node.events
    world.put(2)
    world.driver.run_once()
    world.driver.run_once()
    assert world.story == [("record", 2), "wake"]
    assert WireRecorded(2) in world.node.events


def test_too_long_message_is_a_local_error_and_is_not_sent() -> None:
    huge = wire.StatusReply(cluster=1, request=1, document=bytes(MAX_FRAME))
    world = World(lambda event: [Send(b"a", huge)] if isinstance(event, Received) else [])
    world.put(1)
    with captured_events() as logs:
        world.run()
    assert len(logs) == 1
    assert not world.story
    assert not world.halts


def test_halt_stops() -> None:
    world = World(lambda event: [Halt("two owners")] if isinstance(event, Received) else [])
    world.put(1)
    world.driver.run()
    assert world.halts == ["two owners"]
    assert not world.transport.waits


@pytest.mark.parametrize("effect", [Complete(1, None), None])
def test_exception_of_the_node_halts(effect: Effect | None) -> None:
    def answer(event: Event) -> list[Effect]:
        assert effect is not None, "stable went back"
        return [effect]

    world = World(answer)
    with captured_events():
        world.driver.run()
    assert len(world.halts) == 1


def test_halt_ends_the_process_with_70() -> None:
    program = (
        "from ziplog.runtime import process_logging\n"
        "process_logging.configure('shard-0-0')\n"
        "import atexit; atexit.register(print, 'a checkpoint')\n"
        "process_logging.halt('two owners', 'state=1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 70
    assert not done.stdout
    assert "node=shard-0-0" in done.stderr
    assert 'reason="two owners"' in done.stderr


def test_closed_stderr_does_not_stop_a_server() -> None:
    program = (
        "import os\n"
        "from ziplog import event_log\n"
        "from ziplog.runtime import process_logging\n"
        "process_logging.configure('shard-0-0')\n"
        "reader, writer = os.pipe()\n"
        "os.dup2(writer, 2); os.close(writer); os.close(reader)\n"
        "event_log.warning('frame dropped')\n"
        "print('still here')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.stdout == "still here\n"


@pytest.fixture
def running() -> Iterator[Callable[[FakeNode], tuple[Driver, str]]]:
    started: list[tuple[Driver, threading.Thread, Transport]] = []

    def start(node: FakeNode) -> tuple[Driver, str]:
        transport = Transport("127.0.0.1:0")
        driver = Driver(node, transport)
        thread = threading.Thread(target=driver.run)
        thread.start()
        started.append((driver, thread, transport))
        assert transport.endpoint is not None
        return driver, transport.endpoint

    yield start
    for driver, thread, transport in started:
        driver.stop()
        thread.join(10)
        assert not thread.is_alive()
        transport.close()


def test_on_real_sockets(running: Callable[[FakeNode], tuple[Driver, str]]) -> None:
    def answer(event: Event) -> list[Effect]:
        return [Send(event.src, event.message)] if isinstance(event, Received) else []

    _, endpoint = running(FakeNode(answer))
    client = Transport()
    try:
        client.connect(b"node", endpoint)
        for number in range(100):
            client.send(b"node", b"garbage")
            client.send(b"node", wire.encode(question(number)))
        answers: list[Message] = []
        deadline = time.monotonic() + 10
        while len(answers) < 100:
            assert time.monotonic() < deadline
            received = client.receive()
            if received is None:
                client.wait(100_000_000)
            else:
                answers.append(wire.decode(received[1]))
    finally:
        client.close()
    assert answers == [question(number) for number in range(100)]


def test_events_posted_by_threads_arrive_in_order(
    running: Callable[[FakeNode], tuple[Driver, str]],
) -> None:
    done = threading.Event()
    node = FakeNode()

    def answer(event: Event) -> list[Effect]:
        if event == Persisted(1_000):
            done.set()
        return []

    node.answer = answer
    driver, _ = running(node)
    for fseq in range(1_001):
        driver.post(Persisted(fseq))
    assert done.wait(10)
    posted = [event.fseq for event in node.events if isinstance(event, Persisted)]
    assert posted == list(range(1_001))


def test_with_a_queue_heartbeats_come_first_and_unread_input_is_reported() -> None:
    world = World()
    beat = wire.Beat(1, 0, 1, 1, 5, "up")
    world.put(*range(6_000))
    world.transport.incoming.append((b"other", wire.encode(beat)))
    world.run()
    events = world.node.events
    assert events.index(Received(b"other", beat)) < 1_200
    assert [event for event in events if isinstance(event, Pressed)] == [
        Pressed(unread=True),
        Pressed(unread=False),
    ]
    assert sum(isinstance(event, Received) for event in events) == 6_001


def test_iteration_with_slow_messages_ends_in_time() -> None:
    def answer(event: Event) -> list[Effect]:
        if isinstance(event, Received):
            world.now += 10_000_000
        return []

    world = World(answer)
    world.put(*range(40))
    world.node.deadline = 0
    world.run()
    kinds = [type(event).__name__ for event in world.node.events]
    assert kinds.index("Wakeup") <= 7


def test_posted_frames_are_stepped_with_their_source_and_bad_ones_are_counted() -> None:
    world = World()
    world.driver.post_frame(b"mms-0", wire.encode(question(1)))
    world.driver.post_frame(b"mms-0", b"no message")
    world.run()
    assert world.node.events == [Received(b"mms-0", question(1)), BatchEnd()]
    assert world.driver.bad_frames == 1


def test_publications_leave_by_the_publisher_and_are_requested_of_the_receiver() -> None:
    published: list[bytes] = []
    requested: list[tuple[bytes, str]] = []
    effects: list[Effect] = [Publish(question(2)), ReceivePublications(b"mms-0", "127.0.0.1:1")]
    world = World(
        lambda event: effects if isinstance(event, Received) else [],
        publish=published.append,
        receive_publications=lambda *order: requested.append(order),
    )
    world.put(1)
    world.run()
    assert published == [wire.encode(question(2))]
    assert requested == [(b"mms-0", "127.0.0.1:1")]
