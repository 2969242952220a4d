"""Requests to the membership service, retried until a reply arrives.

A request goes to the presumed leader of the Raft group. `NotLeader` redirects it; without a reply,
the client sends it to all nodes. Retries keep the request number, so any copy's reply counts. From
the third copy on, followers forward it to the leader, which the client may not reach. Any node
answers `Hello`: if the caller allows it, every second one of a client with a region goes to the
nearest node. The rest go to the leader: a node that lags does not know new views and shards.

Invariant: the client sends nothing when no request is open. See docs/protocol.md, sections 3, 8
and 20.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.client.common import other_nodes
from ziplog.core.message import Message
from ziplog.core.node import Broadcast, FailCalls
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.errors import ClusterMismatchError, UnavailableError, VersionError
from ziplog.types import cluster_id
from ziplog.wire import (
    ChangeRegion,
    ChangeShard,
    ClusterInfo,
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
    FinishUpgrade,
    Hello,
    LeaseHistory,
    LeaseQuery,
    RegionChanged,
    ShardChanged,
    StatusQuery,
    StatusReply,
    Trim,
    TrimReply,
    UpgradeFinished,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.client.common.proximity import Proximity
    from ziplog.client.common.step_context import StepContext
    from ziplog.wire import NodeInfo, NotLeader

#: Interval before an unanswered request is sent to all nodes; it doubles up to the last value.
_FIRST_RETRY_NS: Final = 100 * NS_PER_MS
_LAST_RETRY_NS: Final = NS_PER_S
#: That of moves, which wait at the leader for others before consensus.
_FIRST_MOVE_RETRY_NS: Final = 500 * NS_PER_MS
#: The reply to each request.
REPLIES: Final[dict[type[Message], type[Message]]] = {
    Hello: ClusterInfo,
    LeaseQuery: LeaseHistory,
    StatusQuery: StatusReply,
    Trim: TrimReply,
    ChangeShard: ShardChanged,
    ChangeRegion: RegionChanged,
    FinishUpgrade: UpgradeFinished,
    CursorClaim: CursorReply,
    CursorMoves: CursorsMoved,
    CursorRelease: CursorReply,
    CursorEdit: CursorReply,
    CursorRenewal: CursorsRenewed,
    CursorQuery: CursorList,
}
#: Maximum number of endpoints that are remembered.
_MAX_ENDPOINTS: Final = 16


class MembershipRequest(msgspec.Struct):
    """A request without a reply."""

    message: Message
    callback: Callable[[Any], None]
    retry_at: int
    pause: int
    #: The nodes that got the request since `retry_at` was set.
    sent_to: set[bytes] = msgspec.field(default_factory=set)
    #: When it was sent, if to the nearest node only; 0: it was sent to others.
    sent_near_at: int = 0


class MembershipClient:
    """The client's connection to the membership service."""

    def __init__(
        self,
        context: StepContext,
        endpoints: Sequence[str],
        proximity: Proximity,
        cluster: int = 0,
    ) -> None:
        """`cluster`: the number that the cluster must have; 0: any."""
        self._context: Final = context
        self.proximity: Final = proximity
        #: Endpoints that the caller passed.
        self.endpoints: Final = list(endpoints)
        #: The cluster's number; 0 while it is unknown.
        self.cluster = cluster
        self._has_replied = False
        self._names: dict[str, bytes] = {}
        self._leader: bytes | None = None
        #: The region of each node that the service reported.
        self._regions: dict[bytes, str] = {}
        #: The last request that may go to the nearest node did so.
        self._was_near = False
        self._pending: dict[int, MembershipRequest] = {}
        #: By connection: why there is none; "": it is established. Others are being established.
        self._problems: dict[bytes, str] = {}
        #: A node does not speak this version of the wire format.
        self._is_version_wrong = False
        #: By connection: the other cluster that its node belongs to.
        self._other_clusters: dict[bytes, int] = {}

    @property
    def known(self) -> list[str]:
        """All known endpoints, those that the caller passed first."""
        return list(dict.fromkeys((*self.endpoints, *self._names)))

    @property
    def is_unreachable(self) -> bool:
        """Whether no node ever replied, and no attempt to connect to one has succeeded."""
        tried = [self._problems.get(name) for name in self._names.values()]
        return not self._has_replied and bool(tried) and all(tried)

    def on_connection_changed(self, name: bytes, problem: str) -> None:
        """Note that a connection was established, or why an attempt failed."""
        if name in self._names.values():
            self._problems[name] = problem
            self._other_clusters.pop(name, None)

    def on_node_info(self, name: bytes, info: NodeInfo) -> None:
        """Note that a node does not serve this client: its service or its version is another."""
        if name in self._names.values():
            self._problems[name] = other_nodes.describe(info)
            self._is_version_wrong |= other_nodes.speaks_another_version(info)

    @property
    def first_contact_error(self) -> UnavailableError | VersionError:
        """Why no node of the service replied."""
        outcomes = ", ".join(
            f"{one} ({other_nodes.outcome(self._problems.get(one.encode()))})"
            for one in self.endpoints
        )
        if self._is_version_wrong:
            return VersionError(f"no membership service of this version at {outcomes}")
        return UnavailableError(
            f"no membership service answered at {outcomes}; check the address, and that the cluster"
            " runs"
        )

    def on_other_cluster(self, name: bytes, cluster: int) -> None:
        """Handle a refusal of a node of another cluster.

        If no node of this cluster can be reached, all calls fail.
        """
        if name not in self._names.values():
            return
        others = self._other_clusters
        others[name] = cluster
        if all(each in others or self._problems.get(each) for each in self._names.values()):
            error = ClusterMismatchError(
                cluster_id(self.cluster), cluster_id(cluster), name.decode()
            )
            self._context.effects.append(FailCalls(error))

    def update_endpoints(self, endpoints: Sequence[str], regions: Sequence[str]) -> None:
        """Add the service's endpoints, the leader's first, and the region of each."""
        for endpoint in reversed(endpoints):
            self._leader = self._name(endpoint)
        self._regions = {
            self._name(endpoint): region
            for endpoint, region in zip(endpoints, regions, strict=False)
        }

    def _name(self, endpoint: str) -> bytes:
        name = self._names.get(endpoint)
        if name is None:
            name = self._context.connect(endpoint)
            if len(self._names) < _MAX_ENDPOINTS:
                self._names[endpoint] = name
        return name

    def send_request(
        self,
        build: Callable[[int, int], Message],
        callback: Callable[[Any], None],
        *,
        may_be_near: bool = False,
    ) -> int:
        """Send a request to the service.

        Args:
            build: returns the message; it gets the numbers of the cluster and of the request.
            callback: gets the reply.
            may_be_near: the nearest node may answer, also if it lags behind the leader.

        Returns:
            The number of the request.

        """
        context = self._context
        request = context.request()
        message = build(self.cluster, request)
        pause = _FIRST_MOVE_RETRY_NS if type(message) is CursorMoves else _FIRST_RETRY_NS
        pending = MembershipRequest(message, callback, context.retry_at(pause), pause)
        self._pending[request] = pending
        context.set_timer(pending.retry_at)
        if self._leader is None:
            self._send_to_all(pending)
        else:
            dst = self._leader
            if may_be_near and (near := self._next_near_node()):
                dst, pending.sent_near_at = near, context.now
            pending.sent_to.add(dst)
            context.send(dst, message)
        return request

    def _next_near_node(self) -> bytes:
        """Return the nearest node for every second request; b"": the leader gets this one."""
        names, regions = list(self._regions), list(self._regions.values())
        self._was_near = self.proximity.has_order(regions) and not self._was_near
        return names[self.proximity.order(names, regions)[0]] if self._was_near else b""

    def is_open(self, request: int) -> bool:
        """Whether a request has no reply yet."""
        return request in self._pending

    def is_near(self, request: int) -> bool:
        """Whether only the nearest node has got an open request."""
        pending = self._pending.get(request)
        return pending is not None and bool(pending.sent_near_at)

    def cancel(self, request: int) -> None:
        """Cancel a request."""
        self._pending.pop(request, None)

    def on_reply(self, reply: Any) -> None:
        """Handle a reply; ignore it if its request is not open."""
        request: int = reply.request
        pending = self._pending.get(request)
        if pending is None:
            return
        if type(reply) is not REPLIES[type(pending.message)]:
            self._context.counters.protocol_errors += 1
            return
        del self._pending[request]
        self._has_replied = True
        if pending.sent_near_at:
            self.proximity.observe(next(iter(pending.sent_to)), pending.sent_near_at)
        pending.callback(reply)

    def on_not_leader(self, reply: NotLeader) -> None:
        """Send the request to the leader that a node named."""
        pending = self._pending.get(reply.request)
        if pending is None or not reply.leader:
            return
        leader = self._name(reply.leader)
        if leader not in pending.sent_to:
            self._leader = leader
            pending.sent_near_at = 0
            pending.sent_to.add(leader)
            self._context.send(leader, pending.message)

    def _send_to_all(self, pending: MembershipRequest) -> None:
        for endpoint in self.endpoints:
            self._name(endpoint)
        pending.sent_to.update(self._names.values())
        self._context.effects.append(Broadcast(tuple(self._names.values()), pending.message))

    def tick(self) -> None:
        """Retry the requests that are due."""
        context = self._context
        for pending in self._pending.values():
            if context.now >= pending.retry_at:
                if pending.sent_near_at:
                    self.proximity.on_failure(next(iter(pending.sent_to)))
                    pending.sent_near_at = 0
                pending.pause = min(pending.pause * 2, _LAST_RETRY_NS)
                pending.retry_at = context.retry_at(pending.pause)
                pending.sent_to.clear()
                self._send_to_all(pending)
            context.set_timer(pending.retry_at)

    def check(self) -> None:
        """Assert the invariant."""
        for pending in self._pending.values():
            assert self._context.next_timer <= pending.retry_at, "a retry would be missed"
