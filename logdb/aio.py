"""The asyncio API: the names and arguments of `logdb`, with coroutines for blocking calls.

`connect` returns a client of the running event loop; scans and watches are async iterators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logdb import defaults
from logdb.client import asynchronous
from logdb.client.async_transaction import Transaction
from logdb.client.asynchronous import Database, Snapshot, Watch
from logdb.client.engines import AsyncDatabaseEngine, PendingOpen

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Database", "Snapshot", "Transaction", "Watch", "connect"]


class connect(PendingOpen[Database]):  # noqa: N801 - it is used as a function, and as a context manager
    """Connect to a database: ``async with connect(...) as db``, or ``db = await connect(...)``.

    Args:
        coordinators: as for `logdb.connect`.
        timeout: the default timeout of every call and of connecting, in seconds; 10 if None.

    Raises:
        ConfigError: `coordinators` contains no address (raised when awaited).
        UnavailableError: no coordinator replied, or none was ready (raised when awaited).
        VersionError: the coordinators speak another version of the wire format (likewise).

    """

    def __init__(
        self, coordinators: str | Sequence[str] | None = None, *, timeout: float | None = None
    ) -> None:
        """Prepare the connection; nothing is sent before it is awaited."""
        given = defaults.coordinators() if coordinators is None else coordinators
        super().__init__(_connect(given, timeout))


async def _connect(coordinators: str | Sequence[str], seconds: float | None) -> Database:
    return await asynchronous.connect(AsyncDatabaseEngine(coordinators, seconds))
