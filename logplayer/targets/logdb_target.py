"""Targets in LogDB databases: exactly once.

A key of the database, `_key`, has the term and the position of a task. Rules: one transaction reads
it, compares, does the effect and writes it. `open` always writes it, so a commit of unknown outcome
that the log shows after `open` has read a version that is gone, and is aborted. No other module of
players imports LogDB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

import logdb
from logplayer.contract import Fenced, Opened, Rejected, Retry
from logplayer.targets import stored_positions
from logplayer.targets.settings import VALUES, Value, check_apply, check_timeout
from ziplog.client import arguments
from ziplog.errors import (
    ConfigError,
    DeadlineError,
    OutcomeUnknownError,
    RecordTooLargeError,
    UnavailableError,
)
from ziplog.types import Record, cluster_id

if TYPE_CHECKING:
    from logplayer.contract import Batch, RejectedRecord, Task

#: Applies the records of a batch in a transaction.
Apply = Callable[[logdb.Transaction, Sequence[Record]], object]
R = TypeVar("R")

_PORT: Final = 7500


class PositionValue(msgspec.Struct, frozen=True, array_like=True):
    """The value of a task's key."""

    cluster: str
    birth: int
    partitions: int
    term: int
    seek: int
    position: int


class _Refused(Exception):  # noqa: N818 - it carries a verdict out of a transaction
    """What a transaction read means an error, if the read is up to date."""

    def __init__(self, verdict: Exception) -> None:
        super().__init__(verdict)
        self.verdict: Final = verdict


class LogdbTarget:
    """One task's connection to a database."""

    def __init__(
        self,
        connect: Callable[[], logdb.Database],
        apply: Apply,
        *,
        is_mapped: bool,
    ) -> None:
        """Connect to nothing yet.

        Args:
            connect: returns a new client.
            apply: applies the records of a batch.
            is_mapped: the task has a `map`, so it may play the log of the database.

        """
        self._connect: Final = connect
        self._apply: Final = apply
        self._is_mapped: Final = is_mapped
        self._database: logdb.Database | None = None

    def open(self, task: Task) -> Opened:
        """Store the task's term, and return the stored position; connect if need be.

        Raises:
            Retry: the database cannot be reached, or the outcome is unknown.
            Fenced: a later term is stored.
            ConfigError: the key is another cursor's, or is absent although the cursor moved; or the
                database is on the log that the player reads.

        """
        try:
            return self._open(task)
        except Retry:
            # A client refuses another database at its endpoints for good, a new one takes it.
            self.close()
            raise

    def _open(self, task: Task) -> Opened:
        if self._database is None:
            try:
                self._database = self._connect()
            except (UnavailableError, DeadlineError) as error:
                raise Retry(f"cannot connect: {error}") from error
        self._check_is_other_log(self._database, task)
        return Opened(self._run(lambda transaction: _fence(transaction, task)))

    def _check_is_other_log(self, database: logdb.Database, task: Task) -> None:
        if self._is_mapped:
            return
        try:
            found = database.status().get("cluster")
        except (UnavailableError, DeadlineError) as error:
            raise Retry(f"the database does not answer: {error}") from error
        if found == cluster_id(task.cluster):
            problem = (
                "the database is on the log that the player reads, so each batch would become"
                " further records; use another log for the database, or give a `map` that leaves"
                " out the records of LogDB"
            )
            raise ConfigError("coordinators", found, "of another log", message=problem)

    def deliver(self, batch: Batch) -> None:
        """Apply a batch and store its stop, in one transaction.

        Raises:
            Retry: nothing is done, or the outcome of the commit is unknown; open it again.
            Rejected: a record cannot be stored, or the batch does not fit into a transaction.
            Fenced: another term or position is stored; nothing is done.

        """
        self._run(lambda transaction: self._apply_batch(transaction, batch))

    def _apply_batch(self, transaction: logdb.Transaction, batch: Batch) -> None:
        task, stored = batch.task, _stored(transaction, batch.task)
        if stored is None or (stored.term, stored.position) != (task.term, batch.start):
            found = (
                "no value"
                if stored is None
                else f"term {stored.term} and position {stored.position}"
            )
            raise _Refused(
                Fenced(
                    f"the database has {found} for {task.cursor}, not term {task.term} and position"
                    f" {batch.start}"
                )
            )
        if batch.records:
            self._apply(transaction, batch.records)
        _keep_rejected(transaction, task, batch.rejected)
        moved = msgspec.structs.replace(stored, position=batch.stop)
        transaction.put(_key(task), msgspec.to_builtins(moved))

    def _run(self, step: Callable[[logdb.Transaction], R]) -> R:
        """Run a step in a transaction, and commit it."""
        database = self._database
        if database is None:
            raise Retry("the database is not connected")
        try:
            return database.run(step)
        except _Refused as error:
            raise error.verdict from None
        except OutcomeUnknownError as error:
            raise Retry(f"the outcome of the commit is unknown: {error}") from error
        except RecordTooLargeError as error:
            # The player halves the batch until it fits, or is the one record that never does.
            raise Rejected(f"it does not fit into a transaction: {error}") from error
        except (logdb.TransactionAborted, UnavailableError, DeadlineError) as error:
            raise Retry(str(error)) from error

    def check(self) -> None:
        """Connect, and change nothing.

        Raises:
            UnavailableError: the database cannot be reached.

        """
        self._connect().close()

    def close(self) -> None:
        """Close the client."""
        database, self._database = self._database, None
        if database is not None:
            database.close()


