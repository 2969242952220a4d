"""A replica's part in the recovery of its shard: promise, roll-forward, new view.

    up, joined, limbo --Freeze--> frozen: it stores nothing more in its view
    frozen --ViewDecided with its own state--> joined in the new view
    any --ViewDecided with another state, or a higher view--> limbo, state transfer

Rule: every unit that was acked here keeps its slots; every other position below the limit becomes
a no-op. The resulting log is on disk before it is reported. Invariant: of two recoveries, the one
with the higher number counts (docs/protocol.md, section 11; T 4.2.5; D20 to D26).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from shard.recovery.log_comparison import digest_of, entries_after, watermark_at
from shard.recovery.state_transfer import StateTransfer
from shard.state.epoch_clock import LeaseConflictError
from ziplog.core.entries import Place, Skip
from ziplog.core.node import Halt, LogWarning
from ziplog.segments.entry import BusyError, UnreadableError
from ziplog.wire import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import HeldUnit
    from shard.storage.store import Store
    from ziplog.segments.entry import Entry
    from ziplog.wire import Fetched, Freeze, ViewDecided


class MissingEntries(NamedTuple):
    """Entries that a server in limbo needs and cannot read."""

    #: The last entry before them.
    after: int
    error: UnreadableError
    #: The view that the server would join with them; 0: it would lead a recovery.
    view: int


class LogClaim(NamedTuple):
    """The part of the log that a server claims to hold."""

    last: int
    last_view: int
    #: The highest recovery that the server knows.
    number: int
    #: The log has unreadable entries that no peer could provide. In limbo, the claim ends there.
    is_damaged: bool


class RecoveryParticipant:
    """The promises and decisions of one replica in recoveries."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: The highest recovery that this server froze for, or joins; 0: none.
        self.number = 0
        #: The last recovery that this server promised to follow.
        self._promised = 0
        #: Where to send the promise once its entries are on disk; empty: nowhere.
        self._route = b""
        self._decided_end = 0
        self._rolled_forward = 0
        #: The transfer of another server's log; None: none runs.
        self.transfer: StateTransfer | None = None
        #: Entries that this server must read before it can lead or join; None: none known.
        self.missing: MissingEntries | None = None
        #: No peer could provide the missing entries.
        self._is_unrepairable = False
        #: The last warning, so that it is not repeated.
        self._last_warning = ""

    # --- the promise ---

    def freeze(self, route: bytes, message: Freeze, promised: Iterable[HeldUnit], now: int) -> bool:
        """Freeze and promise, if the recovery is the newest; return whether it did. Idempotent.

        `promised`: the units with slots that this server guessed and acked, in gsn order.
        """
        state = self._state
        if not self._applies(message) or message.recovery < self.number:
            return False
        if state.server_state != "frozen" or message.recovery > self.number:
            if state.server_state == "limbo":
                is_awaited = self.missing is not None and self.missing.view == 0
                if is_awaited or not self._recover_from_disk(now):
                    return False
                state.view = message.view  # all replicas are in limbo; the handler chose this one
            if not self._roll_forward(message, promised, now):
                return False
            self.number = self._promised = message.recovery
            self.transfer = None
            self.on_repaired()
            state.server_state = "frozen"
        self._route = route
        self.on_persisted()
        return True

    def _applies(self, message: Freeze) -> bool:
        """Whether the message addresses this process and its current view."""
        state = self._state
        if message.incarnation not in {0, state.incarnation}:
            return False
        if state.server_state == "limbo":
            return message.view >= state.view
        return (
            state.server_state in {"up", "frozen", "joined"}
            and message.view == state.view
            and message.recovery > state.view
        )

    def _recover_from_disk(self, now: int) -> bool:
        """Rebuild sessions and decisions from the disk: every replica is in limbo."""
        state, store = self._state, self._state.store
        stream = state.stream
        if store.last_fseq < stream.stable:
            self._warn(
                f"{state.config.name} cannot lead a recovery: its store ends at entry"
                f" {store.last_fseq}, but {stream.stable} was stable. Put the missing files back"
            )
            return False
        stable, durable, trimmed = stream.stable_mark, stream.durable_mark, store.first_fseq - 1
        at: int | None = None  # the session tables come first
        try:
            fseq, tables = store.last_table()
            at = fseq or stream.stable
            # A session that is not in the table may have expired before.
            last = watermark_at(store, fseq).end - 1 if fseq else 0
            state.sessions.install(tables, now, last, last)
            at = max(min(stream.stable, fseq), trimmed)
            window: list[Entry] = []
            for entry in entries_after(store, at):
                at = entry.fseq
                if at > stream.stable:
                    window.append(entry)
                if at > fseq:
                    state.sessions.replay(entry, now)
            if stable.fseq < trimmed:  # at the start, the following entries could not be read
                stable = durable = watermark_at(store, trimmed)
        except BusyError as error:
            self._warn(f"{state.config.name} cannot lead a recovery yet: {error}")
            return False
        except UnreadableError as error:
            after = stream.stable if at is None else _readable_up_to(store, at)
            self._record_missing(MissingEntries(after, error, 0))
            return False
        stream.restore(stable, durable, window)
        return True

    def _warn(self, text: str) -> None:
        """Log a warning, unless it repeats the last one: requests are retransmitted."""
        if text != self._last_warning:
            self._last_warning = text
            self._state.effects.append(LogWarning(text))

    def _warn_of(self, error: object, what: str = "lead a recovery") -> None:
        name = self._state.config.name
        self._warn(
            f"{name} cannot {what}: {error}. Restore the missing file, or start another"
            " replica of the shard that has these entries"
        )

    # --- unreadable entries ---

    @property
    def repair_view(self) -> int | None:
        """The view of repair requests to peers; None: no repair now.

        0: only servers in limbo answer, in any view.
        """
        state = self._state
        if state.server_state in {"up", "joined"}:
            return state.view
        if state.server_state == "limbo" and self.missing is not None:
            return self.missing.view
        return None

    def _record_missing(self, missing: MissingEntries) -> None:
        self.missing, self._is_unrepairable = missing, False

    def on_repaired(self) -> None:
        """Record that the missing entries arrived or are no longer needed; check again."""
        self.missing, self._is_unrepairable = None, False

    def read_again(self, read: list[Entry], now: int) -> bool:
        """Check again, since no entry is missing; return False if something else is.

        Args:
            read: what the store holds after the last entry before the missing ones.
            now: the time in ns.

        Raises:
            UnreadableError: the session tables still cannot be read.

        """
        missing, transfer = self.missing, self.transfer
        assert missing is not None, "nothing is missing"
        if missing.view == 0:
            self._state.store.last_table()
        elif not read or transfer is None:
            return False
        else:
            transfer.retry_later(now)
        self.on_repaired()
        return True

    def repair_failed(self, why: str) -> None:
        """Record that no peer can provide entries that this server, or one that joins, needs."""
        is_repeated, self._is_unrepairable = self._is_unrepairable, True
        if is_repeated or self.missing is None:
            return
        view = self.missing.view
        what = f"join view {view}" if view else "lead a recovery"
        self._warn_of(f"{self.missing.error}; no peer could repair it ({why})", what)

    @property
    def claim(self) -> LogClaim:
        """The claim for the failure handler: the entries that this server could lead with.

        At least the entries known to be stable: a server that holds less must not lead.
        """
        state, store = self._state, self._state.store
        if not self._is_unrepairable or self.missing is None or state.server_state != "limbo":
            is_damaged = self._is_unrepairable and state.server_state == "joined"
            return LogClaim(store.last_fseq, store.last_view, self.number, is_damaged)
        last = min(max(self.missing.after, state.stream.stable), store.last_fseq)
        # The number of an attempt that is no longer reported must not be used for another one.
        number = max(self.number, store.last_view)
        return LogClaim(last, store.view_at(last), number, is_damaged=True)

    # --- the roll-forward ---

    def _roll_forward(self, message: Freeze, promised: Iterable[HeldUnit], now: int) -> bool:
        """Settle all positions below the limit; False: this server halts, and promises nothing."""
        state, clock, stream = self._state, self._state.clock, self._state.stream
        try:
            clock.announce(message.runs, now, now, state.trim)
        except LeaseConflictError as error:
            state.effects.append(Halt(str(error)))
            return False
        view = message.recovery
        # The entries of a failed attempt were not decided.
        self._decided_end = watermark_at(state.store, state.store.last_of(message.view)).end
        self._rolled_forward = 0
        for unit in [unit for unit in promised if self._is_undecided(unit)]:
            gsns = unit.gsns
            assert gsns is not None, "a promise has slots"
            session = state.sessions.by_client[unit.client]
            if clock.next_owned(stream.end) < gsns[0]:
                state.record(Skip(stream.end, gsns[0]), view)
            assert unit.epoch >= 0, "the epoch of a promise was not noted"
            state.record(
                Place(
                    unit.client,
                    unit.seq,
                    session.first_incomplete,
                    unit.epoch,
                    gsns,
                    unit.checksum,
                    unit.body,
                ),
                view,
            )
            session.confirm(unit, gsns)
            self._rolled_forward += unit.count
        if stream.end < message.limit:
            state.record(Skip(stream.end, message.limit), view)
        state.sessions.drop_undecided()
        return True

    def _is_undecided(self, unit: HeldUnit) -> bool:
        """Whether a promised unit is undecided in this view: joining a view drops former units."""
        session = self._state.sessions.by_client.get(unit.client)
        return session is not None and session.units.get(unit.seq) is unit and not unit.confirmed

    def on_persisted(self) -> None:
        """Send the promise, if its entries are on disk now."""
        state, stream = self._state, self._state.stream
        if not self._route or state.server_state != "frozen" or state.persisted < stream.last:
            return
        route, self._route = self._route, b""
        state.send(
            route,
            Frozen(
                state.cluster, state.shard, state.view, self.number, state.server,
                state.incarnation, stream.stable, self._decided_end, stream.last,
                self._rolled_forward, digest_of(state.store), state.level.recorded == "disk",
            ),
        )  # fmt: skip

    # --- the decision ---

    def on_decided(self, decision: ViewDecided, now: int) -> bool:
        """Enter the decided view, or join its survivor; return whether this server is in it."""
        state = self._state
        if self._enter(decision):
            return True
        if (
            decision.survivor != state.server
            and decision.view >= self.number
            and decision.view > state.view
            and (self.transfer is None or self.transfer.decision.view != decision.view)
        ):
            is_witness = self.is_in_view
            if is_witness:
                self.freeze_for(decision.view)
            self.number = decision.view
            self.on_repaired()
            self.transfer = StateTransfer(state, decision, now, is_witness=is_witness)
            self.transfer.tick(now)
        return False

    def _enter(self, decision: ViewDecided) -> bool:
        """Enter the decided view if it starts with this server's state; return whether it is in."""
        state = self._state
        if state.server_state == "joined" and decision.view == state.view:
            return True  # its state is that of the view; it may be confirmed by now
        if (
            state.server_state != "frozen"
            or decision.view != self.number
            or decision.survivor != state.server
            or decision.incarnation != state.incarnation
        ):
            return False
        assert decision.last == state.stream.last, "another state was decided than the reported one"
        state.view, state.view_base = decision.view, decision.last
        state.server_state = "joined"
        return True

    @property
    def is_in_view(self) -> bool:
        """Whether this server holds the whole state of its view."""
        return self._state.server_state in {"up", "frozen", "joined"}

    @property
    def is_left_out(self) -> bool:
        """Whether a later view has begun, which this server has to join."""
        is_late = self._state.server_state == "frozen" and self.number > self._promised
        return is_late or self.transfer is not None

    def freeze_for(self, number: int) -> None:
        """Freeze in this view and keep its state: another recovery may need it."""
        self.number = max(self.number, number)
        self._route = b""
        self._state.server_state = "frozen"

    def leave(self, number: int) -> None:
        """Leave the view, and drop everything that is not known to be stable."""
        state = self._state
        self.number = max(self.number, number)
        self._route, self.transfer = b"", None
        self.on_repaired()
        state.server_state = "limbo"
        stable, durable = state.stream.stable_mark, state.stream.durable_mark
        state.stream.restore(stable, durable, [])
        state.sessions.clear()

    # --- joining ---

    def on_fetched(self, route: bytes, answer: Fetched, now: int) -> bool:
        """Handle a part of the survivor's log; return whether this server left its view with it."""
        transfer = self.transfer
        if transfer is None:
            return False
        transfer.on_fetched(route, answer, now)
        if not transfer.can_take_over or not transfer.take_over():
            return False
        # The survivor's log is complete here, or begins after this one: this state is obsolete.
        self.leave(transfer.decision.view)
        self.transfer = transfer
        return True

    def try_join(self, now: int) -> bool:
        """Join the survivor's view if the transfer is complete; return whether it was joined."""
        transfer, state = self.transfer, self._state
        if transfer is None:
            return False
        view = transfer.decision.view
        if self.missing is not None and self.missing.view == view:
            return False
        try:
            if not transfer.try_finish(now):
                return False
        except BusyError as error:
            self._warn(f"{state.config.name} cannot join view {view} yet: {error}")
            transfer.retry_later(now)
            return False
        except UnreadableError as error:
            # The log is the survivor's, but a part that was stored before cannot be read.
            after = _readable_up_to(state.store, state.stream.stable)
            self._record_missing(MissingEntries(after, error, view))
            return False
        self.transfer = None
        self.on_repaired()
        state.view, state.view_base = transfer.decision.view, transfer.decision.last
        state.server_state = "joined"
        return True

    def start_view(self, now: int) -> list[Entry]:
        """Start the view: all replicas have the log on disk. Return the newly stable entries."""
        state, stream = self._state, self._state.stream
        state.sessions.reset_idle_time(now)
        assert stream.last == state.store.last_fseq, "the view starts with another log"
        state.server_state = "up"
        state.clock.was_excluded = True  # since the recovery, maybe longer than this server knows
        self.number = state.view
        news = stream.stabilise(stream.last)
        stream.make_durable(stream.last)
        return news

    def check(self) -> None:
        """Assert that a frozen server is frozen for a recovery after its view."""
        assert self._state.server_state != "frozen" or self.number > self._state.view


def _readable_up_to(store: Store, fseq: int) -> int:
    """Return the last entry of the readable run after `fseq`."""
    fseq = max(fseq, store.first_fseq - 1)
    with suppress(UnreadableError):
        for entry in entries_after(store, fseq):
            fseq = entry.fseq
    return fseq
