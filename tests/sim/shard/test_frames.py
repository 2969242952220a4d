"""Every message of a server to a replica fits a frame, in every legal state.

Each state is at another limit: many small units, few large ones, many records in few bytes.
Session tables: test_session_tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from shard.ordering.admission import MAX_UNIT_BYTES
from shard.ordering.epoch_closer import MAX_UNSTABLE_DECISIONS
from shard.ordering.forwards import (
    MAX_FORWARD_DECISIONS,
    MAX_UNSTABLE_BYTES,
    MAX_UNSTABLE_RECORDS,
)
from shard.ordering.primary import Primary
from shard.recovery.state_transfer import _ANSWER_BYTES, serve
from shard.serving import subscription
from shard.state.replica_state import ReplicaConfig, ReplicaState
from shard.state.slots import pack
from ziplog.core.entries import Body, Expire, Place, Unit, encode_body
from ziplog.core.fields import MAX_FRAME, MAX_UNIT_RECORDS
from ziplog.core.node import Broadcast, Send
from ziplog.core.view import Replica as Address
from ziplog.segments.entry import Entry
from ziplog.wire import Fetch, Fetched, Forward, InsertAck, Limits, Located, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.storage.segment_store import SegmentStore
    from ziplog.core.message import Message

HIGH = 2**62
CLIENT = bytes(16)


class Shape(NamedTuple):
    """The shape of units: their records, and the bytes of each."""

    records: int
    size: int

    def gsns(self, number: int) -> list[int]:
        first = HIGH + number * self.records * 300
        return list(range(first, first + self.records * 300, 300))

    def place(self, number: int) -> Place:
        body = encode_body(Body(2**61, None, [bytes(self.size)] * self.records))
        assert len(body) <= MAX_UNIT_BYTES
        return Place(CLIENT, HIGH + number, HIGH, HIGH, self.gsns(number), 2**32 - 1, body)


SHAPES = [
    Shape(1, 0), Shape(1, 4), Shape(256, 0), Shape(256, 4), Shape(MAX_UNIT_RECORDS, 0),
    Shape(MAX_UNIT_RECORDS, 100), Shape(1, MAX_UNIT_BYTES - 64), Shape(2, MAX_UNIT_BYTES // 2 - 64),
]  # fmt: skip


def state_of(store: SegmentStore) -> ReplicaState:
    replicas = tuple(Address(f"shard-0-{i}", f"host:{i}") for i in range(3))
    config = ReplicaConfig("shard-0-0", "host:0", 0, 0, replicas, (), "memory", 1, Limits())
    state = ReplicaState(config, store, 2**62)
    state.cluster, state.view, state.server_state = 2**62, 2**31, "up"
    return state


def sent(state: ReplicaState, kind: type[Message]) -> list[int]:
    """Return the sizes of the sent frames of this kind; all must fit."""
    messages = [e.message for e in state.effects if isinstance(e, Send | Broadcast)]
    state.effects.clear()
    found = [len(encode(message)) for message in messages if isinstance(message, kind)]
    assert all(size <= MAX_FRAME for size in found)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_recent", [True, False])
def test_a_part_of_the_log_fits_a_frame(
    opened: Callable[..., SegmentStore], shape: Shape, is_recent: bool
) -> None:
    store = opened(cache_bytes=2**30 if is_recent else 0)
    size = len(shape.place(0).body or b"") + 100 + 9 * shape.records
    count = min(20 * 2**20 // size + 2, 20_000)
    for number in range(1, count + 1):
        store.append(Entry(number, 2**31, shape.place(number)))
    assert store.flush()
    state, after, answers = state_of(store), 0, 0
    while after < count:
        assert serve(state, b"shard-0-1", Fetch(0, 0, 2**31, 1, after, 2**31, 0)) is None
        (effect,) = state.effects
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Fetched)
        after = effect.message.entries[-1].fseq
        assert sent(state, Fetched)[0] <= 2 * _ANSWER_BYTES + size
        answers += 1
    assert answers > 1 or size * count < 2**22


@pytest.mark.parametrize("shape", SHAPES)
def test_unstable_decisions_are_forwarded_in_frames(
    opened: Callable[..., SegmentStore], shape: Shape
) -> None:
    """The most that the primary admits: forwarded first, again, and with bodies."""
    state = state_of(opened())
    number = 0
    stream = state.stream
    while stream.window_records < MAX_UNSTABLE_RECORDS and stream.window_bytes < MAX_UNSTABLE_BYTES:
        number += 1
        state.record(shape.place(number))
    for client in range(2 * MAX_UNSTABLE_DECISIONS):
        state.record(Expire(client.to_bytes(16, "big")))
    state.effects.clear()
    part = Primary(state, None)  # type: ignore[arg-type]
    part.restore()
    forwards = part._forwards
    forwards._broadcast(1, forwards.gathered[:MAX_FORWARD_DECISIONS])
    for first in (1, number, number + 1):
        for bodies in (0, 1, number):
            part.resend(b"shard-0-1", first, bodies)
    assert len(sent(state, Forward)) == 10


@pytest.mark.parametrize("shape", SHAPES)
def test_one_delivery_fits_a_frame(shape: Shape) -> None:
    place = shape.place(1)
    unit = Unit(place.epoch, place.gsns, place.body or b"")
    count = (
        subscription.MAX_DELIVER_BYTES // (len(unit.body) + subscription.UNIT_OVERHEAD_BYTES) + 1
    )
    assert count * len(encode(unit)) <= MAX_FRAME - 2**20  # type: ignore[arg-type]


def test_the_longest_answers_about_one_unit_are_short() -> None:
    gsns = Shape(MAX_UNIT_RECORDS, 0).gsns(1)
    ack = InsertAck(2**62, 1, 1, 15, 2**62, HIGH, HIGH, True, gsns)
    located = Located(2**62, 1, 1, 15, CLIENT, HIGH, "present", gsns)
    assert len(encode(ack)) < 40_000
    assert len(encode(located)) < 40_000
    uneven = [HIGH + k * k for k in range(MAX_UNIT_RECORDS)]
    assert len(pack(uneven)) < 40_000
