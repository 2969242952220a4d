"""How each API has the requests of the pure steps answered: the same methods, twice.

Rule: nothing is asked while the garbage collector runs: it may have come in the middle of a step.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logdb import defaults, wire
from logdb.client import single_calls
from logdb.client.backoff import Retrying
from logdb.client.core import DatabaseCore
from ziplog import policy
from ziplog.client.arguments import DEFAULT_TIMEOUT_S, deadline_ns, endpoints, timeout_s
from ziplog.client.common.requests import NEVER
from ziplog.client.engines.asyncio_engine import AsyncioEngine
from ziplog.client.engines.blocking_engine import BlockingEngine
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from ziplog.client.common.requests import Request
    from ziplog.errors import OutcomeUnknownError
    from ziplog.types import RecordId

T = TypeVar("T")


def _core(coordinators: str | Sequence[str]) -> DatabaseCore:
    return DatabaseCore(
        os.urandom(24),
        endpoints(coordinators, "coordinators", "a coordinator", defaults.PORT),
        policy.random(),
        wall_offset_us=(time.time_ns() - now_ns()) // 1000,
    )


class Caller:
    """The engine of one blocking database, and its default time-out."""

    def __init__(self, coordinators: str | Sequence[str], timeout: float | None) -> None:
        """Make it; nothing is sent before the first call."""
        self.timeout_s: Final = timeout_s(timeout, DEFAULT_TIMEOUT_S)
        self.core: Final = _core(coordinators)
        self._shared: Final = BlockingEngine(self.core, wire.decode)
        self._shared.resolve = self._resolve
        self.owners: Final = self._shared.owners

    def until(self, timeout: float | None = None) -> int:
        """Return when a call with this time-out (in seconds) ends, in monotonic nanoseconds."""
        return deadline_ns(timeout, self.timeout_s)

    def retrying(self, retries: int | None, timeout: float | None) -> Retrying:
        """Return the attempts of a transaction that begins now; see `Database.run`."""
        is_counted = retries is not None and timeout is None
        return Retrying(retries, NEVER if is_counted else self.until(timeout))

    def call(self, request: Request) -> Any:
        """Return the answer to a request; raises it if it is an exception."""
        return self._shared.call(request)

    def shielded(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`; handlers of signals run only where a call in it waits."""
        return self._shared.shielded(function, *args)

    def drive(self, steps: Generator[Request, Any, T]) -> T:
        """Answer the requests of some steps; return what they return.

        What a signal's handler raises appears at a `yield`, so it never tears the steps apart.
        """
        found: T = self._shared.shielded(self._drive, steps)
        return found

    def _drive(self, steps: Generator[Request, Any, T]) -> T:
        try:
            request = next(steps)
            while True:
                try:
                    result = self.call(request)
                except BaseException as error:  # noqa: BLE001 - the steps raise it again
                    request = steps.throw(error)
                else:
                    request = steps.send(result)
        except StopIteration as end:
            found: T = end.value
            return found

    def tell(self, request: Request) -> None:
        """Hand in what is answered at once, unless it is closed."""
        self._shared.post(request)

    def _resolve(self, error: OutcomeUnknownError, timeout: float | None) -> RecordId | None:
        return self.drive(single_calls.resolved(self.until(timeout), error))

    def close(self) -> None:
        """Close; calls under way in other threads raise ClosedError. May be called again."""
        self._shared.close()


class AsyncCaller:
    """The engine of one asyncio database, and its default time-out; see `Caller`."""

    def __init__(self, coordinators: str | Sequence[str], timeout: float | None) -> None:
        """Make it, in the running event loop."""
        self.timeout_s: Final = timeout_s(timeout, DEFAULT_TIMEOUT_S)
        self.core: Final = _core(coordinators)
        self._engine: Final = AsyncioEngine(self.core, wire.decode)
        self._engine.resolve = self._resolve
        self.owners: Final = self._engine.owners
        self.call: Final = self._engine.call

    def until(self, timeout: float | None = None) -> int:
        """Return when a call with this time-out (in seconds) ends, in monotonic nanoseconds."""
        return deadline_ns(timeout, self.timeout_s)

    def retrying(self, retries: int | None, timeout: float | None) -> Retrying:
        """Return the attempts of a transaction that begins now; see `Database.run`."""
        is_counted = retries is not None and timeout is None
        return Retrying(retries, NEVER if is_counted else self.until(timeout))

    async def drive(self, steps: Generator[Request, Any, T]) -> T:
        """Answer the requests of some steps; return what they return."""
        try:
            request = next(steps)
            while True:
                try:
                    result = await self.call(request)
                except BaseException as error:  # noqa: BLE001 - the steps raise it again
                    request = steps.throw(error)
                else:
                    request = steps.send(result)
        except StopIteration as end:
            found: T = end.value
            return found

    def tell(self, request: Request) -> None:
        """Hand in what is answered at once, unless it is closed."""
        if not self._engine.is_closed:
            self._engine.call_now(request)

    async def _resolve(self, error: OutcomeUnknownError, timeout: float | None) -> RecordId | None:
        return await self.drive(single_calls.resolved(self.until(timeout), error))

    def close(self) -> None:
        """Close; what is under way raises ClosedError. May be called again."""
        self._engine.close()
