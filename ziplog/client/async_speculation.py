"""The iterator over the events of a speculation."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from ziplog.client import arguments
from ziplog.client.async_base import AsyncStream
from ziplog.client.common.requests import EventsRequest, ProgressRequest, UnsubscribeRequest
from ziplog.client.reads.event_buffer import EventBuffer
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Self

    from ziplog.client.common.requests import Blocked, SpeculateRequest
    from ziplog.client.engines.asyncio_engine import AsyncioEngine
    from ziplog.types import Event, RecordId


class AsyncSpeculation(AsyncStream):
    """Events of early delivery: an async iterator and async context manager.

    `Delivery` has a record, `Confirmed` makes deliveries final, `Failed` withdraws them. It closes
    itself when it is garbage-collected. Iteration over a closed one ends. An exception in a call
    (Ctrl-C, a signal handler's, a cancellation) loses nothing: the next call returns the events of
    the interrupted one.
    """

    def __init__(
        self,
        engine: AsyncioEngine,
        request: SpeculateRequest,
        timeout: float | None,
    ) -> None:
        """Use `Log.speculate`."""
        self._timeout: Final = timeout
        self._buffer: Final = EventBuffer(request.start)
        #: Most deliveries that are neither confirmed nor void.
        self.max_pending: Final = request.max_pending
        super().__init__(engine, request, UnsubscribeRequest, self._buffer.forget)

    async def __aenter__(self) -> Self:
        """Return the speculation, once it is open."""
        return await self._entered()

    async def __aexit__(self, *_: object) -> None:
        """Close the speculation."""
        await self.close()

    def __aiter__(self) -> AsyncIterator[Event]:
        """Return the speculation itself."""
        return self

    async def __anext__(self) -> Event:
        """Return the next event; wait for it.

        Raises:
            DeadlineError: no event arrived within the speculation's time-out.
            TrimmedError: the next position was trimmed meanwhile.

        """
        while True:
            for event in self._buffer.batch:
                return event
            if not await self._fill(arguments.READ_AHEAD, self._timeout):
                if self._buffer.ended:
                    await self.close()
                    raise StopAsyncIteration
                raise DeadlineError(f"no event came within {self._timeout:g} s")

    async def fetch(self, max_events: int = 1000, timeout: float | None = None) -> list[Event]:
        """Return up to `max_events` available events; wait for the first one.

        The list is empty if no event arrived within `timeout` seconds (None: as iteration), or if
        the speculation is closed meanwhile.

        Raises:
            TrimmedError: the next position was trimmed meanwhile.
            ClosedError: it is closed.

        """
        if self._buffer.closed and not self._buffer.is_complete:
            raise ClosedError("this speculation", "speculate again to continue")
        limit = self._timeout if timeout is None else arguments.timeout_s(timeout, 0)
        max_events = arguments.count("max_events", max_events, 1)
        while not self._buffer.left and await self._fill(max_events, limit):
            pass  # Another asyncio task may have taken them.
        if self._buffer.ended and not self._buffer.left:
            await self.close()
        return self._buffer.pop(max_events)

    async def _fill(self, max_events: int, limit: float | None) -> bool:
        buffer = self._buffer
        if buffer.ended:
            return False
        deadline_ns = NEVER if limit is None else arguments.deadline_ns(limit, 0)
        if not await self._opens_by(deadline_ns):
            return False
        request = EventsRequest(deadline_ns, self._number, max_events, buffer.taken)
        return buffer.fill(await self._engine.call(request))

    @property
    def position(self) -> RecordId:
        """Where a later speculation or subscription continues: behind all that was confirmed."""
        self._update_progress()
        return self._buffer.progress.position

    @property
    def pending(self) -> int:
        """The number of deliveries that are neither confirmed nor void."""
        self._update_progress()
        return self._buffer.progress.pending

    @property
    def caught_up(self) -> bool:
        """Whether everything stable that the servers last reported was returned."""
        self._update_progress()
        return self._buffer.progress.caught_up

    @property
    def blocked_on(self) -> Blocked | None:
        """The shard and the epoch that block further stable records, if any do."""
        self._update_progress()
        return self._buffer.progress.blocked_on

    @property
    def is_closed(self) -> bool:
        """Whether no event will follow."""
        return self._buffer.closed

    def _update_progress(self) -> None:
        buffer = self._buffer
        if not buffer.closed and self._is_open:
            request = ProgressRequest(NEVER, self._number, buffer.taken)
            buffer.progress = self._engine.call_now(request)

    async def close(self) -> None:
        """Close the speculation; `position` stays. Idempotent."""
        if not self._buffer.closed:
            self._engine.shielded(self._close)

    def _close(self) -> None:
        with contextlib.suppress(ClosedError):
            self._update_progress()
        self._engine.post(UnsubscribeRequest(NEVER, self._number))
        self._buffer.close()
        self._engine.owners.remove(self._owned)
