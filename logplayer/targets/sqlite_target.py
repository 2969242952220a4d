"""Targets in SQLite files: exactly once.

`BEGIN IMMEDIATE` takes the lock of the file before anything is read, so two players take turns. A
process that is suspended in a transaction keeps the file locked until it continues or dies.
"""

from __future__ import annotations

import os
import sqlite3
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logplayer.targets.sql import Dialect, sql_target
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from logplayer.targets.sql import Apply, Connection, Fault, SqlTarget
    from logplayer.targets.statement import Row
    from ziplog.types import Record

#: How long a statement waits for another connection's lock, in seconds.
BUSY_S: Final = 10.0
#: The bits of an error's code without its details.
_PRIMARY: Final = 0xFF
#: Maximum number of rows that one statement inserts. SQLite runs a statement without Python's lock,
#: so the player reads the log meanwhile.
_MAX_ROWS: Final = 500
#: A file that was deleted or replaced is reported as read-only, or as malformed.
_BROKEN: Final = {
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR
}  # fmt: skip


class SqliteDialect(Dialect):
    """How SQLite differs."""

    def __init__(self, path: str) -> None:
        """Take the file's path."""
        self._path: Final = Path(path)
        self.no_connection = f"cannot open {path}"

    def is_absent(self) -> bool:
        """Whether there is no file.

        Raises:
            UnavailableError: its directory is absent as well; or one of both cannot be written.

        """
        directory, is_absent = self._path.absolute().parent, not self._path.exists()
        if not directory.is_dir():
            raise UnavailableError(f"cannot create {self._path}: its directory is absent")
        # The journal of a transaction is a file beside it.
        for path in (directory,) if is_absent else (directory, self._path):
            if not os.access(path, os.W_OK):
                raise UnavailableError(f"cannot write in {path}; check its owner, and its disk")
        return is_absent

    def begin(self, cursor: Any) -> None:
        """Begin a transaction with the lock of the file.

        Raises:
            sqlite3.OperationalError: the file was deleted or replaced. SQLite reports that itself,
                but not in the journal mode WAL.

        """
        connection = cursor.connection
        if isinstance(connection, _Connection) and _number_of(connection.path) != connection.number:
            error = sqlite3.OperationalError(f"{connection.path} was deleted or replaced")
            error.sqlite_errorcode = sqlite3.SQLITE_READONLY_DBMOVED
            raise error
        cursor.execute("BEGIN IMMEDIATE")

    def insert_records(self, cursor: Any, sql: str, rows: Sequence[Any]) -> None:
        """Insert rows into the table `records`, many with one statement."""
        columns = len(rows[0])
        limit = cursor.connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
        most = min(_MAX_ROWS, limit // columns)
        values = f", ({', '.join('?' * columns)})"
        for first in range(0, len(rows), most):
            some = rows[first : first + most]
            cursor.execute(sql + values * (len(some) - 1), tuple(chain.from_iterable(some)))

    def timestamp(self, record: Record) -> str:
        """Return the text that SQLite's functions of dates take."""
        return record.timestamp.isoformat(timespec="microseconds")

    def fault(self, error: Exception) -> Fault:
        """Return what is at fault: one code stands for malformed JSON and for a missing table."""
        is_general = _code(error) == sqlite3.SQLITE_ERROR
        return "unclear" if is_general else super().fault(error)

    def has_transaction(self, connection: Connection) -> bool:
        """Whether a transaction is under way."""
        return bool(getattr(connection, "in_transaction", True))

    def is_valid(self, connection: Connection, sql: str, row: Row) -> bool:
        """Whether SQLite can prepare a statement."""
        try:
            connection.cursor().execute(f"EXPLAIN {sql}", row)
        except sqlite3.Error:
            return False
        return True

    def is_broken(self, error: Exception) -> bool:
        """Whether the file was replaced: SQLite never writes again with that connection."""
        return _code(error) & _PRIMARY in _BROKEN


def _code(error: Exception) -> int:
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code


def connector(
    where: str, path: str | os.PathLike[str], statement: str | None, apply: Apply | None
) -> Callable[[], SqlTarget]:
    """Return how tasks connect to a file.

    Raises:
        ConfigError: the path, the statement or `apply` is invalid.

    """
    named = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(named, str) or named in {"", ":memory:"}:
        raise ConfigError("path", path, "the path of a database file", where)
    return sql_target(where, lambda: open_file(named), SqliteDialect(named), statement, apply)


class _Connection(sqlite3.Connection):
    """A connection that knows which file it has opened."""

    path = Path()
    #: What `_number_of` returned for the path then.
    number: tuple[int, int] | None = None


def _number_of(path: Path) -> tuple[int, int] | None:
    """Return the device and the inode of a file; None: there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def open_file(path: str) -> sqlite3.Connection:
    """Open a file, so that commits survive a power cut."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, factory=_Connection)
    # The directory of the process may change.
    connection.path = Path(path).absolute()
    connection.number = _number_of(connection.path)
    try:
        # FULL, and the directory after the journal is deleted. Without that, a power cut may bring
        # the journal back, and with it the state before a commit that has returned.
        connection.execute("PRAGMA synchronous = EXTRA")
    except sqlite3.Error:
        connection.close()
        raise
    return connection
