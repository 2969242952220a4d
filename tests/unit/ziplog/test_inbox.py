"""The order of waiting frames in a process, and the limits of their number."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest

from ziplog import wire
from ziplog.client.common.membership_client import REPLIES
from ziplog.core.view import NO_DIGEST
from ziplog.runtime import inbox
from ziplog.runtime.inbox import OVERHEAD_BYTES, SOURCE_FRAMES, Inbox
from ziplog.wire.urgency import URGENT, is_urgent

if TYPE_CHECKING:
    from ziplog.core.message import Message

BEAT = wire.encode(wire.Beat(1, 0, 1, 1, 5, "up"))
Frame = tuple[bytes, bytes]


def insert(seq: int = 1, body: bytes = b"") -> bytes:
    return wire.encode(wire.Insert(1, 0, 1, b"c" * 16, seq, 1, 0, 0, 1, body))


def inbox_of(*frames: Frame) -> Inbox:
    waiting = deque(frames)
    return Inbox(lambda: waiting.popleft() if waiting else None)


def drain(box: Inbox) -> list[Frame]:
    return list(iter(box.pop, None))


def test_without_a_queue_frames_pass_in_order() -> None:
    frames = [(b"a", insert()), (b"p", BEAT)]
    assert drain(inbox_of(*frames)) == frames


def test_heartbeats_go_before_client_requests() -> None:
    box = inbox_of((b"a", insert(1)), (b"b", insert(2)), (b"p", BEAT), (b"a", insert(3)))
    box.fill()
    assert not box.is_unread
    assert drain(box) == [(b"p", BEAT), (b"a", insert(1)), (b"b", insert(2)), (b"a", insert(3))]
    assert box.size == 0


def test_busy_source_does_not_delay_a_small_one() -> None:
    much = [(b"a", insert(seq)) for seq in range(1, 2000)]
    box = inbox_of(*much, (b"b", insert()))
    box.fill()
    handled = drain(box)
    assert handled.index((b"b", insert())) < 2 * SOURCE_FRAMES
    assert sorted(handled) == sorted([*much, (b"b", insert())])
    assert box.size == 0


def test_frames_of_one_source_stay_in_order() -> None:
    """A client treats the answer to a later insert as a sign that an earlier one was lost."""
    waiting = deque((b"a", insert(seq)) for seq in range(1, 400))
    box = Inbox(lambda: waiting.popleft() if waiting else None)
    box.fill()
    handled = [box.pop() for _ in range(200)]
    waiting.extend((b"a", insert(seq)) for seq in range(400, 600))
    box.fill()
    handled += drain(box)
    assert handled == [(b"a", insert(seq)) for seq in range(1, 600)]


def test_queue_is_bounded_and_small_sources_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox, "LIMIT_BYTES", 500 * OVERHEAD_BYTES)
    box = inbox_of(*[(b"a", b"")] * 4000, (b"b", insert()), (b"p", BEAT))
    box.fill()
    assert box.size < 510 * OVERHEAD_BYTES
    assert box.dropped >= 3400
    assert {src for src, _ in drain(box)} == {b"a", b"b", b"p"}


def test_more_than_one_fill_reads_is_unread() -> None:
    box = inbox_of(*[(b"a", b"x")] * 10_000)
    box.fill()
    assert box.is_unread
    box.fill()
    box.fill()
    assert not box.is_unread


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (wire.Beat(1, 0, 1, 1, 5, "up"), True),
        (wire.Report(1, 0, 1, 1, 1, 7, 7), True),
        (wire.Forward(1, 0, 1, 1, 1, [], 0, 0), False),
        (wire.Hello(1, 7), False),
        (wire.Tail(1, 0, 1, 1), False),
    ],
)
def test_messages_that_keep_the_cluster_running_are_urgent(
    message: Message, expected: bool
) -> None:
    assert is_urgent(wire.encode(message)) is expected


def test_answers_of_the_service_are_urgent() -> None:
    """The lease of a busy player expires if records overtake the answers to its renewals."""
    assert set(REPLIES.values()) <= set(URGENT)


def test_long_message_is_classified_too() -> None:
    heartbeat = wire.Heartbeat(
        1, "s", "h:1", 0, 1, 1, 1, "up", True, 0, 0, 0, 0, NO_DIGEST, 0, 0, 0, "",
    )  # fmt: skip
    assert wire.encode(heartbeat)[0] == 0xDC
    assert is_urgent(wire.encode(heartbeat))
    assert not any(is_urgent(garbage) for garbage in (b"", b"\xdc", b"\x91", b"\xdc\0\0\xcd\1"))
