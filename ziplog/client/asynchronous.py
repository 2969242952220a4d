"""The asyncio client: the same client node as the blocking one, driven by an event loop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.client import arguments
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import (
    NEVER,
    ConnectRequest,
    ProgressRequest,
    StatusRequest,
    SyncRequest,
    TailRequest,
    UnsubscribeRequest,
)
from ziplog.client.engines.asyncio_engine import AsyncioEngine
from ziplog.client.scan_iterators import AsyncScan
from ziplog.client.subscription_buffer import SubscriptionBuffer
from ziplog.errors import DeadlineError, OutcomeUnknownError, UnavailableError
from ziplog.types import RID_GENESIS, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence
    from typing import Self

    from ziplog.client.arguments import BytesLike
    from ziplog.client.bulk.extents import Extents
    from ziplog.client.bulk.outline import ShardOutline
    from ziplog.client.common.requests import Blocked, Fetched, Policy
    from ziplog.wire import Limits

#: Maximum number of pending `insert_nowait` calls, and of their bytes.
_MAX_FUTURES: Final = 65_536
_MAX_FUTURE_BYTES: Final = 64 * 1024 * 1024


class AsyncLog:
    """A client of one log for asyncio: `ziplog.Log` with coroutines for methods that wait.

    It belongs to the event loop in which it was connected.
    """

    def __init__(
        self, engine: AsyncioEngine, core: ClientCore, limits: Limits, timeout: float
    ) -> None:
        """Use `ziplog.aio.connect`."""
        self._engine: Final = engine
        self._core: Final = core
        engine.resolve = self._resolve
        self._limits: Final = limits
        self._timeout: Final = timeout
        self._nowait: Final[set[asyncio.Future[RecordId]]] = set()
        self._nowait_bytes = 0
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """Flush, unless an exception is being raised, and close."""
        try:
            if kind is None and not self._engine.is_closed:
                await self.flush()
        finally:
            await self.close()

    def __repr__(self) -> str:
        return f"<ziplog.aio.AsyncLog of {self._core.description}>"

    @property
    def endpoints(self) -> list[str]:
        """The "host:port" of the membership service's nodes that this client knows."""
        return self._core.endpoints

    @property
    def cluster_number(self) -> int:
        """The number by which servers distinguish clusters; see `ziplog.Log.cluster_number`."""
        return self._core.cluster

    def _deadline_ns(self, timeout: float | None) -> int:
        return arguments.deadline_ns(timeout, self._timeout)

    # --- inserting ---

    async def insert_after(
        self,
        payload: BytesLike,
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> RecordId:
        """Insert one record after another position; see `ziplog.Log.insert_after`."""
        request = arguments.insert((payload,), after, key, self._limits, self._deadline_ns(timeout))
        rids: list[RecordId] = await self._engine.call(request)
        return rids[0]

    async def insert_many(
        self,
        payloads: Iterable[BytesLike],
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        keys: Iterable[BytesLike | str | None] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> list[RecordId]:
        """Insert records in order at one shard; see `ziplog.Log.insert_many`."""
        deadline_ns = self._deadline_ns(timeout)
        request = arguments.insert(
            payloads, after, key, self._limits, deadline_ns, many=True, keys=keys
        )
        if not request.payloads:
            return []
        rids: list[RecordId] = await self._engine.call(request)
        return rids

    async def insert_rows(
        self,
        payloads: Iterable[BytesLike],
        *,
        keys: Iterable[BytesLike | str | None] | None = None,
        shard: int,
        writer: BytesLike,
        batch: int,
        row: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> list[RecordId]:
        """Insert rows under an identity that allows retries; see `ziplog.Log.insert_rows`."""
        deadline_ns, origin = self._deadline_ns(timeout), (writer, batch, row)
        request = arguments.rows(payloads, keys, shard, origin, self._limits, deadline_ns)
        if not request.payloads:
            return []
        rids: list[RecordId] = await self._engine.call(request)
        return rids

    def insert_nowait(
        self,
        payload: BytesLike,
        after: RecordId = RID_GENESIS,
        *,
        key: BytesLike | str | None = None,
        timeout: float | None = None,
    ) -> asyncio.Future[RecordId]:
        """Start to insert a record; return a future of its rid.

        Raises:
            UnavailableError: 65,536 records or 64 MiB are pending; await `flush`.

        """
        request = arguments.insert((payload,), after, key, self._limits, self._deadline_ns(timeout))
        size = len(request.payloads[0])
        if len(self._nowait) >= _MAX_FUTURES or self._nowait_bytes + size > _MAX_FUTURE_BYTES:
            raise UnavailableError(
                f"{len(self._nowait)} inserts are pending, and no more are allowed;"
                " await flush() and try again"
            )
        _, answer = self._engine.submit(request)
        future: asyncio.Future[RecordId] = asyncio.get_running_loop().create_future()
        self._nowait.add(future)
        self._nowait_bytes += size

        def done(answer: asyncio.Future[list[RecordId]]) -> None:
            self._nowait.discard(future)
            self._nowait_bytes -= size
            error = answer.exception()
            if error is not None and self._failure is None:
                self._failure = error
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
                # `flush` raises it if the caller never looks at the future.
                future.exception()
            else:
                future.set_result(answer.result()[0])

        answer.add_done_callback(done)
        return future

    async def flush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as above
        """Wait until every `insert_nowait` so far is done; raise the first failure, if any."""
        seconds = arguments.timeout_s(timeout, self._timeout)
        late: set[asyncio.Future[RecordId]] = set()
        if self._nowait:
            _, late = await asyncio.wait(set(self._nowait), timeout=seconds)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if late:
            raise DeadlineError(f"{len(late)} inserts were still pending after {seconds:g} s")

    async def sync(self, timeout: float | None = None) -> RecordId:  # noqa: ASYNC109 - as above
        """Wait until every completed insert is on stable storage; see `ziplog.Log.sync`."""
        rid: RecordId = await self._engine.call(SyncRequest(self._deadline_ns(timeout)))
        return rid

    async def _resolve(
        self,
        error: OutcomeUnknownError,
        timeout: float | None,  # noqa: ASYNC109 - as above
    ) -> RecordId | list[RecordId | None] | None:
        """Wait for the outcome of an insert; see `ziplog.OutcomeUnknownError.resolve`."""
        request = arguments.resolve(error, self._deadline_ns(timeout))
        return arguments.resolved(error, await self._engine.call(request))

    def set_policy(self, policy: Policy) -> None:
        """Select the shards of later inserts by `policy` (see `ziplog.policy`)."""
        self._core.set_policy(arguments.policy(policy))

    # --- reading ---

    async def read_record(
        self,
        rid: RecordId,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> Record:
        """Return the record at a position; see `ziplog.Log.read_record`."""
        record: Record = await self._engine.call(arguments.read(rid, self._deadline_ns(timeout)))
        return record

    def subscribe(
        self,
        start: RecordId = RID_GENESIS,
        *,
        follow: bool = True,
        timeout: float | None = None,
    ) -> AsyncSubscription:
        """Return an async iterator over all records from `start` on; see `ziplog.Log.subscribe`.

        Awaiting it waits until it is open.
        """
        if timeout is not None:
            arguments.timeout_s(timeout, 0)
        request = arguments.subscribe(start, self._deadline_ns(None), follow=follow)
        limit = timeout if timeout is not None or follow else self._timeout
        return AsyncSubscription(self._engine, *self._engine.submit(request), start, limit)

    async def check_tail(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> RecordId:
        """Return a position at or after all inserts that completed before this call.

        Later inserts may still get an earlier position; see `ziplog.Log.check_tail`.
        """
        rid: RecordId = await self._engine.call(TailRequest(self._deadline_ns(timeout)))
        return rid

    # --- reading in bulk ---

    async def extents(
        self,
        start: int = 1,
        stop: int | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> Extents:
        """Return the shards that own positions of a range; see `ziplog.Log.extents`."""
        request = arguments.extents(start, stop, self._deadline_ns(timeout))
        found: Extents = await self._engine.call(request)
        return found

    async def outline(
        self,
        shard: int,
        start: int,
        stop: int,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> ShardOutline:
        """Return a shard's size and archives for a range; see `ziplog.Log.outline`."""
        request = arguments.outline(shard, start, stop, self._deadline_ns(timeout))
        found: ShardOutline = await self._engine.call(request)
        return found

    def scan(self, shard: int, start: int, stop: int, *, timeout: float | None = None) -> AsyncScan:
        """Return an async iterator over a shard's units; see `ziplog.Log.scan`."""
        limit = arguments.timeout_s(timeout, self._timeout)
        request = arguments.scan(shard, start, stop, self._deadline_ns(timeout))
        return AsyncScan(self._engine, *self._engine.submit(request), start, stop, limit)

    # --- the cluster ---

    async def trim(
        self,
        rid: RecordId,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> None:
        """Delete all records before `rid`; see `ziplog.Log.trim`."""
        await self._engine.call(arguments.trim(rid, self._deadline_ns(timeout)))

    async def add_shard(
        self,
        shard: int,
        replicas: Mapping[str, str],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> None:
        """Add a shard; see `ziplog.Log.add_shard`."""
        await self._engine.call(
            arguments.change(shard, "add", self._deadline_ns(timeout), replicas)
        )

    async def remove_shard(
        self,
        shard: int,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> None:
        """Remove a shard permanently; see `ziplog.Log.remove_shard`."""
        await self._engine.call(arguments.change(shard, "remove", self._deadline_ns(timeout)))

    async def finalize_shard(
        self,
        shard: int,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> None:
        """Remove a shard and wait until it is finalized; see `ziplog.Log.finalize_shard`."""
        await self._engine.call(arguments.change(shard, "finalize", self._deadline_ns(timeout)))

    async def cluster(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> dict[str, Any]:
        """Return the status document."""
        document: bytes = await self._engine.call(StatusRequest(self._deadline_ns(timeout)))
        return arguments.status(document)

    def stats(self) -> dict[str, int]:
        """Return the counters of this client since it was created."""
        return msgspec.structs.asdict(self._core.counters)

    async def close(self) -> None:
        """Close the client; pending calls raise ClosedError. Idempotent."""
        self._engine.close()


class AsyncSubscription:
    """Records in gsn order, each once: an async iterator and async context manager."""

    def __init__(
        self,
        engine: AsyncioEngine,
        number: int,
        opened: asyncio.Future[int],
        start: RecordId,
        timeout: float | None,
    ) -> None:
        self._engine: Final = engine
        self._number: Final = number
        self._opened: Final = opened
        self._timeout: Final = timeout
        self._buffer: Final = SubscriptionBuffer(start)
        request = UnsubscribeRequest(NEVER, number)
        self._owned: Final = engine.owners.add(self, lambda: (request,))

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until it is open; raises what `ziplog.Log.subscribe` raises."""
        yield from asyncio.shield(self._opened).__await__()
        return self

    async def __aenter__(self) -> Self:
        """Wait until it is open."""
        return await self

    async def __aexit__(self, *_: object) -> None:
        """Close the subscription."""
        await self.close()

    def __aiter__(self) -> AsyncIterator[Record]:
        """Return the subscription itself."""
        return self

    async def __anext__(self) -> Record:
        """Return the next record; see `ziplog.Subscription`."""
        while True:
            for record in self._buffer.batch:
                return record
            if not await self._fill(arguments.READ_AHEAD, self._timeout):
                if self._buffer.ended:
                    await self.close()
                    raise StopAsyncIteration
                raise DeadlineError(f"no record came within {self._timeout:g} s")

    async def fetch(
        self,
        max_records: int = 1000,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking API
    ) -> list[Record]:
        """Return up to `max_records` records; see `ziplog.Subscription.fetch`."""
        limit = self._timeout if timeout is None else arguments.timeout_s(timeout, 0)
        arguments.fetch(self._number, max_records, NEVER, 0)
        while not self._buffer.pending and await self._fill(max_records, limit):
            pass  # Another task may have taken them.
        if self._buffer.ended and not self._buffer.pending:
            await self.close()
        return self._buffer.pop(max_records)

    async def _fill(self, max_records: int, limit: float | None) -> bool:
        buffer = self._buffer
        if buffer.ended:
            return False
        if not self._opened.done() or self._opened.exception() is not None:
            await self
        deadline_ns = NEVER if limit is None else arguments.deadline_ns(limit, 0)
        request = arguments.fetch(self._number, max_records, deadline_ns, buffer.after)
        batch: Fetched = await self._engine.call(request)
        return buffer.fill(batch)

    @property
    def position(self) -> RecordId:
        """The position at which a later subscription continues without loss or duplicates."""
        self._update_progress()
        return self._buffer.position

    @property
    def caught_up(self) -> bool:
        """Whether everything that the servers last reported was returned."""
        self._update_progress()
        return self._buffer.caught_up

    @property
    def blocked_on(self) -> Blocked | None:
        """The shard and the epoch that block further records, if any do."""
        self._update_progress()
        return self._buffer.blocked_on

    def _update_progress(self) -> None:
        is_open = self._opened.done() and not self._engine.is_closed
        if self._buffer.needs_progress and is_open and self._opened.exception() is None:
            request = ProgressRequest(NEVER, self._number, self._buffer.after)
            self._buffer.progress = self._engine.call_now(request)

    async def close(self) -> None:
        """Close the subscription. Idempotent."""
        if self._buffer.closed:
            return
        self._update_progress()
        self._buffer.close()
        if not self._engine.is_closed:
            self._engine.call_now(UnsubscribeRequest(NEVER, self._number))
        self._engine.owners.remove(self._owned)


async def connect(
    bootstrap: str | Sequence[str], policy: Policy, seconds: float | None
) -> AsyncLog:
    """Connect; see `ziplog.aio.connect`."""
    timeout = arguments.timeout_s(seconds, arguments.DEFAULT_TIMEOUT_S)
    core = ClientCore(os.urandom(16), arguments.endpoints(bootstrap), policy)
    engine = AsyncioEngine(core)
    try:
        limits = await engine.call(ConnectRequest(arguments.deadline_ns(timeout, timeout)))
    except BaseException:
        engine.close()
        raise
    return AsyncLog(engine, core, limits, timeout)
