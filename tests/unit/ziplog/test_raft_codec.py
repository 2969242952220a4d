"""The Raft codec: plain values round-trip, with lists as tuples; anything else is refused."""

from __future__ import annotations

import zlib
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from ziplog.raft import codec

LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.binary() | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(0, 9), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_values_round_trip(value: Any) -> None:
    assert codec.loads(codec.dumps(value)) == value
    assert codec.decompress(codec.compress(codec.dumps(value))) == codec.dumps(value)


@given(st.binary())
def test_other_bytes_are_refused_or_decode_to_plain_values(data: bytes) -> None:
    try:
        value = codec.loads(data)
    except ValueError:
        return
    assert isinstance(value, (type(None), bool, int, float, str, bytes, tuple, dict, datetime, Ext))


@pytest.mark.parametrize(
    "data",
    [b"cbuiltins\nopen\n(S'mark'\nS'w'\ntR.", b"\x80\x02]q\x00.", b"\x91" * 100_000, b""],
)
def test_pickles_and_deep_nesting_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        codec.loads(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"x" * 100, zlib.compress(b"x" * 100)[:-1], zlib.compress(bytes(codec.MAX_FRAME + 1))],
)
def test_decompression_bombs_and_torn_frames_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        codec.decompress(data)
