"""What every part of a replica shares: who it is, what it holds, and the orders it is giving.

One `ReplicaState` belongs to one replica; the parts (`primary`, `backup`, `readers`) read and
change it, and `effects` gathers the effects of the current step. Invariant: the frontier only ever
grows (docs/protocol.md, sections 5 and 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from shard.state.decision_log import DecisionLog
from shard.state.epoch_clock import EpochClock
from shard.state.sessions import Sessions
from ziplog.core.entries import Decision, Place
from ziplog.core.node import Broadcast, Effect, Persist, Send
from ziplog.core.view import Replica, ServerState, ShardState
from ziplog.segments.entry import Entry
from ziplog.types import Durability
from ziplog.wire import InsertAck, Limits, Refused

if TYPE_CHECKING:
    from shard.state.sessions import HeldUnit
    from shard.storage.store import Store
    from ziplog.core.message import Message
    from ziplog.segments.entry import UnreadableError
    from ziplog.wire import RefusalCode


#: What an entry takes on disk beside its body and gsns.
_ENTRY_BYTES: Final = 96
#: A shard is watched for so long after somebody waited behind it.
READERS_AFTER_WANT_NS: Final = 1_000_000_000


class ReplicaConfig(msgspec.Struct, frozen=True):
    """Who a replica is. All of it is known when its process starts."""

    name: str
    endpoint: str
    shard: int
    #: Its index among the replicas; 0 is the primary.
    server: int
    replicas: tuple[Replica, ...]
    #: The nodes of the membership service.
    mms: tuple[Replica, ...]
    durability: Durability
    pid: int
    limits: Limits
    session_timeout_s: int = 900
    #: The identity of its data directory: random, made with it. "": unknown.
    identity: str = ""
    #: The nodes of the failure handler; none: nobody watches anybody, and nothing is recovered.
    handlers: tuple[Replica, ...] = ()
    #: A peer that is silent for so long is suspected to have failed.
    suspicion_ms: int = 1000
    #: Shards that are ahead have the others give up their positions at once.
    lag_fix: bool = True


class ReplicaState:
    """The state that a replica's parts share."""

    def __init__(self, config: ReplicaConfig, store: Store, incarnation: int) -> None:
        self.config: Final = config
        self.store: Final = store
        self.incarnation: Final = incarnation
        self.shard: Final = config.shard
        self.server: Final = config.server
        #: The names of the other replicas.
        self.peers: Final = tuple(
            replica.name.encode() for replica in config.replicas if replica.name != config.name
        )
        #: The names of the nodes of the membership service.
        self.service: Final = tuple(node.name.encode() for node in config.mms)
        #: 0 until that told it.
        self.cluster = 0
        self.view = 0
        #: Everything up to this entry was settled before the view began.
        self.view_base = 0
        self.state: ServerState = "starting"
        #: How the membership service said last that the shard is placed; "": it has not.
        self.shard_state: ShardState | Literal[""] = ""
        #: The shard has no more positions, by the leases held (docs/protocol.md, section 13).
        self.has_no_positions = False
        #: All that it will ever own is on this server's disk, and known to be on all others'.
        self.is_sealed = False
        self.trim = 0
        self.clock: Final = EpochClock(config.shard)
        self.stream: Final = DecisionLog()
        self._frontier = 0
        self.sessions: Final = Sessions(config.session_timeout_s * 1_000_000_000)
        #: The entry up to which this server's own log is on its disk.
        self.persisted = store.last_fseq
        #: What was recorded since the last table of sessions was stored, in bytes.
        self.bytes_since_table = 0
        #: A stable gsn that a reader could not be told just now, and why.
        self.damaged: tuple[int, UnreadableError] | None = None
        #: No disk space: nothing new is accepted (D53).
        self.full = False
        #: Counts the acks sent: of two, the greater is the newer.
        self.ack_counter = 0
        #: The port of this server's archive; 0: it has none now.
        self.archive_port = 0
        #: Orders of the step under way.
        self.effects: list[Effect] = []
        #: When the last insert came and when somebody last waited behind this shard, in ns.
        self.last_insert = -(2**62)
        self.last_want = -(2**62)
        #: Leases are missing between those that are held and those that were told last.
        self.has_gap = False
        #: Somebody subscribes to this server.
        self.has_subscribers = False
        #: Until when, as far as this server was told, somebody subscribes to a peer, in ns.
        self.subscribers_until = -(2**62)
        #: Positions that were given up because somebody waited behind them.
        self.holes = 0
        #: Records placed so far.
        self.placed_records = 0

    @property
    def is_leaving(self) -> bool:
        """Whether the shard takes records for a little while only."""
        return self.shard_state == "leaving"

    @property
    def is_retired(self) -> bool:
        """Whether the shard has left, or is about to, for good."""
        return self.shard_state in {"leaving", "finalized"}

    @property
    def frontier(self) -> int:
        """The first owned position that is not decided and stable yet, as far as is known.

        It lies within the leases held: who follows this server needs them to pass it (D44).
        """
        clock = self.clock
        frontier = min(clock.next_owned(self.stream.stable_end), clock.limit)
        # It does not go back when leases that were once known are forgotten.
        self._frontier = max(self._frontier, frontier)
        return self._frontier

    def has_readers(self, now: int) -> bool:
        """Whether somebody reads along, and so waits for positions to be decided."""
        return (
            self.has_subscribers
            or now < self.subscribers_until
            or now - self.last_want < READERS_AFTER_WANT_NS
        )

    def send(self, dst: bytes, message: Message) -> None:
        """Order a message to be sent."""
        self.effects.append(Send(dst, message))

    def broadcast(self, dsts: tuple[bytes, ...], message: Message) -> None:
        """Order one message to be sent to several."""
        if dsts:
            self.effects.append(Broadcast(dsts, message))

    def record(self, decision: Decision, view: int | None = None) -> None:
        """Take a decision, of the present view unless another one is given, into the log."""
        entry = Entry(self.stream.last + 1, self.view if view is None else view, decision)
        if type(decision) is Place and decision.body is not None:
            self.bytes_since_table += len(decision.body) + 9 * len(decision.gsns)
        self.bytes_since_table += _ENTRY_BYTES
        self.stream.append(entry)
        self.effects.append(Persist(entry))

    def ack(self, unit: HeldUnit, *, waited: bool = False) -> None:
        """Tell the unit's client where this server holds it, if the client's copy has come.

        `waited`: not the copy, but the primary's word made this server say so.
        """
        if not unit.route:
            return
        self.ack_counter += 1
        self.effects.append(
            Send(
                unit.route,
                InsertAck(
                    self.cluster,
                    self.shard,
                    self.view,
                    self.server,
                    self.incarnation,
                    unit.seq,
                    self.ack_counter,
                    unit.confirmed,
                    unit.slots,
                    waited,
                    unit.copy,
                ),
            )
        )

    def refuse(
        self,
        route: bytes,
        request: int,
        code: RefusalCode,
        detail: str = "",
        copies: int = 0,
        since: int = 0,
    ) -> None:
        """Tell a client that its request, or the first copies of it, will not be done, and why."""
        self.send(
            route,
            Refused(
                self.cluster, self.shard, self.view, self.server, request, code, detail, copies,
                since,
            ),
        )  # fmt: skip
