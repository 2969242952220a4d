"""The client as one deterministic node: calls in, messages out, and answers to the calls.

The machines of this package share a `Turn`; this one hands each event to its machine. Rules: every
call is answered exactly once, at its deadline at the latest; a message of another cluster is
dropped; with no call under way (and no insert in doubt) nothing is sent. Invariants: `check()`.
See docs/protocol.md, sections 4, 6, 7 and 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.admin.cluster_calls import Upkeep
from ziplog.client.admin.shard_changes import Changes
from ziplog.client.bulk.extents import Inquiries
from ziplog.client.bulk.outline import Outlinings
from ziplog.client.bulk.scan import Scans
from ziplog.client.common.membership_client import Service
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
    ResolveRequest,
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
from ziplog.client.common.step_context import FIRST_REQUEST, Turn
from ziplog.client.inserts.inserts import Inserts
from ziplog.client.inserts.sync import Syncs
from ziplog.client.reads.barrier import Barriers
from ziplog.client.reads.read import Reads
from ziplog.client.reads.subscribe import Subscriptions
from ziplog.client.reads.tail import Surveys
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
    """Everything that a client knows and has under way."""

    def __init__(self, client: bytes, endpoints: Sequence[str], policy: Policy) -> None:
        """Make a client.

        Args:
            client: 16 random bytes, never used by another client (D10).
            endpoints: "host:port" of the membership service's nodes, one or more.
            policy: chooses the shard of each insert.

        """
        turn = self._turn = Turn(client)
        service = self._service = Service(turn, endpoints)
        self._routing: Final = Routing(turn, service)
        self._inserts: Final = Inserts(turn, self._routing, policy)
        self._reads: Final = Reads(turn, self._routing)
        self._surveys: Final = Surveys(turn, service, self._routing)
        self._subscriptions: Final = Subscriptions(turn, service, self._routing, self._surveys)
        self._barriers: Final = Barriers(turn, self._routing, self._subscriptions)
        self._upkeep: Final = Upkeep(turn, service, self._routing, self._surveys)
        self._changes: Final = Changes(turn, service, self._routing)
        self._syncs: Final = Syncs(turn, self._routing, self._inserts.lanes)
        self._inquiries: Final = Inquiries(turn, service, self._routing)
        self._outlinings: Final = Outlinings(turn, self._routing)
        self._scans: Final = Scans(turn, self._routing)
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
            ConnectRequest: self._upkeep.connect,
            TailRequest: self._upkeep.tail,
            TrimRequest: self._upkeep.trim,
            StatusRequest: self._upkeep.status,
            ChangeRequest: self._changes.start,
            ExtentsRequest: self._inquiries.start,
            OutlineRequest: self._outlinings.start,
            ScanRequest: self._scans.start,
            ScanFetchRequest: self._scans.fetch,
            ScanCloseRequest: self._scans.close,
        }
        self._on_message: Final[dict[type[Message], Callable[[Any], None]]] = {
            InsertAck: self._inserts.on_ack,
            Located: self._inserts.on_located,
            Leaving: self._routing.on_leaving,
            Synced: self._syncs.on_synced,
            Deliver: self._delivered,
            ReadReply: self._reads.on_reply,
            Refused: self._refused,
            Trimmed: self._trimmed,
            Outlined: self._outlinings.on_reply,
            TailReply: self._tail_replied,
            ClusterInfo: service.answered,
            LeaseHistory: service.answered,
            TrimReply: service.answered,
            StatusReply: service.answered,
            ShardChanged: service.answered,
            NotLeader: service.not_leader,
        }

    @property
    def counters(self) -> Counters:
        """What this client did."""
        return self._turn.counters

    @property
    def limits(self) -> Limits:
        """What the cluster allows."""
        return self._routing.limits

    @property
    def cluster(self) -> int:
        """The cluster's number; 0 while it is not known."""
        return self._service.cluster

    @property
    def endpoints(self) -> list[str]:
        """Where the membership service is: what the user gave first, then what it told."""
        return self._service.known

    @property
    def awaited(self) -> list[str]:
        """The shards that a question for the tail has waited for, longer than usual, and why."""
        return self._surveys.awaited()

    @property
    def description(self) -> str:
        """The cluster's name and endpoints, for errors."""
        return str(self._routing)

    def set_policy(self, policy: Policy) -> None:
        """Choose the shards of later inserts by `policy`."""
        self._inserts.choice.policy = policy

    # --- the one door ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.core.node`."""
        turn = self._turn
        if now - turn.now > turn.forgotten_ns:
            self._inserts.overslept()
        turn.now = now
        if type(event) is Received:
            self._receive(event.message)
        elif type(event) is BatchEnd:
            self._drained()
        elif type(event) is Call:
            self._on_call[type(event.request)](event.id, event.request)
        elif type(event) is Wakeup:
            if now >= turn.alarm:
                self._tick()
        elif type(event) is Cancelled:
            for machine in (
                self._inserts, self._syncs, self._reads, self._subscriptions, self._barriers,
                self._upkeep, self._changes, self._inquiries, self._outlinings, self._scans,
            ):  # fmt: skip
                machine.cancel(event.id)
        elif type(event) is Closing:
            self._inserts.settling.end()
        effects = turn.effects
        if effects:
            turn.effects = []
        return effects

    def next_wakeup(self) -> int | None:
        """Return when this node wants to be woken."""
        alarm = self._turn.alarm
        return alarm if alarm != NEVER else None

    def _receive(self, message: Message) -> None:
        handler = self._on_message.get(type(message))
        if handler is None:
            self._turn.counters.protocol_errors += 1
        elif message.cluster == self._service.cluster or not self._service.cluster:
            handler(message)
        elif type(message) is Refused:
            # Somebody else listens at an endpoint of ours.
            handler(message)
        else:
            self._turn.counters.protocol_errors += 1

    def _refused(self, refused: Refused) -> None:
        if refused.request < FIRST_REQUEST:
            self._inserts.on_refused(refused)
        else:
            for machine in (
                self._reads, self._subscriptions, self._surveys, self._barriers, self._syncs,
                self._scans, self._outlinings,
            ):  # fmt: skip
                if machine.on_refused(refused):
                    return

    def _delivered(self, deliver: Deliver) -> None:
        if not self._scans.on_deliver(deliver):
            self._subscriptions.on_deliver(deliver)

    def _trimmed(self, trimmed: Trimmed) -> None:
        if not self._scans.on_trimmed(trimmed):
            self._subscriptions.on_trimmed(trimmed)

    def _drained(self) -> None:
        self._subscriptions.drained()
        self._scans.drained()

    def _tail_replied(self, reply: TailReply) -> None:
        if not self._barriers.on_reply(reply):
            self._surveys.on_reply(reply)

    def _tick(self) -> None:
        self._turn.alarm = NEVER
        self._inserts.tick()
        self._inserts.settling.tick()
        self._syncs.tick()
        self._reads.tick()
        self._surveys.tick()
        self._subscriptions.tick()
        self._barriers.tick()
        self._upkeep.tick()
        self._changes.tick()
        self._inquiries.tick()
        self._outlinings.tick()
        self._scans.tick()
        self._service.tick()
        self._routing.tick(waiting=self._is_waiting())
        self._drained()

    def _is_waiting(self) -> bool:
        machines = (
            self._inserts, self._syncs, self._reads, self._surveys, self._subscriptions,
            self._barriers, self._changes, self._inquiries, self._outlinings, self._scans,
        )  # fmt: skip
        return any(machine.waiting for machine in machines)

    def check(self) -> None:
        """Assert the invariants of all parts."""
        for part in (
            self._service, self._routing, self._inserts, self._syncs, self._reads, self._surveys,
            self._subscriptions, self._barriers, self._upkeep, self._changes, self._inquiries,
            self._outlinings, self._scans,
        ):  # fmt: skip
            part.check()
