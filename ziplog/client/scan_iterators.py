"""A shard's units in order, for those who read in bulk: a blocking and an asyncio iterator.

Rule: each step says how far it is complete; the last one says `stop`. A step has a deadline of its
own. A step whose answer was lost (a cancelled task, a signal) is given again: each fetch names the
position. Invariant: `position` is after all that was handed out. See docs/protocol.md, section 14.
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

#: What a step gives: units, and up to where (exclusive) nothing is missing.
Step = tuple[list["Unit"], int]


class _ScanCursor:
    """How far a scan is: the same for both iterators."""

    def __init__(self, number: int, start: int, stop: int, timeout: float) -> None:
        self._number: Final = number
        self._stop: Final = stop
        self._timeout: Final = timeout
        #: All before it was handed out.
        self.position = start
        self._is_closed = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows."""
        return self._is_closed or self.position >= self._stop

    def request(self) -> ScanFetchRequest:
        """Return what to ask for next."""
        deadline_ns = arguments.deadline_ns(self._timeout, 0)
        return ScanFetchRequest(deadline_ns, self._number, self.position)

    def _closing(self) -> ScanCloseRequest:
        return ScanCloseRequest(NEVER, self._number)

    def accept(self, scanned: Scanned) -> Step:
        """Return what came.

        Raises:
            DeadlineError: nothing did.

        """
        if scanned.reached <= self.position:
            what = f"a scan up to gsn {self._stop} came no further than {self.position}"
            raise DeadlineError(f"{what} within {self._timeout:g} s")
        step = scanned.units, scanned.reached
        # Last, and nothing behind it that a handler of a signal could interrupt.
        self.position = scanned.reached
        return step


class Scan(_ScanCursor):
    """Pairs (units, reached): an iterator, and a context manager.

    `units` are those that follow, in order, whole: the first may begin before the range, the last
    end behind it. All that the shard owns below `reached` was handed out or is a no-op. The last
    pair has `reached` == `stop`. It closes itself at its end, and when it is collected as garbage.
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
        """Close it."""
        self.close()

    def __iter__(self) -> Iterator[Step]:
        """Return the scan itself."""
        return self

    def __next__(self) -> Step:
        """Return what follows; waits for it.

        Raises:
            DeadlineError: nothing came within the scan's time-out; going on is allowed.
            TrimmedError: the next position was trimmed.

        """
        if self.has_ended:
            self.close()
            raise StopIteration
        return self.accept(self._engine.call(self.request()))

    def close(self) -> None:
        """End it. May be called again."""
        if not self._is_closed:
            self._engine.shielded(self._close)

    def _close(self) -> None:
        self._engine.post(self._closing())
        self._is_closed = True
        self._engine.owners.remove(self._owned)


class AsyncScan(_ScanCursor):
    """Pairs (units, reached), as of `Scan`: an async iterator, and an async context manager."""

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
        import asyncio  # noqa: PLC0415 - slow to load; who awaits has it

        yield from asyncio.shield(self._opened).__await__()
        return self

    async def __aenter__(self) -> Self:
        """Wait until it is open."""
        return await self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    def __aiter__(self) -> AsyncIterator[Step]:
        """Return the scan itself."""
        return self

    async def __anext__(self) -> Step:
        """Return what follows; see `Scan`."""
        await self
        if self.has_ended:
            await self.close()
            raise StopAsyncIteration
        return self.accept(await self._engine.call(self.request()))

    async def close(self) -> None:
        """End it. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            if not self._engine.is_closed:
                self._engine.call_now(self._closing())
            self._engine.owners.remove(self._owned)
