"""Keys and values: every accepted one can be read again."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.errors import UnsupportedValueError
from logdb.values import decode_key, decode_value, encode_key, encode_value
from ziplog.errors import ConfigError, ProtocolError, RecordTooLargeError

integers = st.integers(-(2**63), 2**64 - 1)
atoms = st.none() | st.booleans() | integers | st.floats(allow_nan=False) | st.text() | st.binary()
names = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
values = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_written_values_can_be_read(value: Any) -> None:
    assert decode_value(encode_value(value)) == value


def test_a_tuple_comes_back_as_a_list_unless_it_is_a_dictionarys_key() -> None:
    assert decode_value(encode_value((1, (2,)))) == [1, [2]]
    assert decode_value(encode_value({(1, (2, b"x")): (3,)})) == {(1, (2, b"x")): [3]}


@pytest.mark.parametrize(
    "value", [object(), 2**64, {1, 2}, "\udcff"], ids=["object", "large", "set", "half a character"]
)
def test_unsupported_values_are_refused(value: Any) -> None:
    with pytest.raises(UnsupportedValueError):
        encode_value(value)
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(UnsupportedValueError):
        encode_value(nested)


@pytest.mark.parametrize(
    "encoded",
    [b"", b"\xc1", b"\x01\x01", b"\xa2a", msgpack.packb({1: 2})[:-1], b"\x81\x81\x01\x01\x01"],
)
def test_invalid_stored_values_raise_a_protocol_error(encoded: bytes) -> None:
    with pytest.raises(ProtocolError, match="not valid MessagePack"):
        decode_value(encoded)


@given(st.binary(max_size=1024))
def test_any_bytes_are_a_valid_key_with_a_text_form(key: bytes) -> None:
    assert encode_key(key) == encode_key(memoryview(key)) == encode_key(decode_key(key)) == key


def test_invalid_keys_are_refused() -> None:
    with pytest.raises(TypeError):
        encode_key(5)
    with pytest.raises(ConfigError):
        encode_key("\ud800")
    with pytest.raises(RecordTooLargeError):
        encode_key("é" * 513)
