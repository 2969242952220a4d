"""The asyncio API: the names and arguments of `ziplog`, with coroutines for calls that wait.

`connect` returns a client of the running event loop; a subscription is an async iterator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog import policy as policies
from ziplog.client.asynchronous import AsyncLog, AsyncSubscription
from ziplog.client.asynchronous import connect as _connect
from ziplog.client.scan_iterators import AsyncScan

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from ziplog.policy import Policy

__all__ = ["AsyncLog", "AsyncScan", "AsyncSubscription", "connect"]


class connect:  # noqa: N801 - it is used as a function, and as a context manager
    """Connect to a log: ``async with connect(...) as log``, or ``log = await connect(...)``.

    Args:
        bootstrap: nodes of the membership service, as for `ziplog.connect`.
        timeout: the default time-out of every call, and that of connecting, in seconds; 10 if None.
        policy: selects the shards of inserts; `ziplog.policy.random()` if None.

    Raises:
        ConfigError: `bootstrap` is not an address, when awaited.
        UnavailableError: no node answered at the addresses given, when awaited.

    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        timeout: float | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._coroutine: Final = _connect(bootstrap, policy or policies.random(), timeout)
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
