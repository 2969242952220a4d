"""The targets of players: each function returns the `TargetSpec` of one kind.

All kinds take the settings of `logplayer.targets.settings.Settings` as keywords. All arguments are
checked, and nothing is connected: the tasks of a player connect. See docs/player.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logplayer.targets import (
    dbapi_target,
    files_target,
    function_target,
    http_target,
    log_target,
    push_target,
    sqlite_target,
)
from logplayer.targets.mirror_mark import mirror_ids
from logplayer.targets.settings import target_spec

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from typing import Unpack

    from logplayer.contract import Target, TargetSpec
    from logplayer.targets.file_formats import Format
    from logplayer.targets.http_target import Position
    from logplayer.targets.log_target import Order
    from logplayer.targets.logdb_target import Apply as ApplyToDatabase
    from logplayer.targets.settings import Settings, Value
    from logplayer.targets.sql import Apply, Connection
    from logplayer.targets.statement import Paramstyle

__all__ = [
    "custom",
    "dbapi",
    "files",
    "function",
    "http",
    "log",
    "logdb",
    "postgres",
    "push",
    "sqlite",
]


def function(
    name: str, function: Any, *, batch: bool = False, **settings: Unpack[Settings]
) -> TargetSpec:
    """Return a target that calls a Python function: each record at least once, in order.

    A failed call is repeated, and those of records whose position was not committed yet when the
    player's process ended. A `TypeError`, `AttributeError`, `NameError` or `ImportError` stops the
    task.

    Args:
        name: of the target, up to 48 characters.
        function: is called with each record; a coroutine is awaited, in an event loop that the
            task keeps. Or a target: an object with the methods of `logplayer.Target` and the
            attribute `stores_position`; or its class, of which each task makes an object.
        batch: call it with the list of a batch's records.
        settings: as for all kinds.

    Raises:
        ConfigError: an argument is invalid.

    """
    partitions = settings.get("partitions", 1)
    connect, stores_position = function_target.connector(
        function, f"target {name}", batch=batch, partitions=partitions
    )
    return target_spec(name, connect, settings, stores_position=stores_position)


def sqlite(
    name: str,
    path: str | os.PathLike[str],
    statement: str | None = None,
    apply: Apply | None = None,
    **settings: Unpack[Settings],
) -> TargetSpec:
    """Return a target in an SQLite file: each record exactly once, in order.

    Args:
        name: of the target, up to 48 characters.
        path: of the file, which is created if its directory exists.
        statement: is run with each record. Its parameters are :gsn :shard :epoch :timestamp_us
            :timestamp :key :key_text :payload :text. Without it and `apply`, records are inserted
            in the table `records`.
        apply: is called in the transaction of a batch, with a DB-API cursor and the list of
            records.
        settings: as for all kinds.

    Raises:
        ConfigError: an argument is invalid.

    """
    connect = sqlite_target.connector(f"target {name}", path, statement, apply)
    return target_spec(name, connect, settings, stores_position=True, keeps_rejected=True)


def postgres(
    name: str,
    dsn: str,
    statement: str | None = None,
    apply: Apply | None = None,
    **settings: Unpack[Settings],
) -> TargetSpec:
    """Return a target in a PostgreSQL database: each record exactly once, in order.

    Args:
        name: of the target, up to 48 characters.
        dsn: a connection string or URI of libpq.
        statement: as for `sqlite`.
        apply: as for `sqlite`; its cursor is one of psycopg 3. It has 30 seconds between two
            statements.
        settings: as for all kinds.

    Raises:
        ConfigError: an argument is invalid.
        ModuleNotFoundError: psycopg is not installed.

    """
    from logplayer.targets import postgres_target  # noqa: PLC0415 - it needs psycopg

    connect = postgres_target.connector(f"target {name}", dsn, statement, apply)
    return target_spec(name, connect, settings, stores_position=True, keeps_rejected=True)


def dbapi(
    name: str,
    connect: Callable[[], Connection],
    statement: str | None = None,
    paramstyle: Paramstyle | None = None,
    *,
    apply: Apply | None = None,
    blob: str = "BLOB",
    **settings: Unpack[Settings],
) -> TargetSpec:
    """Return a target in a database of any DB-API 2.0 module: each record exactly once, in order.

    The database must have transactions with row locks, and durable commits: a commit that returned
    outlives a crash.

    Args:
        name: of the target, up to 48 characters.
        connect: returns a new connection without autocommit; is called by the task's thread.
        statement: as for `sqlite`.
        paramstyle: the module's, which must be given: qmark, numeric, named, format or pyformat.
        apply: as for `sqlite`.
        blob: the database's type of a column of bytes.
        settings: as for all kinds.

    Raises:
        ConfigError: an argument is invalid.

    """
    connector_of_tasks = dbapi_target.connector(
        f"target {name}", connect, statement, apply, paramstyle=paramstyle, blob=blob
    )
    return target_spec(
        name, connector_of_tasks, settings, stores_position=True, keeps_rejected=True
    )


def http(
    name: str,
    url: str,
    *,
    position: Position = "none",
    secret: str | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    **settings: Unpack[Settings],
) -> TargetSpec:
    """Return a target at an HTTP endpoint, which gets a POST for each batch, in order.

    Args:
        name: of the target, up to 48 characters.
        url: of the endpoint, http:// or https://.
        position: "none": each record at least once, always with the same id. "endpoint": the
            endpoint stores positions, so each record exactly once; see docs/player.md.
        secret: signs each request in the header Ziplog-Signature.
        headers: are sent with each request.
        timeout_s: for a connection and for each answer, in seconds, up to 3600.
        settings: as for all kinds; but a batch has one record, unless `batch_records` is given.

    Raises:
        ConfigError: an argument is invalid.

    """
    connect = http_target.connector(
        f"target {name}", url, position=position, secret=secret, headers=headers,
        timeout_s=timeout_s,
    )  # fmt: skip
    settings.setdefault("batch_records", 1)
    return target_spec(name, connect, settings, stores_position=position == "endpoint")


def log(
    name: str,
    bootstrap: str | Sequence[str],
    *,
    order: Order = "total",
    shard: int | None = None,
    envelope: bool = False,
    not_from: Sequence[str] = (),
    timeout_s: float = 30.0,
    **settings: Unpack[Settings],
) -> TargetSpec:
    """Return a target that is another log, a mirror: readers get each record exactly once.

    A seek is refused, and `ziplog cursor seek` fails the task: delete the cursor, and create it at
    the position.

    Args:
        name: of the target, up to 48 characters.
        bootstrap: nodes of the other log's membership service, as for `ziplog.connect`.
        order: "total": one task, and the records have the order of the source. "key": `partitions`
            tasks with a shard each; records with equal keys are in order.
        shard: the first shard of the other log with order="total"; None: one of the live ones. If
            it is removed, another one follows.
        envelope: a payload is MessagePack of [gsn, shard, epoch, timestamp in microseconds,
            payload], as the other log gives records rids and timestamps of its own.
        not_from: mirrors into this log whose records are not copied, as "CLUSTER/PLAYER/TARGET":
            the cluster_id of their source, their player, and their target. For mirrors in both
            directions each one names the other.
        timeout_s: for each call of the other log, and for connecting, in seconds, up to 3600.
        settings: as for all kinds; but a batch has up to 4,096 records, unless `batch_records` is
            given.

    Raises:
        ConfigError: an argument is invalid.

    """
    connect = log_target.connector(
        f"target {name}", bootstrap, order=order, shard=shard, envelope=envelope,
        timeout_s=timeout_s, partitions=settings.get("partitions", 1),
    )  # fmt: skip
    skipped = mirror_ids(not_from, f"target {name}")
    settings.setdefault("batch_records", log_target.BATCH_RECORDS)
    return target_spec(
        name, connect, settings, stores_position=True, skip_writers=skipped,
        check_source=log_target.source_check(name, bootstrap), seeks="nowhere",
    )  # fmt: skip


def files(
    name: str,
    directory: str | os.PathLike[str],
    *,
    format: Format = "jsonl",  # noqa: A002 - its name in files of players, and in `ziplog export`
    roll_bytes: int = files_target.ROLL_BYTES,
    roll_s: int = files_target.ROLL_S,
    **settings: Unpack[Settings],
) -> TargetSpec:
    """Return a target in files: each record exactly once, in order.

    Records are staged, durably, until they are big or old enough to become a file. Its name is the
    gsn of its first record. A partition is a directory.

    Args:
        name: of the target, up to 48 characters.
        directory: of all partitions; it is created if its own directory exists. Its file system
            needs hard links.
        format: "jsonl": the lines of `ziplog tail --json`. "parquet" and "arrow": the columns of
            `ziplog export`; both need pyarrow.
        roll_bytes: the size of staged records that become a file, up to 16 GiB.
        roll_s: the age of staged records that become a file, in seconds, up to 86,400.
        settings: as for all kinds; but a batch has up to 10,000 records and 8 MiB, unless
            `batch_records` and `batch_bytes` are given, because each costs a sync. A `map` must
            keep the rids of records.

    Raises:
        ConfigError: an argument is invalid.
        ModuleNotFoundError: pyarrow is not installed.

    """
    connect = files_target.connector(f"target {name}", directory, format, roll_bytes, roll_s)
    settings.setdefault("batch_records", files_target.BATCH_RECORDS)
    settings.setdefault("batch_bytes", files_target.BATCH_BYTES)
    return target_spec(
        name, connect, settings, stores_position=True, roll_s=roll_s, seeks="forward"
    )


def logdb(
    name: str,
    coordinators: str | Sequence[str] | None = None,
    apply: ApplyToDatabase | None = None,
    *,
    value: Value = "payload",
    tombstones: bool = False,
    timeout_s: float = 10.0,
    **settings: Unpack[Settings],
) -> TargetSpec:
    """Return a target in a LogDB database: each record exactly once, in order.

    Without `apply` the record's payload becomes the value of its key; a record without a key is
    rejected.

    Args:
        name: of the target, up to 48 characters.
        coordinators: of the database, as for `logdb.connect`. Its log must not be the player's,
            unless `map` is given.
        apply: is called in the transaction of a batch, with the transaction and the list of
            records. It may be called several times, so it should only use the transaction.
        value: what a payload becomes: bytes ("payload"), a str ("text"), or what its JSON has
            ("json").
        tombstones: an empty payload deletes its key.
        timeout_s: for a connection and for each transaction, in seconds, up to 3600.
        settings: as for all kinds.

    Raises:
        ConfigError: an argument is invalid.

    """
    from logplayer.targets import logdb_target  # noqa: PLC0415 - a database's client

    connect = logdb_target.connector(
        f"target {name}", coordinators, apply, value=value, tombstones=tombstones,
        timeout_s=timeout_s, is_mapped=settings.get("map") is not None,
    )  # fmt: skip
    return target_spec(name, connect, settings, stores_position=True, keeps_rejected=True)


def push(
    name: str,
    address: str,
    *,
    stores_position: bool = True,
    insecure: bool = False,
    **settings: Unpack[Settings],
) -> TargetSpec:
    """Return a target in another process, which runs a `logplayer.Receiver`.

    It is as strong as the target of the receiver, which has the same name and the same number of
    partitions. It needs no thread.

    Args:
        name: of the target, up to 48 characters.
        address: of the receiver, "host:port".
        stores_position: the receiver's target stores positions, so each record is delivered exactly
            once. False, for example if it is a function: at least once.
        insecure: allow an address outside of this machine; records are not encrypted.
        settings: as for all kinds; but `batch_bytes` is at most 8 MiB. With
            rejected="dead-letter" the receiver's target keeps the records.

    Raises:
        ConfigError: an argument is invalid.

    """
    return push_target.push_spec(
        name, address, settings, stores_position=stores_position, insecure=insecure
    )


def custom(
    name: str,
    connect: Callable[[], Target],
    *,
    stores_position: bool,
    keeps_rejected: bool = False,
    **settings: Unpack[Settings],
) -> TargetSpec:
    """Return a target of your own.

    Args:
        name: of the target, up to 48 characters.
        connect: returns a new object with the methods of `logplayer.Target`, for each claim of a
            task.
        stores_position: it stores positions with its effects, and its `open` returns them; or its
            `open` returns the cursor's, because a repetition has no effect. False: the cursor's
            position counts, so each record is delivered at least once.
        keeps_rejected: it keeps the records in `Batch.rejected` itself.
        settings: as for all kinds.

    Raises:
        ConfigError: an argument is invalid.

    """
    return target_spec(
        name, connect, settings, stores_position=stores_position, keeps_rejected=keeps_rejected
    )
