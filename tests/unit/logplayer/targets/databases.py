"""A log, tasks, and databases whose connections fail, for the tests of targets."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from logplayer.contract import Batch, RejectedRecord, Task
from logplayer.targets.dbapi_target import AnyDialect
from logplayer.targets.sql import sql_target
from logplayer.targets.sqlite_target import SqliteDialect, open_file
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from logplayer.targets.sql import Apply, Connection, Dialect, SqlTarget

CLUSTER = 7
#: The positions that have records; the others are empty, or of other tasks.
GSNS = (1, 2, 3, 5, 8, 13, 14, 15, 21, 34)
#: A target's statement, and the table that it fills.
EVENTS = "CREATE TABLE events (gsn BIGINT PRIMARY KEY, body TEXT NOT NULL CHECK (body <> 'bad'))"
INSERT = "INSERT INTO events VALUES (:gsn, :text)"


def record(gsn: int, payload: bytes = b"good", key: bytes | None = b"k") -> Record:
    return Record(RecordId(gsn, gsn % 2), payload, key, 1_700_000_000_000_000 + gsn, gsn // 10)


def task(term: int = 1, position: int = 1, **more: Any) -> Task:
    fields: dict[str, Any] = {
        "player": "orders", "target": "warehouse", "partition": 0, "partitions": 1,
        "cluster": CLUSTER, "birth": 1, "term": term, "seek": 0, "position": position,
        "mark": b"", "has_moved": False,
    }  # fmt: skip
    return Task(**(fields | more))


def batch(
    of: Task,
    start: int,
    stop: int,
    records: Sequence[Record] | None = None,
    rejected: Sequence[RejectedRecord] = (),
) -> Batch:
    if records is None:
        records = [record(gsn) for gsn in GSNS if start <= gsn < stop]
    return Batch(of, start, stop, records, sum(len(one.payload) for one in records), rejected)


class DatabaseError(Exception):
    """What drivers call the base of their errors."""


class OperationalError(DatabaseError):
    """The connection broke."""


class FailingConnection:
    """A connection that breaks at chosen commits: before they take effect, or after."""

    def __init__(self, connection: Any, faults: list[str]) -> None:
        self._connection, self._faults = connection, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        fault = self._faults.pop(0) if self._faults else ""
        if fault == "before":
            self._connection.close()
        else:
            self._connection.commit()
        if fault:
            self._connection.close()
            raise OperationalError("the connection broke")


class Database:
    """A database with targets of one task."""

    def __init__(self, connect: Callable[[], Any], dialect: Dialect) -> None:
        self._connect, self._dialect = connect, dialect
        #: What becomes of the next commits: "", "before", "after".
        self.faults: list[str] = []
        self.targets: list[SqlTarget] = []
        #: For what the tests run.
        self._own: Any = connect()
        self.run(EVENTS)

    def target(self, statement: str | None = INSERT, apply: Apply | None = None) -> SqlTarget:
        if apply is not None:
            statement = None
        made = sql_target("target warehouse", self._failing, self._dialect, statement, apply)()
        self.targets.append(made)
        return made

    def _failing(self) -> Connection:
        return FailingConnection(self._connect(), self.faults)

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        cursor = self._own.cursor()
        cursor.execute(sql)
        rows = [] if cursor.description is None else cursor.fetchall()
        self._own.commit()
        return [tuple(row) for row in rows]

    def position(self) -> int | None:
        rows = self.run("SELECT position FROM ziplog_position WHERE target = 'warehouse'")
        return rows[0][0] if rows else None

    def gsns(self) -> list[int]:
        return [row[0] for row in self.run("SELECT gsn FROM events ORDER BY gsn")]

    def dead(self) -> list[tuple[Any, ...]]:
        return self.run("SELECT gsn, why FROM ziplog_dead ORDER BY gsn")

    def close(self) -> None:
        self.close_targets()
        self._own.close()

    def close_targets(self) -> None:
        for target in self.targets:
            target.close()
        self.targets.clear()


def sqlite_database(directory: Path) -> Database:
    path = str(directory / "warehouse.db")
    return Database(lambda: quick(open_file(path)), SqliteDialect(path))


def dbapi_database(directory: Path) -> Database:
    """Return SQLite as a module of which nothing is known, with names as parameters."""
    path = str(directory / "other.db")

    def connect() -> sqlite3.Connection:
        return quick(sqlite3.connect(path))

    return Database(connect, AnyDialect("named", "BLOB"))


def quick(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Let a connection wait for locks only shortly, and not for the disk."""
    connection.execute("PRAGMA busy_timeout = 100")
    connection.execute("PRAGMA synchronous = OFF")
    return connection
