"""Forwarding of tail queries: a replica asks its peers for a client that lacks their replies.

    a `Tail` that came twice --numbered anew--> the peers --> their replies --> the client

A tail query waits for all replicas of a shard (D50). If the client does not reach one of them, and
the others do, it repeats its query to those. See docs/protocol.md, section 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.repeated_requests import RepeatedRequests

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.wire import Tail, TailReply

#: The copy from which on a query is forwarded.
_FIRST_COPY: Final = 2
#: Maximum number of queries that are remembered.
MAX_FORWARDED: Final = 256


class TailForwarding:
    """The tail queries of clients at one replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self._requests: Final = RepeatedRequests(MAX_FORWARDED)

    def on_tail(self, route: bytes, tail: Tail) -> None:
        """Forward a query to the peers if it came before."""
        number, copies = self._requests.count(route, tail.request)
        if copies >= _FIRST_COPY:
            self._state.broadcast(self._state.peers, msgspec.structs.replace(tail, request=number))

    def on_reply(self, src: bytes, reply: TailReply) -> None:
        """Return a peer's reply to the client."""
        source = self._requests.source(reply.request)
        if source is not None and src in self._state.peers:
            route, request = source
            self._state.send(route, msgspec.structs.replace(reply, request=request))

    def check(self) -> None:
        """Assert the invariant."""
        self._requests.check()
