"""The client of a database: `Database`, with its snapshots and watches.

Every method validates its arguments (`arguments`) and runs pure steps on the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.client import arguments, single_calls
from logdb.client.async_base import AsyncTransactions
from logdb.client.async_rows import AsyncRows
from logdb.client.async_transaction import Transaction
from logdb.client.requests import (
    CoordinatorStatusRequest,
    DropRequest,
    SnapshotRequest,
    UnwatchRequest,
    WatchHandle,
    WatchRequest,
)
from logdb.client.scanning import OpenScan
from logdb.values import decode_value, encode_key
from ziplog.client.arguments import status, timeout_s
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping
    from typing import Self

    from logdb.client.engines import AsyncDatabaseEngine, PendingOpen
    from logdb.client.requests import KeyState, SnapshotId
    from logdb.values import UserKey
    from ziplog.types import RecordId


class Database(AsyncTransactions):
    """A client of a database. Close it, or use it in an `async with` statement.

    A key is `str` or `bytes` of up to 1,024 bytes. A value is anything that MessagePack carries (a
    tuple comes back as a list). Both must fit into a record, 1 MiB by default. After a timeout a
    method raises `DeadlineError`, and nothing was written. If a write may have happened, it raises
    `OutcomeUnknownError`: its `resolve` returns the commit's position, or None if the write has no
    effect and never will.

    A blocking database may be used from several threads; a transaction, a snapshot's scan and a
    watch from one thread at a time. An asyncio database belongs to the event loop in which it was
    connected; several tasks may use a transaction. No database survives `os.fork`.
    """

    async def __aenter__(self) -> Self:
        """Return the database."""
        self._engine.check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    def __repr__(self) -> str:
        return f"<logdb.aio.Database at {self._engine.core.description}>"

    # --- transactions ---

    def transaction(self, *, timeout: float | None = None) -> Transaction:
        """Start a transaction, for use in an `async with` statement.

        The end of the block commits it; an exception rolls it back. `timeout`: of each call of the
        transaction, in seconds.
        """
        self._engine.check_open()
        if timeout is not None:
            timeout_s(timeout, 0)
        return Transaction(self._engine, self._largest, timeout)

    # --- reading ---

    async def get(self, key: UserKey, default: Any = None, *, timeout: float | None = None) -> Any:
        """Return a key's value, or `default` if it is absent.

        The read sees everything that completed before this call, of every client. `timeout`: in
        seconds.
        """
        values = await self.multi_get((key,), default, timeout=timeout)
        return values[0]

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
        """Return an async iterator over keys and values of one state, in key order.

        Args:
            start: the first key, inclusive; None: no bound.
            stop: the end, exclusive; None: no bound.
            prefix: instead of both bounds: all keys with this prefix.
            limit: maximum number of rows.
            timeout: of each page of 1,000 rows, in seconds.

        Keys are `str` (with surrogate escapes if they are not UTF-8), unless a bound or the prefix
        is `bytes`. The state is that of the first row.

        Raises:
            SnapshotExpired: over 60 s passed between two pages, or more than 1,000,000 keys changed
                during the iteration.

        """
        self._engine.check_open()
        bounds = arguments.bounds(start, stop, prefix, limit)
        pages = OpenScan(bounds, lambda: self._engine.deadline_ns(timeout))
        return AsyncRows(self._engine, bounds, pages)

    def snapshot(self, *, timeout: float | None = None) -> PendingOpen[Snapshot]:
        """Return a snapshot of the present state. Close it after use.

        ``async with db.snapshot() as snapshot``, or ``snapshot = await db.snapshot()``.
        """
        return self._engine.open(self._snapshot, timeout)

    async def _snapshot(self, timeout: float | None) -> Snapshot:
        snapshot, position = await self._engine.call(
            SnapshotRequest(self._engine.deadline_ns(timeout))
        )
        return Snapshot(self._engine, snapshot, position)

    def watch(self, key: UserKey, default: Any = None, *, timeout: float | None = None) -> Watch:
        """Return an async iterator over the values of a key: the present one, then each later one.

        Values that lasted too short a time may be skipped. The iterator never goes back, and never
        ends.

        Args:
            key: the key.
            default: the value of an absent key.
            timeout: time without a change after which iteration raises DeadlineError, in seconds;
                it may be continued. None: it waits without limit.

        """
        self._engine.check_open()
        if timeout is not None:
            timeout_s(timeout, 0)
        return Watch(self._engine, encode_key(key), default, timeout)

    # --- writing ---

    async def put(self, key: UserKey, value: Any, *, timeout: float | None = None) -> RecordId:
        """Set a key's value; return the position of the commit.

        Raises:
            UnsupportedValueError: MessagePack cannot carry the value.
            RecordTooLargeError: the key has over 1,024 bytes, or both do not fit into a record.

        """
        deadline_ns = self._engine.deadline_ns(timeout)
        return await self._engine.run(single_calls.put(deadline_ns, key, value, self._largest))

    async def delete(self, key: UserKey, *, timeout: float | None = None) -> RecordId:
        """Delete a key, whether or not it exists; return the commit's position. See `put`."""
        return await self._engine.run(single_calls.delete(self._engine.deadline_ns(timeout), key))

    async def multi_put(
        self, values: Mapping[Any, Any], *, timeout: float | None = None
    ) -> RecordId | None:
        """Set the values of keys atomically; return the commit's position (None: no keys).

        Raises:
            RecordTooLargeError: a value is too large (see `put`), or the keys do not fit into a
                record: 1 MiB holds some 20,000 keys of 16 bytes.

        """
        deadline_ns = self._engine.deadline_ns(timeout)
        return await self._engine.run(single_calls.multi_put(deadline_ns, values, self._largest))

    async def test_and_multi_put(
        self,
        expected: Mapping[Any, Any],
        writes: Mapping[Any, Any],
        *,
        timeout: float | None = None,
    ) -> bool:
        """Write if keys have the expected values, atomically; return whether they did.

        Args:
            expected: up to 10,000 keys, each with the result expected of `get`, compared as Python
                does (1 == True); None: the value is None, or the key is absent.
            writes: keys and their new values.
            timeout: in seconds.

        """
        deadline_ns = self._engine.deadline_ns(timeout)
        steps = single_calls.test_and_multi_put(deadline_ns, expected, writes, self._largest)
        return await self._engine.run(steps)

    # --- the database ---

    async def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the status of this client's coordinator and its "endpoint" (docs/logdb.md, 16)."""
        request = CoordinatorStatusRequest(self._engine.deadline_ns(timeout))
        document, endpoint = await self._engine.call(request)
        return status(document) | {"endpoint": endpoint}

    def stats(self) -> dict[str, int]:
        """Return the counters of this client."""
        return self._engine.core.stats()

    async def close(self) -> None:
        """Close; open calls raise ClosedError. Idempotent."""
        self._engine.close()


