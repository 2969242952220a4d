"""The part of the asyncio client with other types: the retries of transactions."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from logdb.client.async_transaction import Transaction
from logdb.errors import TransactionAborted
from ziplog.errors import ClosedError, UnavailableError, ZiplogError
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Concatenate, ParamSpec

    from logdb.client.engines import AsyncDatabaseEngine

    P = ParamSpec("P")

T = TypeVar("T")


class AsyncTransactions:
    """The transactions of a database."""

    def __init__(self, engine: AsyncDatabaseEngine, largest: int) -> None:
        """Use `logdb.aio.connect`."""
        self._engine: Final = engine
        self._largest: Final = largest

    @overload
    async def run(
        self,
        function: Callable[[Transaction], Awaitable[T]],
        retries: int | None = None,
        *,
        timeout: float | None = None,
    ) -> T: ...
    @overload
    async def run(
        self,
        function: Callable[[Transaction], T],
        retries: int | None = None,
        *,
        timeout: float | None = None,
    ) -> T: ...
    async def run(
        self,
        function: Callable[[Transaction], Any],
        retries: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Run `function(transaction)` in a transaction, awaited if it is awaitable, and commit.

        See `logdb.Database.run`. A plain function can only write.
        """
        self._engine.check_open()
        attempts = self._engine.backoff(retries, timeout)
        while True:
            try:
                async with Transaction(self._engine, self._largest, timeout) as transaction:
                    try:
                        result = function(transaction)
                        return await result if inspect.isawaitable(result) else result
                    except ZiplogError:
                        raise
                    except Exception:
                        # The error may be due to an out-of-date read.
                        if transaction.status == "open":
                            with suppress(ClosedError, UnavailableError):
                                await transaction.validate()
                        raise
            except TransactionAborted as error:
                if transaction.status not in {"aborted", "rolled back"}:
                    # The error is another transaction's; this one may have taken effect.
                    raise
                jitter = random.random()  # noqa: S311 - not for security
                await asyncio.sleep(attempts.next_delay_s(error, jitter, now_ns()))

    @overload
    def transactional(
        self, function: Callable[Concatenate[Transaction, P], Awaitable[T]], /
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def transactional(
        self, function: None = None, /, *, retries: int | None = None, timeout: float | None = None
    ) -> Callable[
        [Callable[Concatenate[Transaction, P], Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]
    ]: ...
    def transactional(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> Callable[..., Any]:
        """Wrap `function(transaction, ...)` in `run`; callers omit the first argument."""
        self._engine.backoff(retries, timeout)

        def decorate(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                return await self.run(
                    lambda t: function(t, *args, **kwargs), retries, timeout=timeout
                )

            return wrapper

        return decorate if function is None else decorate(function)
