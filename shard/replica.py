"""A storage server: one replica of one shard, as a deterministic node.

    starting --LeaseAnnounced--> up (with a data directory that is not the known one: limbo)
    up --Freeze--> frozen --ViewDecided--> joined --LeaseAnnounced--> up, in the next view
    limbo (after a crash, or when a higher view is heard of) --ViewDecided, the log--> joined

It refuses what is not of its cluster, shard and view, keeps the sessions, and hands the rest to
its parts: `primary` or `backup` for inserts, `readers`, `membership` for leases, `rate`,
`departure`, `health`, `recovery` and `joining`. Any message may be lost, late, twice, of an older
view, or from a server that forgot (docs/protocol.md, sections 3 to 11, 13).

Invariants: `check()`, and those of the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from crc32c import crc32c

from shard.membership.draining import Departure
from shard.membership.heartbeat import Heart
from shard.membership.lease_updates import Membership
from shard.ordering.admission import accepts, may_open, put_off, take
from shard.ordering.backup import Backup
from shard.ordering.lag_fix import LagFix
from shard.ordering.primary import Primary
from shard.ordering.rate import Rates
from shard.recovery.checkpoint import save, start
from shard.recovery.failure_detector import STALE_NS, FailureDetector
from shard.recovery.participant import RecoveryParticipant
from shard.recovery.peer_repair import Repair
from shard.recovery.state_transfer import serve
from shard.recovery.watermark_records import WatermarkWriter
from shard.serving.readers import Readers
from shard.state.replica_state import ReplicaConfig, ReplicaState
from ziplog.core.node import (
    ArchiveOpened,
    BatchEnd,
    Connect,
    Effect,
    Event,
    Persist,
    Persisted,
    Pressed,
    Received,
    ReportBadMessage,
    StorageChanged,
    Wakeup,
)
from ziplog.wire import (
    Ahead,
    Beat,
    Credit,
    Fetch,
    Fetched,
    Forward,
    Freeze,
    Insert,
    LeaseAnnounced,
    LeaseHistory,
    Locate,
    Outline,
    Read,
    Report,
    Resend,
    Settled,
    Subscribe,
    Sync,
    Tail,
    Unsubscribe,
    ViewDecided,
    Want,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.state.guesses import Guesses
    from shard.state.sessions import HeldUnit
    from shard.storage.store import Store
    from ziplog.core.message import Message
    from ziplog.segments.entry import Entry

__all__ = ["Replica", "ReplicaConfig"]


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
        goes_on = start(self._state, checkpoint, now, limbo=limbo)
        self._health: Final = FailureDetector(self._state, now)
        self._recovery: Final = RecoveryParticipant(self._state)
        self._repair: Final = Repair(self._state, self._recovery)
        self._lag_fix: Final = LagFix(self._state)
        self._primary: Primary | None = None
        self._backup: Backup | None = None
        self._role = self._take_role()
        self._readers = Readers(self._state, self._guesses)
        if goes_on:
            self._role.restore()
        self._connected = False
        self._rates: Final = Rates(self._state, now)
        self._heartbeat: Final = Heart(self._state, self._rates, now)
        self._marks: Final = WatermarkWriter(self._state)
        if goes_on:
            self._marks.schedule(now)  # what became stable just before it stopped
        self._membership: Final = Membership(self._state)
        self._departure: Final = Departure(self._state)
        self._handlers: Final[dict[type[Message], Callable[[bytes, Any], None]]] = {
            Insert: self._insert,
            Settled: self._settled,
            Forward: self._forward,
            Report: self._report,
            Resend: self._resend,
            Read: self._read,
            Subscribe: self._subscribe,
            Credit: self._credit,
            Unsubscribe: self._unsubscribe,
            Want: self._want,
            Ahead: self._ahead,
            Tail: self._tail,
            Outline: self._outline,
            LeaseAnnounced: self._lease_announced,
            LeaseHistory: self._lease_history,
            Locate: self._locate,
            Sync: self._sync,
            Beat: self._beat,
            Freeze: self._freeze,
            ViewDecided: self._view_decided,
            Fetch: self._fetch,
            Fetched: self._fetched,
        }

    def _take_role(self) -> Primary | Backup:
        """Begin as the primary or a backup of a view."""
        if self._state.server == 0:
            self._primary = Primary(self._state, self._lag_fix)
            return self._primary
        self._backup = Backup(self._state)
        return self._backup

    @property
    def _guesses(self) -> Guesses | None:
        return self._backup.guesses if self._backup is not None else None

    # --- the one door ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.core.node`."""
        if now - self._now > STALE_NS:
            self._health.on_pause(now)
            self._state.sessions.forgive(now)
        self._now = now
        if isinstance(event, Received):
            handler = self._handlers.get(type(event.message))
            if handler is not None:
                handler(event.src, event.message)
            else:
                self._complain(event.src, event.message, "a storage server takes none")
        elif isinstance(event, BatchEnd):
            self._drained()
        elif isinstance(event, Wakeup):
            self._woke()
        elif isinstance(event, Persisted):
            self._persisted(event.fseq)
            self._drained()
        elif isinstance(event, StorageChanged):
            self._state.full = event.full
        elif isinstance(event, Pressed):
            self._health.on_unread_input(now, unread=event.unread)
        elif isinstance(event, ArchiveOpened):
            self._state.archive_port = event.port
        out = self._state.out
        self._state.out = []
        return out

    def next_wakeup(self) -> int | None:
        """Return when this node wants to be woken."""
        if not self._connected or self._readers.has_work:
            return self._now
        earliest = min(self._heartbeat.due, self._rates.silence_due)
        marks_due = self._marks.due
        if marks_due is not None and marks_due < earliest:
            earliest = marks_due
        if self._state.state == "up":
            due = self._role.next_wakeup(self._now)
            if due is not None and due < earliest:
                earliest = due
        parts = (
            self._health, self._repair, self._recovery.transfer, self._membership, self._departure,
        )  # fmt: skip
        for part in parts:
            due = part.next_wakeup() if part is not None else None
            if due is not None and due < earliest:
                earliest = due
        return earliest

    def _complain(self, src: bytes, message: Message, why: str) -> None:
        self._state.out.append(ReportBadMessage(src, f"{type(message).__name__}: {why}"))

    # --- inserts and the stream ---

    def _insert(self, route: bytes, message: Insert) -> None:
        state = self._state
        if not accepts(state, route, message):
            return
        session = state.sessions.by_client.get(message.client)
        if session is None and not may_open(state, route, message, self._now):
            return
        session = state.sessions.open(message.client, self._now)
        if message.first_incomplete > session.first_incomplete:
            self._role.settled(session, message.first_incomplete, self._now)
        state.last_insert = self._now
        unit = session.units.get(message.seq)
        if unit is None:
            unit = take(state, route, message, session, self._now)
            if unit is not None and not self._role.arrived(session, unit, self._now):
                put_off(state, route, session, message, "too many inserts are waiting")
        elif unit.checksum != crc32c(message.body) or unit.count != message.count:
            detail = f"seq {message.seq} was used for other records"
            state.refuse(route, message.seq, "identity-reused", detail)
        else:
            unit.copy = max(unit.copy, message.copy)
            unit.route = route
            self._role.copied(unit, message.since)
        if state.placed == "leaving":
            self._departure.answer(route, session, self._now)

    def _settled(self, _route: bytes, message: Settled) -> None:
        """Forget what a client calls settled; who is not known here needs no session for that."""
        state = self._state
        session = state.sessions.by_client.get(message.client)
        if session is None or not self._is_mine(message):
            return
        session.last_seen = self._now
        if message.first_incomplete > session.first_incomplete:
            self._role.settled(session, message.first_incomplete, self._now)

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

    def _is_mine(self, message: Forward | Report | Resend | Settled) -> bool:
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
        self._marks.schedule(self._now)

    # --- readers ---

    def _reads(self, message: Message, shard: int) -> bool:
        state = self._state
        return (
            message.cluster == state.cluster
            and shard == state.shard
            and state.cluster != 0
            and not self._health.is_stale
        )

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
        if self._reads(message, message.shard) and self._state.state in {"up", "joined"}:
            self._readers.tail(route, message)

    def _outline(self, route: bytes, message: Outline) -> None:
        if self._reads(message, message.shard):
            self._readers.outline(route, message)

    def _want(self, route: bytes, message: Want) -> None:
        if self._reads(message, message.shard) and self._state.state == "up":
            if self._primary is not None:
                self._primary.wanted(route, message, self._now)
            else:
                self._state.last_want = self._now

    def _ahead(self, _route: bytes, message: Ahead) -> None:
        state = self._state
        if self._primary is not None and state.state == "up" and message.cluster == state.cluster:
            self._primary.heard_of(message.gsn, self._now)

    # --- the membership service ---

    def _lease_announced(self, route: bytes, message: LeaseAnnounced) -> None:
        state = self._state
        if not self._membership.is_from_service(route, message):
            return
        is_first = state.clock.last is None
        if self._backup is not None:
            self._backup.guesses.note_epochs()
        told = self._membership.announced(message, self._now)
        if told is None:
            return
        if self._primary is not None:
            self._lag_fix.announced(message.placements)
        self._health.on_fresh_message(self._now)
        self._health.is_recovering = self._membership.is_recovering
        if told.left_for:
            self._leave(told.left_for)
        elif told.view_begins:
            self._begin_view()
        if message.trim > state.trim:
            self._trim(message.trim)
        if state.has_gap or is_first:
            self._heartbeat.due = self._now  # it says what is held, and so what is missing
        if told.has_leases:
            self._marks.schedule(self._now)
            self._readers.stabilised([])
        may_place = told.has_leases or state.is_leaving  # or may have to be refused
        if may_place and self._primary is not None and state.state == "up":
            self._primary.leased(self._now)
        if state.is_out:
            self._ended()

    def _lease_history(self, route: bytes, message: LeaseHistory) -> None:
        if not self._membership.is_from_service(route, message):
            return
        if self._primary is None or message.cluster != self._state.cluster:
            return
        if self._primary.answered(message):
            # This server misses leases; what it has, and so what it needs, is in its heartbeat.
            self._heartbeat.due = self._now

    def _trim(self, gsn: int) -> None:
        self._state.trim = gsn
        self._state.store.trim(gsn)
        self._readers.trimmed()
        self._marks.write_trim_point()
        self._heartbeat.due = self._now

    # --- the end of a batch, and time ---

    def _drained(self) -> None:
        state = self._state
        if state.state != "up":
            pass
        elif self._primary is not None:
            if not self._primary.has_backups:
                self._stabilise()
            self._primary.drained(self._now)
        elif self._backup is not None:
            news = self._backup.drained(self._now)
            if news:
                self._stabilised(news)
        if self._readers.has_work:
            self._readers.catch_up()
        if state.damaged is not None:
            (gsn, why), state.damaged = state.damaged, None
            self._repair.request(gsn, why, self._now)
        if state.is_out or state.is_sealed:
            self._departure.drained(self._now)
        if self._now >= self._rates.due:
            self._rates.look(self._now)
        self._heartbeat.drained(self._now)

    def _woke(self) -> None:
        if not self._connected:
            self._connect()
        self._look()
        if self._state.state == "up":
            if self._primary is not None:
                self._primary.woke(self._now)
                self._departure.woke(self._now, has_undecided=self._primary.has_undecided)
            elif self._backup is not None:
                self._backup.woke(self._now)
        self._health.tick(self._now, self._recovery.claim)
        if self._recovery.transfer is not None:
            self._recovery.transfer.tick(self._now)
            if self._recovery.transfer.is_retry_due(self._now):
                self._join()
        self._repair.request_in_limbo(self._now)
        self._repair.tick(self._now)
        if self._now >= self._heartbeat.due:
            self._heartbeat.beat(self._now)
            self._readers.forget_silent(self._now)
            if self._state.state == "up":
                self._role.expire_sessions(self._now)
        self._marks.tick(self._now)

    def _look(self) -> None:
        """Look at the time: the shard's last lease may be over."""
        if not self._state.is_out and self._membership.look(self._now):
            self._ended()

    def _ended(self) -> None:
        if self._state.state == "up":
            self._role.ended(self._now)

    def _connect(self) -> None:
        config = self._state.config
        self._connected = True
        for node in (*config.mms, *config.handlers, *config.replicas):
            if node.name != config.name:
                self._state.out.append(Connect(node.name.encode(), node.endpoint))

    def _persisted(self, fseq: int) -> None:
        # It may have been said before the log was cut, of entries that are void now.
        fseq = min(fseq, self._state.store.flushed_fseq)
        self._state.persisted = max(self._state.persisted, fseq)
        if self._state.state != "up":
            self._recovery.on_persisted()
            self._join()
        elif self._primary is not None:
            self._primary.persisted(fseq, self._now)
            self._stabilise()
        elif self._backup is not None:
            self._backup.persisted(fseq)

    # --- recovery ---

    def _beat(self, _route: bytes, message: Beat) -> None:
        state = self._state
        if message.cluster != state.cluster or message.shard != state.shard:
            return
        has_moved_on = message.view > state.view and message.state in {"up", "joined"}
        if has_moved_on and self._recovery.is_in_view:
            self._recovery.freeze_for(message.view)
        self._health.on_beat(message, self._now)

    def _is_from_handler(self, route: bytes, message: Freeze | ViewDecided) -> bool:
        """Whether a message came over this server's own connection to the failure handler."""
        state = self._state
        if not any(route == node.name.encode() for node in state.config.handlers):
            self._complain(route, message, "it is not from the failure handler")
            return False
        self._health.on_fresh_message(self._now)
        is_mine = message.cluster == state.cluster and message.shard == state.shard
        return is_mine and state.cluster != 0

    def _freeze(self, route: bytes, message: Freeze) -> None:
        if not self._is_from_handler(route, message):
            return
        promised: list[HeldUnit] = []
        if self._backup is not None and self._state.state in {"up", "frozen"}:
            self._backup.guesses.note_epochs()
            promised = list(self._backup.guesses.promised.values())
        if self._recovery.freeze(route, message, promised, self._now):
            self._health.expedite(self._now)
        self._repair.request_in_limbo(self._now)

    def _view_decided(self, route: bytes, message: ViewDecided) -> None:
        state = self._state
        if not self._is_from_handler(route, message):
            return
        if self._recovery.on_decided(message, self._now):
            self._health.expedite(self._now)
            if message.is_confirmed:  # nobody will go back behind this view
                self._stabilised(state.stream.stabilise(state.stream.last))

    def _fetch(self, route: bytes, message: Fetch) -> None:
        state = self._state
        is_in_view = state.state in {"up", "joined"} and message.view == state.view
        # In limbo nobody's view tells anything: an entry's own does.
        is_in_limbo = state.state == "limbo" and message.view == 0
        if (
            message.cluster == state.cluster
            and message.shard == state.shard
            and (is_in_view or is_in_limbo)
        ):
            why = serve(state, route, message)
            if why is not None:
                self._repair.request_after(message.after, why, self._now)

    def _fetched(self, route: bytes, message: Fetched) -> None:
        state = self._state
        if message.cluster != state.cluster or message.shard != state.shard:
            return
        if self._repair.on_fetched(route, message, self._now):
            self._join()  # that may have been all that was missing
            return
        if self._recovery.on_fetched(route, message, self._now):
            self._readers.dismiss()
        self._join()

    def _join(self) -> None:
        """Join the view, if all of it is here."""
        if self._recovery.try_join(self._now):
            self._readers = Readers(self._state, self._guesses)
            self._health.expedite(self._now)
            self._heartbeat.due = self._now
        self._repair.request_in_limbo(self._now)

    def _leave(self, view: int) -> None:
        """Stop: the shard has gone on without this server."""
        self._recovery.leave(view)
        self._readers.dismiss()
        self._health.expedite(self._now)
        self._heartbeat.due = self._now

    def _begin_view(self) -> None:
        """All replicas have joined: the view begins."""
        self._stabilised(self._recovery.start_view(self._now))
        self._role = self._take_role()
        self._role.restore()
        self._readers.begin_view(self._guesses)
        self._health.on_view_start(self._now)
        self._heartbeat.due = self._now

    def _locate(self, route: bytes, message: Locate) -> None:
        if self._reads(message, message.shard) and self._state.state in {"up", "joined"}:
            self._readers.locate(route, message, self._now)

    def _sync(self, route: bytes, message: Sync) -> None:
        if self._reads(message, message.shard) and self._state.state == "up":
            if message.view != self._state.view:
                detail = f"the view is {self._state.view}"
                self._state.refuse(route, message.request, "wrong-view", detail)
            elif self._primary is not None:
                self._primary.sync(route, message)

    @property
    def known(self) -> tuple[int, int, int]:
        """The cluster's number (0: not known yet), the last stable entry, the trim point.

        All of it stays so. From any thread.
        """
        state = self._state
        return state.cluster, state.stream.stable, state.trim

    def part(self) -> list[Entry]:
        """Return what the store is to take last: a mark of what is stable, if it is not there."""
        self._marks.write()
        out, self._state.out = self._state.out, []
        return [effect.entry for effect in out if isinstance(effect, Persist)]

    def checkpoint(self) -> bytes:
        """Return what a clean restart needs. Nothing may be stepped after it."""
        return save(self._state)

    def check(self) -> None:
        """Assert the invariants of this replica and of its parts."""
        state = self._state
        state.stream.check()
        self._lag_fix.check()
        state.sessions.check()
        self._readers.check()
        self._recovery.check()
        self._health.check()
        if state.state == "up":
            self._role.check()
            assert state.cluster
            assert state.view
