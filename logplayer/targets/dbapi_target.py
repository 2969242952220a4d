"""Targets in databases of any DB-API 2.0 module: exactly once, if the database has transactions.

A new connection is tested once: a row that it inserts must be gone after a rollback. So a
connection with autocommit and a table without transactions are found before the first record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logplayer.targets.sql import Dialect, sql_target
from logplayer.targets.statement import PARAMSTYLES
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.targets.sql import Apply, Connection, SqlTarget
    from logplayer.targets.statement import Paramstyle


class AnyDialect(Dialect):
    """A database of which nothing is known but its module's interface."""

    # KEY is a reserved word in many databases.
    key_column = "record_key"
    is_known = False
    has_explain = False

    def __init__(self, paramstyle: Paramstyle, blob: str) -> None:
        """Take the module's notation of parameters, and the type of a column of bytes."""
        self.paramstyle = paramstyle
        self.blob = blob


def connector(
    where: str,
    connect: Callable[[], Connection],
    statement: str | None,
    apply: Apply | None,
    *,
    paramstyle: Paramstyle | None,
    blob: str,
) -> Callable[[], SqlTarget]:
    """Return how tasks connect to a database.

    Raises:
        ConfigError: an argument is invalid.

    """
    if not callable(connect):
        raise ConfigError("connect", connect, "a function that returns a connection", where)
    if paramstyle is None or paramstyle not in PARAMSTYLES:
        raise ConfigError("paramstyle", paramstyle, f"one of {' '.join(PARAMSTYLES)}", where)
    if not isinstance(blob, str) or not blob.strip():
        raise ConfigError("blob", blob, "the database's type of a column of bytes", where)
    return sql_target(where, connect, AnyDialect(paramstyle, blob), statement, apply)
