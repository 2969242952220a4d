"""The client as one deterministic node: calls in, messages out, and answers to the calls.

The machines of this package share a `Turn`; this one hands each event to its machine. Rules: every
call is answered exactly once, at its deadline at the latest; a message of another cluster is
dropped; with no call under way (and no insert in doubt) nothing is sent. Invariants: `check()`.
See docs/protocol.md, sections 4, 6, 7 and 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.insert import Inserts
from ziplog.client.read import Reads
from ziplog.client.requests import (
    NEVER,
    ConnectRequest,
    FetchRequest,
    InsertRequest,
    ProgressRequest,
    ReadRequest,
    ResolveRequest,
    StatusRequest,
    SubscribeRequest,
    SyncRequest,
    TailRequest,
    TrimRequest,
    UnsubscribeRequest,
)
from ziplog.client.routing import Routing
from ziplog.client.service import Service
from ziplog.client.subscribe import Subscriptions
from ziplog.client.sync import Syncs
from ziplog.client.tail import Surveys
from ziplog.client.turn import FIRST_REQUEST, Turn
from ziplog.client.upkeep import Upkeep
from ziplog.node import Call, Cancelled, Drained, Received, Wakeup
from ziplog.wire import (
    ClusterInfo,
    Deliver,
    InsertAck,
    LeaseHistory,
    Located,
    NotLeader,
    ReadReply,
    Refused,
    StatusReply,
    Synced,
    TailReply,
    Trimmed,
    TrimReply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.requests import Counters, Policy
    from ziplog.node import Effect, Event
    from ziplog.wire import Limits, Message


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
        self._upkeep: Final = Upkeep(turn, service, self._routing, self._surveys)
        self._syncs: Final = Syncs(turn, self._routing, self._inserts)
        self._on_call: Final[dict[type, Callable[[int, Any], None]]] = {
            InsertRequest: self._inserts.start,
            ResolveRequest: self._inserts.resolve,
            SyncRequest: self._syncs.start,
            ReadRequest: self._reads.start,
            SubscribeRequest: self._subscriptions.start,
            FetchRequest: self._subscriptions.fetch,
            ProgressRequest: self._subscriptions.progress,
            UnsubscribeRequest: self._subscriptions.unsubscribe,
            ConnectRequest: self._upkeep.connect,
            TailRequest: self._upkeep.tail,
            TrimRequest: self._upkeep.trim,
            StatusRequest: self._upkeep.status,
        }
        self._on_message: Final[dict[type[Message], Callable[[Any], None]]] = {
            InsertAck: self._inserts.on_ack,
            Located: self._inserts.on_located,
            Synced: self._syncs.on_synced,
            Deliver: self._subscriptions.on_deliver,
            ReadReply: self._reads.on_reply,
            Refused: self._refused,
            Trimmed: self._subscriptions.on_trimmed,
            TailReply: self._surveys.on_reply,
            ClusterInfo: service.answered,
            LeaseHistory: service.answered,
            TrimReply: service.answered,
            StatusReply: service.answered,
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
    def description(self) -> str:
        """The cluster's name and endpoints, for errors."""
        return str(self._routing)

    def set_policy(self, policy: Policy) -> None:
        """Choose the shards of later inserts by `policy`."""
        self._inserts.choice.policy = policy

    # --- the one door ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.node`."""
        turn = self._turn
        if now - turn.now > turn.forgotten_ns:
            self._inserts.overslept()
        turn.now = now
        if type(event) is Received:
            self._receive(event.message)
        elif type(event) is Drained:
            self._subscriptions.drained()
        elif type(event) is Call:
            self._on_call[type(event.request)](event.id, event.request)
        elif type(event) is Wakeup:
            if now >= turn.alarm:
                self._tick()
        elif type(event) is Cancelled:
            for machine in (
                self._inserts, self._syncs, self._reads, self._subscriptions, self._upkeep,
            ):  # fmt: skip
                machine.cancel(event.id)
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
            for machine in (self._reads, self._subscriptions, self._surveys, self._syncs):
                if machine.on_refused(refused):
                    return

    def _tick(self) -> None:
        self._turn.alarm = NEVER
        self._inserts.tick()
        self._syncs.tick()
        self._reads.tick()
        self._surveys.tick()
        self._subscriptions.tick()
        self._upkeep.tick()
        self._service.tick()
        self._routing.tick(waiting=self._is_waiting())
        self._subscriptions.drained()

    def _is_waiting(self) -> bool:
        machines = (self._inserts, self._syncs, self._reads, self._surveys, self._subscriptions)
        return any(machine.waiting for machine in machines)

    def check(self) -> None:
        """Assert the invariants of all parts."""
        for part in (
            self._service, self._routing, self._inserts, self._syncs, self._reads, self._surveys,
            self._subscriptions, self._upkeep,
        ):  # fmt: skip
            part.check()
