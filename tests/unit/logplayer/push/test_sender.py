"""The player's state machine: what it sends, when, and what a reply means."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from logplayer.contract import Batch, Fenced, Opened, Rejected, Retry, Task
from logplayer.push import messages
from logplayer.push.messages import (
    PushBatch,
    PushClose,
    PushDone,
    PushFailed,
    PushOpen,
    PushOpened,
    PushQuery,
    PushWorking,
)
from logplayer.push.sender import PushSender, name_of
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from tests.sim.player.targets import Sink, Store
from tests.unit.logplayer.push_world import ENDPOINT, push_spec
from ziplog.core.node import Connect, Disconnect, LogWarning, ReportBadMessage, Send
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.errors import ConfigError, ProtocolError
from ziplog.types import Record, RecordId
from ziplog.wire import NodeInfo

_NAME: Final = name_of(ENDPOINT)
_TASK: Final = Task("orders", "db", 0, 1, 9, 2, 5, 0, 7, b"mark", has_moved=True)
_RECORD: Final = Record(RecordId(8, 1), b"payload", b"key", 1, 1)


class Bench:
    """A sender, and what it did."""

    def __init__(self, **settings: Any) -> None:
        target: Any = settings.pop("target", Store("db"))
        self.sender: Final = PushSender([push_spec(target, **settings)])
        self.now = NS_PER_S

    def begin(self, *effects: Any) -> list[Any]:
        found = self.sender.carry_out(list(effects), self.now)
        self.sender.check()
        return found

    def receive(self, message: Any, src: bytes = _NAME) -> list[Any]:
        self.sender.on_message(src, message, self.now)
        self.sender.check()
        return self.sender.pop_effects()

    def ended(self) -> list[Any]:
        """Return the results of steps that have ended."""
        found = self.sender.poll(self.now)
        assert all(one.worker == 1 for one in found)
        return [one.result for one in found]

    def opened(self) -> None:
        self.begin(OpenTarget(1, _TASK))
        self.receive(PushOpened(*fields(1), 7, b"mark"))
        assert self.ended() == [Opened(7, b"mark")]


def fields(number: int, term: int = 5) -> tuple[int, str, str, int, int, int]:
    return (9, "orders", "db", 0, term, number)


def batch(size: int = 10, **more: Any) -> Batch:
    return Batch(_TASK, 7, 20, [_RECORD], size, **more)


def info(role: str, first: int = messages.VERSION) -> NodeInfo:
    return NodeInfo(1, 0, role, "shard-0-0", "trial", "9.9", first, first, [])


def test_steps_become_messages_and_replies_their_results() -> None:
    bench = Bench()
    connect, send = bench.begin(OpenTarget(1, _TASK))
    assert connect == Connect(_NAME, ENDPOINT)
    assert send == Send(
        _NAME,
        PushOpen(
            *fields(1), 1, 2, 0, 7, b"mark", has_moved=True, stores_position=True,
            keeps_rejected=False,
        ),
    )  # fmt: skip
    bench.receive(PushOpened(*fields(1), 7, b"mark"))
    assert bench.ended() == [Opened(7, b"mark")]
    (send,) = bench.begin(Deliver(1, batch()))
    assert isinstance(send.message, PushBatch)
    assert [messages.received(one) for one in send.message.records] == [_RECORD]
    bench.receive(PushDone(*fields(2), b"next"))
    assert bench.ended() == [b"next"]
    assert bench.begin(CloseTarget(1)) == [
        Send(_NAME, PushClose(*fields(3))), Disconnect(_NAME)
    ]  # fmt: skip


def test_steps_of_other_targets_are_left_alone() -> None:
    bench = Bench()
    other: list[Any] = [
        OpenTarget(2, msgspec.structs.replace(_TASK, target="sqlite")), Deliver(2, batch()),
        CloseTarget(2), LogWarning("text"),
    ]  # fmt: skip
    assert bench.begin(*other) == other


def test_a_result_is_asked_for_ever_more_rarely() -> None:
    bench = Bench()
    bench.opened()
    bench.begin(Deliver(1, batch()))
    began, asked = bench.now, []
    while bench.sender.next_wakeup() < began + 8 * NS_PER_S:
        bench.now = bench.sender.next_wakeup()
        assert bench.ended() == []
        assert [one.message for one in bench.sender.pop_effects()] == [PushQuery(*fields(2))]
        asked.append((bench.now - began) // NS_PER_MS)
    assert asked == [250, 750, 1750, 3750, 5750, 7750]


def test_a_silent_receiver_leaves_the_outcome_unknown() -> None:
    bench = Bench()
    bench.opened()
    bench.begin(Deliver(1, batch()))
    bench.now += 8 * NS_PER_S
    bench.receive(PushWorking(*fields(2)))
    bench.now += 10 * NS_PER_S - 1
    assert bench.ended() == []
    bench.now += 1
    (error,) = bench.ended()
    assert isinstance(error, Retry)
    assert "no reply" in str(error)
    bench.receive(PushDone(*fields(2), None))
    assert bench.ended() == [], "it is too late"


@pytest.mark.parametrize("kind", ["lost", "fenced"])
def test_what_is_behind_a_failure_is_opened_before_the_next_batch(kind: Any) -> None:
    bench = Bench(target=Sink("db"))
    bench.opened()
    bench.begin(Deliver(1, batch()))
    bench.receive(PushFailed(*fields(2), kind, "text"))
    (error,) = bench.ended()
    assert isinstance(error, Retry if kind == "lost" else Fenced)
    (send,) = bench.begin(Deliver(1, batch()))
    assert isinstance(send.message, PushOpen)
    (send,) = bench.receive(PushOpened(*fields(3), None, b""))
    assert isinstance(send.message, PushBatch)
    assert bench.ended() == []
    bench.receive(PushDone(*fields(4), None))
    assert bench.ended() == [None]


def test_a_failed_open_before_a_batch_ends_the_batch() -> None:
    bench = Bench(target=Sink("db"))
    bench.opened()
    bench.begin(Deliver(1, batch()))
    bench.receive(PushFailed(*fields(2), "lost", "text"))
    bench.ended()
    bench.begin(Deliver(1, batch()))
    bench.receive(PushFailed(*fields(3), "retry", "busy"))
    assert [str(one) for one in bench.ended()] == ["busy"]
    assert isinstance(bench.begin(Deliver(1, batch()))[0].message, PushOpen)


def test_a_retry_of_a_target_without_position_needs_no_open() -> None:
    bench = Bench(target=Sink("db"))
    bench.opened()
    bench.begin(Deliver(1, batch()))
    bench.receive(PushFailed(*fields(2), "retry", "busy", after_s=2.0))
    (error,) = bench.ended()
    assert error.after_s == 2.0
    assert isinstance(bench.begin(Deliver(1, batch()))[0].message, PushBatch)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("TypeError", TypeError), ("ConfigError", ConfigError), ("ImportError", ImportError),
     ("SomethingNew", TypeError)],
)  # fmt: skip
def test_a_bug_of_the_receiver_fails_the_task(name: str, kind: type[Exception]) -> None:
    bench = Bench()
    bench.opened()
    bench.begin(Deliver(1, batch()))
    bench.receive(PushFailed(*fields(2), "bug", "text", error=name))
    (error,) = bench.ended()
    assert type(error) is kind
    assert str(error) == "text"


def test_a_rejection_keeps_its_index() -> None:
    bench = Bench()
    bench.opened()
    bench.begin(Deliver(1, batch()))
    bench.receive(PushFailed(*fields(2), "rejected", "bad", index=3))
    (error,) = bench.ended()
    assert isinstance(error, Rejected)
    assert error.index == 3


def test_a_batch_that_fits_into_no_frame_is_rejected() -> None:
    """The player halves it; a single record of that size is rejected."""
    bench = Bench()
    bench.opened()
    assert bench.begin(Deliver(1, batch(16 * 2**20))) == []
    assert bench.sender.next_wakeup() <= bench.now
    (error,) = bench.ended()
    assert isinstance(error, Rejected)
    assert error.index is None


@pytest.mark.parametrize(
    "change", [{"payload": "text"}, {"timestamp_us": 2**70}, {"key": 5}, {"rid": 5}]
)
def test_a_record_of_a_map_that_no_message_can_have_is_a_bug(change: dict[str, Any]) -> None:
    bench = Bench(map=print)
    bench.opened()
    wrong = msgspec.structs.replace(batch(), records=[msgspec.structs.replace(_RECORD, **change)])
    assert bench.begin(Deliver(1, wrong)) == []
    (error,) = bench.ended()
    assert type(error) is TypeError


@pytest.mark.parametrize(
    ("message", "src"),
    [
        (PushDone(*fields(2, term=6), None), _NAME),
        (PushDone(*fields(2), None), name_of("127.0.0.1:1")),
        (PushOpened(*fields(2), 7, b""), _NAME),
        (PushQuery(*fields(2)), _NAME),
    ],
)
def test_a_reply_to_another_request_ends_nothing(message: Any, src: bytes) -> None:
    bench = Bench()
    bench.opened()
    bench.begin(Deliver(1, batch()))
    (effect,) = bench.receive(message, src)
    assert isinstance(effect, ReportBadMessage)
    assert bench.ended() == []


def test_a_reply_to_a_closed_worker_is_ignored() -> None:
    bench = Bench()
    bench.opened()
    bench.begin(Deliver(1, batch()))
    bench.begin(CloseTarget(1))
    assert bench.receive(PushDone(*fields(2), None)) == []
    assert bench.ended() == []


def test_another_program_at_the_endpoint_fails_the_task() -> None:
    bench = Bench()
    bench.begin(OpenTarget(1, _TASK))
    bench.receive(info("storage"))
    (error,) = bench.ended()
    assert isinstance(error, ConfigError)
    assert f"no receiver at {ENDPOINT}: this is storage server shard-0-0" in str(error)


def test_a_receiver_of_another_version_is_tried_again() -> None:
    bench = Bench()
    bench.begin(OpenTarget(1, _TASK))
    bench.receive(info(messages.ROLE))
    assert bench.ended() == [], "it did not understand another message"
    bench.receive(info(messages.ROLE, first=2))
    (error,) = bench.ended()
    assert isinstance(error, Retry)
    assert "runs Ziplog 9.9, with version 2 of push; this player needs 1" in str(error)


def test_the_connection_stays_while_another_task_uses_it() -> None:
    bench = Bench(partitions=2)
    bench.opened()
    other = msgspec.structs.replace(_TASK, partition=1)
    bench.begin(OpenTarget(2, other))
    assert [type(one) for one in bench.begin(CloseTarget(1))] == [Send]
    assert [type(one) for one in bench.begin(CloseTarget(2))] == [Send, Disconnect]
    assert StepEnded(1, None) not in bench.sender.poll(bench.now)


@pytest.mark.parametrize("after_s", [float("nan"), float("inf"), -1.0, 3601.0])
def test_a_pause_that_no_receiver_asks_for_is_no_message(after_s: float) -> None:
    failed = messages.PushFailed(*fields(1), "retry", "later", after_s)
    with pytest.raises(ProtocolError):
        messages.decode_any(msgspec.msgpack.encode(failed))
