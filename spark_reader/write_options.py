"""Write options: the options and columns of a write, checked (docs/spark.md, section 3).

Rule: an invalid option is refused before the first insert, by a one-line message with the allowed
values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from spark_reader.options import NAMES, SERVERS, TIMEOUT, boolean, refuse_unknown, seconds
from ziplog.client import arguments
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Options that Spark itself adds to those of a writer.
_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "queryname", "outputmode"})
_NAMES: Final = (
    SERVERS, "keyColumn", "valueColumn", "policy", TIMEOUT, "exactlyOnce", "queryId", "batchId",
)  # fmt: skip
_READ_NAMES: Final = frozenset(name.lower() for name in NAMES)
_POLICY_RULE: Final = "'partition', 'key' or the number of a shard"
_TOGETHER: Final = (
    "given together with {other}: the pair identifies a write, so that a repeated one is recognized"
)


class WriteOptions(msgspec.Struct, frozen=True):
    """Options of one write."""

    #: Addresses of the membership service: "host:port,...".
    servers: str
    #: Names of the columns; without a key column: "key", if it exists.
    value_column: str
    key_column: str | None
    #: None: by key if there are keys, otherwise by partition.
    policy: Literal["partition", "key"] | int | None
    timeout_s: float
    #: All attempts of a task use the same writer id, so readers drop duplicates.
    exactly_once: bool
    #: The user's (queryId, batchId).
    identity: tuple[str, int] | None


class Columns(msgspec.Struct, frozen=True):
    """Indexes of the value and key columns."""

    value: int
    key: int | None


def parse(options: Mapping[str, str], *, stream: bool) -> WriteOptions:
    """Return the options of a write.

    Args:
        options: as Spark passes them; names are case-insensitive.
        stream: Spark identifies the query and its batches, so the user must not.

    Raises:
        ConfigError: an option is unknown, missing or invalid.

    """
    given = {name.lower(): text for name, text in options.items()}
    known = {name.lower() for name in _NAMES} | _SPARK_OPTIONS
    for name, text in options.items():
        if name.lower() in known:
            continue
        if name.lower() in _READ_NAMES:
            raise ConfigError(f"option {name!r}", text, "left out, because only reads have it")
        refuse_unknown(name, text, _NAMES)
    if SERVERS not in given:
        raise ConfigError(SERVERS, None, "'host:port,...' of the cluster's membership service")
    arguments.endpoints(given[SERVERS], SERVERS)
    identity = _identity(given.get("queryid"), given.get("batchid"), stream=stream)
    exactly_once = boolean("exactlyOnce", given.get("exactlyonce", "true"))
    if identity is not None and not exactly_once:
        raise ConfigError("queryId", identity[0], "left out if exactlyOnce is false")
    timeout = given.get("timeout")
    return WriteOptions(
        given[SERVERS],
        given.get("valuecolumn", "value"),
        given.get("keycolumn"),
        _policy(given.get("policy")),
        arguments.DEFAULT_TIMEOUT_S if timeout is None else seconds(TIMEOUT, timeout),
        exactly_once,
        identity,
    )


def _policy(text: str | None) -> Literal["partition", "key"] | int | None:
    if text is None:
        return None
    word = text.strip().lower()
    if word == "partition":
        return "partition"
    if word == "key":
        return "key"
    shard = _whole(word)
    if shard is None or shard >= 2**31:
        raise ConfigError("policy", text, _POLICY_RULE)
    return shard


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _identity(query: str | None, batch: str | None, *, stream: bool) -> tuple[str, int] | None:
    if stream:
        for name, text in (("queryId", query), ("batchId", batch)):
            if text is not None:
                raise ConfigError(
                    name, text, "left out, because the checkpoint identifies a stream's batches"
                )
        return None
    if query is None and batch is None:
        return None
    if not query:
        raise ConfigError("queryId", query, _TOGETHER.format(other="batchId"))
    if batch is None:
        raise ConfigError("batchId", batch, _TOGETHER.format(other="queryId"))
    number = _whole(batch.strip())
    if number is None or number >= 2**63:
        raise ConfigError(
            "batchId", batch, "a whole number from 0 on that increases by one per batch"
        )
    return query, number


def columns(options: WriteOptions, schema: Sequence[tuple[str, str]]) -> Columns:
    """Return the indexes of the value and key columns; other columns are not written.

    Args:
        options: the names of the columns.
        schema: the name and Spark type of each column.

    Raises:
        ConfigError: a column is missing, or neither binary nor string; or the policy needs keys.

    """
    value = _place("valueColumn", options.value_column, schema)
    assert value is not None
    key = _place("keyColumn", options.key_column, schema)
    if options.policy == "key" and key is None:
        raise ConfigError("policy", "key", f"used with a key column; {_existing_columns(schema)}")
    return Columns(value, key)


def _place(option: str, name: str | None, schema: Sequence[tuple[str, str]]) -> int | None:
    wanted = name if name is not None else "key"
    found = [at for at, (column, _) in enumerate(schema) if column.lower() == wanted.lower()]
    if len(found) > 1:
        raise ConfigError(option, wanted, "the name of exactly one column")
    if not found:
        if name is None:
            return None
        raise ConfigError(option, wanted, f"the name of a column; {_existing_columns(schema)}")
    kind = schema[found[0]][1]
    if kind != "binary" and not kind.startswith("string"):
        raise ConfigError(f"the type of column {wanted}", kind, "binary or string: cast it")
    return found[0]


def _existing_columns(schema: Sequence[tuple[str, str]]) -> str:
    return f"there are {', '.join(name for name, _ in schema) or 'none'}"
