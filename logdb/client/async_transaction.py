"""A transaction of a client, which commits when its block ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.client import arguments
from logdb.client.async_rows import AsyncRows
from logdb.client.transaction import TransactionScan, TransactionSets
from logdb.values import decode_value, encode_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from typing import Self

    from logdb.client.engines import AsyncDatabaseEngine
    from logdb.client.transaction import TransactionStatus
    from logdb.values import UserKey
    from ziplog.types import RecordId


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
        """Return a key's value, or `default` if it is absent; sees the transaction's own writes.

        Raises:
            TransactionAborted: another transaction changed what this one has read; it is over.
            TransactionClosed: it was over before.
            TooManyReadsError: it would have read more than 10,000 keys.

        """
        values = await self.multi_get((key,), default)
        return values[0]

    async def multi_get(self, keys: Iterable[UserKey], default: Any = None) -> list[Any]:
        """Return the values of up to 10,000 keys, in their order; see `get`."""
        steps = self._sets.get(arguments.keys(keys), self._deadline_ns())
        values = await self._engine.run(steps)
        return [default if value is None else decode_value(value) for value in values]

    async def exists(self, key: UserKey) -> bool:
        """Return whether a key exists; see `get`."""
        steps = self._sets.exists(encode_key(key), self._deadline_ns())
        return await self._engine.run(steps)

    def scan(
        self,
        start: UserKey | None = None,
        stop: UserKey | None = None,
        *,
        prefix: UserKey | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[tuple[Any, Any]]:
        """Return an async iterator over keys and values in key order; see `Database.scan`, `get`.

        The commit conflicts if another transaction changed the range that was read.
        """
        bounds = arguments.bounds(start, stop, prefix, limit)
        self._sets.check_open()
        return AsyncRows(
            self._engine, bounds, TransactionScan(self._sets, bounds, self._deadline_ns)
        )

    def put(self, key: UserKey, value: Any) -> None:
        """Set a key's value at the commit, without sending it; raises as `Database.put`."""
        self._sets.write(*arguments.write(key, value, self._largest))

    def delete(self, key: UserKey) -> None:
        """Delete a key at the commit."""
        self._sets.write(encode_key(key), None)

    async def validate(self) -> None:
        """Check that everything read is unchanged; a read may return a slightly old state.

        Raises:
            TransactionAborted: another transaction changed it; this one is over.
            TransactionClosed: it was over before.

        """
        await self._engine.run(self._sets.validate(self._deadline_ns()))

    async def commit(self) -> None:
        """Commit; return when the writes have taken effect, as durable as an insert.

        Raises:
            TransactionAborted: it took no effect, because another transaction changed what it read.
            UnavailableError: it took no effect; it is still open, and may be committed again.
            OutcomeUnknownError: it may have taken effect; call the error's `resolve`.
            TransactionClosed: it was over before.

        """
        await self._engine.run(self._sets.commit(self._deadline_ns()))

    def rollback(self) -> None:
        """Roll back, without a trace. Does nothing if the transaction is over, as in a `finally`.

        Raises:
            TransactionClosed: it is "committing", or "in doubt".

        """
        self._sets.rollback()
