"""The messages of push: their codec, their limits, and their version."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logplayer.contract import Batch, RejectedRecord, Task
from logplayer.push import messages
from logplayer.push.messages import PushBatch, PushDone, PushedRejection, PushOpen
from tests.properties import examples
from ziplog.core.fields import MAX_FRAME
from ziplog.core.message import Message
from ziplog.errors import ProtocolError
from ziplog.types import Record, RecordId
from ziplog.wire import AnyMessage, Trimmed, encode

_GSN = st.integers(0, 2**63 - 1)
_RECORDS = st.lists(
    st.builds(
        Record, st.builds(RecordId, _GSN, st.integers(0, 2**31 - 1)), st.binary(max_size=50),
        st.none() | st.binary(max_size=20), st.integers(-(2**63), 2**63 - 1), _GSN,
    ),
    max_size=5,
)  # fmt: skip
_KINDS: list[Any] = list(messages.AnyPush.__args__)
_FIELDS = (9, "orders", "db", 0, 5, 1)


def message_of(records: list[Record], rejected: list[RejectedRecord]) -> PushBatch:
    return PushBatch(
        *_FIELDS, 0, 2**63 - 1, 2**63 - 1, list(map(messages.pushed, records)),
        [PushedRejection(messages.pushed(one.record), one.why) for one in rejected],
    )  # fmt: skip


@given(_RECORDS, st.lists(st.tuples(st.text(max_size=50), _GSN), max_size=3))
def test_a_batch_is_the_same_behind_the_codec_and_not_larger_than_announced(
    records: list[Record], reasons: list[tuple[str, int]]
) -> None:
    rejected = [
        RejectedRecord(Record(RecordId(gsn, 1), b"payload", b"key", 1, 1), why)
        for why, gsn in reasons
    ]
    message = message_of(records, rejected)
    frame = encode(message)
    assert messages.decode(frame) == messages.decode_any(frame) == message
    assert list(map(messages.received, message.records)) == records
    assert list(map(messages.received_rejection, message.rejected)) == rejected
    size = sum(len(one.payload) + len(one.key or b"") for one in records)
    task = Task("orders", "db", 0, 1, 9, 2, 5, 0, 0, b"", has_moved=False)
    assert len(frame) <= messages.frame_size(Batch(task, 0, 1, records, size, rejected))


def test_the_largest_batch_of_records_fits_into_a_frame() -> None:
    """100,000 records and 8 MiB are the limits of the settings."""
    batch = Batch(None, 0, 1, range(100_000), 8 * 2**20, ())  # type: ignore[arg-type]
    assert messages.frame_size(batch) < MAX_FRAME


def test_tags_carry_the_version_and_are_none_of_the_logs() -> None:
    tags = [kind.__struct_config__.tag for kind in _KINDS]
    assert tags == [256 * messages.VERSION + 160 + index for index in range(8)]
    assert not set(tags) & {kind.__struct_config__.tag for kind in AnyMessage.__args__}


def test_fields_in_use_are_unchanged() -> None:
    head = ("cluster", "player", "target", "partition", "term", "number")
    assert PushOpen.__struct_fields__ == (
        *head, "partitions", "birth", "seek", "position", "mark", "has_moved", "stores_position",
        "keeps_rejected",
    )  # fmt: skip
    assert PushBatch.__struct_fields__ == (*head, "start", "stop", "size", "records", "rejected")


def test_a_receiver_understands_no_message_of_the_log() -> None:
    frame = encode(Trimmed(1, 0, 1, 0, 1))
    with pytest.raises(ProtocolError):
        messages.decode(frame)
    assert isinstance(messages.decode_any(frame), Trimmed)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(frame)


@examples(200)
@given(st.data(), _RECORDS)
def test_a_damaged_frame_is_a_protocol_error_or_another_message(
    data: st.DataObject, records: list[Record]
) -> None:
    chosen = data.draw(st.sampled_from([message_of(records, []), PushDone(*_FIELDS, b"mark")]))
    frame = bytearray(encode(chosen))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        try:
            assert isinstance(messages.decode(damaged), Message)
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", -1), ("number", 2**63), ("term", "5"), ("player", "x" * 257), ("start", -1),
        ("records", [[1, 2, "text", None, 1, 1]]), ("records", [[1, 2**31, b"", None, 1, 1]]),
        ("rejected", [[[1, 2, b"", None, 1, 1], "x" * 4097]]),
    ],
)  # fmt: skip
def test_limits_of_fields_are_checked(field: str, value: Any) -> None:
    values = msgspec.msgpack.decode(encode(message_of([], [])))
    values[1 + PushBatch.__struct_fields__.index(field)] = value
    with pytest.raises(ProtocolError):
        messages.decode(msgspec.msgpack.encode(values))
