"""Plain values come back as they were, their lists as tuples, and nothing else is ever made."""

from __future__ import annotations

import zlib
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from ziplog.runtime import plain

LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.binary() | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(0, 9), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_values_come_back(value: Any) -> None:
    assert plain.loads(plain.dumps(value)) == value
    assert plain.decompress(plain.compress(plain.dumps(value))) == plain.dumps(value)


@given(st.binary())
def test_other_bytes_are_refused_or_plain(data: bytes) -> None:
    try:
        value = plain.loads(data)
    except ValueError:
        return
    assert isinstance(value, (type(None), bool, int, float, str, bytes, tuple, dict, datetime, Ext))


@pytest.mark.parametrize(
    "data",
    [b"cbuiltins\nopen\n(S'mark'\nS'w'\ntR.", b"\x80\x02]q\x00.", b"\x91" * 100_000, b""],
)
def test_pickles_and_towers_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        plain.loads(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"x" * 100, zlib.compress(b"x" * 100)[:-1], zlib.compress(bytes(plain.MAX_FRAME + 1))],
)
def test_bombs_and_torn_frames_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        plain.decompress(data)
