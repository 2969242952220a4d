"""A task that is cancelled at every await of a run: before what it waits for is there, or with it.

The second kind is the one that loses results: the future is done, and the task was cancelled in the
same iteration of the loop, before it went on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

T = TypeVar("T")


class Canceller:
    """Cancels once, at one await of all that it is given."""

    def __init__(self, at: int, *, is_late: bool) -> None:
        self._at: Final = at
        self._is_late: Final = is_late
        #: Awaits so far.
        self.awaits = 0

    def __call__(self, awaitable: Awaitable[T]) -> Awaitable[T]:
        """Return what is to be awaited instead."""
        return _Step(self, awaitable)

    def strikes(self) -> bool:
        """Whether this await is the one."""
        self.awaits += 1
        return self.awaits == self._at

    @property
    def is_late(self) -> bool:
        """Whether it cancels when what is waited for is there."""
        return self._is_late


class _Step(Generic[T]):
    def __init__(self, canceller: Canceller, awaitable: Awaitable[T]) -> None:
        self._canceller: Final = canceller
        self._awaitable: Final = awaitable

    def __await__(self) -> Generator[Any, None, Any]:
        steps = self._awaitable.__await__()
        try:
            waited = next(steps)
            while True:
                if self._canceller.strikes():
                    if self._canceller.is_late:
                        yield waited
                    elif waited is not None:
                        waited.cancel()
                    waited = steps.throw(asyncio.CancelledError())
                else:
                    yield waited
                    waited = next(steps)
        except StopIteration as end:
            return end.value


async def cancelled(
    run: Callable[[Canceller], Awaitable[None]], check: Callable[[], Awaitable[None]]
) -> int:
    """Cancel a run at each of its awaits, in both ways; returns how many there were."""
    total = 0
    for is_late in (False, True):
        at = 1
        while True:
            canceller = Canceller(at, is_late=is_late)
            await run(canceller)
            try:
                await check()
            except BaseException as error:
                error.add_note(f"cancelled at await {at}, {'late' if is_late else 'early'}")
                raise
            total += 1
            if canceller.awaits < at:
                break
            at += 1
    return total
