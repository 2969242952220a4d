"""The kinds of targets in a player's file: their keys, and how a target is made of them.

The keys that all kinds have are `logplayer.targets.settings.KEYS`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from logplayer import targets
from logplayer.targets.file_formats import FORMATS
from logplayer.targets.files_target import (
    BATCH_BYTES,
    BATCH_RECORDS,
    MAX_ROLL_BYTES,
    MAX_ROLL_S,
    ROLL_BYTES,
    ROLL_S,
)
from logplayer.targets.http_target import POSITIONS
from logplayer.targets.log_target import BATCH_RECORDS as MIRROR_RECORDS
from logplayer.targets.log_target import ORDERS
from logplayer.targets.mirror_mark import MIRROR_RULE
from logplayer.targets.settings import VALUES, TimeoutKey
from logplayer.targets.statement import PARAMETERS, PARAMSTYLES
from ziplog.config_keys import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logplayer.contract import TargetSpec

#: A function in a module beside the file: "module:name".
REFERENCE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
REFERENCE_RULE: Final = "'MODULE:NAME'; modules are searched in the file's directory first"
_STATEMENT: Final = Key(
    "An SQL statement, which is run with each record. Its parameters are"
    f" {' '.join(f':{name}' for name in PARAMETERS)}. Without it and `apply`, records are inserted"
    " in the table `records`.",
    str,
    rule="an SQL statement",
)
_APPLY: Final = Key(
    "A function of a database cursor and a list of records, in place of a statement. It runs in"
    " the transaction of a batch, and must not commit.",
    str,
    pattern=REFERENCE,
    rule=REFERENCE_RULE,
)


@dataclass(frozen=True)
class SqliteKeys:
    """The keys of an SQLite file."""

    path: Annotated[
        str,
        Key(
            "The database's file. A relative path starts at this file.",
            str,
            rule="the path of a file",
        ),
    ]
    statement: Annotated[str | None, _STATEMENT] = None
    apply: Annotated[str | None, _APPLY] = None


@dataclass(frozen=True)
class PostgresKeys:
    """The keys of a PostgreSQL database."""

    dsn: Annotated[
        str,
        Key(
            "A connection string or URI of libpq; or { env = NAME } or { file = PATH }, so that no"
            " password is here.",
            str,
            rule="a connection string of libpq",
            secret=True,
        ),
    ]
    statement: Annotated[str | None, _STATEMENT] = None
    apply: Annotated[str | None, _APPLY] = None


@dataclass(frozen=True)
class DbapiKeys:
    """The keys of another database, with a DB-API 2.0 module."""

    connect: Annotated[
        str,
        Key(
            "A function that returns a new connection without autocommit.",
            str,
            pattern=REFERENCE,
            rule=REFERENCE_RULE,
        ),
    ]
    paramstyle: Annotated[str, Key("The module's paramstyle.", str, choices=PARAMSTYLES)]
    statement: Annotated[str | None, _STATEMENT] = None
    apply: Annotated[str | None, _APPLY] = None
    blob: Annotated[str, Key("The database's type of a column of bytes.", str, rule="a type")] = (
        "BLOB"
    )


@dataclass(frozen=True)
class FilesKeys:
    """The keys of a directory of files."""

    directory: Annotated[
        str,
        Key(
            "The directory of all partitions. A relative path starts at this file.",
            str,
            rule="the path of a directory",
        ),
    ]
    format: Annotated[
        str,
        Key(
            "JSON lines, or the columns of `ziplog export`, which need `pip install"
            " 'ziplog[arrow]'`. Fixed once the directory exists.",
            str,
            choices=FORMATS,
        ),
    ] = "jsonl"
    roll_bytes: Annotated[
        int,
        Key("Size of records that become a file.", int, "bytes", 1, MAX_ROLL_BYTES),
    ] = ROLL_BYTES
    roll_s: Annotated[
        int,
        Key("Age of records that become a file.", int, "seconds", 1, MAX_ROLL_S),
    ] = ROLL_S


@dataclass(frozen=True)
class LogdbKeys:
    """The keys of a LogDB database."""

    coordinators: Annotated[
        str | None,
        Key(
            "Coordinators of the database; default: $LOGDB_COORDINATOR, else"
            " 127.0.0.1:7500. Its log must not be the player's, unless `map` is given.",
            str,
            rule="'host:port', several separated by commas",
        ),
    ] = None
    apply: Annotated[
        str | None,
        Key(
            "A function of a transaction and a list of records. It runs in the transaction of a"
            " batch, perhaps several times. Left out: a record's key gets its payload.",
            str,
            pattern=REFERENCE,
            rule=REFERENCE_RULE,
        ),
    ] = None
    value: Annotated[
        str,
        Key("What a payload becomes: bytes, a text, or what its JSON has.", str, choices=VALUES),
    ] = "payload"
    tombstones: Annotated[bool, Key("An empty payload deletes its key.", bool)] = False
    timeout_s: Annotated[
        float,
        TimeoutKey("Maximum time for a connection, and for each transaction."),
    ] = 10.0


@dataclass(frozen=True)
class FunctionKeys:
    """The keys of a Python function."""

    function: Annotated[
        str,
        Key(
            "A function of a record, which may be a coroutine; or a class with the methods of"
            " logplayer.Target.",
            str,
            pattern=REFERENCE,
            rule=REFERENCE_RULE,
        ),
    ]
    batch: Annotated[bool, Key("Call it with the list of a batch's records.", bool)] = False


@dataclass(frozen=True)
class HttpKeys:
    """The keys of an HTTP endpoint."""

    url: Annotated[
        str,
        Key(
            "The endpoint, which gets a POST for each batch.",
            str,
            rule="an http:// or https:// URL",
        ),
    ]
    position: Annotated[
        str,
        Key(
            "With none, each record at least once, always with the same id. With endpoint, the"
            " endpoint stores positions, so each record exactly once (docs/player.md).",
            str,
            choices=POSITIONS,
        ),
    ] = "none"
    secret: Annotated[
        str | None,
        Key(
            "Signs each request; or { env = NAME } or { file = PATH }, so that it is not here.",
            str,
            rule="a text",
            secret=True,
        ),
    ] = None
    headers: Annotated[
        dict[str, str] | None,
        Key("Headers of each request.", dict, rule="a table of texts"),
    ] = None
    timeout_s: Annotated[
        float,
        TimeoutKey("Maximum time for a connection, and for each answer."),
    ] = 10.0


@dataclass(frozen=True)
class LogKeys:
    """The keys of another log."""

    bootstrap: Annotated[
        str,
        Key(
            "Nodes of the other log's membership service.",
            str,
            rule="'host:port', several separated by commas",
        ),
    ]
    order: Annotated[
        str,
        Key(
            "With total, one task, and the order of the source. With key, a task and a shard for"
            " each partition; records with equal keys are in order.",
            str,
            choices=ORDERS,
        ),
    ] = "total"
    shard: Annotated[
        int | None,
        Key(
            "The first shard of the other log, with order = 'total'; left out: one of the live"
            " ones. If it is removed, another one follows.",
            int,
            low=0,
            high=2**31 - 1,
        ),
    ] = None
    envelope: Annotated[
        bool,
        Key(
            "A payload is MessagePack of [gsn, shard, epoch, timestamp in microseconds, payload].",
            bool,
        ),
    ] = False
    not_from: Annotated[
        list[str] | None,
        Key(
            "Mirrors into this log whose records are not copied: each one as the cluster_id of its"
            " source, its player, and its target. For mirrors in both directions.",
            list,
            rule=MIRROR_RULE,
        ),
    ] = None
    timeout_s: Annotated[
        float,
        TimeoutKey("Maximum time for a connection, and for each call of the other log."),
    ] = 30.0


@dataclass(frozen=True)
class PushKeys:
    """The keys of a receiver."""

    address: Annotated[str, Key("Where the receiver listens.", str, rule="'host:port'")]
    stores_position: Annotated[
        bool,
        Key(
            "The receiver's target stores positions: exactly once. false: at least once.",
            bool,
        ),
    ] = True
    insecure: Annotated[
        bool, Key("Allow an address outside of this machine; nothing is encrypted.", bool)
    ] = False


class Kind(NamedTuple):
    """A kind of targets."""

    about: str
    #: The class of its own keys.
    keys: type
    #: Makes a target of its name, its own keys and those of all kinds.
    make: Callable[..., TargetSpec]
    #: Values of a file that works.
    example: Mapping[str, Any]
    #: Its defaults of keys that all kinds have, where they differ.
    defaults: Mapping[str, Any] = MappingProxyType({})


_FUNCTION: Final = Kind(
    "A Python function: at least once. Its kind is `function` or `python`.",
    FunctionKeys,
    targets.function,
    {"function": "builtins:print"},
)
KINDS: Final[Mapping[str, Kind]] = {
    "sqlite": Kind(
        "An SQLite file: exactly once.", SqliteKeys, targets.sqlite, {"path": "copy.db"}
    ),
    "postgres": Kind(
        "A PostgreSQL database: exactly once. Needs `pip install 'ziplog[postgres]'`.",
        PostgresKeys,
        targets.postgres,
        {"dsn": {"env": "DATABASE_URL"}},
    ),
    "dbapi": Kind(
        "A database with a DB-API 2.0 module: exactly once. The module of `connect` is beside this"
        " file.",
        DbapiKeys,
        targets.dbapi,
        {"connect": "warehouse:connect", "paramstyle": "qmark"},
    ),
    "files": Kind(
        "A directory of files with JSON lines, Parquet or Arrow: exactly once.",
        FilesKeys,
        targets.files,
        {"directory": "copy"},
        {"batch_records": BATCH_RECORDS, "batch_bytes": BATCH_BYTES},
    ),
    "logdb": Kind(
        "A LogDB database: exactly once.",
        LogdbKeys,
        targets.logdb,
        {"coordinators": "127.0.0.1:7500"},
    ),
    "http": Kind(
        "An HTTP endpoint: at least once, or exactly once if it stores positions.",
        HttpKeys,
        targets.http,
        {"url": "http://127.0.0.1:8000/orders"},
        {"batch_records": 1},
    ),
    "log": Kind(
        "Another log, as a mirror of this one: exactly once.",
        LogKeys,
        targets.log,
        {"bootstrap": "127.0.0.1:7500"},
        {"batch_records": MIRROR_RECORDS},
    ),
    "push": Kind(
        "A receiver in another process: as strong as its target. The receiver's program:"
        " logplayer.Receiver('127.0.0.1:7600', targets.sqlite('copy', 'copy.db')).serve()",
        PushKeys,
        targets.push,
        {"address": "127.0.0.1:7600"},
    ),
    "function": _FUNCTION,
    "python": _FUNCTION,
}
#: Keys with a path, which starts at the file; and those that name a function.
PATHS: Final = frozenset({"dead_letter", "directory", "path"})
FUNCTIONS: Final = frozenset({"apply", "connect", "function", "map"})