class Snapshot:
    """One state of the database; it expires after 60 s without a read.

    Any read may raise SnapshotExpired. An async context manager.
    """

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
        values = await self.multi_get((key,), default, timeout=timeout)
        return values[0]

    async def multi_get(
        self, keys: Iterable[UserKey], default: Any = None, *, timeout: float | None = None
    ) -> list[Any]:
        """Return the values of up to 10,000 keys, in their order."""
        steps = single_calls.read(self._engine.deadline_ns(timeout), self._open(), keys, default)
        return await self._engine.run(steps)

    async def exists(self, key: UserKey, *, timeout: float | None = None) -> bool:
        """Return whether a key exists."""
        return await self._engine.run(
            single_calls.exists(self._engine.deadline_ns(timeout), self._open(), key)
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
        """Return an async iterator over keys and values in key order; see `Database.scan`."""
        bounds = arguments.bounds(start, stop, prefix, limit)
        pages = OpenScan(bounds, lambda: self._engine.deadline_ns(timeout), self._open())
        return AsyncRows(self._engine, bounds, pages, self)

    async def close(self) -> None:
        """Release the snapshot. Idempotent."""
        if not self._is_closed:
            self._engine.shielded(self._close)

    def _close(self) -> None:
        self._is_closed = True
        self._engine.post(DropRequest(NEVER, self._snapshot))
        self._engine.owners.remove(self._owned)


class Watch:
    """The values of a key over time: an async iterator, and an async context manager."""

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
        """Wait for the next value and return it.

        Raises:
            DeadlineError: nothing changed within the timeout; it may be called again.

        """
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
        """Close the watch; a waiting call raises StopAsyncIteration. Idempotent."""
        if self._is_open:
            self._handle.is_closed = True
            self._engine.post(UnwatchRequest(NEVER, self._handle))


async def connect(engine: AsyncDatabaseEngine) -> Database:
    """Return a database; closes the engine if that fails."""
    try:
        largest = await engine.run(single_calls.open_database(engine.deadline_ns()))
    except BaseException:
        engine.close()
        raise
    return Database(engine, largest)
