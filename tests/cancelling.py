"""Cancels a task at every await of a run: before the awaited result arrives, or together with it.

The second kind loses results: the future is done, and the task is cancelled in the same iteration
of the loop, before it continues.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

T = TypeVar("T")


class Canceller:
    """Cancels once, at one of the awaits."""

    def __init__(self, at: int, *, is_late: bool) -> None:
        self._at: Final = at
        self._is_late: Final = is_late
        #: Number of awaits so far.
        self.awaits = 0

    def __call__(self, awaitable: Awaitable[T]) -> Awaitable[T]:
        """Return the awaitable to use instead."""
        return _Step(self, awaitable)

    def strikes(self) -> bool:
        """Whether this await is the selected one."""
        self.awaits += 1
        return self.awaits == self._at

    @property
    def is_late(self) -> bool:
        """Whether it cancels when the awaited result has arrived."""
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
    """Cancel a run at each of its awaits, in both ways; return the number of awaits."""
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
