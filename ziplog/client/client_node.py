"""The client as one deterministic node: it turns calls into messages, and replies into results.

Each event goes to one of the state machines of this package, which share a `StepContext`. Rules:
the node completes every call exactly once, at its deadline at the latest; it drops messages of
other clusters; without pending calls or unknown outcomes it sends no requests. `check()` asserts
the invariants. See docs/protocol.md, sections 4, 6, 7 and 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.admin.cluster_calls import ClusterCalls
from ziplog.client.admin.shard_changes import ShardChanges
from ziplog.client.bulk.extents import ExtentQueries
from ziplog.client.bulk.outline import OutlineQueries
from ziplog.client.bulk.scan import Scans
from ziplog.client.common.membership_client import MembershipClient
from ziplog.client.common.requests import (
    NEVER,
    BarrierRequest,
    ChangeRequest,
    ConnectRequest,
    ExtentsRequest,
    FetchRequest,
    InsertRequest,
    OutlineRequest,
    ProgressRequest,
    ReadRequest,
    ScanCloseRequest,
    ScanFetchRequest,
    ScanRequest,
    StatusRequest,
    SubscribeRequest,
    SyncRequest,
    TailRequest,
    TrimRequest,
    UnsubscribeRequest,
)
from ziplog.client.common.routing import Routing
from ziplog.client.common.step_context import FIRST_REQUEST, StepContext
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.client.inserts.inserts import Inserts
from ziplog.client.inserts.sync import Syncs
from ziplog.client.reads.barrier import Barriers
from ziplog.client.reads.read import Reads
from ziplog.client.reads.subscribe import Subscriptions
from ziplog.client.reads.tail import TailQueries
from ziplog.core.node import BatchEnd, Call, Cancelled, Closing, Received, Wakeup
from ziplog.wire import (
    ClusterInfo,
    Deliver,
    InsertAck,
    LeaseHistory,
    Leaving,
    Located,
    NotLeader,
    Outlined,
    ReadReply,
    Refused,
    ShardChanged,
    StatusReply,
    Synced,
    TailReply,
    Trimmed,
    TrimReply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.common.requests import Counters, Policy
    from ziplog.core.message import Message
    from ziplog.core.node import Effect, Event
    from ziplog.wire import Limits


class ClientCore:
    """The state of one client: a `ziplog.core.node.Node` that answers calls."""

    def __init__(self, client: bytes, endpoints: Sequence[str], policy: Policy) -> None:
        """Create a client.

        Args:
            client: 16 random bytes, never used by another client (D10).
            endpoints: "host:port" of the membership service's nodes, one or more.
            policy: selects the shard of each insert.

        """
        context = self._context = StepContext(client)
        membership = self._membership = MembershipClient(context, endpoints)
        self._routing: Final = Routing(context, membership)
        self._inserts: Final = Inserts(context, self._routing, policy)
        self._plain_inserts: Final = self._inserts.plain
        self._on_plain_ack: Final = self._plain_inserts.on_ack
        #: An event happened after the last end of a batch, which was no ack on the short path.
        self._is_batch_open = False
        self._reads: Final = Reads(context, self._routing)
        self._tail_queries: Final = TailQueries(context, membership, self._routing)
        self._subscriptions: Final = Subscriptions(
            context, membership, self._routing, self._tail_queries
        )
        self._barriers: Final = Barriers(context, self._routing, self._subscriptions)
        self._cluster_calls: Final = ClusterCalls(
            context, membership, self._routing, self._tail_queries
        )
        self._shard_changes: Final = ShardChanges(context, membership, self._routing)
        self._syncs: Final = Syncs(context, self._routing, self._inserts.windows)
        self._extent_queries: Final = ExtentQueries(context, membership, self._routing)
        self._outline_queries: Final = OutlineQueries(context, self._routing)
        self._scans: Final = Scans(context, self._routing)
        self._on_call: Final[dict[type, Callable[[int, Any], None]]] = {
            InsertRequest: self._inserts.start,
            ResolveRequest: self._inserts.resolve,
            SyncRequest: self._syncs.start,
            ReadRequest: self._reads.start,
            SubscribeRequest: self._subscriptions.start,
            FetchRequest: self._subscriptions.fetch,
            ProgressRequest: self._subscriptions.progress,
            BarrierRequest: self._barriers.start,
            UnsubscribeRequest: self._subscriptions.unsubscribe,
            ConnectRequest: self._cluster_calls.connect,
            TailRequest: self._cluster_calls.tail,
            TrimRequest: self._cluster_calls.trim,
            StatusRequest: self._cluster_calls.status,
            ChangeRequest: self._shard_changes.start,
            ExtentsRequest: self._extent_queries.start,
            OutlineRequest: self._outline_queries.start,
            ScanRequest: self._scans.start,
            ScanFetchRequest: self._scans.fetch,
            ScanCloseRequest: self._scans.close,
        }
        self._on_message: Final[dict[type[Message], Callable[[Any], None]]] = {
            InsertAck: self._inserts.on_ack,
            Located: self._inserts.on_located,
            Leaving: self._routing.on_leaving,
            Synced: self._syncs.on_synced,
            Deliver: self._on_deliver,
            ReadReply: self._reads.on_reply,
            Refused: self._on_refused,
            Trimmed: self._on_trimmed,
            Outlined: self._outline_queries.on_reply,
            TailReply: self._on_tail_reply,
            ClusterInfo: membership.on_reply,
            LeaseHistory: membership.on_reply,
            TrimReply: membership.on_reply,
            StatusReply: membership.on_reply,
            ShardChanged: membership.on_reply,
            NotLeader: membership.on_not_leader,
        }

    @property
    def counters(self) -> Counters:
        """The counters of this client."""
        return self._context.counters

    @property
    def limits(self) -> Limits:
        """The limits of the cluster."""
        return self._routing.limits

    @property
    def cluster(self) -> int:
        """The cluster's number; 0 while it is unknown."""
        return self._membership.cluster

    @property
    def endpoints(self) -> list[str]:
        """Endpoints of the membership service, those that the caller passed first."""
        return self._membership.known

    @property
    def waiting_for(self) -> list[str]:
        """The shards that delay a tail query, each with its state."""
        return self._tail_queries.waiting_for()

    @property
    def description(self) -> str:
        """The cluster's name and endpoints, for errors."""
        return str(self._routing)

    def set_policy(self, policy: Policy) -> None:
        """Select the shards of later inserts by `policy`."""
        self._inserts.shard_selector.policy = policy

    # --- events ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Process one event; see `ziplog.core.node`."""
        context = self._context
        if now - context.now > context.session_expiry_ns:
            self._inserts.on_session_expired()
        context.now = now
        if type(event) is BatchEnd:
            if self._is_batch_open:
                self._end_batch()
        elif (
            type(event) is not Received
            or type(event.message) is not InsertAck
            or not self._on_plain_ack(event.message)
        ):
            if self._plain_inserts.insert is not None:
                self._inserts.take_over_plain()
            self._is_batch_open = True
            self._on_event(event)
        effects = context.effects
        if effects:
            context.effects = []
        return effects

    def _on_event(self, event: Event) -> None:
        """Process an event that is neither the end of a batch nor of the short path."""
        if type(event) is Received:
            self._receive(event.message)
        elif type(event) is Call:
            self._on_call[type(event.request)](event.id, event.request)
        elif type(event) is Wakeup:
            if self._context.now >= self._context.next_timer:
                self._tick()
        elif type(event) is Cancelled:
            for machine in (
                self._inserts, self._syncs, self._reads, self._subscriptions, self._barriers,
                self._cluster_calls, self._shard_changes, self._extent_queries,
                self._outline_queries, self._scans,
            ):  # fmt: skip
                machine.cancel(event.id)
        elif type(event) is Closing:
            self._inserts.settled_reports.send_all()

    def next_wakeup(self) -> int | None:
        """Return the time of the next `Wakeup`."""
        next_timer = self._context.next_timer
        return next_timer if next_timer != NEVER else None

    def _receive(self, message: Message) -> None:
        handler = self._on_message.get(type(message))
        if handler is None:
            self._context.counters.protocol_errors += 1
        elif message.cluster == self._membership.cluster or not self._membership.cluster:
            handler(message)
        elif type(message) is Refused:
            # A server of another cluster listens at one of our endpoints.
            handler(message)
        else:
            self._context.counters.protocol_errors += 1

    def _on_refused(self, refused: Refused) -> None:
        if refused.request < FIRST_REQUEST:
            self._inserts.on_refused(refused)
        else:
            for machine in (
                self._reads, self._subscriptions, self._tail_queries, self._barriers, self._syncs,
                self._scans, self._outline_queries,
            ):  # fmt: skip
                if machine.on_refused(refused):
                    return

    def _on_deliver(self, deliver: Deliver) -> None:
        if not self._scans.on_deliver(deliver):
            self._subscriptions.on_deliver(deliver)

    def _on_trimmed(self, trimmed: Trimmed) -> None:
        if not self._scans.on_trimmed(trimmed):
            self._subscriptions.on_trimmed(trimmed)

    def _end_batch(self) -> None:
        self._is_batch_open = False
        self._inserts.sender.on_batch_end()
        self._subscriptions.on_batch_end()
        self._scans.on_batch_end()

    def _on_tail_reply(self, reply: TailReply) -> None:
        if not self._barriers.on_reply(reply):
            self._tail_queries.on_reply(reply)

    def _tick(self) -> None:
        self._context.next_timer = NEVER
        self._inserts.tick()
        self._inserts.settled_reports.tick()
        self._syncs.tick()
        self._reads.tick()
        self._tail_queries.tick()
        self._subscriptions.tick()
        self._barriers.tick()
        self._cluster_calls.tick()
        self._shard_changes.tick()
        self._extent_queries.tick()
        self._outline_queries.tick()
        self._scans.tick()
        self._membership.tick()
        self._routing.tick(waiting=self._is_waiting())
        self._end_batch()

    def _is_waiting(self) -> bool:
        machines = (
            self._inserts, self._syncs, self._reads, self._tail_queries, self._subscriptions,
            self._barriers, self._shard_changes, self._extent_queries, self._outline_queries,
            self._scans,
        )  # fmt: skip
        return any(machine.waiting for machine in machines)

    def check(self) -> None:
        """Assert the invariants of all parts."""
        for part in (
            self._membership, self._routing, self._inserts, self._syncs, self._reads,
            self._tail_queries, self._subscriptions, self._barriers, self._cluster_calls,
            self._shard_changes, self._extent_queries, self._outline_queries, self._scans,
        ):  # fmt: skip
            part.check()
