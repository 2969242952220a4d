"""Repeated requests: the copies of each request that a node received, and a number to forward it.

A client repeats a request to all nodes that may answer it until a reply arrives. If copies reach
one node, and the client lacks the reply of another one, the link to that node may be cut. Then the
first node forwards the request, under a number of its own: those of two clients may be equal.

Invariant: the requests that came last are kept, `size` of them at most.
"""

from __future__ import annotations

from typing import Final

#: Forwarded requests have greater numbers than this; clients do not reach it.
_LAST_OF_CLIENTS: Final = 2**62


class RepeatedRequests:
    """The latest requests of clients at one node."""

    def __init__(self, size: int) -> None:
        """`size`: the maximum number of requests."""
        self._size: Final = size
        self._last_number = _LAST_OF_CLIENTS
        #: By route and number of the client: the number to forward it, and its copies so far. The
        #: request that came last is the last one.
        self._requests: Final[dict[tuple[bytes, int], tuple[int, int]]] = {}
        #: The keys of `_requests` by the number to forward them.
        self._sources: Final[dict[int, tuple[bytes, int]]] = {}

    def count(self, src: bytes, request: int) -> tuple[int, int]:
        """Count a copy of a request that arrived.

        Returns:
            The number to forward it, and its copies so far; none of one that was forwarded.

        """
        if request > _LAST_OF_CLIENTS:
            return request, 0
        key = (src, request)
        number, copies = self._requests.pop(key, (0, 0))
        if not copies:
            if len(self._requests) >= self._size:
                first = next(iter(self._requests))
                del self._sources[self._requests.pop(first)[0]]
            number = self._last_number = self._last_number + 1
            self._sources[number] = key
        self._requests[key] = (number, copies + 1)
        return number, copies + 1

    def source(self, number: int) -> tuple[bytes, int] | None:
        """Return the route and the number of the client's request; None: it is not kept."""
        return self._sources.get(number)

    def check(self) -> None:
        """Assert the invariant."""
        assert len(self._requests) == len(self._sources) <= self._size
