"""Forwarding for clients: a follower passes on the requests of a client without a reply.

    a request that came three times --numbered anew--> the leader --> its reply --> the client

A client repeats a request to all nodes until a reply arrives. So a request that came three times is
slow, or the link between the client and the leader is cut. Rules: a follower forwards only requests
of which any number of copies count as one (`Forwarded`), and none that another follower forwarded.
Invariant: it keeps at most `MAX_FORWARDED` requests. See docs/protocol.md, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.node import Send
from ziplog.core.repeated_requests import RepeatedRequests
from ziplog.wire import (
    CursorClaim,
    CursorEdit,
    CursorList,
    CursorMoves,
    CursorQuery,
    CursorRelease,
    CursorRenewal,
    CursorReply,
    CursorsMoved,
    CursorsRenewed,
    LeaseHistory,
    LeaseQuery,
    Refused,
    StatusQuery,
    StatusReply,
)

if TYPE_CHECKING:
    from mms.upgrades import Peers
    from ziplog.core.node import Effect

#: The requests that are forwarded, and the leader's replies to them. Without operators' requests
#: and trims: the leader may refuse one copy and fulfil another one.
Forwarded = (
    LeaseQuery | StatusQuery | CursorClaim | CursorMoves | CursorRelease | CursorEdit
    | CursorRenewal | CursorQuery
)  # fmt: skip
Reply = (
    LeaseHistory | StatusReply | CursorReply | CursorsMoved | CursorsRenewed | CursorList | Refused
)
#: The copy from which on a request is forwarded; a client sends it after 0.7 s.
_FIRST_COPY: Final = 3
#: Maximum number of requests. The leader queues 256 that wait for consensus, its own clients' too.
MAX_FORWARDED: Final = 64


class ClientForwarding:
    """The requests of clients at one follower."""

    def __init__(self, peers: Peers) -> None:
        self._peers: Final = peers
        self._requests: Final = RepeatedRequests(MAX_FORWARDED)

    def on_request(self, src: bytes, message: Forwarded, leader: str) -> list[Effect]:
        """Forward a request if it has come three times.

        `leader`: the leader's name; "": it is not known.
        """
        number, copies = self._requests.count(src, message.request)
        if copies < _FIRST_COPY or not leader:
            return []
        forwarded = msgspec.structs.replace(message, request=number)
        return [*self._peers.connect(), Send(leader.encode(), forwarded)]

    def on_reply(self, message: Reply) -> list[Effect]:
        """Return the leader's reply to the client."""
        source = self._requests.source(message.request)
        if source is None:
            return []
        src, request = source
        return [Send(src, msgspec.structs.replace(message, request=request))]

    def check(self) -> None:
        """Assert the invariant."""
        self._requests.check()
