"""Recognition of records by their first bytes."""

from __future__ import annotations

import msgspec
import pytest

from logdb.records import (
    MARK,
    AnyRecord,
    CheckpointBegun,
    CheckpointDone,
    CheckpointPart,
    Commit,
    Moved,
    TransactionId,
    Value,
    encode,
    is_done,
    is_part,
)
from ziplog.types import RecordId

DONE = CheckpointDone(b"writer--", RecordId(9, 0), 1, [RecordId(7, 0)], 2, 3, 4, 5, 6, 7)
PART = CheckpointPart([], [], [])
OTHERS: list[AnyRecord] = [
    Value(b"key", b"value"),
    Commit(TransactionId(b"session-", 1), 1, [], [], []),
    Moved([]),
    CheckpointBegun(b"writer--", 1),
]


@pytest.mark.parametrize("record", [DONE, PART, *OTHERS])
def test_the_record_type_is_recognised_by_the_first_bytes(record: AnyRecord) -> None:
    assert is_done(encode(record)) == (record is DONE)
    assert is_part(encode(record)) == (record is PART)


def test_a_checkpoint_with_additional_fields_is_recognised() -> None:
    fields = msgspec.msgpack.decode(encode(DONE)[len(MARK) :])
    assert is_done(MARK + msgspec.msgpack.encode([*fields, "more"]))
    assert is_done(MARK + msgspec.msgpack.encode(fields[:-1]))


@pytest.mark.parametrize("payload", [b"", MARK, b"LDB\x02" + encode(DONE)[4:], b"\x06" * 20])
def test_a_foreign_payload_is_not_recognised(payload: bytes) -> None:
    assert not is_done(payload)
    assert not is_part(payload)
