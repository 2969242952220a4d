"""The engines of the blocking and of the asyncio API: they run steps against the client core.

While the garbage collector runs, nothing is requested, because it may interrupt a step.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from logdb import defaults, wire
from logdb.client import single_calls
from logdb.client.backoff import Backoff
from logdb.client.core import DatabaseCore
from logdb.client.requests import DropRequest, TakenSnapshot
from ziplog.client import placement_arguments
from ziplog.client.arguments import DEFAULT_TIMEOUT_S, deadline_ns, endpoints, timeout_s
from ziplog.client.engines.asyncio_engine import AsyncioEngine
from ziplog.client.engines.blocking_engine import BlockingEngine
from ziplog.core.units import NEVER
from ziplog.runtime.clock import wall_offset_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence

    from ziplog.client.common.requests import Request
    from ziplog.errors import OutcomeUnknownError
    from ziplog.types import RecordId

T = TypeVar("T")


def _core(coordinators: str | Sequence[str]) -> DatabaseCore:
    here = placement_arguments.preferences(None, None, None)
    return DatabaseCore(
        os.urandom(24),
        endpoints(coordinators, "coordinators", "a coordinator", defaults.PORT),
        here.policy,
        wall_offset_ns=wall_offset_ns,
        region=here.region,
    )


def _release(post: Callable[[Request], None], result: Any) -> None:
    """Release the snapshot that a call has taken, if its caller was interrupted or cancelled."""
    if isinstance(result, TakenSnapshot):
        post(DropRequest(NEVER, result.snapshot))


class Closable(Protocol):
    """An object with an async `close`."""

    async def close(self) -> None:
        """Close it."""


C = TypeVar("C", bound=Closable)


class PendingOpen(Generic[C]):
    """An object that is being opened: `await` it, or use it in an `async with` statement."""

    def __init__(self, coroutine: Coroutine[Any, Any, C]) -> None:
        """Take the coroutine that opens the object."""
        self._coroutine: Final = coroutine
        self._opened: C | None = None

    def __await__(self) -> Generator[Any, None, C]:
        """Open it."""
        return self._coroutine.__await__()

    async def __aenter__(self) -> C:
        """Open it."""
        self._opened = await self
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        if self._opened is not None:
            await self._opened.close()


class _Timeouts:
    """The timeouts of one database."""

    def __init__(self, timeout: float | None) -> None:
        #: The default timeout.
        self.timeout_s: Final = timeout_s(timeout, DEFAULT_TIMEOUT_S)

    def deadline_ns(self, timeout: float | None = None) -> int:
        """Return a call's deadline from its timeout in seconds, in monotonic nanoseconds."""
        return deadline_ns(timeout, self.timeout_s)

    def backoff(self, retries: int | None, timeout: float | None) -> Backoff:
        """Return the attempts of a transaction that starts now; see `Database.run`."""
        is_counted = retries is not None and timeout is None
        return Backoff(retries, NEVER if is_counted else self.deadline_ns(timeout))


class DatabaseEngine(_Timeouts):
    """The engine of one blocking database."""

    def __init__(
        self,
        coordinators: str | Sequence[str],
        timeout: float | None,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        """Prepare; nothing is sent before the first call. `on_close` is called once, at the end."""
        super().__init__(timeout)
        self._on_close = on_close
        self.core: Final = _core(coordinators)
        self._shared: Final = BlockingEngine(self.core, wire.decode)
        self._shared.resolve = self._resolve
        self._shared.on_lost_result = partial(_release, self.post)
        self.owners: Final = self._shared.owners
        self.check_open: Final = self._shared.check_open

    def call(self, request: Request) -> Any:
        """Return the result of a request; raise it if it is an exception."""
        return self._shared.call(request)

    def shielded(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`; signal handlers run only where a call in it waits."""
        return self._shared.shielded(function, *args)

    #: Opens an object; the asyncio engine's returns a `PendingOpen`.
    open = shielded

    def run(self, steps: Generator[Request, Any, T]) -> T:
        """Run steps and return their result.

        An exception of a signal handler appears at a `yield`, so it cannot interrupt a step. If the
        database is closed, no step runs.
        """
        self.check_open()
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
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


class AsyncDatabaseEngine(_Timeouts):
    """The engine of one asyncio database; see `DatabaseEngine`."""

    def __init__(self, coordinators: str | Sequence[str], timeout: float | None) -> None:
        """Prepare, in the running event loop."""
        super().__init__(timeout)
        self.core: Final = _core(coordinators)
        self._engine: Final = AsyncioEngine(self.core, wire.decode)
        self._engine.resolve = self._resolve
        self.owners: Final = self._engine.owners
        self.check_open: Final = self._engine.check_open
        self.call: Final = self._engine.call
        self.post: Final = self._engine.post
        self._engine.on_lost_result = partial(_release, self.post)
        self.shielded: Final = self._engine.shielded

    async def run(self, steps: Generator[Request, Any, T]) -> T:
        """Run steps and return their result; none if the database is closed."""
        self.check_open()
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

    def open(self, function: Callable[..., Coroutine[Any, Any, C]], *args: Any) -> PendingOpen[C]:
        """Return the object that `function(*args)` opens, once it is awaited."""
        return PendingOpen(function(*args))

    async def _resolve(self, error: OutcomeUnknownError, timeout: float | None) -> RecordId | None:
        return await self.run(single_calls.resolve(self.deadline_ns(timeout), error))

    def close(self) -> None:
        """Close; open calls raise ClosedError. Idempotent."""
        self._engine.close()
