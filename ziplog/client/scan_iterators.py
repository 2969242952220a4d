"""Iterators over a shard's units for bulk reads: a blocking and an asyncio one.

Rule: each step returns the end of its complete part; the last one returns `stop`. Each step has its
own deadline. Each fetch names the position, so a lost result (a cancelled task, a signal) is
returned again.

Invariant: `position` is after all returned units. See docs/protocol.md, section 14.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client import arguments
from ziplog.client.common.requests import NEVER, ScanCloseRequest, ScanFetchRequest, Scanned
from ziplog.errors import DeadlineError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Generator, Iterator
    from typing import Any, Self

    from ziplog.client.engines.asyncio_engine import AsyncioEngine
    from ziplog.client.engines.blocking_engine import BlockingEngine
    from ziplog.core.entries import Unit

#: The result of a step: units, and the gsn (exclusive) up to which they are complete.
Step = tuple[list["Unit"], int]


class _ScanCursor:
    """The position of a scan, common to both iterators."""

    def __init__(self, number: int, start: int, stop: int, timeout: float) -> None:
        self._number: Final = number
        self._stop: Final = stop
        self._timeout: Final = timeout
        #: The end of the units that were returned.
        self.position = start
        self._is_closed = False

    @property
    def has_ended(self) -> bool:
        """Whether no unit follows."""
        return self._is_closed or self.position >= self._stop

    def request(self) -> ScanFetchRequest:
        """Return the next fetch."""
        deadline_ns = arguments.deadline_ns(self._timeout, 0)
        return ScanFetchRequest(deadline_ns, self._number, self.position)

    def _closing(self) -> ScanCloseRequest:
        return ScanCloseRequest(NEVER, self._number)

    def accept(self, scanned: Scanned) -> Step:
        """Return the result of a fetch, and advance the position.

        Raises:
            DeadlineError: the fetch made no progress.

        """
        if scanned.reached <= self.position:
            what = f"a scan up to gsn {self._stop} did not get beyond gsn {self.position}"
            raise DeadlineError(f"{what} within {self._timeout:g} s")
        step = scanned.units, scanned.reached
        # The last statement, so that no signal handler can interrupt after it.
        self.position = scanned.reached
        return step


class Scan(_ScanCursor):
    """Pairs (units, reached): an iterator and context manager.

    `units` are the following ones, in order, whole: the first may begin before the range, the last
    end after it. Every position of the shard below `reached` was returned or is a no-op. The last
    pair has `reached` == `stop`. The scan closes itself at its end, and when it is
    garbage-collected.
    """

    def __init__(
        self, engine: BlockingEngine, number: int, start: int, stop: int, timeout: float
    ) -> None:
        super().__init__(number, start, stop, timeout)
        self._engine: Final = engine
        request = self._closing()
        self._owned: Final = engine.owners.add(self, lambda: (request,))

    def __enter__(self) -> Self:
        """Return the scan."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the scan."""
        self.close()

    def __iter__(self) -> Iterator[Step]:
        """Return the scan itself."""
        return self

    def __next__(self) -> Step:
        """Return the next units; wait for them.

        Raises:
            DeadlineError: nothing arrived within the scan's time-out; iteration may continue.
            TrimmedError: the next position was trimmed.

        """
        if self.has_ended:
            self.close()
            raise StopIteration
        return self.accept(self._engine.call(self.request()))

    def close(self) -> None:
        """Close the scan. Idempotent."""
        if not self._is_closed:
            self._engine.shielded(self._close)

    def _close(self) -> None:
        self._engine.post(self._closing())
        self._is_closed = True
        self._engine.owners.remove(self._owned)


class AsyncScan(_ScanCursor):
    """Pairs (units, reached), as `Scan`: an async iterator and async context manager."""

    def __init__(
        self,
        engine: AsyncioEngine,
        number: int,
        opened: asyncio.Future[int],
        start: int,
        stop: int,
        timeout: float,
    ) -> None:
        super().__init__(number, start, stop, timeout)
        self._engine: Final = engine
        self._opened: Final = opened
        request = self._closing()
        self._owned: Final = engine.owners.add(self, lambda: (request,))

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until it is open; raises what `ziplog.Log.scan` raises."""
        import asyncio  # noqa: PLC0415 - slow to load; loaded already when awaited

        yield from asyncio.shield(self._opened).__await__()
        return self

    async def __aenter__(self) -> Self:
        """Wait until it is open."""
        return await self

    async def __aexit__(self, *_: object) -> None:
        """Close the scan."""
        await self.close()

    def __aiter__(self) -> AsyncIterator[Step]:
        """Return the scan itself."""
        return self

    async def __anext__(self) -> Step:
        """Return the next units; see `Scan`."""
        await self
        if self.has_ended:
            await self.close()
            raise StopAsyncIteration
        return self.accept(await self._engine.call(self.request()))

    async def close(self) -> None:
        """Close the scan. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if not self._engine.is_closed:
                self._engine.call_now(self._closing())
            self._engine.owners.remove(self._owned)