def connector(
    where: str,
    coordinators: str | Sequence[str] | None,
    apply: Any,
    *,
    value: Value,
    tombstones: bool,
    timeout_s: float,
    is_mapped: bool,
) -> Callable[[], LogdbTarget]:
    """Return how tasks connect to a database.

    Raises:
        ConfigError: an argument is invalid.

    """
    if coordinators is not None:
        arguments.endpoints(coordinators, "coordinators", "the coordinators", _PORT, where=where)
    if value not in VALUES:
        raise ConfigError("value", value, " or ".join(map(repr, VALUES)), where)
    check_timeout(timeout_s, where)
    chosen: Apply
    if apply is None:
        chosen = PutRecords(value, tombstones=tombstones)
    elif value != "payload" or tombstones:
        raise ConfigError("apply", apply, "left out with value or tombstones", where)
    else:
        check_apply(apply, "a function of a transaction and a list of records", where)
        chosen = apply

    def connect() -> logdb.Database:
        return logdb.connect(coordinators, timeout=timeout_s)

    return lambda: LogdbTarget(connect, chosen, is_mapped=is_mapped)


class PutRecords:
    """Stores the payload of each record as the value of its key."""

    def __init__(self, value: Value, *, tombstones: bool) -> None:
        """Take what a payload becomes, and whether an empty one deletes."""
        self._value: Final = value
        self._tombstones: Final = tombstones

    def __call__(self, transaction: logdb.Transaction, records: Sequence[Record]) -> None:
        """Store records.

        Raises:
            Rejected: a record has no key, or its payload is not what it must be.
            RecordTooLargeError: a record, or all together, are too large.

        """
        for index, record in enumerate(records):
            if record.key is None:
                raise Rejected(index, "it has no key")
            if self._tombstones and not record.payload:
                transaction.delete(record.key)
                continue
            try:
                transaction.put(record.key, self._converted(record.payload))
            except (UnicodeDecodeError, msgspec.DecodeError) as error:
                raise Rejected(index, f"its payload is not {self._value}: {error}") from error
            except logdb.UnsupportedValueError as error:
                raise Rejected(index, str(error)) from error

    def _converted(self, payload: bytes) -> object:
        if self._value == "payload":
            return payload
        return payload.decode() if self._value == "text" else msgspec.json.decode(payload)


def _key(task: Task) -> bytes:
    return f"\0player\0{task.player}\0{task.target}\0{task.partition}".encode()


def _stored(transaction: logdb.Transaction, task: Task) -> PositionValue | None:
    found = transaction.get(_key(task))
    return None if found is None else msgspec.convert(found, PositionValue)


def _fence(transaction: logdb.Transaction, task: Task) -> int:
    """Store the term of a task; return its position."""
    stored = _stored(transaction, task)
    if stored is None:
        _check_may_create(transaction, task)
        seek, position = task.seek, task.position
    else:
        _check_is_same_cursor(stored, task)
        if stored.term > task.term:
            text = f"the database has the later term {stored.term}, not {task.term}"
            raise _Refused(Fenced(text))
        is_sought = task.seek > stored.seek
        seek, position = max(task.seek, stored.seek), stored.position
        if is_sought:
            _check_has_seek(stored, task)
            position = task.position
    value = PositionValue(
        cluster_id(task.cluster), task.birth, task.partitions, task.term, seek, position
    )
    transaction.put(_key(task), msgspec.to_builtins(value))
    return position


def _check_may_create(transaction: logdb.Transaction, task: Task) -> None:
    for _, found in transaction.scan(prefix=f"\0player\0{task.player}\0{task.target}\0"):
        other = msgspec.convert(found, PositionValue)
        if other.partitions != task.partitions:
            error = stored_positions.partitions_error("the database", other.partitions, task)
            raise _Refused(error)
    if task.has_moved:
        raise _Refused(stored_positions.missing_error("the database", "the database", task))


def _check_is_same_cursor(stored: PositionValue, task: Task) -> None:
    try:
        stored_positions.check_is_same_cursor(
            "the database", stored.cluster, stored.birth, stored.partitions, task,
            f"Use another database or target name, or delete the key {_key(task)!r}",
        )  # fmt: skip
    except ConfigError as error:
        raise _Refused(error) from None


def _check_has_seek(stored: PositionValue, task: Task) -> None:
    try:
        stored_positions.check_has_seek("the database", stored.seek, stored.position, task)
    except ConfigError as error:
        raise _Refused(error) from None


def _keep_rejected(
    transaction: logdb.Transaction, task: Task, rejected: Sequence[RejectedRecord]
) -> None:
    for number, (record, why) in enumerate(rejected):
        key = f"\0dead\0{task.player}\0{task.target}\0{record.rid.gsn:019}\0{number}"
        kept: dict[str, Any] = {
            "why": why, "shard": record.rid.shard, "timestamp_us": record.timestamp_us,
            "key": record.key, "payload": record.payload,
        }  # fmt: skip
        try:
            transaction.put(key, kept)
        except RecordTooLargeError:
            # What never fits is in the log only, at its position.
            transaction.put(key, kept | {"key": None, "payload": None})
