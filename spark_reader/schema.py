"""The columns of the log, and a projection of them: what was asked for, in that order.

Rule: types are named as Spark's DDL names them, and each column has few that it may be asked for
in; any other is refused (docs/spark.md, section 1). Nothing here knows Spark or Arrow.
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

#: Each column's types, the usual one first.
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
    """A column as it was asked for."""

    #: Its name in the result.
    name: str
    #: Which of the columns it is.
    column: str
    #: Its type in Spark's words.
    type: str
    is_nullable: bool = True


#: All columns, as they are without a schema.
DEFAULT: Final = tuple(Field(name, name, types[0]) for name, types in TYPES.items())


def projection(fields: Iterable[tuple[str, str, bool]]) -> tuple[Field, ...]:
    """Return what a schema asks for.

    Args:
        fields: of each its name, its type and whether it may be null.

    Raises:
        ConfigError: there is no such column, or not in this type.

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
            f"column {name!r} of the schema", "not null", "nullable: not all have one"
        )
    return Field(name, column, kind, is_nullable)
