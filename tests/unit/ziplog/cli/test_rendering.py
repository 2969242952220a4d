"""Records as JSON lines: the same document as the plain encoding, without control characters."""

from __future__ import annotations

import base64
import json
import unicodedata
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from ziplog.cli.rendering import as_json, key_as_json
from ziplog.types import Record, RecordId

#: Bytes without a meaning, and text with characters that a terminal obeys.
values = st.binary(max_size=20) | st.text(max_size=20).map(
    lambda text: text.encode(errors="ignore")
)
special = st.text("a\x00\n\x7f\x85\u2028\u202e\u2066", max_size=5).map(str.encode)
records = st.builds(
    Record,
    rid=st.builds(RecordId, st.integers(0, 2**63 - 1), st.integers(0, 999)),
    payload=values | special,
    key=st.none() | values | special,
    timestamp_us=st.sampled_from([0, 1, -1, -1_000_000]) | st.integers(-(10**16), 10**17),
    epoch=st.integers(0, 2**40),
)


def field(name: str, value: bytes | None) -> dict[str, str | None]:
    try:
        return {name: None if value is None else value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_b64": base64.b64encode(value or b"").decode()}


def document(record: Record) -> dict[str, Any]:
    return {
        "rid": f"{record.rid.gsn}@{record.rid.shard}",
        "gsn": record.rid.gsn,
        "shard": record.rid.shard,
        "epoch": record.epoch,
        "timestamp": record.timestamp.isoformat(),
        **field("key", record.key),
    }


@examples(100)
@given(record=records)
def test_line_is_the_document_without_control_characters(record: Record) -> None:
    expected = document(record)
    assert list(json.loads(key_as_json(record)).items()) == list(expected.items())
    expected |= field("payload", record.payload)
    line = as_json(record).decode()
    assert list(json.loads(line).items()) == list(expected.items())
    assert line.endswith("\n")
    obeyed = {"Cc", "Zl", "Zp"}
    assert not [one for one in line[:-1] if unicodedata.category(one) in obeyed]
    assert not {"\u200e", "\u202e", "\u2066"} & {*line}
