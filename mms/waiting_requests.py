"""Operators' requests that wait for a commit; each is answered once its command is applied.

Rule: a request gets one answer, however often it arrives. A late copy of a refused request must not
be fulfilled, and one of a fulfilled request must not undo a later one.

Invariant: the numbers of requests and of kept answers are bounded. The oldest request is dropped
without an answer: its client repeats it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

#: Maximum number of requests that wait.
MAX_WAITING: Final = 256
#: Maximum number of answers kept for copies of their requests.
_KEPT_ANSWERS: Final = 256


class _Request(Protocol):
    @property
    def request(self) -> int: ...


_RequestT = TypeVar("_RequestT", bound=_Request)


class WaitingRequests(Generic[_RequestT]):
    """The requests of one kind at a node of the membership service, with their routes."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bytes, _RequestT]] = []
        #: The latest answers: the obstacle of each request; "": it was fulfilled.
        self._answers: Final[dict[tuple[bytes, _RequestT], str]] = {}

    def add(self, src: bytes, message: _RequestT) -> None:
        """Add a request, unless it waits already."""
        if (src, message) not in self._waiting:
            self._waiting = [*self._waiting[1 - MAX_WAITING :], (src, message)]

    def has(self, src: bytes, message: _RequestT) -> bool:
        """Whether a request waits: its command may still be applied."""
        return (src, message) in self._waiting

    def answer(self, src: bytes, message: _RequestT) -> str | None:
        """Return the answer that an earlier copy of a request got; None: none did."""
        return self._answers.get((src, message))

    def on_answered(self, src: bytes, message: _RequestT, obstacle: str) -> None:
        """Keep the answer of a request for its copies; the first answer counts."""
        self._answers.setdefault((src, message), obstacle)
        if len(self._answers) > _KEPT_ANSWERS:
            del self._answers[next(iter(self._answers))]

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
        assert len(self._answers) <= _KEPT_ANSWERS
        assert self._answers.keys().isdisjoint(self._waiting)
