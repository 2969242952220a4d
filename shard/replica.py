"""A storage server: one replica of one shard, as a deterministic node.

    starting --LeaseAnnounced--> up (with a data directory that is not the known one: limbo)
    up --Freeze--> frozen --ViewDecided--> joined --LeaseAnnounced--> up, in the next view
    limbo (after a crash, or when a higher view is heard of) --ViewDecided, the log--> joined

It refuses what is not of its cluster, shard and view, keeps the sessions, and hands the rest to its
parts: `primary` or `backup` for inserts, `readers`, `epochs` for leases, `health`, `recovery` and
`joining`. Any message may be lost, late, twice, of an older view, or from a server that forgot
(docs/protocol.md, sections 3 to 11).

Invariants: `check()`, and those of the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from crc32c import crc32c
from msgspec.structs import replace

from shard.admission import accepts, take
from shard.backup import Backup
from shard.checkpoint import save, start
from shard.entry import Entry, Mark, Table
from shard.epochs import LeaseConflictError
from shard.health import STALE_NS, Health
from shard.heartbeat import Heart
from shard.joining import serve
from shard.primary import Primary
from shard.readers import Readers
from shard.recovery import Recovery
from shard.repair import Repair
from shard.sessions import MAX_SESSIONS, HeldUnit
from shard.state import ReplicaConfig, ReplicaState
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
from ziplog.view import NO_DIGEST, Placement, fingerprint
from ziplog.wire import (
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
    Read,
    Report,
    Resend,
    Subscribe,
    Sync,
    Tail,
    Unsubscribe,
    ViewDecided,
    Want,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.entry import Store
    from shard.guesses import Guesses
    from ziplog.wire import Message

__all__ = ["Replica", "ReplicaConfig"]

_MS: Final = 1_000_000
#: A mark is written at most so often.
MARK_NS: Final = 100 * _MS
#: After so much of the log, what the sessions hold is stored.
TABLE_BYTES: Final = 16 * 1024 * 1024


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
        self._health: Final = Health(self._state, now)
        self._recovery: Final = Recovery(self._state)
        self._repair: Final = Repair(self._state, self._recovery)
        self._primary: Primary | None = None
        self._backup: Backup | None = None
        self._role = self._take_role()
        self._readers = Readers(self._state, self._guesses)
        if goes_on:
            self._role.restore()
        self._connected = False
        self._heartbeat: Final = Heart(self._state, now)
        self._mark_due: int | None = None
        self._marked = (0, 0, 0)
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
            self._primary = Primary(self._state)
            return self._primary
        self._backup = Backup(self._state)
        return self._backup

    @property
    def _guesses(self) -> Guesses | None:
        return self._backup.guesses if self._backup is not None else None

    # --- the one door ---

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event; see `ziplog.node`."""
        if now - self._now > STALE_NS:
            self._health.missed(now)
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
        earliest = self._heartbeat.due
        if self._mark_due is not None and self._mark_due < earliest:
            earliest = self._mark_due
        if self._state.state == "up":
            due = self._role.next_wakeup(self._now)
            if due is not None and due < earliest:
                earliest = due
        for part in (self._health, self._repair, self._recovery.joining):
            due = part.next_wakeup() if part is not None else None
            if due is not None and due < earliest:
                earliest = due
        return earliest

    def _complain(self, src: bytes, message: Message, why: str) -> None:
        self._state.out.append(Complain(src, f"{type(message).__name__}: {why}"))

    # --- inserts and the stream ---

    def _insert(self, route: bytes, message: Insert) -> None:
        state = self._state
        if not accepts(state, route, message):
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
            unit = take(state, route, message, session)
            if unit is not None:
                self._role.arrived(session, unit, self._now)
        elif unit.checksum != crc32c(message.body) or unit.count != message.count:
            detail = f"seq {message.seq} was used for other records"
            state.refuse(route, message.seq, "identity-reused", detail)
        else:
            unit.route = route
            self._role.copied(unit)

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
            news = state.clock.announce(message.runs, begins, self._now, message.trim)
        except LeaseConflictError as error:
            self._halt(str(error))
            return
        self._health.touched(self._now)
        placement = next((p for p in message.placements if p.shard == state.shard), None)
        if placement is not None and state.clock.lease is not None:
            self._placed(placement)
        if message.trim > state.trim:
            self._trim(message.trim)
        if news:
            self._mark_due = self._mark_due or self._now + MARK_NS
            self._readers.stabilised([])
            if self._primary is not None and state.state == "up":
                self._primary.leased(self._now)

    def _placed(self, placement: Placement) -> None:
        """Take the news of what the membership service has committed about this shard."""
        state = self._state
        self._health.is_recovering = placement.state == "recovering"
        if state.state == "starting":
            self._begin(placement)
        elif state.state != "limbo" and placement.view > state.view:
            self._leave(placement.view)
        elif (
            state.state == "joined"
            and placement.state == "live"
            and placement.view == state.view
        ):  # fmt: skip
            self._begin_view()

    def _begin(self, placement: Placement) -> None:
        """Become part of the shard, unless this server was that before and has forgotten it."""
        state, config = self._state, self._state.config
        self._heartbeat.due = self._now
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
            self._heartbeat.due = self._now

    def _trim(self, gsn: int) -> None:
        state = self._state
        state.trim = gsn
        state.store.trim(gsn)
        self._readers.trimmed()
        # The service counts on what the heartbeat says, so it must survive a crash.
        if state.state == "up":
            self._mark()
        elif state.store.mark is not None:  # without one, it serves nobody before it hears of it
            mark = replace(state.store.mark, trim=gsn)
            state.out.append(Persist(Entry(0, state.view, mark)))
        self._heartbeat.due = self._now

    def _halt(self, reason: str) -> None:
        self._state.out.append(Halt(reason))

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
            self._backup.drained()
        if self._readers.has_work:
            self._readers.catch_up()
        if state.damaged is not None:
            (gsn, why), state.damaged = state.damaged, None
            self._repair.needed(gsn, why, self._now)
        self._heartbeat.drained(self._now)

    def _woke(self) -> None:
        if not self._connected:
            self._connect()
        if self._state.state == "up":
            if self._primary is not None:
                self._primary.woke(self._now)
            elif self._backup is not None:
                self._backup.woke(self._now)
        self._health.woke(self._now, self._recovery.claim)
        if self._recovery.joining is not None:
            self._recovery.joining.woke(self._now)
        self._repair.needed_in_limbo(self._now)
        self._repair.woke(self._now)
        if self._now >= self._heartbeat.due:
            self._heartbeat.beat(self._now)
            self._readers.forget_silent(self._now)
            if self._state.state == "up":
                self._role.expire_sessions(self._now)
        if self._mark_due is not None and self._now >= self._mark_due:
            self._mark()

    def _connect(self) -> None:
        config = self._state.config
        self._connected = True
        for node in (*config.mms, *config.handlers, *config.replicas):
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
        if state.bytes_since_table > TABLE_BYTES:
            state.bytes_since_table = 0
            state.out.append(Persist(Entry(0, state.view, Table(state.sessions.tables()))))

    def _persisted(self, fseq: int) -> None:
        # It may have been said before the log was cut, of entries that are void now.
        fseq = min(fseq, self._state.store.flushed_fseq)
        self._state.persisted = max(self._state.persisted, fseq)
        if self._state.state != "up":
            self._recovery.persisted()
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
            self._recovery.stand_by(message.view)
        self._health.beaten(message, self._now)

    def _is_from_handler(self, route: bytes, message: Freeze | ViewDecided) -> bool:
        """Whether a message came over this server's own connection to the failure handler."""
        state = self._state
        if not any(route == node.name.encode() for node in state.config.handlers):
            self._complain(route, message, "it is not from the failure handler")
            return False
        self._health.touched(self._now)
        is_mine = message.cluster == state.cluster and message.shard == state.shard
        return is_mine and state.cluster != 0

    def _freeze(self, route: bytes, message: Freeze) -> None:
        if not self._is_from_handler(route, message):
            return
        promised: list[HeldUnit] = []
        if self._backup is not None and self._state.state in {"up", "frozen"}:
            promised = list(self._backup.guesses.promised.values())
        if self._recovery.freeze(route, message, promised, self._now):
            self._health.hurry(self._now)
        self._repair.needed_in_limbo(self._now)

    def _view_decided(self, route: bytes, message: ViewDecided) -> None:
        state = self._state
        if not self._is_from_handler(route, message):
            return
        if self._recovery.decided(message, self._now):
            self._health.hurry(self._now)
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
                self._repair.needed_after(message.after, why, self._now)

    def _fetched(self, route: bytes, message: Fetched) -> None:
        state = self._state
        if message.cluster != state.cluster or message.shard != state.shard:
            return
        if self._repair.fetched(route, message, self._now):
            self._join()  # that may have been all that was missing
            return
        if self._recovery.fetched(route, message, self._now):
            self._readers.dismiss()
        self._join()

    def _join(self) -> None:
        """Join the view, if all of it is here."""
        if self._recovery.joined(self._now):
            self._readers = Readers(self._state, self._guesses)
            self._health.hurry(self._now)
            self._heartbeat.due = self._now
        self._repair.needed_in_limbo(self._now)

    def _leave(self, view: int) -> None:
        """Stop: the shard has gone on without this server."""
        self._recovery.leave(view)
        self._readers.dismiss()
        self._health.hurry(self._now)
        self._heartbeat.due = self._now

    def _begin_view(self) -> None:
        """All replicas have joined: the view begins."""
        self._stabilised(self._recovery.begin(self._now))
        self._role = self._take_role()
        self._role.restore()
        self._readers.begin_view(self._guesses)
        self._health.begin_view(self._now)
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

    def checkpoint(self) -> bytes:
        """Return what a clean restart needs. Nothing may be stepped after it."""
        return save(self._state)

    def check(self) -> None:
        """Assert the invariants of this replica and of its parts."""
        state = self._state
        state.stream.check()
        state.sessions.check()
        self._readers.check()
        self._recovery.check()
        self._health.check()
        if state.state == "up":
            self._role.check()
        if state.state == "up":
            assert state.cluster
            assert state.view
