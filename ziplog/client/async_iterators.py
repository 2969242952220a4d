"""The iterators of a client: over the records of the log, and over a shard's stored units."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar, Final

from ziplog.client import arguments
from ziplog.client.async_base import AsyncStream
from ziplog.client.bulk.scan_cursor import ScanCursor
from ziplog.client.common.requests import (
    BarrierRequest,
    FetchRequest,
    ProgressRequest,
    ScanCloseRequest,
    ScanFetchRequest,
    UnsubscribeRequest,
)
from ziplog.client.reads.subscription_buffer import SubscriptionBuffer
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Self

    from ziplog.client.bulk.scan_cursor import Step
    from ziplog.client.common.requests import Blocked, Request
    from ziplog.client.engines.asyncio_engine import AsyncioEngine
    from ziplog.types import Record, RecordId


class AsyncSubscription(AsyncStream):
    """Records in gsn order, each once: an async iterator and async context manager.

    It closes itself at its end, and when it is garbage-collected. Iteration over a closed one
    ends. An exception in a call (Ctrl-C, a signal handler's, a cancellation) loses nothing: the
    next call returns the records of the interrupted one.
    """

    #: Maximum number of records that iteration fetches at once.
    _READ_AHEAD: ClassVar[int] = arguments.READ_AHEAD
    #: What the error of a call after `close` names, and its advice.
    _CLOSED: ClassVar[tuple[str, str]] = ("this subscription", "subscribe again to continue")

    def __init__(
        self, engine: AsyncioEngine, request: Request, start: RecordId, timeout: float | None
    ) -> None:
        """Use `Log.subscribe`."""
        self._timeout: Final = timeout
        self._buffer: Final = SubscriptionBuffer(start)
        super().__init__(engine, request, UnsubscribeRequest, self._buffer.forget)

    async def __aenter__(self) -> Self:
        """Return the subscription, once it is open."""
        return await self._entered()

    async def __aexit__(self, *_: object) -> None:
        """Close the subscription."""
        await self.close()

    def __aiter__(self) -> AsyncIterator[Record]:
        """Return the subscription itself."""
        return self

    async def __anext__(self) -> Record:
        """Return the next record; wait for it.

        Raises:
            DeadlineError: no record arrived within the subscription's time-out.
            TrimmedError: the next position was trimmed meanwhile.

        """
        while True:
            for record in self._buffer.batch:
                return record
            if not await self._fill(self._READ_AHEAD, self._timeout):
                if self._buffer.ended:
                    await self.close()
                    raise StopAsyncIteration
                raise self._silence()

    def _silence(self) -> DeadlineError:
        """Return the error of an iteration without a record in time."""
        blocked = self.blocked_on
        cause = "" if blocked is None else f": shard {blocked.shard} holds back what follows"
        return DeadlineError(f"no record came within {self._timeout:g} s{cause}")

    async def fetch(self, max_records: int = 1000, timeout: float | None = None) -> list[Record]:
        """Return up to `max_records` available records; wait for the first one.

        The list is empty at the end, or if no record arrived within `timeout` seconds (None: as
        iteration).

        Raises:
            TrimmedError: the next position was trimmed meanwhile.
            ClosedError: it was closed before its end.

        """
        self._check_open()
        limit = self._timeout if timeout is None else arguments.timeout_s(timeout, 0)
        max_records = arguments.count("max_records", max_records, 1)
        while not self._buffer.left and await self._fill(max_records, limit):
            pass  # Another asyncio task may have taken them.
        if self._buffer.ended and not self._buffer.left:
            await self.close()
        return self._buffer.pop(max_records)

    def _check_open(self) -> None:
        if self._buffer.closed and not self._buffer.is_complete:
            raise ClosedError(*self._CLOSED)

    async def _fill(self, max_records: int, limit: float | None) -> bool:
        buffer = self._buffer
        if buffer.ended:
            return False
        deadline_ns = NEVER if limit is None else arguments.deadline_ns(limit, 0)
        if not await self._opens_by(deadline_ns):
            return False
        request = FetchRequest(deadline_ns, self._number, max_records, buffer.after)
        return buffer.fill(await self._engine.call(request))

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

    async def barrier(self, *, timeout: float | None = None) -> RecordId:
        """Return a position that no such subscription had passed when this was called.

        Once `position` is at or after it, this subscription has returned every record (of its
        shards) whose append completed before the call, and every record that a subscription of
        all shards had received. For a subscription of chosen shards: also what a subscription of
        these and other shards had received. Subscriptions of fewer shards may be ahead. This
        fetches nothing: go on reading. Without `follow`, the subscription may end before that.

        Args:
            timeout: in seconds; None: no limit.

        Raises:
            DeadlineError: a server did not report its position, or it is not open yet.
            ClosedError: the subscription is closed.

        """
        deadline_ns = NEVER if timeout is None else arguments.deadline_ns(timeout, 0)
        if not await self._opens_by(deadline_ns):
            raise DeadlineError(
                f"no barrier within {timeout:g} s: the subscription is not open yet; try again"
            )
        rid: RecordId = await self._engine.call(BarrierRequest(deadline_ns, self._number))
        return rid

    def _update_progress(self) -> None:
        if self._buffer.needs_progress and self._is_open:
            request = ProgressRequest(NEVER, self._number, self._buffer.after)
            self._buffer.progress = self._engine.call_now(request)

    async def close(self) -> None:
        """Close the subscription. Idempotent."""
        if not self._buffer.closed:
            self._engine.shielded(self._close)

    def _close(self) -> None:
        with contextlib.suppress(ClosedError):
            self._update_progress()
        self._engine.post(UnsubscribeRequest(NEVER, self._number))
        self._buffer.close()
        self._engine.owners.remove(self._owned)


class AsyncScan(AsyncStream, ScanCursor):
    """Pairs (units, reached): an async iterator and async context manager.

    `units` are the following ones, in order, whole: the first may begin before the range, the last
    end after it. Every position of the shard below `reached` was returned or is a no-op. The last
    pair has `reached` == `stop`. The scan closes itself at its end, and when it is
    garbage-collected.
    """

    def __init__(
        self, engine: AsyncioEngine, request: Request, start: int, stop: int, timeout: float
    ) -> None:
        """Use `Log.scan`."""
        ScanCursor.__init__(self, start, stop, timeout)
        AsyncStream.__init__(self, engine, request, ScanCloseRequest)

    async def __aenter__(self) -> Self:
        """Return the scan, once it is open."""
        return await self._entered()

    async def __aexit__(self, *_: object) -> None:
        """Close the scan."""
        await self.close()

    def __aiter__(self) -> AsyncIterator[Step]:
        """Return the scan itself."""
        return self

    async def __anext__(self) -> Step:
        """Return the next units; wait for them.

        Raises:
            DeadlineError: nothing arrived within the scan's time-out; iteration may continue.
            TrimmedError: the next position was trimmed.

        """
        await self
        if self.has_ended:
            await self.close()
            raise StopAsyncIteration
        return self.accept(await self._engine.call(self.request()))

    def request(self) -> ScanFetchRequest:
        """Return the next fetch."""
        deadline_ns = arguments.deadline_ns(self._timeout, 0)
        return ScanFetchRequest(deadline_ns, self._number, self.position)

    async def close(self) -> None:
        """Close the scan. Idempotent."""
        if not self._is_closed:
            self._engine.shielded(self._close)

    def _close(self) -> None:
        self._engine.post(ScanCloseRequest(NEVER, self._number))
        self._is_closed = True
        self._engine.owners.remove(self._owned)
