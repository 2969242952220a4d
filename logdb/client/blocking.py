"""The blocking client: `Database`, and the transactions, snapshots and watches that it gives.

Rule: every method checks what it is given (`arguments`), and has the engine answer the requests
that the pure parts make of it. A database may be used from several threads; a transaction, a
snapshot's scan and a watch from one at a time.
"""

from __future__ import annotations

import functools
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from logdb.client import arguments, single_calls
from logdb.client.engines import DatabaseEngine
from logdb.client.requests import (
    CoordinatorStatusRequest,
    DropRequest,
    SnapshotRequest,
    UnwatchRequest,
    Watching,
    WatchRequest,
)
from logdb.client.rows import Rows
from logdb.client.scanning import OpenScan
from logdb.client.transaction import TransactionScan, TransactionSets
from logdb.errors import TransactionAborted
from logdb.values import decode_value, encode_key
from ziplog.client.arguments import status, timeout_s
from ziplog.client.common.requests import NEVER
from ziplog.errors import ClosedError, UnavailableError, ZiplogError
from ziplog.runtime.clock import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Concatenate, ParamSpec, Self

    from logdb.client.requests import KeyState, SnapshotId
    from logdb.client.transaction import TransactionStatus
    from logdb.values import UserKey
    from ziplog.types import RecordId

    P = ParamSpec("P")

T = TypeVar("T")


