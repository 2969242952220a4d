"""Record ids and records."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ziplog
from ziplog.errors import ConfigError
from ziplog.types import RID_GENESIS, RID_RECENT, Record, RecordId

GSNS = st.integers(0, 2**63 - 1)
RIDS = st.builds(RecordId, GSNS, st.integers(0, 2**31 - 1))


@given(RIDS)
def test_the_text_form_names_the_rid(rid: RecordId) -> None:
    assert str(rid) == f"{rid.gsn}@{rid.shard}"
    assert RecordId.parse(str(rid)) == rid
    assert f"{rid}" == str(rid)
    assert f"{rid:>40}" == str(rid).rjust(40)


@given(RIDS, RIDS)
def test_rids_are_ordered_by_gsn_hashable_and_immutable(a: RecordId, b: RecordId) -> None:
    if a.gsn != b.gsn:
        assert (a < b) == (a.gsn < b.gsn)
    assert len({a, b, RecordId(*a)}) == len({tuple(a), tuple(b)})
    with pytest.raises(AttributeError):
        a.gsn = 5  # type: ignore[misc]
    assert copy.deepcopy(a) == a


def test_the_constants() -> None:
    assert RecordId.parse("genesis") is RID_GENESIS == RecordId(0, 0)
    assert RecordId.parse("recent") is RID_RECENT
    assert str(RID_RECENT) == "recent"
    assert RecordId(1, 0) > RID_GENESIS
    assert ziplog.RID_GENESIS is RID_GENESIS


@pytest.mark.parametrize(
    "text",
    ["", "5", "5@", "@5", "-1@0", "5@-1", "5 @0", "5@0\n", "٣@٤", "9223372036854775808@0",
     "0@2147483648", "1@0@0", "GENESIS", "1.5@0", "1e3@0"],
)  # fmt: skip
def test_invalid_rid_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RecordId.parse(text)
    assert "'<gsn>@<shard>'" in str(caught.value)


@pytest.mark.parametrize("text", [None, 5, b"5@0", RecordId(5, 0)])
def test_what_is_no_text_is_refused_as_a_rid(text: Any) -> None:
    with pytest.raises(TypeError, match="text must be a str, such as '5@0', not"):
        RecordId.parse(text)


@given(st.integers(-(10**15), 10**16))
def test_a_records_timestamp_is_exact_and_aware(timestamp_us: int) -> None:
    record = Record(RecordId(1, 0), b"", None, timestamp_us, 0)
    assert record.timestamp.tzinfo is UTC
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert (record.timestamp - epoch) // timedelta(microseconds=1) == timestamp_us


def test_records_are_immutable_values() -> None:
    record: Any = Record(RecordId(1, 0), b"x", b"k", 5, 2)
    assert record == Record(RecordId(1, 0), b"x", b"k", 5, 2)
    with pytest.raises(AttributeError):
        record.payload = b"y"
