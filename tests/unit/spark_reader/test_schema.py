"""User schemas: the allowed columns and types."""

from __future__ import annotations

import pytest

from spark_reader.schema import DEFAULT, Field, projection
from ziplog.errors import ConfigError


def test_the_columns_are_kafkas() -> None:
    assert [(field.name, field.type) for field in DEFAULT] == [
        ("key", "binary"), ("value", "binary"), ("topic", "string"), ("partition", "int"),
        ("offset", "bigint"), ("timestamp", "timestamp"), ("timestampType", "int"),
        ("epoch", "bigint"),
    ]  # fmt: skip


def test_a_projection_has_its_order_its_names_and_its_types() -> None:
    asked = [("gsn", "bigint", True), ("Value", "string", False), ("SHARD", "int", True)]
    assert projection(asked) == (
        Field("gsn", "offset", "bigint"),
        Field("Value", "value", "string", is_nullable=False),
        Field("SHARD", "partition", "int"),
    )


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (("offsett", "bigint", True), "'offset' is meant"),
        (("gnn", "bigint", True), "'offset' is meant"),
        (("payload", "binary", True), "left out; there are key, value, topic, partition, offset"),
        (("gsn", "int", True), "it must be bigint"),
        (("value", "int", True), "it must be binary or string"),
        (("key", "binary", False), "it must be nullable"),
    ],
)
def test_unknown_columns_and_types_are_refused(field: tuple[str, str, bool], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        projection([field])
    assert repr(field[0]) in str(refused.value)
