"""A replica's part in the recovery of its shard: the promise, the roll-forward, the new view.

    up, joined, limbo --Freeze--> frozen: it stores nothing more in its view
    frozen --ViewDecided for it--> joined in the new view
    any --ViewDecided for another, or a higher view heard of--> limbo, follows (`joining`)

Rule: what was acked here stays at its slot; every other position below the limit becomes a no-op.
The log that results is on disk before anybody hears of it. Invariant: of two recoveries, the one
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
    """Entries that a server in limbo cannot read, and cannot go on without."""

    #: The last entry before them.
    after: int
    error: UnreadableError
    #: The view that it would join with them; 0: it would lead a recovery.
    view: int


class LogClaim(NamedTuple):
    """How much a server says that it holds."""

    last: int
    last_view: int
    #: The highest recovery that it knows of.
    number: int
    #: There is more, which it cannot read, and nobody could give it.
    is_damaged: bool


class RecoveryParticipant:
    """What one replica promised and decided to be."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: The highest recovery that this server froze for, or follows; 0: none.
        self.number = 0
        #: Who is to be told of the promise, once its entries are on disk; empty: nobody.
        self._route = b""
        self._decided_end = 0
        self._rolled_forward = 0
        #: The decision that this server entered its view with, until the view begins.
        self.entered: ViewDecided | None = None
        #: How it takes over another server's log; None while it does not.
        self.transfer: StateTransfer | None = None
        #: What keeps this server from leading, or from joining; None: nothing is known to.
        self.missing: MissingEntries | None = None
        #: Nobody could give it.
        self._is_unrepairable = False
        #: What was said last of what cannot be done.
        self._last_warning = ""

    # --- the promise ---

    def freeze(self, route: bytes, message: Freeze, promised: Iterable[HeldUnit], now: int) -> bool:
        """Promise, if the recovery is the newest one; again is the same. Whether it did.

        `promised` are the units whose slots this server guessed and acked, in gsn order.
        """
        state = self._state
        if not self._applies(message) or message.recovery < self.number:
            return False
        if state.state != "frozen" or message.recovery > self.number:
            if state.state == "limbo":
                is_awaited = self.missing is not None and self.missing.view == 0
                if is_awaited or not self._recover_from_disk(now):
                    return False
                state.view = message.view  # of all that have forgotten, this one speaks for it
            self._roll_forward(message, promised, now)
            self.number, self.entered, self.transfer = message.recovery, None, None
            self.on_repaired()
            state.state = "frozen"
        self._route = route
        self.on_persisted()
        return True

    def _applies(self, message: Freeze) -> bool:
        """Whether it is for this process, about the view that it is in."""
        state = self._state
        if message.incarnation not in {0, state.incarnation}:
            return False
        if state.state == "limbo":
            return message.view >= state.view
        return (
            state.state in {"up", "frozen", "joined"}
            and message.view == state.view
            and message.recovery > state.view
        )

    def _recover_from_disk(self, now: int) -> bool:
        """Take what is on disk for all that is known: everybody has forgotten something."""
        state, store = self._state, self._state.store
        stream = state.stream
        if store.last_fseq < stream.stable:
            self._warn(
                f"{state.config.name} cannot lead a recovery: its store ends at entry"
                f" {store.last_fseq}, but {stream.stable} was stable. Put the missing files back"
            )
            return False
        stable, durable, trimmed = stream.stable_mark, stream.durable_mark, store.first_fseq - 1
        at = stream.stable
        try:
            fseq, tables = store.last_table()
            # A session that is not in the table may have been forgotten before.
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
            if stable.fseq < trimmed:  # at the start, it could not be read what follows
                stable = durable = watermark_at(store, trimmed)
        except BusyError as error:
            self._warn(f"{state.config.name} cannot lead a recovery yet: {error}")
            return False
        except UnreadableError as error:
            self._record_missing(MissingEntries(at, error, 0))
            return False
        stream.restore(stable, durable, window)
        return True

    def _warn(self, text: str) -> None:
        """Say something to the operator, unless it was said last: it is asked again and again."""
        if text != self._last_warning:
            self._last_warning = text
            self._state.out.append(LogWarning(text))

    def _warn_of(self, error: object, what: str = "lead a recovery") -> None:
        name = self._state.config.name
        self._warn(
            f"{name} cannot {what}: {error}. Put back what is missing, or start another"
            " replica of the shard that has it"
        )

    # --- what cannot be read ---

    @property
    def repair_view(self) -> int | None:
        """The view in which others are asked for what cannot be read here; None: not now.

        0: only servers in limbo answer, whichever view they remember.
        """
        state = self._state
        if state.state in {"up", "joined"}:
            return state.view
        if state.state == "limbo" and self.missing is not None:
            return self.missing.view
        return None

    def _record_missing(self, missing: MissingEntries) -> None:
        self.missing, self._is_unrepairable = missing, False

    def on_repaired(self) -> None:
        """Note that what was missing has come, or is not needed any more: look again."""
        self.missing, self._is_unrepairable = None, False

    def repair_failed(self, why: str) -> None:
        """Note that nobody can give what is missing."""
        assert self.missing is not None, "nothing was missing"
        if self._is_unrepairable:
            return  # it was tried again
        self._is_unrepairable = True
        view = self.missing.view
        what = f"join view {view}" if view else "lead a recovery"
        self._warn_of(f"{self.missing.error}; nobody could repair it ({why})", what)

    @property
    def claim(self) -> LogClaim:
        """What the handler is told that this server holds: what it could lead with.

        No less than what it knows to be stable: nobody who holds less may lead instead.
        """
        state, store = self._state, self._state.store
        if not self._is_unrepairable or self.missing is None or state.state != "limbo":
            return LogClaim(store.last_fseq, store.last_view, self.number, is_damaged=False)
        last = min(max(self.missing.after, state.stream.stable), store.last_fseq)
        # The number of an attempt that is not told any more must not be given to another one.
        number = max(self.number, store.last_view)
        return LogClaim(last, store.view_at(last), number, is_damaged=True)

    # --- the roll-forward ---

    def _roll_forward(self, message: Freeze, promised: Iterable[HeldUnit], now: int) -> None:
        state, clock, stream = self._state, self._state.clock, self._state.stream
        try:
            clock.announce(message.runs, now, now, state.trim)
        except LeaseConflictError as error:
            state.out.append(Halt(str(error)))
            return
        view = message.recovery
        # An attempt that failed may have settled the rest: that was not decided.
        self._decided_end = watermark_at(state.store, state.store.last_of(message.view)).end
        self._rolled_forward = 0
        for unit in [unit for unit in promised if not unit.confirmed]:
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

    def on_persisted(self) -> None:
        """Say what was promised, if it is on disk now."""
        state, stream = self._state, self._state.stream
        if not self._route or state.state != "frozen" or state.persisted < stream.last:
            return
        route, self._route = self._route, b""
        state.send(
            route,
            Frozen(
                state.cluster, state.shard, state.view, self.number, state.server,
                state.incarnation, stream.stable, self._decided_end, stream.last,
                self._rolled_forward, digest_of(state.store),
            ),
        )  # fmt: skip

    # --- the decision ---

    def on_decided(self, decision: ViewDecided, now: int) -> bool:
        """Take a decision: enter its view, or follow the survivor. Whether it was entered."""
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
        """Enter the view that was decided, if it is this server's own state; whether it did."""
        state = self._state
        if self.entered is not None and self.entered.view == decision.view:
            self.entered = decision  # it may be confirmed by now
            return True
        if (
            state.state != "frozen"
            or decision.view != self.number
            or decision.survivor != state.server
            or decision.incarnation != state.incarnation
        ):
            return False
        assert decision.last == state.stream.last, "another state was decided than the one told"
        state.view, state.view_base = decision.view, decision.last
        state.state = "joined"
        self.entered = decision
        return True

    @property
    def is_in_view(self) -> bool:
        """Whether this server remembers all of its view."""
        return self._state.state in {"up", "frozen", "joined"}

    def freeze_for(self, number: int) -> None:
        """Take nothing more in this view, but keep what it left: it may be asked for yet."""
        self.number = max(self.number, number)
        self._route, self.entered = b"", None
        self._state.state = "frozen"

    def leave(self, number: int) -> None:
        """Leave the view: forget all but what is known to be stable."""
        state = self._state
        self.number = max(self.number, number)
        self._route, self.entered, self.transfer = b"", None, None
        self.on_repaired()
        state.state = "limbo"
        stable, durable = state.stream.stable_mark, state.stream.durable_mark
        state.stream.restore(stable, durable, [])
        state.sessions.clear()

    # --- joining ---

    def on_fetched(self, route: bytes, answer: Fetched, now: int) -> bool:
        """Take a part of the survivor's log; whether this server left its view with that."""
        transfer = self.transfer
        if transfer is None:
            return False
        transfer.on_fetched(route, answer, now)
        if not transfer.can_take_over or not transfer.take_over():
            return False
        # The other log is here, or begins behind this one: what is remembered counts no more.
        self.leave(transfer.decision.view)
        self.transfer = transfer
        return True

    def try_join(self, now: int) -> bool:
        """Whether this server has just joined the view that it follows into."""
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
            # The log is the survivor's, but a part of what was here before cannot be read.
            after = _readable_up_to(state.store, state.stream.stable)
            self._record_missing(MissingEntries(after, error, view))
            return False
        self.transfer = None
        self.on_repaired()
        state.view, state.view_base = transfer.decision.view, transfer.decision.last
        state.state = "joined"
        return True

    def start_view(self, now: int) -> list[Entry]:
        """The view begins: every replica holds the whole log, on its disk. Return what is news."""
        state, stream = self._state, self._state.stream
        state.sessions.forgive(now)
        assert stream.last == state.store.last_fseq, "a view begins with another log"
        state.state = "up"
        state.clock.was_out = False  # in this view, nothing was refused yet
        self.number, self.entered = state.view, None
        news = stream.stabilise(stream.last)
        stream.make_durable(stream.last)
        return news

    def check(self) -> None:
        """Assert the invariant."""
        assert self._state.state != "frozen" or self.number > self._state.view


def _readable_up_to(store: Store, fseq: int) -> int:
    """Return the last entry that can be read with all those after `fseq`."""
    fseq = max(fseq, store.first_fseq - 1)
    with suppress(UnreadableError):
        for entry in entries_after(store, fseq):
            fseq = entry.fseq
    return fseq
