"""A backup: it guesses what the primary will decide, and takes the primary's word when it comes.

A unit is: arrived -> promised (acked with a guess) -> confirmed (the stream named it), or without
slots when it was displaced or came while the backup was ahead (`guesses`). The stream is applied
strictly in order; a gap or a missing body is asked for. docs/protocol.md, section 4, rules 1 to 6.

Invariant: what this server applied is a prefix of the primary's stream.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from shard.ordering.admission import refuse_forgotten, refuse_permanently
from shard.state.decision_log import STREAM_ACTIVE_NS, SUBSCRIBERS_REPORT_NS, end_after
from shard.state.guesses import Guesses
from shard.state.sessions import HeldUnit
from ziplog.core.entries import Expire, Place
from ziplog.wire import Report, Resend

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import Session
    from ziplog.core.entries import Decision
    from ziplog.segments.entry import Entry
    from ziplog.wire import Forward

_MS: Final = 1_000_000
#: How long the client's own copy may take after the primary's word, before the body is asked for.
BODY_GRACE_NS: Final = 2 * _MS
#: A lost part of the stream is asked for again after so long.
REQUEST_INTERVAL_NS: Final = 5 * _MS
#: Nothing heard for so long while something is not stable: the last word may have been lost.
STABLE_REQUEST_DELAY_NS: Final = 1000 * _MS
#: Decisions held back behind a missing body.
MAX_HELD_DECISIONS: Final = 16_384
#: Promised, but not decided: above this, arrivals get no guess.
MAX_PROMISED_UNITS: Final = 4096
#: Bodies that wait for the primary's word.
MAX_UNDECIDED_BYTES: Final = 64 * 1024 * 1024
#: Not yet written to disk: above this, nothing more is reported.
MAX_BACKLOG_BYTES: Final = 128 * 1024 * 1024
#: So many right guesses in a row, and the backup is in no hurry to hear of decisions.
BATCH_AFTER_GUESSES: Final = 256


class Backup:
    """A backup's part of a replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self.guesses: Final = Guesses(state.clock)
        self._primary: Final = state.config.replicas[0].name.encode()
        self._acks_guesses: Final = state.config.durability == "memory"
        #: The shard has no other backup.
        self._is_only: Final = len(state.config.replicas) == 2
        #: The stream from `stream.last + 1` on, as far as it was received and not yet applied.
        self._pending: deque[Decision] = deque()
        #: The last decision that is known to exist, and the gsn after the last one received.
        self._last_known = 0
        self._received_end = 0
        #: When to ask for what is missing; None while nothing is.
        self._request_due: int | None = None
        self._report_due = False
        #: Whether the last report said that somebody subscribes here, and when it was made.
        self._reported_subscribers = False
        self._reported_at = -(2**62)
        self._durable = state.stream.last
        #: When the primary was heard last, and when it was asked last.
        self._last_forward_at = -(2**62)
        #: When it last went on inside an epoch: then it says which one the shard is in.
        self._last_activity_at = -(2**62)
        self._requested_at = -(2**62)
        #: Decisions in a row that were guessed right.
        self._right_guesses = 0
        #: Bodies of units that the primary has not placed yet.
        self._undecided_bytes = 0

    def restore(self) -> None:
        """After a restart: promises are kept, and other units wait for the primary's word."""
        undecided = [
            unit
            for session in self._state.sessions.by_client.values()
            for unit in session.units.values()
            if not unit.confirmed
        ]
        self._undecided_bytes = sum(len(unit.body) for unit in undecided)
        self.guesses.restore(undecided)
        # What was sent while this server was away is lost.
        self._request_due = 0

    # --- inserts ---

    def accept(self, session: Session, unit: HeldUnit, now: int) -> bool:
        """Take a unit that this server has not seen before; False: there is no room for it."""
        if self._undecided_bytes > MAX_UNDECIDED_BYTES:
            del session.units[unit.seq]
            return False
        self._undecided_bytes += len(unit.body)
        if self._pending:
            self._apply(now)
            if unit.is_placed or self._is_pending(unit):
                return True
        if self._is_stream_complete:
            if session.units.get(unit.seq) is unit:  # not refused with the others just now
                self._refuse_permanently(session, unit)
        elif session.is_placed(unit.predecessor) and self._can_promise():
            self._promise(unit, now)
        return True

    def _is_pending(self, unit: HeldUnit) -> bool:
        """Whether the primary's word about a unit is here already, behind a missing body."""
        return any(
            type(d) is Place and d.seq == unit.seq and d.client == unit.client
            for d in self._pending
        )

    def _can_promise(self) -> bool:
        """At level `disk` only what is decided is stored, so only that is acked."""
        return self._acks_guesses and len(self.guesses.promised) < MAX_PROMISED_UNITS

    def _promise(self, unit: HeldUnit, now: int) -> None:
        state = self._state
        floor = max(state.stream.end, self._received_end)
        if now - self._last_activity_at >= STREAM_ACTIVE_NS:
            floor = max(floor, state.clock.current_epoch_base(now))
        if self.guesses.promise(unit, floor):
            state.ack(unit)

    def on_copy(self, unit: HeldUnit, since: int) -> None:
        """Take another copy of a known unit: say again where it is."""
        state = self._state
        if unit.is_placed:
            state.ack(unit)
        elif state.sessions.may_have_forgotten(unit.client, since):
            # It came before the client's `Expire`, and lost its slot: the primary never takes it.
            if not self._is_pending(unit):
                self._drop(state.sessions.by_client[unit.client], unit)
                refuse_forgotten(state, unit.route, unit.seq)
        elif (state.is_leaving or state.clock.was_excluded) and not self._is_pending(unit):
            # The primary may have refused it for good. If not, its word will be above ours.
            self._refuse_permanently(state.sessions.by_client[unit.client], unit)

    @property
    def _is_stream_complete(self) -> bool:
        """Whether the stream is here to its end: it will name no unit that it has not named."""
        state = self._state
        return state.has_no_positions and state.clock.has_ended(state.stream.end)

    def on_no_positions(self, _now: int) -> None:
        """Refuse what has no slots, once the stream of a shard without positions is at its end."""
        if not self._is_stream_complete:
            return
        for session in self._state.sessions.by_client.values():
            for unit in [unit for unit in session.units.values() if not unit.is_placed]:
                self._refuse_permanently(session, unit)

    def _drop(self, session: Session, unit: HeldUnit) -> None:
        """Forget a unit without slots."""
        del session.units[unit.seq]
        self._undecided_bytes -= len(unit.body)

    def _refuse_permanently(self, session: Session, unit: HeldUnit) -> None:
        self._drop(session, unit)
        refuse_permanently(self._state, unit.route, session, unit.seq)

    def on_settled(self, session: Session, first_incomplete: int, _now: int) -> None:
        """Forget what the client calls settled."""
        for unit in session.settle(first_incomplete):
            self._undecided_bytes -= len(unit.body)

    # --- the stream ---

    def on_forward(self, forward: Forward, now: int) -> list[Entry]:
        """Take a part of the primary's stream; return what became stable."""
        stream, pending = self._state.stream, self._pending
        self._last_forward_at = now
        self._report_due = True
        self._last_known = max(self._last_known, forward.first + len(forward.decisions) - 1)
        expected = stream.last + len(pending) + 1
        for fseq, decision in enumerate(forward.decisions, forward.first):
            if fseq == expected and len(pending) < MAX_HELD_DECISIONS:
                pending.append(decision)
                self._received_end = end_after(decision, self._received_end)
                if type(decision) is Place or not self._state.clock.begins_epoch(
                    self._received_end
                ):
                    self._last_activity_at = now
                expected += 1
            elif stream.last < fseq < expected and type(decision) is Place and decision.body:
                pending[fseq - stream.last - 1] = decision
        self._apply(now)
        news = stream.stabilise(min(forward.stable, stream.last))
        stream.make_durable(forward.durable)
        return news

    def _apply(self, now: int) -> None:
        """Apply the stream as far as it can be: up to the first body that has not come."""
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
                self._request_due = now + BODY_GRACE_NS
        elif stream.last < self._last_known:
            self._request_due = (
                now
                if self._request_due is None
                else min(self._request_due, now + REQUEST_INTERVAL_NS)
            )
        else:
            self._request_due = None
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
        self._displace(self.guesses.decide(gsns[-1] + 1, unit, gsns))
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
        self.on_settled(session, place.first_incomplete, now)
        unit.checksum, unit.count = place.checksum, len(gsns)
        session.confirm(unit, gsns)
        if unit.count > 1:
            state.sessions.schedule_packing(unit)
        state.placed_records += unit.count
        if is_kept:
            self._right_guesses += 1
        else:
            self._right_guesses = 0
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
        else:
            self._displace(self.guesses.decide(state.stream.end, None, None))

    def _displace(self, units: list[HeldUnit]) -> None:
        """Forget those units that lost their slots and that their clients gave up."""
        for unit in units:
            session = self._state.sessions.by_client[unit.client]
            if unit.seq < session.first_incomplete:
                del session.units[unit.seq]
                self._undecided_bytes -= len(unit.body)

    def on_persisted(self, fseq: int) -> None:
        """Take the news that this server's own entries are on stable storage."""
        if fseq > self._durable:
            self._durable = fseq
            self._report_due = True

    # --- the end of a batch, and time ---

    def on_batch_end(self, now: int) -> list[Entry]:
        """Report what this server holds, if it is news or was missed; return what became stable."""
        state, stream = self._state, self._state.stream
        if self._report_due or state.has_subscribers is not self._reported_subscribers:
            self._report(now)
        if self._is_only and stream.stable < stream.last:
            return stream.stabilise(self._held_by_both)
        return []

    @property
    def _held_by_both(self) -> int:
        """Up to where a shard of two replicas holds the stream on both.

        The primary holds all that it forwards; at level `disk`, on its disk. Who forgets goes on in
        no view, and a recovery leaves behind nothing that one of the two holds.
        """
        return self._state.stream.last if self._acks_guesses else self._durable

    def _report(self, now: int) -> None:
        state = self._state
        if state.store.backlog_bytes > MAX_BACKLOG_BYTES:
            return
        self._report_due = False
        self._reported_subscribers, self._reported_at = state.has_subscribers, now
        last = state.stream.last
        state.send(
            self._primary,
            Report(
                state.cluster, state.shard, state.view, state.server, state.incarnation,
                last, min(self._durable, last),
                state.has_subscribers or self._right_guesses < BATCH_AFTER_GUESSES,
                state.has_subscribers,
            ),
        )  # fmt: skip

    def tick(self, now: int) -> None:
        """Ask for what is missing, and say again that somebody subscribes here."""
        if self._reported_subscribers and now >= self._reported_at + SUBSCRIBERS_REPORT_NS:
            self._report_due, self._reported_at = True, now
        due = self._missing_due
        if due is None or now < due:
            return
        state = self._state
        first = state.stream.last + 1
        bodies = self._missing_bodies() if self._pending else 0
        self._requested_at = now
        if self._request_due is not None:
            self._request_due = now + REQUEST_INTERVAL_NS
        state.send(
            self._primary,
            Resend(state.cluster, state.shard, state.view, state.server, first, bodies),
        )

    def _missing_bodies(self) -> int:
        """Return up to which pending decision bodies are missing."""
        by_client = self._state.sessions.by_client
        missing = 1
        for index, decision in enumerate(self._pending, 1):
            if type(decision) is Place and decision.body is None:
                session = by_client.get(decision.client)
                if session is None or decision.seq not in session.units:
                    missing = index
        return missing

    def expire_sessions(self, now: int) -> None:
        """Forget what clients that were silent for too long left here without slots.

        Their confirmed units go with the primary's `Expire`, their promises with its decisions.
        """
        state = self._state
        for session in state.sessions.idle(now):
            for unit in [u for u in session.units.values() if not u.is_placed]:
                del session.units[unit.seq]
                self._undecided_bytes -= len(unit.body)
            if not session.units:
                state.sessions.expire(session.client)

    def next_wakeup(self, _now: int) -> int | None:
        """Return when something becomes due."""
        due = self._missing_due
        if not self._reported_subscribers:
            return due
        repeat_due = self._reported_at + SUBSCRIBERS_REPORT_NS
        return repeat_due if due is None else min(due, repeat_due)

    @property
    def _missing_due(self) -> int | None:
        """When to ask for what is missing."""
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
