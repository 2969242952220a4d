"""A storage server: one replica of one shard, as a deterministic node.

    starting --LeaseAnnounced--> up (limbo, if the shard knows another data directory)
    up, joined, limbo --Freeze--> frozen --ViewDecided--> joined --LeaseAnnounced--> up
    limbo (after a crash, a Beat of a higher view or a longer log) --ViewDecided, log--> joined

The replica refuses messages of another cluster, shard or view, keeps the sessions, and dispatches
to its parts: `Primary` or `Backup` for inserts, `Readers`, `LeaseUpdates`, `RateReporter`,
`Draining`, and the modules of `shard.recovery`. Any message may be lost, delayed, duplicated, old,
or from a server that lost its state (docs/protocol.md, 3 to 11, 13). Invariants: `check()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shard.membership.draining import Draining
from shard.membership.heartbeat import HeartbeatSender
from shard.membership.lease_updates import LeaseUpdates
from shard.ordering.admission import Admission
from shard.ordering.backup import Backup
from shard.ordering.lag_fix import LagFix
from shard.ordering.plain_inserts import PlainInserts
from shard.ordering.primary import Primary
from shard.ordering.rate import RateReporter
from shard.recovery.checkpoint import save, start
from shard.recovery.failure_detector import STALE_NS, FailureDetector
from shard.recovery.old_copies import OldCopyDetector
from shard.recovery.participant import RecoveryParticipant
from shard.recovery.peer_repair import Repair
from shard.recovery.state_transfer import serve
from shard.recovery.watermark_records import WatermarkWriter
from shard.serving.readers import REQUESTS, Readers
from shard.state.replica_state import ReplicaConfig, ReplicaState
from ziplog.core.node import (
    ArchiveOpened,
    BatchEnd,
    Connect,
    Effect,
    Event,
    LevelRecorded,
    LevelRequested,
    Persist,
    Persisted,
    Pressed,
    Received,
    ReportBadMessage,
    SettingsChanged,
    StopRequested,
    StorageChanged,
    Wakeup,
    WireRecorded,
)
from ziplog.wire import (
    Ahead,
    Beat,
    Echo,
    Fetch,
    Fetched,
    Forward,
    Freeze,
    Insert,
    LeaseAnnounced,
    LeaseHistory,
    NodeInfo,
    Refused,
    RelayedInsert,
    Report,
    Resend,
    Settled,
    Sync,
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
        """Start from the store and the checkpoint.

        `limbo`: it ran before and left no checkpoint. `incarnation`: random, of this process.
        """
        #: Public for the metrics (shard/metrics.py).
        state = self.state = ReplicaState(config, store, incarnation)
        self.wire_use: Final = state.wire_use
        self._now = now
        resumes = start(state, checkpoint, now, limbo=limbo)
        self._health: Final = FailureDetector(state, now)
        self._old_copies: Final = OldCopyDetector(state, resumes=resumes)
        self._recovery: Final = RecoveryParticipant(state)
        self._repair: Final = Repair(state, self._recovery)
        self._admission: Final = Admission(state)
        #: The short path of most inserts, beside `step`.
        self.plain_inserts: Final = PlainInserts(
            state, self._receive_plain, self._deliver_stable, self._send_early
        )
        self._lag_fix: Final = LagFix(state)
        self._primary: Primary | None = None
        self._backup: Backup | None = None
        self._role = self._create_role()
        self._readers = Readers(state, self._guesses)
        self._connected = False
        self._rates: Final = RateReporter(state, now)
        self._heartbeat: Final = HeartbeatSender(state, self._rates, now)
        self._marks: Final = WatermarkWriter(state)
        if resumes:
            self._role.restore()
            self._marks.schedule(now)  # for entries that became stable just before the stop
        self._membership: Final = LeaseUpdates(state)
        self._draining: Final = Draining(state)
        self._handlers: Final[dict[type[Message], Callable[[bytes, Any], None]]] = {
            Insert: self._insert,
            RelayedInsert: lambda _, m: self._admission.admit_relayed(
                m.insert, self._role, self._now
            ),
            Settled: self._settled,
            Forward: self._forward,
            Report: self._report,
            Resend: self._resend,
            **dict.fromkeys(REQUESTS, self._serve),
            Want: self._want,
            Ahead: self._ahead,
            LeaseAnnounced: self._lease_announced,
            LeaseHistory: self._lease_history,
            Echo: lambda route, message: self._membership.on_echo(route, message, self._now),
            NodeInfo: self._membership.on_node_info,
            Refused: self._membership.on_refused,
            Sync: self._sync,
            Beat: self._beat,
            Freeze: self._freeze,
            ViewDecided: self._view_decided,
            Fetch: self._fetch,
            Fetched: self._fetched,
        }

    def _create_role(self) -> Primary | Backup:
        """Create the primary's or the backup's part for a view."""
        if self.state.server == 0:
            self._primary = Primary(self.state, self._lag_fix)
            return self._primary
        self._backup = Backup(self.state)
        return self._backup

    @property
    def _guesses(self) -> Guesses | None:
        return self._backup.guesses if self._backup is not None else None

    # --- events ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Process one event; see `ziplog.core.node`."""
        self.plain_inserts.stop()
        if now - self._now > STALE_NS:
            self._health.on_pause(now)
            self.state.sessions.reset_idle_time(now)
        self._now = now
        if isinstance(event, Received):
            handler = self._handlers.get(type(event.message))
            if handler is not None:
                handler(event.src, event.message)
            else:
                self._report_bad_message(event.src, event.message, "a storage server accepts none")
        elif isinstance(event, BatchEnd):
            self._on_batch_end()
        elif isinstance(event, Wakeup):
            self._tick()
        elif isinstance(event, Persisted):
            self._on_persisted(event.fseq)
        elif isinstance(event, StorageChanged):
            self.state.full = (event.reason or "its disk is full") if event.full else ""
            self._health.expedite(now)  # The backups must refuse what a full primary refuses.
        elif isinstance(event, Pressed):
            self._health.on_unread_input(now, unread=event.unread)
        elif isinstance(event, ArchiveOpened):
            self.state.archive_port = event.port
        elif isinstance(event, SettingsChanged):
            self._health.set_suspicion(event.suspicion_ms, now)
            self._admission.set_rate(event.inserts_per_s, event.insert_bytes_per_s)
        elif isinstance(event, StopRequested):
            self._membership.stopping.request(self._now)
        elif isinstance(event, WireRecorded):
            self.state.wire_use.on_recorded(event.wire)
        elif isinstance(event, LevelRequested | LevelRecorded):
            self.state.effects += self.state.level.on_event(event)
        return self.state.pop_effects()

    @property
    def cluster(self) -> int:
        """The cluster's number; 0 until it is known."""
        return self.state.cluster

    def next_wakeup(self) -> int | None:
        """Return the time of the next wakeup, in ns."""
        if not self._connected or self._has_readers_behind:
            return self._now
        earliest = min(self._heartbeat.due, self._rates.silence_due)
        marks_due = self._marks.due
        if marks_due is not None and marks_due < earliest:
            earliest = marks_due
        if self.state.server_state == "up":
            due = self._role.next_wakeup(self._now)
            if due is not None and due < earliest:
                earliest = due
        for part in (
            self._health, self._repair, self._recovery.transfer, self._membership, self._draining,
        ):  # fmt: skip
            due = part.next_wakeup() if part is not None else None
            if due is not None and due < earliest:
                earliest = due
        return earliest

    def _receive_plain(self, route: bytes, message: Message, now: int) -> None:
        """Handle a message on the short path."""
        self._now = now
        self._handlers[type(message)](route, message)

    def _report_bad_message(self, src: bytes, message: Message, why: str) -> None:
        self.state.effects.append(ReportBadMessage(src, f"{type(message).__name__}: {why}"))

    # --- inserts and the stream ---

    def _insert(self, route: bytes, message: Insert) -> None:
        session = self._admission.admit(route, message, self._role, self._now)
        if session is not None and self.state.shard_state == "leaving":
            self._draining.send_leaving(route, session, self._now)

    def _settled(self, _route: bytes, message: Settled) -> None:
        """Forget completed units of a client; an unknown client gets no session."""
        state = self.state
        session = state.sessions.by_client.get(message.client)
        if session is None or not self._is_mine(message):
            return
        session.last_seen = self._now
        if message.first_incomplete > session.first_incomplete:
            self._role.on_settled(session, message.first_incomplete, self._now)

    def _forward(self, _route: bytes, message: Forward) -> None:
        if self._backup is not None and self._is_mine(message):
            self._deliver_stable(self._backup.on_forward(message, self._now), self._now)

    def _report(self, _route: bytes, message: Report) -> None:
        if self._primary is not None and self._is_mine(message):
            self._primary.on_report(message, self._now)
            self._deliver_stable(self._primary.stabilise(self._now), self._now)

    def _resend(self, route: bytes, message: Resend) -> None:
        if self._primary is not None and self._is_mine(message):
            self._primary.resend(route, message.first, message.bodies)

    def _is_mine(self, message: Forward | Report | Resend | Settled) -> bool:
        state = self.state
        return (
            state.server_state == "up"
            and message.cluster == state.cluster
            and message.shard == state.shard
            and message.view == state.view
        )

    def _on_stable(self, news: list[Entry], now: int) -> None:
        self._readers.on_stable(news)
        self._marks.schedule(now)

    def _deliver_stable(self, news: list[Entry], now: int) -> bool:
        """Pass stable entries to the readers; return whether a reader is behind."""
        if news:
            self._on_stable(news, now)
        return self._has_readers_behind

    @property
    def _has_readers_behind(self) -> bool:
        """Whether readers are to get more now: not from a server that may have missed a trim."""
        return self._readers.has_work and not self._health.is_stale

    # --- readers ---

    def _send_early(self) -> bool:
        """Send new decisions to early streams; return False if that needs the store."""
        return self._readers.send_early_without_store()

    def _is_readable(self, message: Any) -> bool:
        state = self.state
        return (
            message.cluster == state.cluster
            and message.shard == state.shard
            and state.cluster != 0
            and not self._health.is_stale
        )

    def _serve(self, route: bytes, message: Any) -> None:
        """Have the readers' part handle a request, if it is for this shard."""
        if self._is_readable(message):
            self._readers.on_request(route, message, self._now)

    def _want(self, route: bytes, message: Want) -> None:
        if self._is_readable(message) and self.state.server_state == "up":
            if self._primary is not None:
                self._primary.on_want(route, message, self._now)
            else:
                self.state.last_want = self._now

    def _ahead(self, _route: bytes, message: Ahead) -> None:
        state = self.state
        if state.server_state == "up" and message.cluster == state.cluster:
            self._role.on_ahead_hint(message.gsn, self._now)

    # --- the membership service ---

    def _lease_announced(self, route: bytes, message: LeaseAnnounced) -> None:
        state = self.state
        if not self._membership.check_sender(route, message):
            return
        is_first = state.clock.last is None
        if self._backup is not None:
            self._backup.guesses.record_epochs()
        update = self._membership.on_lease_announced(route, message, self._now)
        if update is None:
            return
        if self._primary is not None:
            self._lag_fix.on_lease_announced(message.placements)
        self._health.on_fresh_message(self._now)
        is_recovering = self._membership.is_recovering
        self._health.on_placement(self._now, is_recovering=is_recovering)
        if update.left_for:
            self._leave(update.left_for)
        elif update.view_begins:
            self._begin_view()
        self._marks.write()  # before the first entry of a new lease
        if message.trim > state.trim:
            self._trim(message.trim)
        if state.has_gap or is_first:
            self._heartbeat.due = self._now  # the service then sends the missing leases
        if update.has_leases:
            self._marks.schedule(self._now)
            self._readers.on_stable([])
        may_place = update.has_leases or state.is_leaving  # or units may have to be refused
        if may_place and self._primary is not None and state.server_state == "up":
            self._primary.decide_waiting(self._now)
        self._on_no_positions()

    def _lease_history(self, route: bytes, message: LeaseHistory) -> None:
        if not self._membership.check_sender(route, message) or self._primary is None:
            return
        if message.cluster == self.state.cluster and self._primary.on_lease_history(message):
            # This server misses leases: its heartbeat reports the last one that it holds.
            self._heartbeat.due = self._now

    def _trim(self, gsn: int) -> None:
        self.state.trim = gsn
        self.state.delete_trimmed()
        self._readers.on_trim()
        self._marks.write_trim_point()

    # --- the end of a batch, and time ---

    def _on_batch_end(self) -> None:
        state = self.state
        if state.server_state == "up":
            news = self._role.newly_stable(self._now)
            self._role.on_batch_end(self._now)
            self._deliver_stable(news, self._now)
        if state.has_early_streams:
            self._readers.send_early()
        if self._has_readers_behind:
            self._readers.catch_up()
        if state.damaged is not None:
            (gsn, why), state.damaged = state.damaged, None
            self._repair.request(gsn, why, self._now)
        if state.has_no_positions or state.is_sealed:
            self._draining.on_batch_end(self._now)
        if state.level.is_changing and state.server_state == "up":
            is_settled = self._backup is None or self._backup.settle_promises(self._now)
            is_complete = is_settled and state.persisted >= state.stream.last
            state.effects += state.level.advance(self._now, is_complete=is_complete)
        self._rates.on_batch_end(self._now)
        state.counters.on_batch_end(state.stream, state.persisted, self._now)
        self._heartbeat.on_batch_end(self._now)
        self._membership.stopping.on_batch_end(self._now)
        self.plain_inserts.start(self._role, self._now)

    def _tick(self) -> None:
        if not self._connected:
            self._connect()
        if not self.state.has_no_positions and self._membership.tick(self._now):
            self._on_no_positions()  # the shard's last lease is over
        if self._membership.publications.tick(self._now):
            self._heartbeat.due = self._now
        if self.state.server_state == "up":
            if self._primary is not None:
                self._primary.tick(self._now)
                self._draining.tick(self._now, has_undecided=self._primary.has_undecided)
            elif self._backup is not None:
                self._backup.tick(self._now)
        self._health.tick(self._now, self._recovery.claim)
        is_left_out = self._recovery.is_left_out or self._health.is_left_out(self._now)
        self._readers.set_left_out(is_left_out=is_left_out)
        if self._recovery.transfer is not None:
            self._recovery.transfer.tick(self._now)
            if self._recovery.transfer.take_due_retry(self._now):
                self._join()
        self._repair.request_in_limbo(self._now)
        self._repair.tick(self._now)
        if self._now >= self._heartbeat.due:
            self._heartbeat.send(self._now)
            self.state.delete_trimmed()
            self._readers.drop_idle(self._now)
            if self.state.server_state == "up":
                self._role.expire_sessions(self._now)
        self._marks.tick(self._now)

    def _on_no_positions(self) -> None:
        if self.state.has_no_positions and self.state.server_state == "up":
            self._role.on_no_positions(self._now)

    def _connect(self) -> None:
        config = self.state.config
        self._connected = True
        nodes = (*config.mms, *config.handlers, *config.replicas)
        others = (node for node in nodes if node.name != config.name)
        self.state.effects += [Connect(node.name.encode(), node.endpoint) for node in others]

    def _on_persisted(self, fseq: int) -> None:
        self._heartbeat.on_persisted(self._now)
        # The report may precede a cut of the log, and cover entries that were removed.
        fseq = min(fseq, self.state.store.flushed_fseq)
        self.state.persisted = max(self.state.persisted, fseq)
        if self.state.server_state != "up":
            self._recovery.on_persisted()
            self._join()
        elif self._primary is not None:
            self._primary.on_persisted(fseq, self._now)
            self._deliver_stable(self._primary.stabilise(self._now), self._now)
        elif self._backup is not None:
            self._backup.on_persisted(fseq)

    # --- recovery ---

    def _beat(self, _route: bytes, message: Beat) -> None:
        state = self.state
        if message.cluster != state.cluster or message.shard != state.shard:
            return
        has_moved_on = message.view > state.view and message.state in {"up", "joined"}
        if has_moved_on and self._recovery.is_in_view:
            self._recovery.freeze_for(message.view)
        self._health.on_beat(message, self._now)
        if message.server == 0 and self._backup is not None:
            self._backup.on_primary_space(message.full)
        was_compared = state.is_compared
        if self._old_copies.compare(message):
            state.incarnation = (state.incarnation + 1) % 2**63
            self._leave(state.view)
        elif self._primary is not None and not was_compared and state.server_state == "up":
            self._primary.decide_waiting(self._now)
            self._on_no_positions()

    def _is_from_handler(self, route: bytes, message: Freeze | ViewDecided) -> bool:
        """Whether a message came over this server's own connection to the failure handler."""
        state = self.state
        if not any(route == node.name.encode() for node in state.config.handlers):
            self._report_bad_message(route, message, "it is not from the failure handler")
            return False
        self._health.on_fresh_message(self._now)
        is_mine = message.cluster == state.cluster and message.shard == state.shard
        return is_mine and state.cluster != 0

    def _freeze(self, route: bytes, message: Freeze) -> None:
        if not self._is_from_handler(route, message):
            return
        promised: list[HeldUnit] = []
        if self._backup is not None and self.state.server_state in {"up", "frozen"}:
            self._backup.guesses.record_epochs()
            promised = list(self._backup.guesses.promised.values())
        if self._recovery.freeze(route, message, promised, self._now):
            self._health.expedite(self._now)
        self._repair.request_in_limbo(self._now)

    def _view_decided(self, route: bytes, message: ViewDecided) -> None:
        state = self.state
        if not self._is_from_handler(route, message):
            return
        if self._recovery.on_decided(message, self._now):
            self._health.expedite(self._now)
            if message.is_confirmed:  # no recovery goes back before this view
                self._on_stable(state.stream.stabilise(state.stream.last), self._now)

    def _fetch(self, route: bytes, message: Fetch) -> None:
        state = self.state
        # A joining server names a client. It has forgotten what it acked in a view that started.
        is_late = state.server_state == "up" and message.client is not None
        is_in_view = (
            state.server_state in {"up", "joined"} and message.view == state.view and not is_late
        )
        # In limbo, the server's view means nothing; each entry has its own view.
        is_in_limbo = state.server_state == "limbo" and message.view == 0
        if (
            message.cluster == state.cluster
            and message.shard == state.shard
            and (is_in_view or is_in_limbo)
        ):
            why = serve(state, route, message)
            if why is not None:
                self._repair.request_after(message.after, why, self._now)

    def _fetched(self, route: bytes, message: Fetched) -> None:
        state = self.state
        if message.cluster != state.cluster or message.shard != state.shard:
            return
        is_repair = self._repair.on_fetched(route, message, self._now)
        if not is_repair and self._recovery.on_fetched(route, message, self._now):
            self._readers.close_all()
        self._join()  # the entries may have been all that was missing

    def _join(self) -> None:
        """Join the view, if its log is complete here."""
        if self._recovery.try_join(self._now):
            self._readers.close_all()
            self._readers = Readers(self.state, self._guesses)
            self._health.expedite(self._now)
            self._heartbeat.due = self._now
        self._repair.request_in_limbo(self._now)

    def _leave(self, view: int) -> None:
        """Leave the view: the shard continues without this server."""
        self._recovery.leave(view)
        self._readers.close_all()
        self._health.expedite(self._now)
        self._heartbeat.due = self._now

    def _begin_view(self) -> None:
        """Begin the view: all replicas have joined."""
        self._on_stable(self._recovery.start_view(self._now), self._now)
        self._role = self._create_role()
        self._role.restore()
        self._readers.begin_view(self._guesses)
        self._health.on_view_start(self._now)
        self._old_copies.on_view_start()
        self._heartbeat.due = self._now

    def _sync(self, route: bytes, message: Sync) -> None:
        if self._is_readable(message) and self.state.server_state == "up":
            if message.view != self.state.view:
                detail = f"the view is {self.state.view}"
                self.state.refuse(route, message.request, "wrong-view", detail)
            elif self._primary is not None:
                self._primary.on_sync(route, message)

    @property
    def known(self) -> tuple[int, int, int]:
        """The cluster's number (0: not known yet), the last stable entry, the trim point.

        The values only grow. Safe to read from any thread.
        """
        state = self.state
        return state.cluster, state.stream.stable, state.trim

    def last_entries(self) -> list[Entry]:
        """Return what a clean stop still has to store: a watermark record, if a fact is new."""
        self._marks.write()
        return [one.entry for one in self.state.pop_effects() if isinstance(one, Persist)]

    def checkpoint(self) -> bytes:
        """Return the checkpoint of a clean stop. No event may follow it."""
        return save(self.state)

    def check(self) -> None:
        """Assert the invariants of this replica and of its parts."""
        state = self.state
        state.stream.check()
        self._lag_fix.check()
        state.sessions.check()
        self._readers.check()
        self._recovery.check()
        state.level.check()
        self._health.check()
        if state.server_state == "up":
            self._role.check()
            assert state.cluster
            assert state.view
