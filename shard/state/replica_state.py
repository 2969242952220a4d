"""State that all parts of a replica share: identity, leases, log, sessions and effects.

One `ReplicaState` belongs to one replica. Its parts (`Primary`, `Backup`, `Readers`) read and
change it; `effects` collects the effects of the current step. Invariant: the frontier only grows
(docs/protocol.md, sections 5 and 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from shard.state.ack_level import AckLevel
from shard.state.counters import Counters
from shard.state.decision_log import DecisionLog
from shard.state.epoch_clock import EpochClock
from shard.state.recorded_leases import RecordedLeases
from shard.state.recorded_value import RecordedValue
from shard.state.round_trips import RoundTrips
from shard.state.sessions import Sessions
from ziplog.core.node import Broadcast, Effect, Persist, Send
from ziplog.core.units import NS_PER_S
from ziplog.core.view import NO_DIGEST, Placement, Replica, ServerState, ShardState
from ziplog.core.wire_use import Release, WireUse
from ziplog.segments.entry import Entry, WatermarkRecord
from ziplog.types import Durability
from ziplog.wire import InsertAck, Limits, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard.state.sessions import HeldUnit
    from shard.storage.store import Store
    from ziplog.core.entries import Decision
    from ziplog.core.message import Message
    from ziplog.core.view import LeaseRun
    from ziplog.segments.entry import UnreadableError
    from ziplog.wire import RefusalCode


#: Most bytes not yet written to disk; above this, new units wait, and a backup sends no reports.
MAX_BACKLOG_BYTES: Final = 128 * 1024 * 1024
#: Bytes of an entry on disk beside its body and gsns.
_ENTRY_BYTES: Final = 96
#: Time after a reader waited for this shard during which it counts as having readers.
READERS_AFTER_WANT_NS: Final = NS_PER_S


class ReplicaConfig(msgspec.Struct, frozen=True):
    """The configuration of a replica when its process starts."""

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
    #: The random identity of its data directory; "": unknown.
    identity: str = ""
    #: The nodes of the failure handler; without any, failures are neither detected nor recovered.
    handlers: tuple[Replica, ...] = ()
    #: Time without a heartbeat after which a peer is suspected, in ms.
    suspicion_ms: int = 1000
    #: Whether a shard that is ahead has the others give up positions at once (lag-fix).
    lag_fix: bool = True
    #: The release that the process runs, and the wire version in use, from its data directory.
    release: Release = Release()
    wire: int = 1
    #: Limits of each client's insert rate, in records and bytes; 0: none.
    inserts_per_s: int = 0
    insert_bytes_per_s: int = 0
    #: The durability level that its data directory has recorded.
    recorded_level: Durability = "memory"
    #: The region in which it runs; "": it has no label.
    region: str = ""


class ReplicaState:
    """The state that a replica's parts share."""

    #: The number of this process. It changes when the server finds that its log is an old copy, so
    #: that a request to freeze meant for a server with the whole log does not make it lead.
    incarnation: int
    #: The insert rate of each client is limited.
    limits_rate = False
    #: This primary has compared its log with all backups', or need not; before, it decides nothing.
    is_compared = True
    #: The port of this server's archive; 0: none runs.
    archive_port = 0
    #: The process is to end: the shard needs no positions meanwhile.
    is_stopping = False
    #: Why the primary refuses new inserts, as this backup has heard last; "": it accepts them.
    primary_full = ""

    def __init__(self, config: ReplicaConfig, store: Store, incarnation: int) -> None:
        self.config: Final = config
        self.store: Final = store
        self.incarnation = incarnation
        self.shard: Final = config.shard
        self.server: Final = config.server
        #: The names of the other replicas.
        self.peers: Final = tuple(
            replica.name.encode() for replica in config.replicas if replica.name != config.name
        )
        #: The names of the nodes of the membership service.
        self.service: Final = tuple(node.name.encode() for node in config.mms)
        #: The number of the cluster; 0 until the membership service announces it.
        self.cluster = 0
        self.view = 0
        #: The last entry that was decided before the view began.
        self.view_base = 0
        self.server_state: ServerState = "starting"
        #: The shard's state in the last announcement of the membership service; "": none came yet.
        self.shard_state: ShardState | Literal[""] = ""
        #: The placement in that announcement; before, the one in the log; None: unknown.
        self.placement: Placement | None = store.mark.placement if store.mark is not None else None
        #: The shard has no more positions, by the leases held (docs/protocol.md, section 13).
        self.has_no_positions = False
        #: All that the shard will ever own is on the disks of this server and of all others.
        self.is_sealed = False
        self.trim = self._deleted_below = 0
        self.wire_use: Final = WireUse(config.release, config.wire)
        self.level: Final = AckLevel(config.durability, config.recorded_level)
        self.clock: Final = EpochClock(config.shard)
        #: To the nodes of the membership service.
        self.round_trips: Final = RoundTrips(config.limits.rtt_ms)
        #: The leases in this server's own log.
        self.recorded_leases: Final = RecordedLeases(store)
        #: The trim point in this server's own log.
        self.recorded_trim: Final = RecordedValue(store, store.mark.trim if store.mark else 0)
        self.stream: Final = DecisionLog()
        self._frontier = 0
        self.sessions: Final = Sessions(config.session_timeout_s * NS_PER_S)
        #: The last entry of this server's own log that is on its disk.
        self.persisted = store.last_fseq
        #: Bytes recorded since the last session table was stored.
        self.bytes_since_table = 0
        #: A stable gsn that could not be read for a reader, and the error.
        self.damaged: tuple[int, UnreadableError] | None = None
        #: Why the disk is full, so that new inserts are refused; "": there is room (D53).
        self.full = ""
        #: Number of acks sent: of two acks, the greater number is the newer.
        self.ack_counter = 0
        #: The effects of the current step.
        self.effects: list[Effect] = []
        #: Times in ns: of the last insert; and when a reader last waited, or `break_promises` ran.
        self.last_insert = -(2**62)
        self.last_want = -(2**62)
        #: Leases are missing between those held and those announced last.
        self.has_gap = False
        #: The endpoint whose publication brought the last lease; "": it came by another way.
        self.publisher = ""
        #: A reader subscribes to this server; one with records, or early ones; one that speculates.
        self.has_subscribers = self.has_followers = self.has_early_streams = False
        #: The highest position that each client with a bare stream waits for; `awaiting`: still.
        self.awaited: Final[dict[bytes, int]] = {}
        self.awaiting: Final[set[bytes]] = set()
        #: Time until which peers are known to have subscribers, in ns.
        self.subscribers_until = -(2**62)
        #: Positions given up because readers waited for later ones.
        self.holes = 0
        #: Records placed so far, and their bytes.
        self.placed_records = self.placed_bytes = 0
        self.counters: Final = Counters(self.level)

    @property
    def no_space(self) -> str:
        """Why this server refuses new inserts, with the full server's name; "": it accepts them.

        A backup refuses what its primary refuses: else the unit would be in doubt.
        """
        if self.full:
            return f"{self.config.name}: {self.full}"
        return self.primary_full and f"{self.config.replicas[0].name}: {self.primary_full}"

    @property
    def is_leaving(self) -> bool:
        """Whether the shard still accepts records, but only for a short time."""
        return self.shard_state == "leaving"

    @property
    def is_retired(self) -> bool:
        """Whether the shard has left permanently, or is about to."""
        return self.shard_state in {"leaving", "finalized"}

    @property
    def frontier(self) -> int:
        """The first owned position that is not known to be decided and stable.

        It lies within the leases held: a reader needs the leases to pass it (D44).
        """
        clock = self.clock
        frontier = min(clock.next_owned(self.stream.stable_end), clock.limit)
        # It does not decrease when old leases are dropped.
        self._frontier = max(self._frontier, frontier)
        return self._frontier

    @property
    def lasting_trim(self) -> int:
        """The position below which the server refuses reads, also if it crashes now.

        Without a watermark record, a server serves no reader before it learns the trim point.
        """
        return self.trim if self.store.mark is None else min(self.trim, self.recorded_trim.on_disk)

    def delete_trimmed(self) -> None:
        """Delete the trimmed entries that are known to be stable.

        The shard may have dropped the others, and decided other entries in their place.
        """
        gsn = min(self.trim, self.stream.stable_end)
        if gsn > self._deleted_below:
            self._deleted_below = gsn
            self.store.trim(gsn)

    def break_promises(self, now: int) -> None:
        """End the epochs of the next second, as for a reader, because a unit is refused.

        A backup may have promised it a slot. The end of the epoch breaks that promise.
        """
        self.last_want = now

    def has_readers(self, now: int) -> bool:
        """Whether epochs are to be ended: readers wait for positions to be decided."""
        return (
            self.has_subscribers
            or now < self.subscribers_until
            or now - self.last_want < READERS_AFTER_WANT_NS
        )

    @property
    def is_awaited(self) -> bool:
        """Whether a reader here needs each decision at once.

        A client with a bare stream does only while it waits for a position.
        """
        return self.has_followers or bool(self.awaiting)

    def is_awaited_from(self, gsn: int) -> bool:
        """Whether a client with a bare stream waits for `gsn`, or a later position."""
        return any(self.awaited[client] >= gsn for client in self.awaiting)

    def raise_awaited(self, client: bytes, gsn: int) -> None:
        """Have a client with a bare stream get the frontiers up to the first one above `gsn`."""
        if self.awaited.get(client, gsn) < gsn:
            self.awaited[client] = gsn
            self.awaiting.add(client)

    def send(self, dst: bytes, message: Message) -> None:
        """Add the effect of sending a message."""
        self.effects.append(Send(dst, message))

    def broadcast(self, dsts: tuple[bytes, ...], message: Message) -> None:
        """Add the effect of sending one message to several nodes."""
        if dsts:
            self.effects.append(Broadcast(dsts, message))

    def pop_effects(self) -> list[Effect]:
        """Return the effects of the current step, and begin the next one."""
        out = self.effects
        self.effects = []
        return out

    def record(self, decision: Decision, view: int | None = None) -> None:
        """Append a decision to the log, with the current view unless another one is given."""
        stream = self.stream
        entry = Entry(stream.last + 1, self.view if view is None else view, decision)
        self.bytes_since_table += _ENTRY_BYTES + stream.append(entry)
        self.effects.append(Persist(entry))

    def record_watermark(self, runs: Sequence[LeaseRun] = ()) -> None:
        """Append a watermark record; `runs` follow the leases held.

        Only a server that is up, or has joined its view, records where its log is stable.
        """
        store = self.store
        held = [*self.clock.recent, *runs]
        number, digest = (held[-1].last.number, held[-1].last.digest) if held else (0, NO_DIGEST)
        mark = store.mark
        stable, frontier, limit = (mark.stable, mark.frontier, mark.limit) if mark else (0, 1, 0)
        if self.server_state in {"up", "joined"}:
            stable, frontier = self.stream.stable, self.stream.stable_end
        mark = WatermarkRecord(
            self.cluster, stable, frontier, self.trim, number, digest,
            self.recorded_leases.news(held, frontier), self.placement,
            max(limit, self.clock.left_at),
        )  # fmt: skip
        last = max(self.stream.last, store.last_fseq)
        self.recorded_leases.on_record(number, last)
        self.recorded_trim.on_record(self.trim, last)
        self.effects.append(Persist(Entry(0, self.view, mark)))

    def ack(self, unit: HeldUnit, *, waited: bool = False) -> None:
        """Acknowledge a unit to its client, if the client's own copy has arrived.

        `waited`: the primary's decision, not the client's copy, is the reason for the ack.
        """
        if waited:
            self.counters.waited_records += unit.count
        if unit.route:
            self.effects.append(Send(unit.route, self.ack_of(unit, waited=waited)))

    def ack_of(self, unit: HeldUnit, *, waited: bool = False) -> InsertAck:
        """Return the next ack: of a unit with slots."""
        self.ack_counter += 1
        return InsertAck(
            self.cluster, self.shard, self.view, self.server, self.incarnation, unit.seq,
            self.ack_counter, unit.confirmed, unit.slots, waited, unit.copy,
        )  # fmt: skip

    def refuse(
        self,
        route: bytes,
        request: int,
        code: RefusalCode,
        detail: str = "",
        copies: int = 0,
        since: int = 0,
    ) -> None:
        """Refuse a request, or its first copies, and send the client the reason.

        A client without a route gets none: a backup has relayed its insert.
        """
        self.counters.refused[code] += 1
        if route:
            refused = Refused(
                self.cluster, self.shard, self.view, self.server, request, code, detail, copies,
                since,
            )  # fmt: skip
            self.send(route, refused)
