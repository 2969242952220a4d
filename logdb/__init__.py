"""LogDB: a transactional key-value database on the log (docs/logdb.md).

`connect` returns a client of a coordinator: transactions, single reads and writes, snapshots, scans
and watches. `aio` is the same API for asyncio. `Coordinator` and `local` run a coordinator in a
thread of this program.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from logdb import defaults, errors
from logdb.client import blocking
from logdb.client.blocking import Database, Snapshot, Watch
from logdb.client.blocking_transaction import Transaction
from logdb.client.engines import DatabaseEngine
from logdb.errors import (
    SnapshotExpired,
    TooManyReadsError,
    TransactionAborted,
    TransactionClosed,
    UnsupportedValueError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logdb import aio
    from logdb.embedded import Coordinator, local

__all__ = [
    "Coordinator",
    "Database",
    "Snapshot",
    "SnapshotExpired",
    "TooManyReadsError",
    "Transaction",
    "TransactionAborted",
    "TransactionClosed",
    "UnsupportedValueError",
    "Watch",
    "aio",
    "connect",
    "errors",
    "local",
]


def connect(
    coordinators: str | Sequence[str] | None = None, *, timeout: float | None = None
) -> Database:
    """Connect to a database.

    Args:
        coordinators: "host:port"; several are separated by commas or given as a list. The client
            uses one of them and switches to the next when it is silent. None: the value of
            `LOGDB_COORDINATOR`, else 127.0.0.1:7500.
        timeout: the default timeout of every call and of connecting, in seconds; 10 if None.

    Raises:
        ConfigError: `coordinators` contains no address.
        UnavailableError: no coordinator replied, or none was ready.
        VersionError: the coordinators speak another version of the wire format.

    """
    given = defaults.coordinators() if coordinators is None else coordinators
    return blocking.connect(DatabaseEngine(given, timeout))


def __getattr__(name: str) -> Any:
    """Import `aio`, `Coordinator` and `local` at their first use."""
    if name == "aio":
        return importlib.import_module("logdb.aio")
    if name in {"Coordinator", "local"}:
        return getattr(importlib.import_module("logdb.embedded"), name)
    raise AttributeError(f"module 'logdb' has no attribute {name!r}")
