"""SQL statements with the parameters of a record, in the notation of the driver.

A user writes a parameter as `:name` for every database. It becomes what the driver takes (PEP 249,
`paramstyle`). Text in quotes, comments and casts (`::`) stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from logplayer.contract import Rejected
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from ziplog.types import Record

#: The notations of PEP 249: `?`, `:1`, `:name`, `%s`, `%(name)s`.
Paramstyle = Literal["qmark", "numeric", "named", "format", "pyformat"]
PARAMSTYLES: Final[tuple[Paramstyle, ...]] = get_args(Paramstyle)
#: The values of one record: a mapping for the notations with names.
Row = Sequence[Any] | Mapping[str, Any]

#: What a statement is divided into; the first alternative that fits counts.
_TOKENS: Final = re.compile(
    r"""(?xs)
      (?P<text> (?<![\w$])[eE]'(?:\\.|''|[^'\\])*' | '(?:''|[^'])*' | "(?:""|[^"])*" | `[^`]*`
              | \$(?P<tag>(?:[A-Za-z_]\w*)?)\$.*?\$(?P=tag)\$
              | --[^\n]* | /\*.*?\*/ | ::+ )
    | :(?P<name> [A-Za-z_]\w* )
    | (?P<positional> \? | %s\b | %\(\w*\)s | \$\d+ | (?<![\w\])]):\d+ | [@$][A-Za-z_]\w* )
    | (?P<end> ;\s*(?=\S) )
    """,
    re.ASCII,
)
#: `executemany` of SQLite takes only changes, and drivers make it fast for them.
_CHANGES: Final = re.compile(r"\s*(insert|update|delete|replace|merge)\b", re.IGNORECASE)


def _text(value: bytes | None, what: str, parameter: str) -> str | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Rejected(f"the {what} is not UTF-8, which :{parameter} needs: {error}") from error


#: The parameters of a statement.
PARAMETERS: Final[Mapping[str, Callable[[Record], Any]]] = {
    "gsn": attrgetter("rid.gsn"),
    "shard": attrgetter("rid.shard"),
    "epoch": attrgetter("epoch"),
    "timestamp_us": attrgetter("timestamp_us"),
    "timestamp": attrgetter("timestamp"),
    "key": attrgetter("key"),
    "key_text": lambda record: _text(record.key, "key", "key_text"),
    "payload": attrgetter("payload"),
    "text": lambda record: _text(record.payload, "payload", "text"),
}
PARAMETER_RULE: Final = f"one of {' '.join(f':{name}' for name in PARAMETERS)}"


class Statement(NamedTuple):
    """A user's statement in the driver's notation."""

    sql: str
    #: The parameters in the order of their occurrence.
    parameters: tuple[str, ...]
    #: The driver takes a mapping.
    by_name: bool
    #: It inserts, updates or deletes, so `executemany` may run it.
    is_change: bool
    #: The values of the parameters.
    values: Sequence[Callable[[Record], Any]]

    def row(self, record: Record) -> Row:
        """Return the values of a record.

        Raises:
            Rejected: a value that the statement needs as text is not UTF-8.

        """
        (row,) = self.rows([record])
        return row

    def rows(self, records: Sequence[Record]) -> Sequence[Row]:
        """Return the values of each record; errors are those of `row`."""
        if not self.values:
            return [{} if self.by_name else ()] * len(records)
        # A loop over the records of each column runs in C, mostly.
        found = list(zip(*(map(value, records) for value in self.values), strict=True))
        if not self.by_name:
            return found
        return [dict(zip(self.parameters, row, strict=True)) for row in found]


def translate(
    sql: str,
    paramstyle: Paramstyle,
    where: str,
    *,
    operators: frozenset[str] = frozenset(),
    timestamp: Callable[[Record], Any] = PARAMETERS["timestamp"],
) -> Statement:
    """Return a user's statement in the driver's notation.

    Args:
        sql: one statement with named parameters.
        paramstyle: the driver's notation.
        where: the target, for errors.
        operators: what is an operator of the database, and elsewhere a parameter: "?".
        timestamp: returns the value of `:timestamp`.

    Raises:
        ConfigError: it is empty, or several statements, or has an unknown parameter.

    """
    if not isinstance(sql, str) or not sql.strip():
        raise ConfigError("statement", sql, "an SQL statement", where)
    found: list[str] = []
    parts: list[str] = []
    at = 0
    for token in _TOKENS.finditer(sql):
        parts.append(_literal(sql[at : token.start()], paramstyle))
        at = token.end()
        if name := token["name"]:
            if name not in PARAMETERS:
                raise _parameter_error(f":{name}", where)
            found.append(name)
            parts.append(_placeholder(name, len(found), paramstyle))
        elif (other := token["positional"]) and other not in operators:
            raise _parameter_error(other, where)
        elif token["end"] is not None:
            raise ConfigError("statement", sql, "one statement; `apply` may run several", where)
        else:
            parts.append(_literal(token[0], paramstyle))
    parts.append(_literal(sql[at:], paramstyle))
    return Statement(
        "".join(parts).rstrip().removesuffix(";"),
        tuple(found),
        _is_by_name(paramstyle),
        _CHANGES.match(sql) is not None,
        [timestamp if name == "timestamp" else PARAMETERS[name] for name in found],
    )


@lru_cache
def positional(sql: str, paramstyle: Paramstyle) -> str:
    """Return a statement with `?` in the driver's notation; it has no other `?`."""
    first, *rest = sql.split("?")
    return first + "".join(
        _placeholder(f"p{number}", number, paramstyle) + text for number, text in enumerate(rest, 1)
    )


def positional_row(values: Sequence[Any], paramstyle: Paramstyle) -> Row:
    """Return the values of a statement that `positional` returned."""
    if _is_by_name(paramstyle):
        return {f"p{number}": value for number, value in enumerate(values, 1)}
    return tuple(values)


def _is_by_name(paramstyle: Paramstyle) -> bool:
    return paramstyle in {"named", "pyformat"}


def _literal(text: str, paramstyle: Paramstyle) -> str:
    return text.replace("%", "%%") if paramstyle in {"format", "pyformat"} else text


def _placeholder(name: str, number: int, paramstyle: Paramstyle) -> str:
    match paramstyle:
        case "qmark":
            return "?"
        case "numeric":
            return f":{number}"
        case "named":
            return f":{name}"
        case "format":
            return "%s"
        case "pyformat":
            return f"%({name})s"


def _parameter_error(parameter: str, where: str) -> ConfigError:
    problem = f"the statement has the parameter {parameter}; it must be {PARAMETER_RULE}"
    return ConfigError("parameter", parameter, PARAMETER_RULE, where, message=problem)
