"""The asyncio API: the names and arguments of `ziplog`, with coroutines for calls that wait.

`connect` returns a client of the running event loop; a subscription is an async iterator.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from ziplog.client import arguments, placement_arguments
from ziplog.client.async_cursors import AsyncCursor
from ziplog.client.async_iterators import AsyncScan, AsyncSubscription
from ziplog.client.async_speculation import AsyncSpeculation
from ziplog.client.asynchronous import AsyncLog
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import ConnectRequest
from ziplog.client.engines.asyncio_engine import AsyncioEngine

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ziplog.client.common.requests import Preferences
    from ziplog.policy import Policy

__all__ = [
    "AsyncCursor",
    "AsyncLog",
    "AsyncScan",
    "AsyncSpeculation",
    "AsyncSubscription",
    "Cursor",
    "Log",
    "Scan",
    "Speculation",
    "Subscription",
    "connect",
]

# The names that these classes have in `ziplog`.
Cursor = AsyncCursor
Log = AsyncLog
Scan = AsyncScan
Speculation = AsyncSpeculation
Subscription = AsyncSubscription


class connect:  # noqa: N801 - it is used as a function, and as a context manager
    """Connect to a log: ``async with connect(...) as log``, or ``log = await connect(...)``.

    Args:
        bootstrap: nodes of the membership service, as for `ziplog.connect`.
        timeout: the default time-out of every call, and that of connecting, in seconds; 10 if None.
            0 is too short to connect, so it raises DeadlineError.
        policy: selects the shards of inserts, as for `ziplog.connect`.
        cluster_id: the id that the cluster must have, as for `ziplog.connect`.
        region: the region of this client, as for `ziplog.connect`.
        min_regions: least number of regions of an insert, as for `ziplog.connect`.

    Raises:
        ConfigError: `bootstrap` is not an address, or missing, or `cluster_id` is not an id, when
            awaited.
        ClusterMismatchError: the cluster has another id, when awaited.
        UnavailableError: no node answered at the addresses given, when awaited.
        VersionError: the cluster speaks another version of the wire format, when awaited.

    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        policy: Policy | None = None,
        cluster_id: str | None = None,
        region: str | None = None,
        min_regions: int | None = None,
    ) -> None:
        preferences = placement_arguments.preferences(policy, region, min_regions)
        self._coroutine: Final = _connect(bootstrap, preferences, timeout, cluster_id)
        self._log: AsyncLog | None = None

    def __await__(self) -> Generator[Any, None, AsyncLog]:
        """Connect."""
        return self._coroutine.__await__()

    async def __aenter__(self) -> AsyncLog:
        """Connect."""
        self._log = await self
        return self._log

    async def __aexit__(self, *error: object) -> None:
        """Flush, unless an exception was raised, and close."""
        if self._log is not None:
            await self._log.__aexit__(*error)


async def _connect(
    bootstrap: str | Sequence[str] | None,
    preferences: Preferences,
    seconds: float | None,
    cluster_id: str | None,
) -> AsyncLog:
    timeout = arguments.timeout_s(seconds, arguments.DEFAULT_TIMEOUT_S)
    endpoints, cluster = arguments.log_address(bootstrap, cluster_id)
    core = ClientCore(os.urandom(16), endpoints, preferences, cluster)
    engine = AsyncioEngine(core)
    try:
        limits = await engine.call(ConnectRequest(arguments.deadline_ns(timeout, timeout)))
    except BaseException:
        engine.close()
        raise
    if core.has_unknown_region:
        placement_arguments.warn_of_region()
    return AsyncLog(engine, core, limits, timeout)
