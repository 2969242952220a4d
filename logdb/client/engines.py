"""The engines of the blocking and of the asyncio API: they run steps against the client core.

While the garbage collector runs, nothing is requested, because it may interrupt a step.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logdb import defaults, wire
from logdb.client import single_calls
from logdb.client.backoff import Backoff
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


class DatabaseEngine:
    """The engine of one blocking database, and its default timeout."""

    def __init__(self, coordinators: str | Sequence[str], timeout: float | None) -> None:
        """Prepare; nothing is sent before the first call."""
        self.timeout_s: Final = timeout_s(timeout, DEFAULT_TIMEOUT_S)
        self.core: Final = _core(coordinators)
        self._shared: Final = BlockingEngine(self.core, wire.decode)
        self._shared.resolve = self._resolve
        self.owners: Final = self._shared.owners

    def deadline_ns(self, timeout: float | None = None) -> int:
        """Return a call's deadline from its timeout in seconds, in monotonic nanoseconds."""
        return deadline_ns(timeout, self.timeout_s)

    def backoff(self, retries: int | None, timeout: float | None) -> Backoff:
        """Return the attempts of a transaction that starts now; see `Database.run`."""
        is_counted = retries is not None and timeout is None
        return Backoff(retries, NEVER if is_counted else self.deadline_ns(timeout))

    def call(self, request: Request) -> Any:
        """Return the result of a request; raise it if it is an exception."""
        return self._shared.call(request)

    def shielded(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`; signal handlers run only where a call in it waits."""
        return self._shared.shielded(function, *args)

    def run(self, steps: Generator[Request, Any, T]) -> T:
        """Run steps and return their result.

        An exception of a signal handler appears at a `yield`, so it cannot interrupt a step.
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

    def post(self, request: Request) -> None:
        """Submit a request that completes immediately; ignored if the engine is closed."""
        self._shared.post(request)

    def _resolve(self, error: OutcomeUnknownError, timeout: float | None) -> RecordId | None:
        return self.run(single_calls.resolve(self.deadline_ns(timeout), error))

    def close(self) -> None:
        """Close; open calls in other threads raise ClosedError. Idempotent."""
        self._shared.close()


class AsyncDatabaseEngine:
    """The engine of one asyncio database, and its default timeout; see `DatabaseEngine`."""

    def __init__(self, coordinators: str | Sequence[str], timeout: float | None) -> None:
        """Prepare, in the running event loop."""
        self.timeout_s: Final = timeout_s(timeout, DEFAULT_TIMEOUT_S)
        self.core: Final = _core(coordinators)
        self._engine: Final = AsyncioEngine(self.core, wire.decode)
        self._engine.resolve = self._resolve
        self.owners: Final = self._engine.owners
        self.call: Final = self._engine.call

    def deadline_ns(self, timeout: float | None = None) -> int:
        """Return a call's deadline from its timeout in seconds, in monotonic nanoseconds."""
        return deadline_ns(timeout, self.timeout_s)

    def backoff(self, retries: int | None, timeout: float | None) -> Backoff:
        """Return the attempts of a transaction that starts now; see `Database.run`."""
        is_counted = retries is not None and timeout is None
        return Backoff(retries, NEVER if is_counted else self.deadline_ns(timeout))

    async def run(self, steps: Generator[Request, Any, T]) -> T:
        """Run steps and return their result."""
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

    def post(self, request: Request) -> None:
        """Submit a request that completes immediately; ignored if the engine is closed."""
        if not self._engine.is_closed:
            self._engine.call_now(request)

    async def _resolve(self, error: OutcomeUnknownError, timeout: float | None) -> RecordId | None:
        return await self.run(single_calls.resolve(self.deadline_ns(timeout), error))

    def close(self) -> None:
        """Close; open calls raise ClosedError. Idempotent."""
        self._engine.close()
