"""LogDB: a transactional key/value store on the log (docs/logdb.md).

`connect` gives a client of a coordinator: transactions, single reads and writes, snapshots, scans,
watches. `aio` is the same for asyncio; `Coordinator` and `local` run a coordinator in a thread.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from logdb import defaults, errors
from logdb.client import blocking
from logdb.client.blocking import Database, Snapshot, Transaction, Watch
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
        coordinators: "host:port", several separated by commas or in a list. One is used, the others
            when it is silent. None: those that `LOGDB_COORDINATOR` names, else 127.0.0.1:7500.
        timeout: the default time-out of every call, and that of connecting, in seconds; 10 if None.

    Raises:
        ConfigError: `coordinators` names none.
        UnavailableError: none of them answered, or was ready.

    """
    return blocking.connect(
        defaults.coordinators() if coordinators is None else coordinators, timeout
    )


def __getattr__(name: str) -> Any:
    """Load what few programs need when it is first used."""
    if name == "aio":
        return importlib.import_module("logdb.aio")
    if name in {"Coordinator", "local"}:
        return getattr(importlib.import_module("logdb.embedded"), name)
    raise AttributeError(f"module 'logdb' has no attribute {name!r}")
