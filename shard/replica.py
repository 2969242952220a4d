"""A storage server: one replica of one shard, as a deterministic node.

    starting --LeaseAnnounced--> up
       --LeaseAnnounced, but its data directory is not the known one--> limbo
    limbo (or after a crash): stable reads only

It refuses what is not of its cluster, shard and view, keeps the sessions, and hands the rest to
its parts: `primary` or `backup` for inserts, `readers` for reads, `epochs` for leases. Any message
may be lost, late, twice, from an older view, or from a server that forgot (docs/protocol.md,
sections 3 to 9).

Invariants: `check()`, and those of the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from crc32c import crc32c

from shard.backup import Backup
from shard.entry import Entry, Mark
from shard.epochs import LeaseConflictError
from shard.primary import Primary
from shard.readers import Readers
from shard.sessions import MAX_SESSIONS, HeldUnit, Session
from shard.state import ReplicaConfig, ReplicaState
from shard.stream import Watermark
from ziplog.errors import ProtocolError
from ziplog.node import (
    Complain,
    Connect,
    Drained,
    Effect,
    Event,
    Halt,
    Persist,
    Persisted,
    Received,
    StorageChanged,
    Wakeup,
    Warn,
)
from ziplog.view import NO_DIGEST, LeaseRun, Placement, fingerprint
from ziplog.wire import (
    MAX_FRAME,
    Credit,
    Forward,
    Heartbeat,
    Insert,
    LeaseAnnounced,
    LeaseHistory,
    Read,
    Report,
    Resend,
    Subscribe,
    Tail,
    Unsubscribe,
    Want,
    decode_body,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.entry import Store
    from ziplog.wire import Message

__all__ = ["Checkpoint", "Replica", "ReplicaConfig"]

_MS: Final = 1_000_000
HEARTBEAT_NS: Final = 1000 * _MS
#: A mark is written at most so often.
MARK_NS: Final = 100 * _MS
#: The longest body of a unit: it must fit into a frame of any kind, leases and all.
MAX_UNIT_BYTES: Final = MAX_FRAME * 9 // 16


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """Everything that a replica needs to go on where it stopped (D20)."""

    cluster: int
    view: int
    trim: int
    ack_counter: int
    #: It was in limbo, and what it holds proves nothing.
    limbo: bool
    leases: list[LeaseRun]
    stable: Watermark
    durable: Watermark
    #: The entries after `stable`.
    window: list[Entry]
    #: Per session: client, done_below, its units.
    sessions: list[tuple[bytes, int, list[HeldUnit]]]


class Replica:
    """One storage server."""

    def __init__(
        self,
        config: ReplicaConfig,
        store: Store,
        checkpoint: bytes | None,
        *,
        limbo: bool,
        incarnation: int,
        now: int,
    ) -> None:
        """Start with what the store and the checkpoint hold.

        `limbo`: the server ran before and left no checkpoint. `incarnation`: random, new in every
        process. `now`: monotonic nanoseconds.
        """
        self._state: Final = ReplicaState(config, store, incarnation)
        self._now = now
        saved = None if checkpoint is None else _decode(checkpoint)
        goes_on = saved is not None and not saved.limbo and self._is_stored(saved)
        if saved is not None and goes_on:
            self._restore(saved, now)
        elif saved is not None or limbo:
            self._enter_limbo()
        self._primary = Primary(self._state) if config.server == 0 else None
        self._backup = Backup(self._state) if config.server != 0 else None
        guesses = self._backup.guesses if self._backup is not None else None
        self._readers: Final = Readers(self._state, guesses)
        role = self._primary or self._backup
        assert role is not None
        self._role: Final = role
        if goes_on:
            role.restore()
        self._connected = False
        self._heartbeat_due = now
        self._mark_due: int | None = None
        self._marked = (0, 0, 0)
        self._was_active = False
        self._rate_from = (now, 0)
        self._rate_per_s = 0
        self._handlers: Final[dict[type[Message], Callable[[bytes, Any], None]]] = {
            Insert: self._insert,
            Forward: self._forward,
            Report: self._report,
            Resend: self._resend,
            Read: self._read,
            Subscribe: self._subscribe,
            Credit: self._credit,
            Unsubscribe: self._unsubscribe,
            Want: self._want,
            Tail: self._tail,
            LeaseAnnounced: self._lease_announced,
            LeaseHistory: self._lease_history,
        }

    # --- the one door ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.node`."""
        self._now = now
        if isinstance(event, Received):
            handler = self._handlers.get(type(event.message))
            if handler is not None:
                handler(event.src, event.message)
            else:
                self._complain(event.src, event.message, "a storage server takes none")
        elif isinstance(event, Drained):
            self._drained()
        elif isinstance(event, Wakeup):
            self._woke()
        elif isinstance(event, Persisted):
            self._persisted(event.fseq)
            self._drained()
        elif isinstance(event, StorageChanged):
            self._state.full = event.full
        out = self._state.out
        self._state.out = []
        return out

    def next_wakeup(self) -> int | None:
        """Return when this node wants to be woken."""
        if not self._connected or self._readers.has_work:
            return self._now
        earliest = self._heartbeat_due
        if self._mark_due is not None and self._mark_due < earliest:
            earliest = self._mark_due
        if self._state.state == "up":
            due = self._role.next_wakeup(self._now)
            if due is not None and due < earliest:
                earliest = due
        return earliest

    def _complain(self, src: bytes, message: Message, why: str) -> None:
        self._state.out.append(Complain(src, f"{type(message).__name__}: {why}"))

    # --- inserts and the stream ---

    def _insert(self, route: bytes, message: Insert) -> None:
        state = self._state
        if not self._accepts(route, message, message.seq):
            return
        session = state.sessions.by_client.get(message.client)
        if session is None and len(state.sessions.by_client) >= MAX_SESSIONS:
            state.refuse(route, message.seq, "full", f"{MAX_SESSIONS} clients are known")
            return
        session = state.sessions.open(message.client, self._now)
        if message.done_below > session.done_below:
            self._role.settled(session, message.done_below, self._now)
        state.last_insert = self._now
        unit = session.units.get(message.seq)
        if unit is None:
            unit = self._take(route, message, session)
            if unit is not None:
                self._role.arrived(session, unit, self._now)
        elif unit.checksum != crc32c(message.body) or unit.count != message.count:
            detail = f"seq {message.seq} was used for other records"
            state.refuse(route, message.seq, "identity-reused", detail)
        else:
            unit.route = route
            self._role.copied(unit)

    def _accepts(self, route: bytes, message: Insert, request: int) -> bool:
        state = self._state
        if message.cluster != state.cluster and state.cluster:
            state.refuse(route, request, "wrong-cluster", f"this is cluster {state.cluster}")
        elif message.shard != state.shard:
            state.refuse(route, request, "wrong-shard", f"this is shard {state.shard}")
        elif state.state != "up":
            state.refuse(route, request, "not-ready", f"{state.config.name} is {state.state}")
        elif message.view != state.view:
            state.refuse(route, request, "wrong-view", f"the view is {state.view}")
        else:
            return True
        return False

    def _take(self, route: bytes, message: Insert, session: Session) -> HeldUnit | None:
        """Return the unit of an insert that is new here, or refuse it."""
        state, limits = self._state, self._state.config.limits
        seq = message.seq
        if seq < session.done_below:
            state.refuse(route, seq, "identity-reused", f"seq {seq} is settled")
            return None
        if state.full:
            state.refuse(route, seq, "full", f"{state.config.name} has no disk space left")
            return None
        if seq >= session.done_below + limits.max_unsettled_units:
            detail = f"{limits.max_unsettled_units} units may be unsettled"
            state.refuse(route, seq, "full", detail)
            return None
        if message.follows >= seq:
            state.refuse(route, seq, "malformed", "a unit follows one with a lower seq")
            return None
        try:
            body = decode_body(message.body, message.count)
        except ProtocolError as error:
            state.refuse(route, seq, "malformed", str(error))
            return None
        largest = max(map(len, body.payloads))
        if (
            largest > limits.max_payload_bytes
            or len(body.key or b"") > limits.max_key_bytes
            or len(message.body) > MAX_UNIT_BYTES
        ):
            detail = f"payloads have at most {limits.max_payload_bytes} bytes"
            state.refuse(route, seq, "too-large", detail)
            return None
        unit = HeldUnit(
            message.client, seq, message.count, crc32c(message.body), message.body,
            message.after, message.follows, route,
        )  # fmt: skip
        session.units[seq] = unit
        return unit

    def _forward(self, _route: bytes, message: Forward) -> None:
        if self._backup is not None and self._is_mine(message):
            news = self._backup.forwarded(message, self._now)
            if news:
                self._stabilised(news)

    def _report(self, _route: bytes, message: Report) -> None:
        if self._primary is not None and self._is_mine(message):
            self._primary.reported(message, self._now)
            self._stabilise()

    def _resend(self, route: bytes, message: Resend) -> None:
        if self._primary is not None and self._is_mine(message):
            self._primary.resend(route, message)

    def _is_mine(self, message: Forward | Report | Resend) -> bool:
        state = self._state
        return (
            state.state == "up"
            and message.cluster == state.cluster
            and message.shard == state.shard
            and message.view == state.view
        )

    def _stabilise(self) -> None:
        assert self._primary is not None
        news = self._primary.stabilise(self._now)
        if news:
            self._stabilised(news)

    def _stabilised(self, news: list[Entry]) -> None:
        self._readers.stabilised(news)
        if self._mark_due is None:
            self._mark_due = self._now + MARK_NS

    # --- readers ---

    def _reads(self, message: Message, shard: int) -> bool:
        state = self._state
        return message.cluster == state.cluster and shard == state.shard and state.cluster != 0

    def _read(self, route: bytes, message: Read) -> None:
        if self._reads(message, message.shard):
            self._readers.read(route, message)

    def _subscribe(self, route: bytes, message: Subscribe) -> None:
        if self._reads(message, message.shard):
            self._readers.subscribe(route, message, self._now)

    def _credit(self, route: bytes, message: Credit) -> None:
        if self._reads(message, message.shard):
            self._readers.renew(route, message, self._now)

    def _unsubscribe(self, _route: bytes, message: Unsubscribe) -> None:
        if self._reads(message, message.shard):
            self._readers.unsubscribe(message)

    def _tail(self, route: bytes, message: Tail) -> None:
        if self._reads(message, message.shard) and self._state.state == "up":
            self._readers.tail(route, message)

    def _want(self, route: bytes, message: Want) -> None:
        if self._reads(message, message.shard) and self._state.state == "up":
            if self._primary is not None:
                self._primary.wanted(route, message, self._now)
            else:
                self._state.last_want = self._now

    # --- the membership service ---

    def _lease_announced(self, route: bytes, message: LeaseAnnounced) -> None:
        state = self._state
        if not self._is_from_service(route, message):
            return
        if state.cluster not in (0, message.cluster):
            self._halt(f"told of cluster {message.cluster}, but this is {state.cluster}")
            return
        state.cluster = message.cluster
        begins = self._now + message.starts_in_us * 1000
        try:
            news = state.clock.announce(message.runs, begins, self._now)
        except LeaseConflictError as error:
            self._halt(str(error))
            return
        placement = next((p for p in message.placements if p.shard == state.shard), None)
        if state.state == "starting" and placement and state.clock.lease is not None:
            self._begin(placement)
        if message.trim > state.trim:
            self._trim(message.trim)
        if news:
            self._mark_due = self._mark_due or self._now + MARK_NS
            self._readers.stabilised([])
            if self._primary is not None and state.state == "up":
                self._primary.leased(self._now)

    def _begin(self, placement: Placement) -> None:
        """Become part of the shard, unless this server was that before and has forgotten it."""
        state, config = self._state, self._state.config
        self._heartbeat_due = self._now
        known = next((r.fingerprint for r in placement.replicas if r.name == config.name), "")
        if known in {"", fingerprint(config.identity)}:
            state.view = state.view or placement.view
            state.state = "up"
            return
        state.state = "limbo"
        state.out.append(Warn(
            f"{config.name} is in limbo: shard {state.shard} knows it with another data directory."
            " What was there is missing here: stop it, put that directory back, and start it"
        ))  # fmt: skip

    def _is_from_service(self, route: bytes, message: Message) -> bool:
        """Whether a message came over this server's own connection to the membership service.

        Who decides what a server halts on must not be just anybody who can reach its port.
        """
        if any(route == node.name.encode() for node in self._state.config.mms):
            return True
        self._complain(route, message, "it is no answer of the membership service")
        return False

    def _lease_history(self, route: bytes, message: LeaseHistory) -> None:
        if not self._is_from_service(route, message):
            return
        if self._primary is None or message.cluster != self._state.cluster:
            return
        if self._primary.answered(message):
            # This server misses leases; what it has, and so what it needs, is in its heartbeat.
            self._heartbeat_due = self._now

    def _trim(self, gsn: int) -> None:
        state = self._state
        state.trim = gsn
        state.store.trim(gsn)
        self._readers.trimmed()
        # The service counts on what the heartbeat says, so it must survive a crash.
        self._mark()
        self._heartbeat_due = self._now

    def _halt(self, reason: str) -> None:
        self._state.out.append(Halt(reason))

    def _heartbeat(self) -> None:
        state, stream, config = self._state, self._state.stream, self._state.config
        last = state.clock.last
        self._measure_rate()
        self._heartbeat_due = self._now + HEARTBEAT_NS
        state.broadcast(
            tuple(node.name.encode() for node in config.mms),
            Heartbeat(
                state.cluster, config.name, config.endpoint, state.shard, state.view,
                state.incarnation, config.pid, state.state, self._is_active(), self._rate_per_s,
                state.frontier, stream.durable_end,
                last.number if last else 0, last.digest if last else NO_DIGEST, state.trim,
                stream.stable_record, stream.durable_record, config.identity,
            ),
        )  # fmt: skip

    def _is_active(self) -> bool:
        return self._now - self._state.last_insert < HEARTBEAT_NS

    def _measure_rate(self) -> None:
        since, count = self._rate_from
        elapsed = self._now - since
        if elapsed >= HEARTBEAT_NS // 4:
            placed = self._state.placed_records
            self._rate_per_s = (placed - count) * 1_000_000_000 // elapsed
            self._rate_from = (self._now, placed)

    # --- the end of a batch, and time ---

    def _drained(self) -> None:
        state = self._state
        if self._primary is not None:
            if not self._primary.has_backups:
                self._stabilise()
            self._primary.drained(self._now)
        elif self._backup is not None:
            self._backup.drained()
        if self._readers.has_work:
            self._readers.catch_up()
        active = self._is_active()
        if active and not self._was_active and state.state == "up":
            self._heartbeat_due = min(self._heartbeat_due, self._now)
        self._was_active = active

    def _woke(self) -> None:
        if not self._connected:
            self._connect()
        if self._state.state == "up":
            if self._primary is not None:
                self._primary.woke(self._now)
            elif self._backup is not None:
                self._backup.woke(self._now)
        if self._now >= self._heartbeat_due:
            self._heartbeat()
            self._readers.forget_silent(self._now)
            if self._state.state == "up":
                self._role.expire_sessions(self._now)
        if self._mark_due is not None and self._now >= self._mark_due:
            self._mark()

    def _connect(self) -> None:
        config = self._state.config
        self._connected = True
        for node in (*config.mms, *config.replicas):
            if node.name != config.name:
                self._state.out.append(Connect(node.name.encode(), node.endpoint))

    def _mark(self) -> None:
        state = self._state
        self._mark_due = None
        last = state.clock.last
        marked = (state.stream.stable, state.trim, last.number if last else 0)
        if marked == self._marked or state.state != "up":
            return
        self._marked = marked
        mark = Mark(
            state.cluster, state.stream.stable, state.stream.stable_end, state.trim,
            marked[2], last.digest if last else NO_DIGEST,
        )  # fmt: skip
        state.out.append(Persist(Entry(0, state.view, mark)))

    def _persisted(self, fseq: int) -> None:
        if self._primary is not None:
            self._primary.persisted(fseq, self._now)
            self._stabilise()
        elif self._backup is not None:
            self._backup.persisted(fseq)

    # --- stopping and starting ---

    def checkpoint(self) -> bytes:
        """Return what a clean restart needs. Nothing may be stepped after it."""
        state, stream = self._state, self._state.stream
        return msgspec.msgpack.encode(
            Checkpoint(
                state.cluster, state.view, state.trim, state.ack_counter,
                state.state == "limbo", list(state.clock.recent),
                stream.stable_mark,
                stream.durable_mark,
                list(stream.window),
                [
                    (s.client, s.done_below, [s.units[seq] for seq in sorted(s.units)])
                    for s in state.sessions.by_client.values()
                ],
            )
        )  # fmt: skip

    def _is_stored(self, checkpoint: Checkpoint) -> bool:
        """Whether the store has what the checkpoint follows: its files may have been lost."""
        state, window = self._state, checkpoint.window
        last = window[-1].fseq if window else checkpoint.stable.fseq
        is_all_trimmed = not window and checkpoint.trim >= checkpoint.stable.end
        if state.store.last_fseq == last or is_all_trimmed:
            return True
        state.out.append(Warn(
            f"{state.config.name} is in limbo: its store ends at entry {state.store.last_fseq}, but"
            f" it had {last} when it stopped. Stop it, put the missing files back, and start it"
        ))  # fmt: skip
        return False

    def _restore(self, checkpoint: Checkpoint, now: int) -> None:
        state = self._state
        state.cluster, state.view = checkpoint.cluster, checkpoint.view
        state.trim, state.ack_counter = checkpoint.trim, checkpoint.ack_counter
        state.stream.restore(checkpoint.stable, checkpoint.durable, checkpoint.window)
        if checkpoint.leases:
            state.clock.restore(checkpoint.leases, now)
        if checkpoint.view:
            state.state = "up"
        for client, done_below, units in checkpoint.sessions:
            session = state.sessions.open(client, now)
            session.done_below = done_below
            for unit in units:
                session.units[unit.seq] = unit
                # The way back was one of connections that are gone: it may lead to another client.
                unit.route = b""

    def _enter_limbo(self) -> None:
        state, mark = self._state, self._state.store.mark
        state.state = "limbo"
        if mark is not None:
            state.cluster, state.trim = mark.cluster, mark.trim
            record = state.store.last_record_below(mark.frontier)
            known = Watermark(mark.stable, mark.frontier, record)
            state.stream.restore(known, known, [])

    def check(self) -> None:
        """Assert the invariants of this replica and of its parts."""
        state = self._state
        state.stream.check()
        state.sessions.check()
        self._readers.check()
        self._role.check()
        if state.state == "up":
            assert state.cluster
            assert state.view


def _decode(checkpoint: bytes) -> Checkpoint:
    return msgspec.msgpack.decode(checkpoint, type=Checkpoint)
