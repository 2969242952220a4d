"""Targets in SQL databases: the position and the effects change in one transaction.

F, the transaction of `open`, stores the term. D, the one of `deliver`, moves the position from the
start of a batch to its stop, before it has an effect. That locks the position's row. So of two
players the later one waits, and then finds what the earlier one committed.
Invariant: the stored position is p if and only if the effects are those of the records below p.
See docs/player.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Protocol, TypeVar

from logplayer.contract import Fenced, Opened, Rejected, Retry
from logplayer.targets import stored_positions, tables
from logplayer.targets.settings import check_apply
from logplayer.targets.statement import positional, positional_row, translate
from ziplog.errors import ConfigError, UnavailableError
from ziplog.types import Record, RecordId, cluster_id

if TYPE_CHECKING:
    from logplayer.contract import Batch, Task
    from logplayer.targets.statement import Paramstyle, Row, Statement
    from logplayer.targets.tables import PositionRow

R = TypeVar("R")
#: Applies records in the transaction of a batch; it must neither commit nor roll back.
Apply = Callable[[Any, Sequence[Record]], object]
#: What made a statement fail: the content of a record, or another thing. unclear: `is_valid` asks.
Fault = Literal["record", "unclear", "other"]


class Cursor(Protocol):
    """A cursor of PEP 249."""

    @property
    def rowcount(self) -> int:
        """Number of rows that the last statement changed."""
        ...

    def execute(self, sql: str, values: Any = ..., /) -> object:
        """Run a statement."""
        ...

    def executemany(self, sql: str, rows: Any, /) -> object:
        """Run a statement for each row."""
        ...

    def fetchone(self) -> Any:
        """Return the next row of the result, or None."""
        ...

    def close(self) -> object:
        """Close it."""
        ...


class Connection(Protocol):
    """A connection of PEP 249."""

    def cursor(self) -> Any:
        """Return a new cursor."""
        ...

    def commit(self) -> object:
        """Commit the transaction."""
        ...

    def rollback(self) -> object:
        """Roll the transaction back."""
        ...

    def close(self) -> object:
        """Close it; a transaction under way is rolled back."""
        ...


class Dialect:
    """How a database differs from others."""

    paramstyle: Paramstyle = "qmark"
    #: How the error of a failed connection begins.
    no_connection = "cannot connect"
    #: The type of a column of bytes, and the name of the column with the key.
    blob = "BLOB"
    key_column = "key"
    #: Operators that are parameters in other databases.
    operators: frozenset[str] = frozenset()
    #: It has transactions; False: new connections are tested.
    is_known = True

    #: EXPLAIN before a statement prepares it without running it.
    has_explain = True

    def is_absent(self) -> bool:
        """Whether there is no database yet, and the first connection would create it.

        Raises:
            UnavailableError: it could not.

        """
        return False

    def begin(self, cursor: Cursor) -> None:
        """Begin a transaction; by default the driver does so with the first statement."""

    def insert_records(self, cursor: Cursor, sql: str, rows: Sequence[Any]) -> None:
        """Insert rows into the table `records`; `sql` inserts one of them."""
        cursor.executemany(sql, rows)

    def timestamp(self, record: Record) -> Any:
        """Return the value of the parameter `:timestamp`."""
        return record.timestamp

    def fault(self, error: Exception) -> Fault:
        """Return what made a statement fail."""
        return "record" if _names(error) & {"IntegrityError", "DataError"} else "other"

    def has_transaction(self, connection: Connection) -> bool:  # noqa: ARG002
        """Whether a transaction is under way that can be committed, as far as the driver knows."""
        return True

    def is_valid(self, connection: Connection, sql: str, row: Row) -> bool:  # noqa: ARG002
        """Whether a statement can run at all, after one that failed for an unclear reason."""
        return False

    def is_broken(self, error: Exception) -> bool:  # noqa: ARG002
        """Whether no further statement of a connection can succeed, after an error."""
        return False


#: For a look at a statement.
_EXAMPLE: Final = Record(RecordId(1, 0), b"{}", b"key", 0, 0)


class _BatchFailedError(Exception):
    """One record of many made `executemany` fail."""


class SqlTarget:
    """One task's connection to a database."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        dialect: Dialect,
        statement: Statement | None,
        apply: Apply | None,
        *,
        has_own_table: bool,
    ) -> None:
        self._connect: Final = connect
        self._dialect: Final = dialect
        self._statement: Final = statement
        self._apply: Final = apply
        #: It fills the table `records`, which it creates.
        self._has_own_table: Final = has_own_table
        self._connection: Connection | None = None
        #: A savepoint shows whether `apply` has committed.
        self._has_savepoints = dialect.is_known

    def open(self, task: Task) -> Opened:
        """Store the task's term, and return the stored position; connect if need be.

        Raises:
            Retry: the database cannot be reached, or another transaction has locked the row.
            Fenced: a later term is stored.
            ConfigError: the row is another cursor's, or is absent or older than the last seek
                although the cursor moved.

        """
        if self._connection is None:
            try:
                self._connection = self._connect()
                self._create_tables()
                if not self._dialect.is_known:
                    self._probe()
            except Exception as error:
                self.close()
                if _is_of_database(error):
                    raise Retry(f"{self._dialect.no_connection}: {brief(error)}") from error
                raise
        return self._run(lambda cursor: self._fence(cursor, task), "cannot store the term")

    def deliver(self, batch: Batch) -> None:
        """Do the effect of a batch and store its stop, in one transaction.

        Raises:
            Retry: nothing is done, or the outcome of the commit is unknown; open it again.
            Rejected: a record violates a rule of the database; nothing is done.
            Fenced: another term or position is stored; nothing is done.

        """
        if self._connection is None:
            raise Retry("the connection was lost")
        statement = self._statement
        if statement is None or not batch.records:
            self._apply_or_undo(batch)
            return
        rows = _rows(statement, batch.records)
        if statement.is_change and len(rows) > 1:
            try:
                self._run(lambda cursor: self._run_batch(cursor, batch, rows), "the batch failed")
            except _BatchFailedError:
                pass  # It is rolled back. Find the record.
            else:
                return
        self._run(lambda cursor: self._run_rows(cursor, batch, rows), "a record failed")

    def check(self) -> None:
        """Connect, let the database prepare the statement, and change nothing.

        Raises:
            UnavailableError: the database cannot be reached.
            ConfigError: it refuses the statement.

        """
        if self._dialect.is_absent():
            if self._statement is not None and not self._has_own_table:
                raise UnavailableError("there is no database yet, with tables for the statement")
            return
        try:
            connection = self._connect()
        except Exception as error:
            if _is_of_database(error) or isinstance(error, OSError):
                text = f"{self._dialect.no_connection}: {brief(error)}"
                raise UnavailableError(text) from error
            raise
        try:
            self._explain(connection)
        finally:
            with suppress(Exception):
                connection.close()

    def _explain(self, connection: Connection) -> None:
        statement = self._statement
        if statement is None or self._has_own_table or not self._dialect.has_explain:
            return
        try:
            connection.cursor().execute(f"EXPLAIN {statement.sql}", statement.row(_EXAMPLE))
        except Exception as error:
            if self._dialect.fault(error) == "record":
                return  # The database got as far as the example's values.
            problem = f"the database refuses the statement: {brief(error)}"
            raise ConfigError("statement", statement.sql, "valid", message=problem) from error

    def close(self) -> None:
        """Close the connection; a transaction under way is rolled back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.close()

    # --- transactions ---

    def _run(self, step: Callable[[Cursor], R], failure: str) -> R:
        """Run a step in a transaction, and commit it."""
        connection = self._connection
        if connection is None:
            raise Retry("the connection was lost")
        try:
            cursor = connection.cursor()
            self._dialect.begin(cursor)
            result = step(cursor)
            cursor.close()
        except BaseException as error:
            self._roll_back(connection)
            if isinstance(error, Exception) and self._dialect.is_broken(error):
                self.close()
            if _is_of_database(error):
                raise Retry(f"{failure}: {brief(error)}") from error
            raise
        # Only now is the commit sent: the server has answered each statement, so it has the lock of
        # the row. Whatever becomes of the commit, it cannot take effect after the next F.
        try:
            connection.commit()
        except BaseException as error:
            self.close()
            if _names(error) & {"IntegrityError"}:  # a constraint that is checked at the commit
                raise Rejected(brief(error)) from error
            if _is_of_database(error) or isinstance(error, OSError):
                raise Retry(f"the outcome of the commit is unknown: {brief(error)}") from error
            raise
        return result

    def _roll_back(self, connection: Connection) -> None:
        try:
            connection.rollback()
        except Exception:  # noqa: BLE001 - whatever the driver raises, the connection is broken
            self.close()

    def _execute(self, cursor: Cursor, sql: str, values: Sequence[Any] = ()) -> None:
        style = self._dialect.paramstyle
        cursor.execute(positional(sql, style), positional_row(values, style))

    def _create_tables(self) -> None:
        """Create the tables that are absent; a role without that right needs them present."""
        needed = tables.TABLES | ({"records": tables.RECORDS} if self._has_own_table else {})
        names = {"key": self._dialect.key_column, "blob": self._dialect.blob}
        for table, definition in needed.items():
            try:
                self._run(partial(_count, table=table), "")
            except Retry:
                sql = definition.format(**names)
                self._run(partial(_execute, sql=sql), f"cannot create {table}")

    def _probe(self) -> None:
        """Test whether a rollback takes back what a statement did.

        Raises:
            ConfigError: it does not, or the driver does not count rows.

        """
        connection = self._connection
        assert connection is not None
        if getattr(connection, "autocommit", False) is True:
            raise ConfigError("autocommit of the connection", True, "False")
        cursor = connection.cursor()
        self._execute(cursor, tables.CREATE, tables.PROBE)
        self._execute(cursor, tables.MOVE_PROBE, tables.PROBE[:1])
        changed = cursor.rowcount
        connection.rollback()
        self._execute(cursor, tables.FIND_PROBE, tables.PROBE[:1])
        is_kept = cursor.fetchone() is not None
        if is_kept:
            self._execute(cursor, tables.DELETE_PROBE, tables.PROBE[:1])
        connection.commit()
        self._has_savepoints = self._finds_ended_savepoints(connection, cursor)
        cursor.close()
        if is_kept:
            problem = "a rollback does not take back what the connection did: it commits by itself"
            problem += ", or the table ziplog_position has no transactions"
            raise ConfigError("connect", "", "a connection with transactions", message=problem)
        if changed != 1:
            allowed = "the number of changed rows"
            raise ConfigError("rowcount of the driver's cursors", changed, allowed)

    def _finds_ended_savepoints(self, connection: Connection, cursor: Cursor) -> bool:
        """Whether the database has savepoints, and refuses to release one that has ended."""
        try:
            self._execute(cursor, tables.MOVE_PROBE, tables.PROBE[:1])  # A transaction begins.
            cursor.execute(tables.SAVEPOINT)
            cursor.execute(tables.RELEASE)
        except Exception as error:
            if not _is_of_database(error):
                raise
            return False
        else:
            return not _succeeds(cursor, tables.RELEASE)
        finally:
            connection.rollback()

    # --- F ---

    def _fence(self, cursor: Cursor, task: Task) -> Opened:
        key = (task.player, task.target, task.partition)
        owner = (task.partitions, task.cluster, task.birth, task.term)
        # A cursor that has moved since its last seek is not where that seek led.
        least_seek = task.seek if task.has_moved else 0
        fence = (task.seek, task.position, task.term, task.seek, *key, *owner, least_seek)
        self._execute(cursor, tables.FENCE, fence)
        row = self._stored(cursor, task)
        if row is None:
            self._check_may_create(cursor, task)
            self._execute(cursor, tables.CREATE, (*key, *owner, task.seek, task.position))
            return Opened(task.position)
        stored_positions.check_is_same_cursor(
            "the database", cluster_id(row.cluster), row.birth, row.parts, task,
            "Use another database or target name, or delete the rows of the target in"
            " ziplog_position",
        )  # fmt: skip
        if row.term > task.term:
            raise Fenced(f"the database has the later term {row.term}, not {task.term}")
        stored_positions.check_has_seek("the database", row.seek, row.position, task)
        return Opened(row.position)

    def _stored(self, cursor: Cursor, task: Task) -> PositionRow | None:
        self._execute(cursor, tables.STORED, (task.player, task.target, task.partition))
        row = cursor.fetchone()
        return None if row is None else tables.PositionRow(*row)

    def _check_may_create(self, cursor: Cursor, task: Task) -> None:
        self._execute(cursor, tables.OTHER_PARTS, (task.player, task.target, task.partitions))
        if (other := cursor.fetchone()) is not None:
            raise stored_positions.partitions_error("the database", other[0], task)
        if task.has_moved:
            raise stored_positions.missing_error("the database", "the database", task)

    # --- D ---

    def _move(self, cursor: Cursor, batch: Batch) -> None:
        """Move the position, which locks its row, and keep the rejected records."""
        task = batch.task
        key = (task.player, task.target, task.partition)
        self._execute(cursor, tables.MOVE, (batch.stop, *key, task.term, batch.start))
        if cursor.rowcount != 1:
            self._refuse(cursor, batch)
        for record, why in batch.rejected:
            values = (
                task.player, task.target, record.rid.gsn, record.rid.shard, record.key,
                record.payload, record.timestamp_us, why,
            )  # fmt: skip
            self._execute(cursor, tables.KEEP.format(key=self._dialect.key_column), values)

    def _refuse(self, cursor: Cursor, batch: Batch) -> NoReturn:
        task, row = batch.task, self._stored(cursor, batch.task)
        found = "no row" if row is None else f"term {row.term} and position {row.position}"
        raise Fenced(
            f"the database has {found} for {task.cursor}, not term {task.term} and position"
            f" {batch.start}"
        )

    def _run_batch(self, cursor: Cursor, batch: Batch, rows: Sequence[Row]) -> None:
        assert self._statement is not None
        self._move(cursor, batch)
        try:
            if self._has_own_table:
                self._dialect.insert_records(cursor, self._statement.sql, rows)
            else:
                cursor.executemany(self._statement.sql, rows)
        except Exception as error:
            if self._dialect.fault(error) == "other":
                raise
            raise _BatchFailedError from error

    def _run_rows(self, cursor: Cursor, batch: Batch, rows: Sequence[Row]) -> None:
        assert self._statement is not None
        sql = self._statement.sql
        self._move(cursor, batch)
        for index, row in enumerate(rows):
            try:
                cursor.execute(sql, row)
            except Exception as error:
                if self._is_records_fault(error, sql, row):
                    raise Rejected(index, brief(error)) from error
                raise

    def _is_records_fault(self, error: Exception, sql: str, row: Row) -> bool:
        assert self._connection is not None
        fault = self._dialect.fault(error)
        return fault == "record" or (
            fault == "unclear" and self._dialect.is_valid(self._connection, sql, row)
        )

    def _apply_or_undo(self, batch: Batch) -> None:
        """Run `apply`; if it fails, look whether it has committed what it did before."""
        try:
            self._run(lambda cursor: self._apply_batch(cursor, batch), "cannot apply records")
        except (Fenced, ConfigError):
            raise
        except Exception as error:
            if self._apply is not None and self._is_done(batch):
                raise _transaction_error() from error
            raise

    def _is_done(self, batch: Batch) -> bool:
        """Whether the position of a batch is stored although the batch was rolled back."""
        if self._connection is None:  # The outcome of the commit is unknown.
            return False
        try:
            row = self._run(lambda cursor: self._stored(cursor, batch.task), "")
        except Retry:
            return False
        return row is not None and (row.term, row.position) == (batch.task.term, batch.stop)

    def _apply_batch(self, cursor: Cursor, batch: Batch) -> None:
        self._move(cursor, batch)
        if self._apply is None or not batch.records:
            return
        if self._has_savepoints:
            cursor.execute(tables.SAVEPOINT)
        try:
            self._apply(cursor, batch.records)
        except Exception as error:
            if self._dialect.fault(error) == "record":
                raise Rejected(brief(error)) from error
            raise
        # `apply` may have hidden an error, after which some servers roll back at the commit.
        connection = self._connection
        assert connection is not None
        is_whole = self._dialect.has_transaction(connection)
        if is_whole:
            row = self._stored(cursor, batch.task)
            is_whole = row is not None and row.position == batch.stop
        if not is_whole:
            raise _transaction_error()
        if self._has_savepoints:
            cursor.execute(tables.RELEASE)  # If it fails, `_apply_or_undo` looks for the reason.


def _transaction_error() -> ConfigError:
    problem = "`apply` ended the transaction of its batch, or hid an error of a statement in it"
    return ConfigError("apply", "", "a function that does neither", message=problem)


def sql_target(
    where: str,
    connect: Callable[[], Connection],
    dialect: Dialect,
    statement: str | None,
    apply: Apply | None,
) -> Callable[[], SqlTarget]:
    """Return how the tasks of a target connect.

    Raises:
        ConfigError: the statement or `apply` is invalid.

    """
    if apply is not None:
        if statement is not None:
            raise ConfigError("apply", apply, "left out with a statement", where)
        check_apply(apply, "a function of a cursor and a list of records", where)
        return lambda: SqlTarget(connect, dialect, None, apply, has_own_table=False)
    has_own_table = statement is None
    translated = translate(
        tables.INSERT_RECORD.format(key=dialect.key_column) if statement is None else statement,
        dialect.paramstyle,
        where,
        operators=dialect.operators,
        timestamp=dialect.timestamp,
    )
    return lambda: SqlTarget(connect, dialect, translated, None, has_own_table=has_own_table)


def brief(error: BaseException) -> str:
    """Return the first line of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _count(cursor: Cursor, table: str) -> None:
    cursor.execute(f"SELECT COUNT(*) FROM {table} WHERE 1 = 0")  # noqa: S608 - our names
    cursor.fetchone()


def _execute(cursor: Cursor, sql: str) -> None:
    cursor.execute(sql)


def _succeeds(cursor: Cursor, sql: str) -> bool:
    try:
        cursor.execute(sql)
    except Exception as error:
        if not _is_of_database(error):
            raise
        return False
    return True


def _rows(statement: Statement, records: Sequence[Record]) -> Sequence[Row]:
    """Return the rows of records; say which record has a value that the statement cannot have."""
    with suppress(Rejected):
        return statement.rows(records)
    for index, record in enumerate(records):
        try:
            statement.row(record)
        except Rejected as error:
            raise Rejected(index, str(error)) from error
    raise AssertionError("a record was rejected once, and not again")


def _names(error: BaseException) -> set[str]:
    """Return the names of an error's classes: each module has its own classes of PEP 249."""
    return {kind.__name__ for kind in type(error).__mro__}


def _is_of_database(error: BaseException) -> bool:
    return bool(_names(error) & {"DatabaseError", "InterfaceError"})
