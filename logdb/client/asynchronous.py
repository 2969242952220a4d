"""The asyncio client: the API of `logdb/client/blocking.py`, run by the event loop.

The pure steps are shared; only the waiting differs. A database belongs to the event loop in which
it was connected; a transaction may be used by several tasks.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, overload

from logdb.client import arguments, single_calls
from logdb.client.engines import AsyncDatabaseEngine
from logdb.client.requests import (
    CoordinatorStatusRequest,
    DropRequest,
    SnapshotRequest,
    UnwatchRequest,
    WatchHandle,
    WatchRequest,
)
from logdb.client.rows import AsyncRows
from logdb.client.scanning import OpenScan
from logdb.client.transaction import TransactionScan, TransactionSets
from logdb.errors import TransactionAborted
from logdb.values import decode_value, encode_key
from ziplog.client.arguments import status, timeout_s
from ziplog.client.common.requests import NEVER
from ziplog.errors import ClosedError, UnavailableError, ZiplogError
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Coroutine,
        Generator,
        Iterable,
        Mapping,
        Sequence,
    )
    from typing import Concatenate, ParamSpec, Self

    from logdb.client.requests import KeyState, SnapshotId
    from logdb.client.transaction import TransactionStatus
    from logdb.values import UserKey
    from ziplog.types import RecordId

    P = ParamSpec("P")


class Closable(Protocol):
    """An object with an async `close`."""

    async def close(self) -> None:
        """Close it."""


T = TypeVar("T")
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


class Database:
    """An asyncio client of a database. As `logdb.Database`, with coroutines for blocking calls."""

    def __init__(self, engine: AsyncDatabaseEngine, largest: int) -> None:
        """Use `logdb.aio.connect`."""
        self._engine: Final = engine
        self._largest: Final = largest

    async def __aenter__(self) -> Self:
        """Return the database."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    def __repr__(self) -> str:
        return f"<logdb.aio.Database at {self._engine.core.description}>"

    # --- transactions ---

    def transaction(self, *, timeout: float | None = None) -> Transaction:
        """Start a transaction, for use in an `async with` statement; see `logdb.Database`."""
        if timeout is not None:
            timeout_s(timeout, 0)
        return Transaction(self._engine, self._largest, timeout)

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
        attempts = self._engine.backoff(retries, timeout)
        while True:
            try:
                async with self.transaction(timeout=timeout) as transaction:
                    try:
                        result = function(transaction)
                        return await result if inspect.isawaitable(result) else result
                    except ZiplogError:
                        raise
                    except Exception:
                        # The error may be due to an out-of-date read.
                        if transaction.status == "open":
                            with suppress(UnavailableError):
                                await transaction.validate()
                        raise
            except TransactionAborted as error:
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

    # --- reading ---

    async def get(self, key: UserKey, default: Any = None, *, timeout: float | None = None) -> Any:
        """Return a key's value, or `default` if it is absent; see `logdb.Database.get`."""
        return (await self.multi_get((key,), default, timeout=timeout))[0]

    async def multi_get(
        self, keys: Iterable[UserKey], default: Any = None, *, timeout: float | None = None
    ) -> list[Any]:
        """Return the values of up to 10,000 keys of one state, in their order."""
        steps = single_calls.read(self._engine.deadline_ns(timeout), None, keys, default)
        return await self._engine.run(steps)

    async def exists(self, key: UserKey, *, timeout: float | None = None) -> bool:
        """Return whether a key exists."""
        return await self._engine.run(
            single_calls.exists(self._engine.deadline_ns(timeout), None, key)
        )

    def scan(
        self,
        start: UserKey | None = None,
        stop: UserKey | None = None,
        *,
        prefix: UserKey | None = None,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Return an async iterator over keys and values; see `logdb.Database.scan`."""
        bounds = arguments.bounds(start, stop, prefix, limit)
        pages = OpenScan(bounds, lambda: self._engine.deadline_ns(timeout))
        return AsyncRows(self._engine, bounds, pages)

    def snapshot(self, *, timeout: float | None = None) -> PendingOpen[Snapshot]:
        """Open a snapshot of the present state. Close it after use.

        ``async with db.snapshot() as snapshot``, or ``snapshot = await db.snapshot()``.
        """
        return PendingOpen(self._snapshot(timeout))

    async def _snapshot(self, timeout: float | None) -> Snapshot:
        snapshot, position = await self._engine.call(
            SnapshotRequest(self._engine.deadline_ns(timeout))
        )
        return Snapshot(self._engine, snapshot, position)

    def watch(self, key: UserKey, default: Any = None, *, timeout: float | None = None) -> Watch:
        """Return an async iterator over the values of a key; see `logdb.Database.watch`."""
        if timeout is not None:
            timeout_s(timeout, 0)
        return Watch(self._engine, encode_key(key), default, timeout)

    # --- writing ---

    async def put(self, key: UserKey, value: Any, *, timeout: float | None = None) -> RecordId:
        """Set a key's value; see `logdb.Database.put`."""
        deadline_ns = self._engine.deadline_ns(timeout)
        return await self._engine.run(single_calls.put(deadline_ns, key, value, self._largest))

    async def delete(self, key: UserKey, *, timeout: float | None = None) -> RecordId:
        """Delete a key, whether or not it exists; return the position of the commit."""
        return await self._engine.run(single_calls.delete(self._engine.deadline_ns(timeout), key))

    async def multi_put(
        self, values: Mapping[Any, Any], *, timeout: float | None = None
    ) -> RecordId | None:
        """Set the values of keys atomically; return the commit's position (None: no keys)."""
        deadline_ns = self._engine.deadline_ns(timeout)
        return await self._engine.run(single_calls.multi_put(deadline_ns, values, self._largest))

    async def test_and_multi_put(
        self,
        expected: Mapping[Any, Any],
        writes: Mapping[Any, Any],
        *,
        timeout: float | None = None,
    ) -> bool:
        """Write if keys have the expected values; see `logdb.Database.test_and_multi_put`."""
        deadline_ns = self._engine.deadline_ns(timeout)
        steps = single_calls.test_and_multi_put(deadline_ns, expected, writes, self._largest)
        return await self._engine.run(steps)

    # --- the database ---

    async def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the status of the coordinator that this client uses, with its "endpoint"."""
        request = CoordinatorStatusRequest(self._engine.deadline_ns(timeout))
        document, endpoint = await self._engine.call(request)
        return status(document) | {"endpoint": endpoint}

    def stats(self) -> dict[str, int]:
        """Return the counters of this client."""
        return self._engine.core.stats()

    async def close(self) -> None:
        """Close; open calls raise ClosedError. Idempotent."""
        self._engine.close()


class Transaction:
    """A transaction: an async context manager that commits when its block ends."""

    def __init__(self, engine: AsyncDatabaseEngine, largest: int, timeout: float | None) -> None:
        """Use `Database.transaction`."""
        self._engine: Final = engine
        self._largest: Final = largest
        self._timeout: Final = timeout
        self._sets: Final = TransactionSets(largest)

    async def __aenter__(self) -> Self:
        """Return the transaction."""
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """Commit, unless the transaction is over; roll back if an exception is raised."""
        if not self._sets.is_undecided:
            return
        if kind is None:
            await self.commit()
        else:
            self.rollback()

    def __repr__(self) -> str:
        return f"<logdb.aio.Transaction, {self.status}>"

    @property
    def status(self) -> TransactionStatus:
        """The status: "open", "committing", "committed", "aborted", "rolled back" or "in doubt"."""
        return self._sets.status

    @property
    def position(self) -> RecordId | None:
        """The position of the commit, or of the state that a read-only transaction read."""
        return self._sets.position

    def _deadline_ns(self) -> int:
        return self._engine.deadline_ns(self._timeout)

    async def get(self, key: UserKey, default: Any = None) -> Any:
        """Return a key's value, or `default` if it is absent; see `logdb.Transaction.get`."""
        return (await self.multi_get((key,), default))[0]

    async def multi_get(self, keys: Iterable[UserKey], default: Any = None) -> list[Any]:
        """Return the values of keys, in their order; see `get`."""
        steps = self._sets.get(arguments.keys(keys), self._deadline_ns())
        values = await self._engine.run(steps)
        return [default if value is None else decode_value(value) for value in values]

    async def exists(self, key: UserKey) -> bool:
        """Return whether a key exists; see `get`."""
        return await self._engine.run(self._sets.exists(encode_key(key), self._deadline_ns()))

    def scan(
        self,
        start: UserKey | None = None,
        stop: UserKey | None = None,
        *,
        prefix: UserKey | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Return an async iterator over keys and values; see `logdb.Transaction.scan`."""
        bounds = arguments.bounds(start, stop, prefix, limit)
        self._sets.check_open()
        return AsyncRows(
            self._engine, bounds, TransactionScan(self._sets, bounds, self._deadline_ns)
        )

    def put(self, key: UserKey, value: Any) -> None:
        """Set a key's value at the commit; not a coroutine, because nothing is sent."""
        self._sets.write(*arguments.write(key, value, self._largest))

    def delete(self, key: UserKey) -> None:
        """Delete a key at the commit; not a coroutine."""
        self._sets.write(encode_key(key), None)

    async def validate(self) -> None:
        """Check that everything read is unchanged; see `logdb.Transaction.validate`."""
        await self._engine.run(self._sets.validate(self._deadline_ns()))

    async def commit(self) -> None:
        """Commit; see `logdb.Transaction.commit`."""
        await self._engine.run(self._sets.commit(self._deadline_ns()))

    def rollback(self) -> None:
        """Roll back, without a trace; not a coroutine. See `logdb.Transaction.rollback`."""
        self._sets.rollback()


class Snapshot:
    """One state of the database; see `logdb.Snapshot`."""

    def __init__(
        self, engine: AsyncDatabaseEngine, snapshot: SnapshotId, position: RecordId
    ) -> None:
        """Use `Database.snapshot`."""
        self._engine: Final = engine
        self._snapshot: Final = snapshot
        #: The position of the state.
        self.position: Final = position
        self._is_closed = False
        request = DropRequest(NEVER, snapshot)
        self._owned: Final = engine.owners.add(self, lambda: (request,))

    async def __aenter__(self) -> Self:
        """Return the snapshot."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    def __repr__(self) -> str:
        return f"<logdb.aio.Snapshot at {self.position}>"

    def _open(self) -> SnapshotId:
        if self._is_closed:
            raise ClosedError("this snapshot", "take a new one")
        return self._snapshot

    async def get(self, key: UserKey, default: Any = None, *, timeout: float | None = None) -> Any:
        """Return a key's value, or `default` if it is absent."""
        return (await self.multi_get((key,), default, timeout=timeout))[0]

    async def multi_get(
        self, keys: Iterable[UserKey], default: Any = None, *, timeout: float | None = None
    ) -> list[Any]:
        """Return the values of up to 10,000 keys, in their order."""
        steps = single_calls.read(self._engine.deadline_ns(timeout), self._open(), keys, default)
        return await self._engine.run(steps)

    async def exists(self, key: UserKey, *, timeout: float | None = None) -> bool:
        """Return whether a key exists."""
        steps = single_calls.exists(self._engine.deadline_ns(timeout), self._open(), key)
        return await self._engine.run(steps)

    def scan(
        self,
        start: UserKey | None = None,
        stop: UserKey | None = None,
        *,
        prefix: UserKey | None = None,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Return an async iterator over keys and values; see `logdb.Database.scan`."""
        bounds = arguments.bounds(start, stop, prefix, limit)
        pages = OpenScan(bounds, lambda: self._engine.deadline_ns(timeout), self._open())
        return AsyncRows(self._engine, bounds, pages, self)

    async def close(self) -> None:
        """Release the snapshot. Idempotent."""
        if not self._is_closed:
            self._engine.post(DropRequest(NEVER, self._snapshot))
            self._is_closed = True
            self._engine.owners.remove(self._owned)


class Watch:
    """The values of a key over time: an async iterator, and context manager."""

    def __init__(
        self, engine: AsyncDatabaseEngine, key: bytes, default: Any, timeout: float | None
    ) -> None:
        """Use `Database.watch`."""
        self._engine: Final = engine
        self._key: Final = key
        self._default: Final = default
        self._timeout: Final = timeout
        self._handle: Final = WatchHandle()
        #: The version of the last returned value: the gsn of its record; 0: absent, -1: none yet.
        self.version = -1

    async def __aenter__(self) -> Self:
        """Return the watch."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    @property
    def _is_open(self) -> bool:
        return not self._handle.is_closed

    def __aiter__(self) -> AsyncIterator[Any]:
        """Return the watch itself."""
        return self

    async def __anext__(self) -> Any:
        """Wait for the next value and return it. See `logdb.Watch`."""
        deadline_ns = NEVER if self._timeout is None else self._engine.deadline_ns(self._timeout)
        request = WatchRequest(deadline_ns, self._key, self.version, self._handle)
        state: KeyState | None = await self._engine.call(request) if self._is_open else None
        if state is None:
            raise StopAsyncIteration
        value = self._default if state.value is None else decode_value(state.value)
        # Last, because decoding may raise, and then the value is requested again.
        self.version = state.version
        return value

    async def close(self) -> None:
        """Close the watch; a waiting task gets StopAsyncIteration. Idempotent."""
        if self._is_open:
            self._handle.is_closed = True
            self._engine.post(UnwatchRequest(NEVER, self._handle))


async def connect(coordinators: str | Sequence[str], timeout: float | None) -> Database:
    """Connect; see `logdb.aio.connect`."""
    engine = AsyncDatabaseEngine(coordinators, timeout)
    try:
        largest = await engine.run(single_calls.open_database(engine.deadline_ns()))
    except BaseException:
        engine.close()
        raise
    return Database(engine, largest)
