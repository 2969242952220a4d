"""The parts of the asyncio client that are not the blocking ones without `await`.

`blocking_base` has the same names for the blocking client, which is generated.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from ziplog.client import arguments
from ziplog.client.common.requests import EndClaimsRequest
from ziplog.core.units import NEVER, NS_PER_S
from ziplog.errors import ClosedError
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Self

    from ziplog.client.client_node import ClientCore
    from ziplog.client.common.requests import Request
    from ziplog.client.engines.asyncio_engine import AsyncioEngine
    from ziplog.errors import OutcomeUnknownError
    from ziplog.types import RecordId
    from ziplog.wire import Limits


class AsyncConnection:
    """A connected engine."""

    def __init__(
        self, engine: AsyncioEngine, core: ClientCore, limits: Limits, timeout: float
    ) -> None:
        """Use `ziplog.aio.connect`."""
        self._timeout: Final = timeout
        self._core: Final = core
        self._engine: Final = engine
        self._limits: Final = limits
        engine.resolve = self._resolve

    def _deadline_ns(self, timeout: float | None) -> int:
        return arguments.deadline_ns(timeout, self._timeout)

    async def _resolve(
        self, error: OutcomeUnknownError, timeout: float | None
    ) -> RecordId | list[RecordId | None] | None:
        """Wait for the outcome of an insert; see `OutcomeUnknownError.resolve`."""
        request = arguments.resolve(error, self._deadline_ns(timeout))
        return arguments.resolved(error, await self._engine.call(request))

    async def _end_claims(self) -> None:
        """Release what the service grants of the claims under way; wait a second at most."""
        engine = self._engine
        engine.close_collected()
        if self._core.has_cursor_calls and not (engine.is_closed or engine.has_ended):
            with contextlib.suppress(ClosedError):
                deadline_ns = arguments.deadline_ns(arguments.END_CLAIMS_S, 0)
                await engine.call(EndClaimsRequest(deadline_ns))


def _retrieve(opened: asyncio.Future[Any]) -> None:
    """Mark the error as retrieved: a stream that is closed before it is awaited needs no log."""
    if not opened.cancelled():
        opened.exception()


class AsyncStream:
    """A subscription or scan; it opens in the background, and can be awaited."""

    def __init__(
        self,
        engine: AsyncioEngine,
        request: Request,
        closing: Callable[[int, int], Request],
        on_fork: Callable[[], None] | None = None,
    ) -> None:
        """Start to open it; `closing` makes the request that closes it; `on_fork`: see `Owners`."""
        self._engine: Final = engine
        self._number, self._opened = engine.submit(request)
        self._opened.add_done_callback(_retrieve)
        requests = (closing(NEVER, self._number),)
        self._owned: Final = engine.owners.add(self, lambda: requests, on_fork)

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until it is open; raises what opening it raises."""
        if not self._opened.done():
            yield from asyncio.shield(self._opened).__await__()
        self._opened.result()
        return self

    async def _opens_by(self, deadline_ns: int) -> bool:
        """Wait until it is open; return False at a deadline; raises what opening it raises."""
        if not self._opened.done():
            left_s = None if deadline_ns == NEVER else max(deadline_ns - now_ns(), 0) / NS_PER_S
            await asyncio.wait([self._opened], timeout=left_s)
            if not self._opened.done():
                return False
        self._opened.result()
        return True

    async def _entered(self) -> Self:
        """Return the stream, once it is open; close it if it cannot be entered.

        A claim of a cursor would last for as long as the traceback of the cancellation.
        """
        try:
            return await self
        except BaseException:
            self._engine.shielded(self._close)
            raise

    @abc.abstractmethod
    def _close(self) -> None:
        """Close it without waiting."""

    @property
    def _is_open(self) -> bool:
        is_open = self._opened.done() and not self._engine.is_closed
        return is_open and self._opened.exception() is None
