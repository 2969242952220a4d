"""The backup: guesses positions, then follows the primary's stream of decisions.

A unit is: accepted -> promised (acked with a guess) -> confirmed (the stream places it). It has no
slots when it was displaced, or arrived while the backup was ahead (`Guesses`). The backup applies
the stream strictly in order, and requests gaps and missing bodies (docs/protocol.md, section 4,
rules 1 to 6).

Invariant: the entries that this server applied are a prefix of the primary's stream.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from shard.ordering.admission import (
    refuse_for_lack_of_space,
    refuse_forgotten,
    refuse_permanently,
)
from shard.ordering.epoch_closer import STREAM_ACTIVE_NS
from shard.ordering.hints import Hints
from shard.ordering.reports import Reports
from shard.state.decision_log import end_after
from shard.state.guesses import Guesses
from shard.state.sessions import HeldUnit
from ziplog.core import distance
from ziplog.core.entries import Expire, Place, Skip
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.wire import Resend, Want

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import Session
    from ziplog.core.entries import Decision
    from ziplog.segments.entry import Entry
    from ziplog.wire import Forward

#: Interval between requests to decide the promised slots.
SETTLE_INTERVAL_NS: Final = 100 * NS_PER_MS
#: Maximum of the interval between requests: it doubles while no answer brings an entry.
MAX_REQUEST_INTERVAL_NS: Final = 1000 * NS_PER_MS
#: Time without a forward, while entries are unstable, before requesting the last one again.
STABLE_REQUEST_DELAY_NS: Final = 1000 * NS_PER_MS
#: Most decisions held back by a missing body.
MAX_HELD_DECISIONS: Final = 16_384
#: Most promised units that are not decided; above this, new units get no guess.
MAX_PROMISED_UNITS: Final = 4096
#: Most bytes of bodies that wait for the primary's decision.
MAX_UNDECIDED_BYTES: Final = 64 * 1024 * 1024


class Backup:
    """A backup's part of a replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self.guesses: Final = Guesses(state.clock)
        self._primary: Final = state.config.replicas[0].name.encode()
        self._level: Final = state.level
        rtt_ms = state.config.limits.rtt_ms
        self._body_grace_ns: Final = distance.body_grace_ns(rtt_ms)
        self._request_interval_ns: Final = distance.request_interval_ns(rtt_ms)
        #: Whether the shard has no other backup.
        self._is_only: Final = len(state.config.replicas) == 2
        #: Decisions from `stream.last + 1` on that were received but not applied.
        self._pending: deque[Decision] = deque()
        #: The last decision known to exist, and the gsn after the last one received.
        self._last_known = 0
        #: The last decision that the primary holds, by its level.
        self._held_by_primary = state.stream.stable
        self._received_end = 0
        #: The interval now, and the first entry of the last request.
        self._interval_ns = self._request_interval_ns
        self._requested_from = 0
        #: Time of the next request for missing decisions; None while none is missing.
        self._request_due: int | None = None
        self._durable = state.stream.last
        #: Time of the last forward from the primary, and of the last request to it.
        self._last_forward_at = -(2**62)
        #: Time when the stream last advanced within an epoch: it determines the current epoch.
        self._last_activity_at = -(2**62)
        self._requested_at = -(2**62)
        #: Time of the next request to decide the promised slots.
        self._settle_at = -(2**62)
        #: The unit that is being accepted.
        self._arriving: HeldUnit | None = None
        #: Bytes of bodies of units that the primary has not placed.
        self._undecided_bytes = 0
        self._hints: Final = Hints()
        self._reports: Final = Reports(state)

    def restore(self) -> None:
        """Restore after a restart: promises are kept, other units wait for decisions."""
        undecided = [
            unit
            for session in self._state.sessions.by_client.values()
            for unit in session.units.values()
            if not unit.confirmed
        ]
        self._undecided_bytes = sum(len(unit.body) for unit in undecided)
        self.guesses.restore(undecided)
        # Messages sent while this server was down are lost.
        self._request_due = 0

    # --- inserts ---

    def can_accept(self) -> bool:
        """Whether there is room for another unit."""
        return self._undecided_bytes <= MAX_UNDECIDED_BYTES

    def accept(self, session: Session, unit: HeldUnit, now: int) -> None:
        """Promise a new unit slots, or let it wait for the primary's decision."""
        self._undecided_bytes += len(unit.body)
        if self._pending:
            self._arriving = unit
            self._apply(now)
            self._arriving = None
            if unit.has_slots or self._is_pending(unit):
                return
        if self._is_stream_complete:
            if session.units.get(unit.seq) is unit:  # not refused with the others by `_apply`
                self._refuse_permanently(session, unit)
        elif session.has_slots(unit.predecessor) and self._can_promise():
            self._promise(unit, now)

    def _is_pending(self, unit: HeldUnit) -> bool:
        """Whether a decision about the unit was received, but waits for an earlier body."""
        return any(
            type(d) is Place and d.seq == unit.seq and d.client == unit.client
            for d in self._pending
        )

    @property
    def _pending_units(self) -> set[tuple[bytes, int]]:
        """The units for which that holds: (client, seq)."""
        return {(d.client, d.seq) for d in self._pending if type(d) is Place}

    def _can_promise(self) -> bool:
        """Whether a unit may get a guess; at level `disk`, only decided units are acked."""
        return self._level.is_memory and len(self.guesses.promised) < MAX_PROMISED_UNITS

    def _promise(self, unit: HeldUnit, now: int) -> None:
        if self.guesses.promise(unit, self._next_guess_from(now)):
            self._state.ack(unit)

    def _next_guess_from(self, now: int) -> int:
        """Return the first gsn that the primary may decide next."""
        state = self._state
        floor = max(state.stream.end, self._received_end, self._hints.floor)
        if now - self._last_activity_at >= STREAM_ACTIVE_NS:
            floor = max(floor, state.clock.current_epoch_base(now))
        return floor

    def plain_until(self, _now: int) -> int:
        """Return the time until which `accept_plain` may be called, unless anything else happens.

        Until then every unit whose predecessor is placed gets a guess. 0: not now.
        """
        can_guess = self._level.is_memory and self.guesses.is_aligned
        return NEVER if can_guess and self._request_due is None else 0

    def accept_plain(self, session: Session, unit: HeldUnit, now: int) -> bool:
        """Promise a new unit slots, if the leases held have them."""
        if not self.can_accept() or not self._can_promise():
            return False
        if not self.guesses.promise(unit, self._next_guess_from(now)):
            return False
        session.units[unit.seq] = unit
        self._undecided_bytes += len(unit.body)
        return True

    @property
    def batch_end_due(self) -> int:
        """When a batch next needs `on_batch_end`, in ns."""
        return self._reports.due

    def on_copy(self, unit: HeldUnit, since: int) -> None:
        """Handle another copy of a known unit: ack its slots again, or refuse it."""
        state = self._state
        if unit.has_slots:
            state.ack(unit)
        elif state.sessions.may_have_forgotten(unit.client, since):
            # It arrived before the client's `Expire`, and lost its slot: the primary refuses it.
            if not self._is_pending(unit):
                self._drop(state.sessions.by_client[unit.client], unit)
                refuse_forgotten(state, unit.route, unit.seq)
        elif (state.is_leaving or state.clock.was_excluded) and not self._is_pending(unit):
            # The primary may have refused it permanently. If not, its decision overrides this.
            self._refuse_permanently(state.sessions.by_client[unit.client], unit)
        elif state.primary_full and not self._is_pending(unit):
            self._refuse_for_lack_of_space(state.sessions.by_client[unit.client], unit)

    @property
    def _is_stream_complete(self) -> bool:
        """Whether the stream was received to its end: no further unit will be placed."""
        state = self._state
        return state.has_no_positions and state.clock.has_ended(state.stream.end)

    def on_no_positions(self, _now: int) -> None:
        """Refuse the units without slots, if the stream has ended."""
        if not self._is_stream_complete:
            return
        for session in self._state.sessions.by_client.values():
            for unit in [unit for unit in session.units.values() if not unit.has_slots]:
                self._refuse_permanently(session, unit)

    def _drop(self, session: Session, unit: HeldUnit) -> None:
        """Forget a unit without slots."""
        del session.units[unit.seq]
        self.guesses.forget(unit)
        self._undecided_bytes -= len(unit.body)

    def on_primary_space(self, full: str) -> None:
        """Note why the primary refuses new inserts; "": it accepts them.

        A full primary has no space for the units without slots, so this backup refuses them. Later
        ones are refused when they arrive, or lose their slots. If the primary accepted one before,
        its decision overrides the refusal.
        """
        state = self._state
        was_full, state.primary_full = state.primary_full, full
        if not full or was_full or state.server_state != "up":
            return
        pending = self._pending_units
        for session in self._state.sessions.by_client.values():
            for unit in [unit for unit in session.units.values() if not unit.has_slots]:
                if (unit.client, unit.seq) not in pending:
                    self._refuse_for_lack_of_space(session, unit)

    def _refuse_for_lack_of_space(self, session: Session, unit: HeldUnit) -> None:
        self._drop(session, unit)
        refuse_for_lack_of_space(self._state, unit.route, session, unit.seq, unit.copy)

    def _refuse_permanently(self, session: Session, unit: HeldUnit) -> None:
        self._drop(session, unit)
        refuse_permanently(self._state, unit.route, session, unit.seq)

    def on_ahead_hint(self, gsn: int, now: int) -> None:
        """Guess that the primary turns the positions below `gsn` into no-ops: it got the hint too.

        Inserts that arrive before its forward so get the same slots here as there.
        """
        state = self._state
        if gsn < state.clock.limit and state.has_readers(now):
            self._hints.on_hint(gsn)

    def on_settled(self, session: Session, first_incomplete: int, _now: int) -> None:
        """Forget the units below the client's `first_incomplete`."""
        for unit in session.settle(first_incomplete):
            self._undecided_bytes -= len(unit.body)

    # --- the stream ---

    def on_forward(self, forward: Forward, now: int) -> list[Entry]:
        """Handle a part of the primary's stream; return what became stable."""
        stream, pending = self._state.stream, self._pending
        self._state.clock.advance(now)  # Lookups in the current lease are the fastest.
        self._last_forward_at = now
        last = forward.first + len(forward.decisions) - 1
        self._last_known = max(self._last_known, last)
        held = last if forward.flushed is None else forward.flushed
        self._held_by_primary = max(self._held_by_primary, held)
        expected = stream.last + len(pending) + 1
        known = max(expected - forward.first, 0)
        for fseq, decision in enumerate(forward.decisions[:known], forward.first):
            if fseq > stream.last and type(decision) is Place and decision.body:
                pending[fseq - stream.last - 1] = decision
        if forward.first <= expected:
            self._receive(forward.decisions[known:], now)
        self._apply(now)
        self._reports.on_forward(now, is_requested=forward.report_immediately)
        news: list[Entry] = []
        if forward.stable > stream.stable:
            news = stream.stabilise(min(forward.stable, stream.last))
        stream.make_durable(forward.durable)
        return news

    def _receive(self, decisions: list[Decision], now: int) -> None:
        """Add the next decisions of the stream, as far as there is room, to those to be applied."""
        pending, end = self._pending, self._received_end
        for decision in decisions[: MAX_HELD_DECISIONS - len(pending)]:
            pending.append(decision)
            end = end_after(decision, end)
            if type(decision) is Place or not self._state.clock.begins_epoch(end):
                self._last_activity_at = now
        self._received_end = end

    def _apply(self, now: int) -> None:
        """Apply the received stream up to the first missing body."""
        stream, pending = self._state.stream, self._pending
        before = stream.last
        while pending:
            decision = pending[0]
            if type(decision) is Place:
                if not self._apply_place(decision, now):
                    break
            else:
                self._apply_other(decision)
            pending.popleft()
        if pending:
            if self._request_due is None or stream.last > before:
                self._request_due = now + self._body_grace_ns
        elif stream.last < self._last_known:
            self._request_due = (
                now
                if self._request_due is None
                else min(self._request_due, now + self._interval_ns)
            )
        else:
            self._request_due, self._interval_ns = None, self._request_interval_ns
        if self._state.has_no_positions:
            self.on_no_positions(now)

    def _apply_place(self, place: Place, now: int) -> bool:
        state, gsns = self._state, place.gsns
        session = state.sessions.by_client.get(place.client)
        unit = session.units.get(place.seq) if session is not None else None
        body = place.body
        if body is None:
            if unit is None or unit.checksum != place.checksum:
                return False
            body = unit.body
        if session is None:
            session = state.sessions.open(place.client, now)
        if unit is None:
            unit = HeldUnit(place.client, place.seq, len(gsns), place.checksum)
            session.units[place.seq] = unit
        assert not unit.confirmed, "the primary placed a unit twice"
        self._undecided_bytes -= len(unit.body)
        is_kept = unit.gsns == gsns and unit.checksum == place.checksum
        self._hints.on_place(unit.guess, gsns[0])
        if displaced := self.guesses.apply_place(unit, gsns):
            self._displace(displaced)
        state.record(
            Place(
                place.client,
                place.seq,
                place.first_incomplete,
                place.epoch,
                gsns,
                place.checksum,
                body,
            )
        )
        if place.first_incomplete > session.first_incomplete:
            self.on_settled(session, place.first_incomplete, now)
        unit.checksum, unit.count = place.checksum, len(gsns)
        session.confirm(unit, gsns)
        if unit.sealed:
            state.raise_awaited(unit.client, gsns[-1])
        if unit.count > 1:
            state.sessions.schedule_packing(unit)
        state.placed_records += unit.count
        state.placed_bytes += len(body)
        if unit is self._arriving:  # The decision came first: no guess was needed, none was wrong.
            state.ack(unit)
            return True
        self._reports.on_guess(is_right=is_kept)
        if not is_kept:
            state.ack(unit, waited=True)
        return True

    def _apply_other(self, decision: Decision) -> None:
        state = self._state
        state.record(decision)
        if type(decision) is Expire:
            sessions = state.sessions
            sessions.horizon = max(sessions.horizon, decision.horizon)
            session = sessions.by_client.get(decision.client)
            if session is not None:
                session.forget_confirmed()
                sessions.raise_horizon(session)
                if not session.units:
                    sessions.expire(decision.client)
        elif type(decision) is Skip:
            self._hints.on_skip(decision.stop)
            self._displace(self.guesses.apply_skip(state.stream.end))

    def _displace(self, units: list[HeldUnit]) -> None:
        """Forget the units that lost their slots and that their clients abandoned.

        If the primary has no space, also refuse the others.
        """
        state = self._state
        pending = self._pending_units if units and state.primary_full else set()
        for unit in units:
            session = state.sessions.by_client[unit.client]
            if unit.seq < session.first_incomplete:
                self._drop(session, unit)
            elif state.primary_full and (unit.client, unit.seq) not in pending:
                self._refuse_for_lack_of_space(session, unit)

    def on_persisted(self, fseq: int) -> None:
        """Record that this server's own entries up to `fseq` are on stable storage."""
        if fseq > self._durable:
            self._durable = fseq
            self._reports.on_durable()

    def settle_promises(self, now: int) -> bool:
        """Ask the primary to decide the promised slots; return whether no promise is left.

        A unit may have reached this backup only, and its client may have died.
        """
        promised = self.guesses.promised
        if promised and now >= self._settle_at:
            self._settle_at = now + SETTLE_INTERVAL_NS
            state, last = self._state, next(reversed(promised))
            state.send(self._primary, Want(state.cluster, state.shard, 0, last))
        return not promised

    # --- the end of a batch, and time ---

    def newly_stable(self, _now: int) -> list[Entry]:
        """Return what became stable with this batch: the only backup knows without the primary."""
        stream = self._state.stream
        if self._is_only and stream.stable < stream.last:
            return stream.stabilise(self._held_by_both)
        return []

    def on_batch_end(self, now: int) -> None:
        """Report progress that is new or was requested."""
        self._reports.on_batch_end(self._durable, now)

    @property
    def _held_by_both(self) -> int:
        """The last entry that both replicas of a two-replica shard hold, each by its level.

        A server that lost entries leaves its view, and a recovery keeps all entries that either
        replica holds.
        """
        own = self._state.stream.last if self._level.is_memory else self._durable
        return min(own, self._held_by_primary)

    def tick(self, now: int) -> None:
        """Request missing decisions, and schedule a report that is due."""
        self._reports.tick(now)
        due = self._missing_due
        if due is None or now < due:
            return
        state = self._state
        first = state.stream.last + 1
        bodies = self._missing_bodies() if self._pending else 0
        self._requested_at = now
        if self._request_due is not None:
            if first == self._requested_from:
                self._interval_ns = max(
                    self._interval_ns, min(2 * self._interval_ns, MAX_REQUEST_INTERVAL_NS)
                )
            self._requested_from = first
            self._request_due = now + self._interval_ns
        state.send(
            self._primary,
            Resend(state.cluster, state.shard, state.view, state.server, first, bodies),
        )

    def _missing_bodies(self) -> int:
        """Return the number of pending decisions up to the last one without a body."""
        by_client = self._state.sessions.by_client
        missing = 1
        for index, decision in enumerate(self._pending, 1):
            if type(decision) is Place and decision.body is None:
                session = by_client.get(decision.client)
                if session is None or decision.seq not in session.units:
                    missing = index
        return missing

    def expire_sessions(self, now: int) -> None:
        """Forget the units without slots of expired sessions.

        The primary's `Expire` removes confirmed units; its decisions remove promises.
        """
        state = self._state
        for session in state.sessions.idle(now):
            for unit in [u for u in session.units.values() if not u.has_slots]:
                del session.units[unit.seq]
                self._undecided_bytes -= len(unit.body)
            if not session.units:
                state.sessions.expire(session.client)

    def next_wakeup(self, _now: int) -> int | None:
        """Return the time of the next action, in ns; None: none is due."""
        due = self._reports.next_wakeup()
        if self._missing_due is not None:
            due = min(due, self._missing_due)
        return due if due < NEVER else None

    @property
    def _missing_due(self) -> int | None:
        """Time of the next request for missing decisions."""
        if self._request_due is not None:
            return self._request_due
        stream = self._state.stream
        known = (
            min(stream.stable, stream.durable) if self._state.has_no_positions else stream.stable
        )
        if known < stream.last:
            return max(self._last_forward_at, self._requested_at) + STABLE_REQUEST_DELAY_NS
        return None

    def check(self) -> None:
        """Assert the invariants."""
        self.guesses.check(self._state.stream.end)
        undecided = [
            unit
            for session in self._state.sessions.by_client.values()
            for unit in session.units.values()
            if not unit.confirmed
        ]
        assert self._undecided_bytes == sum(len(unit.body) for unit in undecided)
        promised = [unit for unit in undecided if unit.gsns is not None]
        assert len(promised) == len(self.guesses.promised), "a promise was forgotten"
        assert all(self.guesses.promised.get((u.gsns or [0])[0]) is u for u in promised)
