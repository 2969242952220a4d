"""Operators' requests that wait for a commit; each is answered once its command is applied.

Invariant: their number is bounded. The oldest is dropped without an answer: its client repeats it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

#: Maximum number of requests that wait.
MAX_WAITING: Final = 256


class _Request(Protocol):
    @property
    def request(self) -> int: ...


_RequestT = TypeVar("_RequestT", bound=_Request)


class WaitingRequests(Generic[_RequestT]):
    """The requests of one kind at a node of the membership service, with their routes."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bytes, _RequestT]] = []

    def add(self, src: bytes, message: _RequestT) -> None:
        """Add a request, unless it waits already."""
        if (src, message) not in self._waiting:
            self._waiting = [*self._waiting[1 - MAX_WAITING :], (src, message)]

    def pop(self, is_done: Callable[[_RequestT], bool]) -> list[tuple[bytes, _RequestT]]:
        """Remove and return the requests for which this holds."""
        done = [one for one in self._waiting if is_done(one[1])]
        self._waiting = [one for one in self._waiting if one not in done]
        return done

    def abandon(self) -> list[tuple[bytes, int]]:
        """Forget all requests; return their routes and numbers."""
        waiting, self._waiting = self._waiting, []
        return [(src, message.request) for src, message in waiting]

    def check(self) -> None:
        """Assert the invariant."""
        assert len(self._waiting) <= MAX_WAITING
