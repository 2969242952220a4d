"""Forwarding: a follower passes the failure handler's requests to the leader.

    a repeated Remove or Reinsert --> the leader --> its reply --> the failure handler

The failure handler sends a request to all nodes, and repeats it until the leader replies. So a
repeated request is slow, or the link between the two leaders is cut. Rule: only requests that come
from a node of the failure handler are forwarded, so no request is forwarded twice. Invariant: at
most one request is kept for a shard. See docs/protocol.md, section 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import Send

if TYPE_CHECKING:
    from mms.servers import FailureHandlers
    from mms.state import ClusterState
    from mms.upgrades import Peers
    from ziplog.core.node import Effect
    from ziplog.wire import Refused, Reinsert, Reinserted, Remove, Removed


class Forwarding:
    """The requests of the failure handler at one follower."""

    def __init__(
        self, state: ClusterState, failure_handlers: FailureHandlers, peers: Peers
    ) -> None:
        self._state: Final = state
        self._failure_handlers: Final = failure_handlers
        self._peers: Final = peers
        #: By shard: the last request, and its source.
        self._last: Final[dict[int, tuple[bytes, Remove | Reinsert]]] = {}

    def on_request(self, src: bytes, message: Remove | Reinsert, leader: str) -> list[Effect]:
        """Forward a request if it is a repeated one.

        `leader`: the leader's name; "": it is not known.
        """
        shard = message.shard
        if shard not in self._state.placements or not self._failure_handlers.is_route(src):
            return []
        is_repeated = self._last.get(shard) == (src, message)
        self._last[shard] = (src, message)
        if not is_repeated or not leader:
            return []
        return [*self._peers.connect(), Send(leader.encode(), message)]

    def on_reply(self, message: Removed | Reinserted | Refused) -> list[Effect]:
        """Return the leader's reply to the node that sent the request."""
        src, request = self._last.get(message.shard, (b"", None))
        if request is None or request.request != message.request:
            return []
        return [Send(src, message)]

    def check(self) -> None:
        """Assert the invariant."""
        assert self._last.keys() <= self._state.placements.keys()
