"""What somebody who writes asked for: options and columns, checked (docs/spark.md, section 3).

Rule: what is wrong is said before the first row goes out, in one line that tells what may stand
there instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from spark_reader.options import SERVERS, TIMEOUT, boolean, refuse_unknown, seconds
from ziplog.client import arguments
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: What Spark itself puts among a writer's options.
_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "queryname", "outputmode"})
_NAMES: Final = (
    SERVERS, "keyColumn", "valueColumn", "policy", TIMEOUT, "exactlyOnce", "queryId", "batchId",
)  # fmt: skip
_POLICY_RULE: Final = "'partition', 'key' or the number of a shard"
_TOGETHER: Final = (
    "given together with {other}: the two name a write that may be made again, and is there once"
)


class WriteOptions(msgspec.Struct, frozen=True):
    """Options of one write."""

    #: Where the membership service is: "host:port,...".
    servers: str
    #: Names of the columns; no key column: "key", if there is one.
    value_column: str
    key_column: str | None
    #: None: by key if there are keys, otherwise by partition.
    policy: Literal["partition", "key"] | int | None
    timeout_s: float
    #: Each attempt of a task writes under the same name: readers drop what another one wrote.
    exactly_once: bool
    #: Who writes, and which batch, if the user says so: (queryId, batchId).
    identity: tuple[str, int] | None


class Columns(msgspec.Struct, frozen=True):
    """Where in a row value and key stand."""

    value: int
    key: int | None


def parse(options: Mapping[str, str], *, stream: bool) -> WriteOptions:
    """Return the options of a write.

    Args:
        options: as Spark gives them; names are matched without regard to case.
        stream: Spark names the query and its batches, so the user may not.

    Raises:
        ConfigError: one is unknown, missing or wrong.

    """
    given = {name.lower(): text for name, text in options.items()}
    known = {name.lower() for name in _NAMES} | _SPARK_OPTIONS
    for name, text in options.items():
        if name.lower() not in known:
            refuse_unknown(name, text, _NAMES)
    if SERVERS not in given:
        raise ConfigError(SERVERS, None, "'host:port,...' of the cluster's membership service")
    arguments.endpoints(given[SERVERS], SERVERS)
    identity = _identity(given.get("queryid"), given.get("batchid"), stream=stream)
    exactly_once = boolean("exactlyOnce", given.get("exactlyonce", "true"))
    if identity is not None and not exactly_once:
        raise ConfigError("queryId", identity[0], "left out, if exactlyOnce is false")
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
                raise ConfigError(name, text, "left out: a stream's checkpoint names its batches")
        return None
    if query is None and batch is None:
        return None
    if not query:
        raise ConfigError("queryId", query, _TOGETHER.format(other="batchId"))
    if batch is None:
        raise ConfigError("batchId", batch, _TOGETHER.format(other="queryId"))
    number = _whole(batch.strip())
    if number is None or number >= 2**63:
        raise ConfigError("batchId", batch, "a whole number from 0 on, one more for each batch")
    return query, number


def columns(options: WriteOptions, schema: Sequence[tuple[str, str]]) -> Columns:
    """Return where the columns of a write are; others are not written.

    Args:
        options: tell their names.
        schema: the name and type (as Spark says it) of each column.

    Raises:
        ConfigError: one is missing, or neither binary nor string; or a policy wants keys.

    """
    value = _place("valueColumn", options.value_column, schema)
    assert value is not None
    key = _place("keyColumn", options.key_column, schema)
    if options.policy == "key" and key is None:
        raise ConfigError("policy", "key", f"used with a key column; {_existing_columns(schema)}")
    return Columns(value, key)


def _place(option: str, name: str | None, schema: Sequence[tuple[str, str]]) -> int | None:
    projection_of = name if name is not None else "key"
    found = [at for at, (column, _) in enumerate(schema) if column.lower() == projection_of.lower()]
    if len(found) > 1:
        raise ConfigError(option, projection_of, "the name of one column, and there are several")
    if not found:
        if name is None:
            return None
        raise ConfigError(
            option, projection_of, f"the name of a column; {_existing_columns(schema)}"
        )
    kind = schema[found[0]][1]
    if kind != "binary" and not kind.startswith("string"):
        raise ConfigError(f"the type of column {projection_of}", kind, "binary or string: cast it")
    return found[0]


def _existing_columns(schema: Sequence[tuple[str, str]]) -> str:
    return f"there are {', '.join(name for name, _ in schema) or 'none'}"
