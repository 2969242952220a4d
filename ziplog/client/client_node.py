"""The client as one deterministic node: it turns calls into messages, and replies into results.

Each event goes to one of the state machines of this package, which share a `StepContext`. Rules:
the node completes every call exactly once, at its deadline at the latest; it drops messages of
other clusters; without pending calls, unknown outcomes or unwanted claims it sends no requests.
`check()` asserts the invariants. See docs/protocol.md, sections 4, 6, 7 and 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.admin.cluster_calls import ClusterCalls
from ziplog.client.admin.shard_changes import ShardChanges
from ziplog.client.bulk.extents import ExtentQueries
from ziplog.client.bulk.outline import OutlineQueries
from ziplog.client.bulk.scan import Scans
from ziplog.client.common.membership_client import REPLIES, MembershipClient
from ziplog.client.common.proximity import Proximity
from ziplog.client.common.requests import (
    BarrierRequest,
    ChangeRequest,
    ExtentsRequest,
    InsertRequest,
    MeasureRequest,
    OutlineRequest,
    PolicyRequest,
    ReadRequest,
    SealRequest,
    SyncRequest,
    TailRequest,
)
from ziplog.client.common.routing import Routing
from ziplog.client.common.step_context import StepContext
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.client.cursors.claims import Claims
from ziplog.client.cursors.edits import Edits
from ziplog.client.inserts.inserts import Inserts
from ziplog.client.inserts.sync import Syncs
from ziplog.client.reads.barrier import Barriers
from ziplog.client.reads.read import Reads
from ziplog.client.reads.subscribe import Subscriptions
from ziplog.client.reads.tail import TailQueries
from ziplog.client.seals.seals import Seals
from ziplog.core.node import (
    BatchEnd,
    Call,
    Cancelled,
    Closing,
    ConnectionChanged,
    Received,
    Wakeup,
)
from ziplog.core.units import NEVER
from ziplog.wire import (
    Deliver,
    Early,
    InsertAck,
    Leaving,
    Located,
    NodeInfo,
    NotLeader,
    Outlined,
    ReadReply,
    Refused,
    Synced,
    TailReply,
    Trimmed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.common.requests import Counters, Policy, Preferences, Request
    from ziplog.core.message import Message
    from ziplog.core.node import Effect, Event
    from ziplog.wire import Limits


class ClientCore:
    """The state of one client: a `ziplog.core.node.Node` that answers calls."""

    def __init__(
        self, client: bytes, endpoints: Sequence[str], preferences: Preferences, cluster: int = 0
    ) -> None:
        """Create a client.

        Args:
            client: 16 random bytes, never used by another client (D10).
            endpoints: "host:port" of the membership service's nodes, one or more.
            preferences: how it selects the shard of each insert.
            cluster: the number that the cluster must have; 0: any.

        """
        context = self._context = StepContext(client)
        near = Proximity(context, preferences.region)
        membership = self._membership = MembershipClient(context, endpoints, near, cluster)
        routing = self._routing = Routing(context, membership)
        tail_queries = self._tail_queries = TailQueries(context, routing)
        seals = self._seals = Seals(context, routing, tail_queries)
        inserts = self._inserts = Inserts(context, routing, preferences, seals)
        self._plain_inserts: Final = inserts.plain
        self._on_plain_ack: Final = inserts.plain.on_ack
        #: A `BatchEnd` is due: an event happened since the last one, besides inserts on the short
        #: path and their acks.
        self.is_batch_open = False
        reads, syncs = Reads(context, routing), Syncs(context, routing, inserts.windows)
        outlines, edits = OutlineQueries(context, routing), Edits(context, routing, tail_queries)
        subscriptions = Subscriptions(context, routing, tail_queries, outlines)
        self._subscriptions: Final = subscriptions
        inserts.measurements.backlogs = subscriptions.backlogs
        barriers = Barriers(context, routing, subscriptions)
        cluster_calls = self._cluster_calls = ClusterCalls(context, routing)
        shard_changes, extents = ShardChanges(context, routing), ExtentQueries(context, routing)
        scans = self._scans = Scans(context, routing)
        claims = self._claims = Claims(context, routing, tail_queries, subscriptions)
        self._machines: Final = (
            inserts.outcomes, inserts, syncs, reads, tail_queries, seals, subscriptions, barriers,
            cluster_calls, shard_changes, extents, outlines, scans, claims, edits,
        )  # fmt: skip
        self._on_call: Final[dict[type, Callable[[int, Any], None]]] = {
            InsertRequest: inserts.start,
            ResolveRequest: inserts.resolve,
            MeasureRequest: inserts.measurements.start,
            PolicyRequest: self._start_policy,
            SyncRequest: syncs.start,
            ReadRequest: reads.start,
            **subscriptions.calls,
            BarrierRequest: barriers.start,
            **cluster_calls.calls,
            SealRequest: seals.start,
            TailRequest: seals.start_tail,
            ChangeRequest: shard_changes.start,
            ExtentsRequest: extents.start,
            OutlineRequest: outlines.start,
            **scans.calls,
            **claims.calls,
            **edits.calls,
        }
        self._on_message: Final[dict[type[Message], Callable[[Any], None]]] = {
            InsertAck: inserts.on_ack,
            Located: inserts.on_located,
            Leaving: routing.on_leaving,
            Synced: syncs.on_synced,
            Deliver: _each(seals.on_deliver, scans.on_deliver, subscriptions.on_deliver),
            Early: subscriptions.on_deliver,
            ReadReply: reads.on_reply,
            Refused: _each(*(machine.on_refused for machine in self._machines)),
            Trimmed: _each(seals.on_trimmed, scans.on_trimmed, subscriptions.on_trimmed),
            Outlined: outlines.on_reply,
            TailReply: _each(tail_queries.on_reply, barriers.on_reply),
            NotLeader: membership.on_not_leader,
            **dict.fromkeys(REPLIES.values(), membership.on_reply),
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
    def has_cursor_calls(self) -> bool:
        """Whether the service may grant a claim of a cursor later, or calls of cursors wait."""
        return self._claims.has_calls

    @property
    def has_claims(self) -> bool:
        """Whether this client owns cursors, so that its timers must run between calls."""
        return self._claims.has_claims

    def backlog(self, subscription: int) -> tuple[int, int]:
        """Return the positions that were reported and not returned; (0, 0): it is not open."""
        found = self._subscriptions.get(subscription)
        return found.backlog if found is not None else (0, 0)

    @property
    def description(self) -> str:
        """The cluster's name and endpoints, for errors."""
        return str(self._routing)

    @property
    def has_unknown_region(self) -> bool:
        """Whether no shard has a server in the region of this client, so nothing is near."""
        routing, region = self._routing, self._inserts.shard_selector.region
        found = {one for shard in routing.shards for one in routing.regions(shard)}
        return bool(region) and region not in found

    def insert_latency_ns(self, shard: int) -> int:
        """Return the measured latency of inserts at a shard; 0: there is none."""
        return self._inserts.shard_selector.latency_ns(shard)

    def set_policy(self, policy: Policy) -> None:
        """Select the shards of later inserts by `policy`."""
        self._inserts.shard_selector.policy = policy

    def _start_policy(self, number: int, request: PolicyRequest) -> None:
        self.set_policy(request.policy)
        self._context.complete(number, None)

    # --- events ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Process one event; see `ziplog.core.node`."""
        context = self._context
        is_session_expired = now - context.now > context.session_expiry_ns
        context.now = now
        if is_session_expired:
            self._inserts.on_session_expired()
        if type(event) is BatchEnd:
            if self.is_batch_open:
                self._end_batch()
        elif not (
            type(event) is Received
            and type(event.message) is InsertAck
            and self._on_plain_ack(event.message)
        ):
            self._leave_short_path()
            self._on_event(event)
            if self._plain_inserts.insert is None:  # The event did not begin one.
                self.is_batch_open = True
        return context.pop_effects()

    def _leave_short_path(self) -> None:
        """Have the general machinery continue with an insert on the short path."""
        if self._plain_inserts.insert is not None:
            self._inserts.take_over_plain()
            self.is_batch_open = True

    def step_call(self, number: int, request: Request, now: int) -> list[Effect]:
        """Do `step(Call(number, request), now)`; it is quick for an insert on the short path."""
        context, plain = self._context, self._plain_inserts
        if (
            type(request) is InsertRequest
            and plain.insert is None
            and now - context.now <= context.session_expiry_ns
        ):
            context.now = now
            self._inserts.start(number, request)
            if plain.insert is None:
                self.is_batch_open = True
            return context.pop_effects()
        return self.step(Call(number, request), now)

    def step_ack(self, src: bytes, ack: InsertAck, now: int) -> list[Effect]:
        """Do `step(Received(src, ack), now)`; it is quick for an insert on the short path."""
        context = self._context
        if now - context.now <= context.session_expiry_ns:
            context.now = now
            if self._on_plain_ack(ack):
                return context.pop_effects()
        return self.step(Received(src, ack), now)

    def _on_event(self, event: Event) -> None:
        """Process an event that is neither the end of a batch nor of the short path."""
        if type(event) is Received:
            self._receive(event.src, event.message)
        elif type(event) is Call:
            self._on_call[type(event.request)](event.id, event.request)
        elif type(event) is Wakeup:
            if self._context.now >= self._context.next_timer:
                self._tick()
        elif type(event) is ConnectionChanged:
            self._membership.on_connection_changed(event.name, event.problem)
            self._routing.on_connection_changed(event.name, event.problem)
            self._cluster_calls.end_if_unreachable()
        elif type(event) is Cancelled:
            for machine in self._machines:
                machine.cancel(event.id)
        elif type(event) is Closing:
            self._inserts.settled_reports.send_all()
            self._inserts.measurements.is_closed = True
            self._seals.close()
            self._claims.close()

    def next_wakeup(self) -> int | None:
        """Return the time of the next `Wakeup`."""
        next_timer = self._context.next_timer
        return next_timer if next_timer != NEVER else None

    def _receive(self, src: bytes, message: Message) -> None:
        if type(message) is NodeInfo:
            self._membership.on_node_info(src, message)
            self._cluster_calls.end_if_unreachable()
            return
        handler = self._on_message.get(type(message))
        if handler is None:
            self._context.counters.protocol_errors += 1
        elif message.cluster == self._membership.cluster or not self._membership.cluster:
            handler(message)
        elif type(message) is Refused:
            # A server of another cluster listens at one of our endpoints.
            self._membership.on_other_cluster(src, message.cluster)
            handler(message)
        else:
            self._context.counters.protocol_errors += 1

    def _end_batch(self) -> None:
        self.is_batch_open = False
        self._inserts.sender.on_batch_end()
        self._subscriptions.on_batch_end()
        self._scans.on_batch_end()
        self._seals.on_batch_end()

    def _tick(self) -> None:
        self._context.next_timer = NEVER
        for machine in self._machines:
            machine.tick()
        self._membership.tick()
        self._routing.tick(waiting=self._is_waiting())
        self._end_batch()

    def _is_waiting(self) -> bool:
        return any(machine.waiting for machine in self._machines)

    def check(self) -> None:
        """Assert the invariants of all parts."""
        for part in (self._membership, self._routing, *self._machines):
            part.check()


def _each(*handlers: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a handler of messages that several machines may get; each ignores those of others."""

    def handle(message: Any) -> None:
        for handler in handlers:
            handler(message)

    return handle
