"""Transaction scripts: one JSON object per line, executed in order.

{"get": KEY}, {"put": [KEY, VALUE]}, {"delete": KEY}, {"check": [KEY, VALUE]}; values as in
`json_values`. A line reads the effects of the lines before it. Writes are sent only after all
checks have passed, so a failed check leaves a read-only transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from logdb.cli import json_values
from logdb.values import encode_key
from ziplog.errors import ConfigError, ZiplogError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logdb.client.blocking_transaction import Transaction

_SHAPE: Final = '{"get": KEY}, {"put": [KEY, VALUE]}, {"delete": KEY} or {"check": [KEY, VALUE]}'


#: Characters of a value shown in a message.
_MAX_SHOWN: Final = 100


class _Absent:
    """The type of `ABSENT`, because None is a value."""


ABSENT: Final = _Absent()


class CheckFailedError(ZiplogError):
    """A checked key had another value."""

    def __init__(self, key: bytes, expected: Any, found: Any) -> None:
        shown = repr(key.decode(errors="backslashreplace"))
        required, actual = (_shortened(value) for value in (expected, found))
        hint = ""
        if isinstance(expected, str) and not isinstance(found, str) and found is not ABSENT:
            hint = " (words are text; with --json they are JSON)"
        super().__init__(f"{shown} is {actual}, not {required}{hint}; nothing was written")


def _shortened(value: Any) -> str:
    """Return a value as short text."""
    text = "absent" if value is ABSENT else json_values.encode(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class Operation(msgspec.Struct, frozen=True):
    """One line of a script."""

    verb: Literal["get", "put", "delete", "check"]
    key: bytes
    value: Any = None


def parse(text: str, where: str) -> list[Operation]:
    """Return the operations of a script; empty lines are skipped.

    Args:
        text: the script.
        where: its name, for messages.

    Raises:
        ConfigError: a line is not an operation; the error has the line number.
        RecordTooLargeError: a key has more than 1,024 bytes.

    """
    lines = enumerate(text.split("\n"), start=1)
    return [_operation(line, f"{where}, line {number}") for number, line in lines if line.strip()]


def _operation(line: str, where: str) -> Operation:
    found = json_values.decode(line, where)
    match list(found.items()) if isinstance(found, dict) else None:
        case [("get" | "delete" as verb, str() | bytes() as key)]:
            return Operation(verb, encode_key(key))
        case [("put" | "check" as verb, [str() | bytes() as key, value])]:
            return Operation(verb, encode_key(key), value)
        case _:
            raise ConfigError(where, line, _SHAPE)


def execute(
    script: Sequence[Operation], transaction: Transaction
) -> list[tuple[bytes, Any]] | CheckFailedError:
    """Run a script; return the result of each "get" (or `ABSENT`), or the failed check."""
    read: list[tuple[bytes, Any]] = []
    written: dict[bytes, Any] = {}
    for operation in script:
        key = operation.key
        if operation.verb in {"put", "delete"}:
            written[key] = operation.value if operation.verb == "put" else ABSENT
            continue
        value = written[key] if key in written else transaction.get(key, ABSENT)
        if operation.verb == "get":
            read.append((key, value))
        elif (None if value is ABSENT else value) != operation.value:
            return CheckFailedError(key, operation.value, value)
    for key, value in written.items():
        if value is ABSENT:
            transaction.delete(key)
        else:
            transaction.put(key, value)
    return read
