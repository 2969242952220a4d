"""Values as JSON: every value can be read back."""

from __future__ import annotations

import json
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.cli import json_values
from logdb.values import decode_value, encode_value
from ziplog.errors import ConfigError

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
texts = st.text() | st.sampled_from(["$", "$$base64", "$base64", "$map", "$float", "$unknown"])
atoms = st.none() | st.booleans() | numbers | texts | st.binary()
names = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(texts, inner, max_size=2)
        | st.dictionaries(names, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values)
def test_a_value_is_a_line_of_json_and_comes_back(value: Any) -> None:
    line = json_values.encode(value)
    assert "\n" not in line
    json.loads(line)
    found = json_values.decode(line, "VALUE")
    assert found == value
    assert encode_value(found) == encode_value(value)


def test_values_without_a_json_form_are_marked() -> None:
    assert json_values.encode(b"\x00\xff") == '{"$base64":"AP8="}'
    assert json_values.encode({1: "a", "b": None}) == '{"$map":[[1,"a"],["b",null]]}'
    assert json_values.encode({"$base64": 1}) == '{"$$base64":1}'
    assert json_values.encode({"$base64": 1, "b": 2}) == '{"$base64":1,"b":2}'
    assert json_values.encode(-math.inf) == '{"$float":"-inf"}'
    assert math.isnan(json_values.decode('{"$float":"nan"}', "VALUE"))
    assert json_values.encode([msgpack.Timestamp(5)]).startswith('[{"$unknown":"')


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "nan", "1 2", '"\\ud800"', "\udcff", '{"$base64":"A"}', '{"$base64":5}',
        '{"$base64":"é"}', '{"$float":"1"}', '{"$float":[]}', '{"$map":5}', '{"$map":[[1]]}',
        '{"$map":[[{},1]]}', '{"$unknown":"x"}', '{"$":1}', "1e999",
    ],
)  # fmt: skip
def test_invalid_json_values_are_refused_with_their_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"VALUE is .* it must be JSON") as caught:
        json_values.decode(text, "VALUE")
    assert "\n" not in str(caught.value)


def test_deeply_nested_values_are_supported_or_refused() -> None:
    deepest: Any = 5
    for _ in range(505):
        deepest = [deepest]
    stored = decode_value(encode_value(deepest))
    assert json_values.decode(json_values.encode(stored), "VALUE") == stored
    for depth in (2_000, 100_000):
        with pytest.raises(ConfigError, match="less nesting"):
            json_values.decode("[" * depth + "]" * depth, "VALUE")
