"""Targets in PostgreSQL databases: exactly once; needs `ziplog[postgres]`.

At READ COMMITTED, an update that has waited for the lock of a row looks at the row again. So a
former owner that waited sees the new term, and changes nothing. The server ends the session of an
owner that was suspended in a transaction, after 30 seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logplayer.targets.sql import Dialect, sql_target
from ziplog.errors import ConfigError

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.pq import TransactionStatus
except ImportError as error:
    raise ModuleNotFoundError(
        "a postgres target needs psycopg 3, not installed: pip install 'ziplog[postgres]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logplayer.targets.sql import Apply, Cursor, Fault, SqlTarget

#: What a connection string may override: a silent server is noticed within half a minute.
_DEFAULTS: Final = {
    "connect_timeout": "10",
    "fallback_application_name": "ziplog player",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
#: A commit returns when it is on stable storage, with one of these.
_DURABLE: Final = {"on", "remote_apply"}
_SETTINGS: Final = (
    "SET idle_in_transaction_session_timeout = '30s'",
    "SET lock_timeout = '10s'",
)
#: Inserts a list of values for each column of `records`. It is faster than a statement for each
#: row, and subject to the same privileges, policies and triggers, as COPY is not.
_INSERT_MANY: Final = (
    "INSERT INTO records (gsn, shard, epoch, timestamp_us, key, payload) SELECT * FROM"
    " unnest(%b::bigint[], %b::integer[], %b::bigint[], %b::bigint[], %b::bytea[], %b::bytea[])"
)
#: Beside the classes 22 (data) and 23 (integrity): a cardinality, a value that an index cannot
#: have, a view's check option, and `RAISE` in a trigger.
_RECORDS_FAULTS: Final = {"21000", "44000", "54000", "P0001"}


class PostgresDialect(Dialect):
    """How PostgreSQL differs."""

    paramstyle = "format"
    blob = "BYTEA"
    # Operators of jsonb.
    operators = frozenset("?")

    def insert_records(self, cursor: Cursor, sql: str, rows: Sequence[Any]) -> None:  # noqa: ARG002
        """Insert rows into the table `records`, all with one statement."""
        cursor.execute(_INSERT_MANY, [list(column) for column in zip(*rows, strict=True)])

    def has_transaction(self, connection: Any) -> bool:
        """Whether a transaction is under way, and has not failed."""
        return bool(connection.info.transaction_status == TransactionStatus.INTRANS)

    def fault(self, error: Exception) -> Fault:
        """Return what made a statement fail."""
        is_records = getattr(error, "sqlstate", None) in _RECORDS_FAULTS
        return "record" if is_records else super().fault(error)


def connector(
    where: str, dsn: str, statement: str | None, apply: Apply | None
) -> Callable[[], SqlTarget]:
    """Return how tasks connect to a database.

    Raises:
        ConfigError: the connection string, the statement or `apply` is invalid.

    """
    allowed = "a connection string of libpq, such as 'postgresql://user@host/database'"
    # It may contain a password, so no error has it.
    if not isinstance(dsn, str):
        raise ConfigError("dsn", "(not shown)", allowed, where)
    try:
        parameters = _DEFAULTS | conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise ConfigError("dsn", "(not shown)", allowed, where) from None
    return sql_target(where, lambda: open_session(parameters), PostgresDialect(), statement, apply)


def open_session(parameters: dict[str, Any]) -> psycopg.Connection[Any]:
    """Connect, so that commits are durable and no lock is held or awaited for long."""
    connection = psycopg.connect(autocommit=True, **parameters)
    try:
        for setting in _SETTINGS:
            connection.execute(setting)
        row = connection.execute("SHOW synchronous_commit").fetchone()
        if row is None or row[0] not in _DURABLE:
            connection.execute("SET synchronous_commit = on")
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        connection.autocommit = False
    except psycopg.Error:
        connection.close()
        raise
    return connection