class Database:
    """A client of a database. Close it, or use it in a `with` statement.

    Keys are `str` or `bytes` of up to 1,024 bytes, values anything that MessagePack carries (a
    tuple comes back as a list), together up to a record's size, 1 MiB unless the cluster says else.
    A method that runs into the time-out raises `DeadlineError`, and nothing was written (for a
    write that may have happened, `OutcomeUnknownError`, which can be asked: `resolve` returns the
    commit's position, or None if it has, and will have, no effect). Does not survive `os.fork`.
    """

    def __init__(
        self, engine: DatabaseEngine, largest: int, on_close: Callable[[], object] | None = None
    ) -> None:
        """Use `logdb.connect`."""
        self._engine: Final = engine
        self._largest: Final = largest
        self._on_close = on_close

    def __enter__(self) -> Self:
        """Return the database."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        return f"<logdb.Database at {self._engine.core.description}>"

    # --- transactions ---

    def transaction(self, *, timeout: float | None = None) -> Transaction:
        """Begin a transaction, to be used in a `with` statement.

        Leaving the block commits it, leaving it by an exception rolls it back. `timeout`: of each
        of its calls, in seconds.
        """
        if timeout is not None:
            timeout_s(timeout, 0)
        return Transaction(self._engine, self._largest, timeout)

    def run(
        self,
        function: Callable[[Transaction], T],
        retries: int | None = None,
        *,
        timeout: float | None = None,
    ) -> T:
        """Return `function(transaction)`, committed; it is run again if others were faster.

        Args:
            function: may be called several times, so it should do nothing but use the transaction;
                an exception of its own rolls back and is raised, unless what it had read is no
                longer so.
            retries: at most so many times more, with growing pauses (1 ms to 100 ms) between; None:
                any number.
            timeout: in seconds: when it has passed, it is not run again; and that of each of the
                transaction's calls. None: the database's; with `retries`, only these count.

        Raises:
            TransactionAborted: each time; the last one's.

        """
        attempts = self._engine.backoff(retries, timeout)
        while True:
            try:
                with self.transaction(timeout=timeout) as transaction:
                    try:
                        return function(transaction)
                    except ZiplogError:
                        raise
                    except Exception:
                        # Maybe of a state a little old.
                        if transaction.status == "open":
                            with suppress(UnavailableError):
                                transaction.validate()
                        raise
            except TransactionAborted as error:
                jitter = random.random()  # noqa: S311 - to part rivals
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
        """Make of `function(transaction, ...)` a function without the first argument, by `run`."""
        self._engine.backoff(retries, timeout)

        def decorate(function: Callable[..., T]) -> Callable[..., T]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> T:
                return self.run(lambda t: function(t, *args, **kwargs), retries, timeout=timeout)

            return wrapper

        return decorate if function is None else decorate(function)

    # --- reading ---

    def get(self, key: UserKey, default: Any = None, *, timeout: float | None = None) -> Any:
        """Return a key's value, or `default` if it is absent.

        Everything that completed before this call is seen, whoever did it. `timeout`: in seconds.
        """
        return self.multi_get((key,), default, timeout=timeout)[0]

    def multi_get(
        self, keys: Iterable[UserKey], default: Any = None, *, timeout: float | None = None
    ) -> list[Any]:
        """Return the values of up to 10,000 keys, in their order and all of one state."""
        steps = single_calls.read(self._engine.deadline_ns(timeout), None, keys, default)
        return self._engine.run(steps)

    def exists(self, key: UserKey, *, timeout: float | None = None) -> bool:
        """Return whether a key is there."""
        return self._engine.run(single_calls.exists(self._engine.deadline_ns(timeout), None, key))

    def scan(
        self,
        start: UserKey | None = None,
        stop: UserKey | None = None,
        *,
        prefix: UserKey | None = None,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Return an iterator over keys and values in key order, all of one state.

        Args:
            start: the first key, inclusive; None: the very first one.
            stop: where it ends, exclusive; None: with the last one.
            prefix: instead of both: all keys that begin with it.
            limit: at most so many rows.
            timeout: of each page of 1,000 rows, in seconds.

        Keys come as `str` (with surrogate escapes where they are no UTF-8) unless a bound or the
        prefix is `bytes`. The state is that of the first `next`.

        Raises:
            SnapshotExpired: the iteration took too long: over 60 s between two pages, or more than
                1,000,000 keys were changed meanwhile.

        """
        bounds = arguments.bounds(start, stop, prefix, limit)
        scanning = OpenScan(bounds, lambda: self._engine.deadline_ns(timeout))
        return Rows(self._engine, bounds, scanning)

    def snapshot(self, *, timeout: float | None = None) -> Snapshot:
        """Return a view of the present state that does not change; close it when it is done."""
        return self._engine.shielded(self._snapshot, timeout)

    def _snapshot(self, timeout: float | None) -> Snapshot:
        snapshot, position = self._engine.call(SnapshotRequest(self._engine.deadline_ns(timeout)))
        return Snapshot(self._engine, snapshot, position)

    def watch(self, key: UserKey, default: Any = None, *, timeout: float | None = None) -> Watch:
        """Return an iterator over the values of a key: the present one, and each one seen later.

        Values that lasted too short may be left out, but it never goes back, and never ends.

        Args:
            key: the key.
            default: the value of a key that is absent.
            timeout: iteration raises DeadlineError after so many seconds without a change, and may
                be gone on with; None: it waits without limit.

        """
        if timeout is not None:
            timeout_s(timeout, 0)
        return Watch(self._engine, encode_key(key), default, timeout)

    # --- writing ---

    def put(self, key: UserKey, value: Any, *, timeout: float | None = None) -> RecordId:
        """Set a key's value, whatever it was; returns the position of the commit.

        Raises:
            UnsupportedValueError: MessagePack cannot carry the value.
            RecordTooLargeError: the key has over 1,024 bytes, or both do not fit into a record.

        """
        deadline_ns = self._engine.deadline_ns(timeout)
        return self._engine.run(single_calls.put(deadline_ns, key, value, self._largest))

    def delete(self, key: UserKey, *, timeout: float | None = None) -> RecordId:
        """Make a key absent, whether or not it is; returns the commit's position. See `put`."""
        return self._engine.run(single_calls.delete(self._engine.deadline_ns(timeout), key))

    def multi_put(
        self, values: Mapping[Any, Any], *, timeout: float | None = None
    ) -> RecordId | None:
        """Set keys' values, all at once; returns the commit's position (None if there are none).

        Raises:
            RecordTooLargeError: one is too large (see `put`), or the keys are more than a record
                holds: some 20,000 of 16 bytes in 1 MiB.

        """
        deadline_ns = self._engine.deadline_ns(timeout)
        return self._engine.run(single_calls.multi_put(deadline_ns, values, self._largest))

    def test_and_multi_put(
        self,
        expected: Mapping[Any, Any],
        writes: Mapping[Any, Any],
        *,
        timeout: float | None = None,
    ) -> bool:
        """Write if keys have the values expected, all at once; returns whether they had.

        Args:
            expected: up to 10,000 keys, each with what `get` would return, compared as Python does
                (1 == True); None: it is None, or absent.
            writes: keys and their new values.
            timeout: in seconds.

        """
        deadline_ns = self._engine.deadline_ns(timeout)
        steps = single_calls.test_and_multi_put(deadline_ns, expected, writes, self._largest)
        return self._engine.run(steps)

    # --- the database ---

    def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return how the coordinator is that this client uses (docs/logdb.md, section 16)."""
        request = CoordinatorStatusRequest(self._engine.deadline_ns(timeout))
        document, endpoint = self._engine.call(request)
        return status(document) | {"endpoint": endpoint}

    def stats(self) -> dict[str, int]:
        """Return what this client did: counts since it was made."""
        return self._engine.core.stats()

    def close(self) -> None:
        """Close; calls under way in other threads raise ClosedError. May be called again."""
        self._engine.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


class Transaction:
    """A transaction: a context manager that commits when its block ends."""

    def __init__(self, engine: DatabaseEngine, largest: int, timeout: float | None) -> None:
        """Use `Database.transaction`."""
        self._engine: Final = engine
        self._largest: Final = largest
        self._timeout: Final = timeout
        self._sets: Final = TransactionSets(largest)

    def __enter__(self) -> Self:
        """Return the transaction."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Commit it, unless it was ended before; roll it back if an exception is under way."""
        if not self._sets.is_undecided:
            return
        if kind is None:
            self.commit()
        else:
            self.rollback()

    def __repr__(self) -> str:
        return f"<logdb.Transaction, {self.status}>"

    @property
    def status(self) -> TransactionStatus:
        """How it is: "open", "committing", "committed", "aborted", "rolled back" or "in doubt"."""
        return self._sets.status

    @property
    def position(self) -> RecordId | None:
        """Where it was committed; of one that wrote nothing, of which state it read. Else None."""
        return self._sets.position

    def _deadline_ns(self) -> int:
        return self._engine.deadline_ns(self._timeout)

    def get(self, key: UserKey, default: Any = None) -> Any:
        """Return a key's value, or `default` if it is absent: what this transaction has made of it.

        Raises:
            TransactionAborted: somebody has changed what this transaction read before; it is over.
            TransactionClosed: it was over before.
            TooManyReadsError: it would have read more than 10,000 keys.

        """
        return self.multi_get((key,), default)[0]

    def multi_get(self, keys: Iterable[UserKey], default: Any = None) -> list[Any]:
        """Return the values of up to 10,000 keys, in their order; see `get`."""
        steps = self._sets.get(arguments.keys(keys), self._deadline_ns())
        values = self._engine.run(steps)
        return [default if value is None else decode_value(value) for value in values]

    def exists(self, key: UserKey) -> bool:
        """Return whether a key is there; see `get`."""
        steps = self._sets.exists(encode_key(key), self._deadline_ns())
        return self._engine.run(steps)

    def scan(
        self,
        start: UserKey | None = None,
        stop: UserKey | None = None,
        *,
        prefix: UserKey | None = None,
        limit: int | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Return an iterator over keys and values in key order; see `Database.scan`, and `get`.

        What lies in the range read so far must still be the same when this transaction commits.
        """
        bounds = arguments.bounds(start, stop, prefix, limit)
        self._sets.check_open()
        return Rows(self._engine, bounds, TransactionScan(self._sets, bounds, self._deadline_ns))

    def put(self, key: UserKey, value: Any) -> None:
        """Set a key's value when this transaction commits; errors are those of `Database.put`."""
        self._sets.write(*arguments.write(key, value, self._largest))

    def delete(self, key: UserKey) -> None:
        """Make a key absent when this transaction commits."""
        self._sets.write(encode_key(key), None)

    def validate(self) -> None:
        """Check that all that was read is still so, now. A read may show a state a little old.

        Raises:
            TransactionAborted: somebody has changed it; the transaction is over.
            TransactionClosed: it was over before.

        """
        self._engine.run(self._sets.validate(self._deadline_ns()))

    def commit(self) -> None:
        """Commit; returns when the writes have taken effect, and are as durable as an insert.

        Raises:
            TransactionAborted: it took no effect, as somebody has changed what it read.
            UnavailableError: it took no effect; it is still open, and may be committed again.
            OutcomeUnknownError: it may have taken effect; ask the error's `resolve`.
            TransactionClosed: it was over before.

        """
        self._engine.run(self._sets.commit(self._deadline_ns()))

    def rollback(self) -> None:
        """End it without a trace. Nothing happens if it is over, so it may stand in a `finally`.

        Raises:
            TransactionClosed: it is "committing", or "in doubt".

        """
        self._sets.rollback()


class Snapshot:
    """One state of the database, for as long as it is used: 60 s without a read end it.

    Any read may raise SnapshotExpired. A context manager.
    """

    def __init__(self, engine: DatabaseEngine, snapshot: SnapshotId, position: RecordId) -> None:
        """Use `Database.snapshot`."""
        self._engine: Final = engine
        self._snapshot: Final = snapshot
        #: The last record of the log that the state holds.
        self.position: Final = position
        self._is_closed = False
        request = DropRequest(NEVER, snapshot)
        self._owned: Final = engine.owners.add(self, lambda: (request,))

    def __enter__(self) -> Self:
        """Return the snapshot."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        return f"<logdb.Snapshot at {self.position}>"

    def _open(self) -> SnapshotId:
        if self._is_closed:
            raise ClosedError("this snapshot", "take another one")
        return self._snapshot

    def get(self, key: UserKey, default: Any = None, *, timeout: float | None = None) -> Any:
        """Return a key's value, or `default` if it is absent."""
        return self.multi_get((key,), default, timeout=timeout)[0]

    def multi_get(
        self, keys: Iterable[UserKey], default: Any = None, *, timeout: float | None = None
    ) -> list[Any]:
        """Return the values of up to 10,000 keys, in their order."""
        steps = single_calls.read(self._engine.deadline_ns(timeout), self._open(), keys, default)
        return self._engine.run(steps)

    def exists(self, key: UserKey, *, timeout: float | None = None) -> bool:
        """Return whether a key is there."""
        return self._engine.run(
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
    ) -> Iterator[tuple[Any, Any]]:
        """Return an iterator over keys and values in key order; see `Database.scan`."""
        bounds = arguments.bounds(start, stop, prefix, limit)
        scanning = OpenScan(bounds, lambda: self._engine.deadline_ns(timeout), self._open())
        return Rows(self._engine, bounds, scanning, self)

    def close(self) -> None:
        """Let go of it. May be called again."""
        if not self._is_closed:
            self._engine.shielded(self._close)

    def _close(self) -> None:
        self._is_closed = True
        self._engine.post(DropRequest(NEVER, self._snapshot))
        self._engine.owners.remove(self._owned)


class Watch:
    """The values of a key, one after the other: an iterator, and a context manager."""

    def __init__(
        self, engine: DatabaseEngine, key: bytes, default: Any, timeout: float | None
    ) -> None:
        """Use `Database.watch`."""
        self._engine: Final = engine
        self._key: Final = key
        self._default: Final = default
        self._timeout: Final = timeout
        self._watching: Final = Watching()
        #: The version of the value given last: the gsn where it was written; 0: absent, -1: none.
        self.version = -1

    def __enter__(self) -> Self:
        """Return the watch."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @property
    def _is_open(self) -> bool:
        return not self._watching.is_closed

    def __iter__(self) -> Iterator[Any]:
        """Return the watch itself."""
        return self

    def __next__(self) -> Any:
        """Return the next value; waits for it.

        Raises:
            DeadlineError: nothing changed within the time-out; it may be asked again.

        """
        deadline_ns = NEVER if self._timeout is None else self._engine.deadline_ns(self._timeout)
        request = WatchRequest(deadline_ns, self._key, self.version, self._watching)
        state: KeyState | None = self._engine.call(request) if self._is_open else None
        if state is None:
            raise StopIteration
        value = self._default if state.value is None else decode_value(state.value)
        # Last: what comes before may raise, and then the value is asked for again.
        self.version = state.version
        return value

    def close(self) -> None:
        """End it: a thread that waits for the next value has none. May be called again."""
        if self._is_open:
            self._watching.is_closed = True
            self._engine.post(UnwatchRequest(NEVER, self._watching))


def connect(
    coordinators: str | Sequence[str],
    timeout: float | None,
    on_close: Callable[[], object] | None = None,
) -> Database:
    """Connect; see `logdb.connect`. `on_close` is called once the database is closed."""
    engine = DatabaseEngine(coordinators, timeout)
    try:
        largest = engine.run(single_calls.open_database(engine.deadline_ns()))
    except BaseException:
        engine.close()
        raise
    return Database(engine, largest, on_close)
