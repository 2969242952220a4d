"""Columns of the log, and projections: the requested columns in the requested order.

Rule: types have the names of Spark's DDL, each column has a fixed set of types, and any other type
is refused (docs/spark.md, section 1). This module does not import Spark or Arrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from spark_reader.suggestions import closest_name
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

KEY, VALUE, TOPIC, PARTITION, OFFSET = "key", "value", "topic", "partition", "offset"
TIMESTAMP, TIMESTAMP_TYPE, EPOCH = "timestamp", "timestampType", "epoch"

#: Types of each column; the first is the default.
TYPES: Final[dict[str, tuple[str, ...]]] = {
    KEY: ("binary", "string"),
    VALUE: ("binary", "string"),
    TOPIC: ("string",),
    PARTITION: ("int",),
    OFFSET: ("bigint",),
    TIMESTAMP: ("timestamp",),
    TIMESTAMP_TYPE: ("int",),
    EPOCH: ("bigint",),
}
#: Other names of columns.
_ALIASES: Final = {"gsn": OFFSET, "shard": PARTITION}
_COLUMNS: Final = {name.lower(): name for name in TYPES} | _ALIASES


class Field(msgspec.Struct, frozen=True):
    """A requested column."""

    #: Its name in the result.
    name: str
    #: Its name in `TYPES`.
    column: str
    #: Its type in Spark's DDL.
    type: str
    is_nullable: bool = True


#: All columns: the projection without a user schema.
DEFAULT: Final = tuple(Field(name, name, types[0]) for name, types in TYPES.items())


def projection(fields: Iterable[tuple[str, str, bool]]) -> tuple[Field, ...]:
    """Return the requested columns of a schema.

    Args:
        fields: name, type and nullability of each.

    Raises:
        ConfigError: the column does not exist, or does not have this type.

    """
    return tuple(_field(*field) for field in fields)


def _field(name: str, kind: str, is_nullable: bool) -> Field:
    column = _COLUMNS.get(name.lower())
    if column is None:
        near = closest_name(name, _COLUMNS)
        meant = f", or {_COLUMNS[near]!r} is meant" if near else f"; there are {', '.join(TYPES)}"
        allowed = f"left out{meant}"
        raise ConfigError(f"column {name!r} of the schema", kind, allowed)
    if kind not in TYPES[column]:
        raise ConfigError(f"column {name!r} of the schema", kind, " or ".join(TYPES[column]))
    if column == KEY and not is_nullable:
        raise ConfigError(
            f"column {name!r} of the schema",
            "not null",
            "nullable, because records may have no key",
        )
    return Field(name, column, kind, is_nullable)
