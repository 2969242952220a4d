"""The part of the blocking client that is not generated: the retries of transactions."""

from __future__ import annotations

import functools
import inspect
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from logdb.client.blocking_transaction import Transaction
from logdb.errors import TransactionAborted
from ziplog.errors import ClosedError, UnavailableError, ZiplogError
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Concatenate, ParamSpec

    from logdb.client.engines import DatabaseEngine

    P = ParamSpec("P")

T = TypeVar("T")


class Transactions:
    """The transactions of a database."""

    def __init__(self, engine: DatabaseEngine, largest: int) -> None:
        """Use `logdb.connect`."""
        self._engine: Final = engine
        self._largest: Final = largest

    def run(
        self,
        function: Callable[[Transaction], T],
        retries: int | None = None,
        *,
        timeout: float | None = None,
    ) -> T:
        """Run `function(transaction)` in a transaction and commit; retry after a conflict.

        Args:
            function: may be called several times, so it should only use the transaction. An
                exception of its own rolls back and is raised, unless what it has read is out of
                date.
            retries: maximum number of retries, with growing delays (1 ms to 100 ms) between them;
                None: no limit.
            timeout: time after which it is not retried, and the timeout of each call of the
                transaction, in seconds. None: the database's; with `retries`, only the retries are
                limited.

        Raises:
            TransactionAborted: every attempt was aborted; the error is the last one's.
            TypeError: `function` is a coroutine function, which only `logdb.aio` awaits.

        """
        self._engine.check_open()
        attempts = self._engine.backoff(retries, timeout)
        while True:
            try:
                with Transaction(self._engine, self._largest, timeout) as transaction:
                    try:
                        return _plain(function(transaction))
                    except ZiplogError:
                        raise
                    except Exception:
                        # The error may be due to an out-of-date read.
                        if transaction.status == "open":
                            with suppress(ClosedError, UnavailableError):
                                transaction.validate()
                        raise
            except TransactionAborted as error:
                if transaction.status not in {"aborted", "rolled back"}:
                    # The error is another transaction's; this one may have taken effect.
                    raise
                jitter = random.random()  # noqa: S311 - not for security
                time.sleep(attempts.next_delay_s(error, jitter, now_ns()))

    @overload
    def transactional(
        self, function: Callable[Concatenate[Transaction, P], T], /
    ) -> Callable[P, T]: ...
    @overload
    def transactional(
        self, function: None = None, /, *, retries: int | None = None, timeout: float | None = None
    ) -> Callable[[Callable[Concatenate[Transaction, P], T]], Callable[P, T]]: ...
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

        def decorate(function: Callable[..., T]) -> Callable[..., T]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> T:
                return self.run(lambda t: function(t, *args, **kwargs), retries, timeout=timeout)

            return wrapper

        return decorate if function is None else decorate(function)


def _plain(result: T) -> T:
    """Return the result of a function of `run`; refuse a coroutine, which would never run."""
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("the function is a coroutine function; use logdb.aio, or a plain function")
    return result
