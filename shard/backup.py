"""A backup: it guesses what the primary will decide, and takes the primary's word when it comes.

A unit is: arrived -> promised (acked with a guess) -> confirmed (the stream named it), or without slots
when it was displaced or came while the backup was ahead (`guesses`). The stream is applied strictly in
order; a gap or a missing body is asked for. docs/protocol.md, section 4, rules 1 to 6.

Invariant: what this server applied is a prefix of the primary's stream.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from shard.guesses import Guesses
from shard.sessions import HeldUnit
from shard.stream import end_of
from ziplog.wire import Expire, Place, Report, Resend

if TYPE_CHECKING:
    from shard.sessions import Session
    from shard.state import ReplicaState
    from ziplog.wire import Decision, Forward

_MS: Final = 1_000_000
#: How long the client's own copy may take after the primary's word, before the body is asked for.
BODY_GRACE_NS: Final = 2 * _MS
#: A lost part of the stream is asked for again after so long.
ASK_AGAIN_NS: Final = 5 * _MS
#: While the primary's stream was heard of this lately, it says which epoch it is in.
STREAM_FLOWS_NS: Final = 40 * _MS
#: Decisions held back behind a missing body.
MAX_HELD_DECISIONS: Final = 16_384
#: Promised, but not decided: above this, arrivals get no guess.
MAX_PROMISED_UNITS: Final = 4096
#: Bodies that wait for the primary's word.
MAX_UNDECIDED_BYTES: Final = 64 * 1024 * 1024
#: Not yet written to disk: above this, nothing more is reported.
MAX_BACKLOG_BYTES: Final = 128 * 1024 * 1024


class Backup:
    """A backup's part of a replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self.guesses: Final = Guesses(state.clock)
        self._primary: Final = state.config.replicas[0].name.encode()
        #: The stream from `stream.last + 1` on, as far as it was received and not yet applied.
        self._pending: deque[Decision] = deque()
        #: When to ask for what is missing; None while nothing is.
        self._ask_due: int | None = None
        self._report_due = False
        self._reported_durable = 0
        self._durable = state.stream.last
        self._heard_stream = -(2**62)
        #: Bodies of units that the primary has not placed yet.
        self._undecided_bytes = 0

    def restore(self) -> None:
        """After a restart: promises are kept, and other units wait for the primary's word."""
        for session in self._state.sessions.by_client.values():
            for unit in session.units.values():
                if not unit.confirmed:
                    self._undecided_bytes += len(unit.body)
        self.guesses.restore(
            unit
            for session in self._state.sessions.by_client.values()
            for unit in session.units.values()
            if unit.gsns is not None and not unit.confirmed
        )

    # --- inserts ---

    def arrived(self, session: Session, unit: HeldUnit, now: int) -> None:
        """Take a unit that this server has not seen before."""
        if self._undecided_bytes > MAX_UNDECIDED_BYTES:
            del session.units[unit.seq]
            self._state.refuse(unit.route, unit.seq, "full", "too many inserts are waiting")
            return
        self._undecided_bytes += len(unit.body)
        if self._pending:
            self._apply(now)
        if unit.gsns is None and session.is_placed(unit.follows) and self._may_promise():
            self._promise(unit, now)

    def _may_promise(self) -> bool:
        """At level `disk` only what is decided is stored, so only that is acked."""
        return (
            self._state.config.durability == "memory"
            and len(self.guesses.promised) < MAX_PROMISED_UNITS
        )

    def _promise(self, unit: HeldUnit, now: int) -> None:
        state = self._state
        flows = now - self._heard_stream < STREAM_FLOWS_NS
        late = state.clock.epoch_ns // 4 if flows else 0
        floor = max(state.stream.end, state.clock.due(now - late))
        if self.guesses.promise(unit, floor):
            state.ack(unit)

    def copied(self, unit: HeldUnit) -> None:
        """Take another copy of a known unit: say again where it is."""
        if unit.gsns is not None:
            self._state.ack(unit)

    # --- the stream ---

    def forwarded(self, forward: Forward, now: int) -> None:
        """Take a part of the primary's stream."""
        stream = self._state.stream
        self._heard_stream = now
        self._report_due = True
        expected = stream.last + len(self._pending) + 1
        if forward.first > expected:
            self._ask_due = self._ask_due or now
            return
        for fseq, decision in enumerate(forward.decisions, forward.first):
            if fseq == expected and len(self._pending) < MAX_HELD_DECISIONS:
                self._pending.append(decision)
                expected += 1
            elif stream.last < fseq < expected and type(decision) is Place and decision.body:
                self._pending[fseq - stream.last - 1] = decision
        self._apply(now)
        stream.stabilise(min(forward.stable, stream.last))
        stream.make_durable(forward.durable)

    def _apply(self, now: int) -> None:
        """Apply the stream as far as it can be: up to the first body that has not come."""
        while self._pending:
            decision = self._pending[0]
            if type(decision) is Place:
                if not self._apply_place(decision, now):
                    self._ask_due = self._ask_due or now + BODY_GRACE_NS
                    return
            else:
                self._apply_other(decision)
            self._pending.popleft()
        self._ask_due = None

    def _apply_place(self, place: Place, now: int) -> bool:
        state = self._state
        session = state.sessions.by_client.get(place.client)
        unit = session.units.get(place.seq) if session is not None else None
        if unit is not None and unit.checksum != place.checksum:
            unit = None if place.body is None else unit
        body = place.body if unit is None or place.body is not None else unit.body
        if body is None:
            return False
        if session is None:
            session = state.sessions.open(place.client, now)
        if unit is None:
            unit = HeldUnit(place.client, place.seq, len(place.gsns), place.checksum)
            session.units[place.seq] = unit
        self._undecided_bytes -= len(unit.body)
        kept = self.guesses.decide(place.gsns[-1] + 1, unit, place.gsns)
        state.record(
            Place(
                place.client, place.seq, place.done_below, place.epoch, place.gsns,
                place.checksum, body,
            )
        )  # fmt: skip
        session.settle(place.done_below)
        session.confirm(unit, place.gsns)
        unit.checksum = place.checksum
        state.placed_records += unit.count
        if unit.route and not kept:
            state.ack(unit)
        return True

    def _apply_other(self, decision: Decision) -> None:
        state = self._state
        state.record(decision)
        if type(decision) is Expire:
            session = state.sessions.expire(decision.client)
            for unit in session.units.values() if session is not None else ():
                self.guesses.drop(unit)
                self._undecided_bytes -= len(unit.body)
        else:
            end = end_of(state.stream.window[-1], state.stream.end)
            self.guesses.decide(end, None, None)

    def persisted(self, fseq: int) -> None:
        """Take the news that this server's own entries are on stable storage."""
        self._durable = max(self._durable, fseq)
        self._report_due = True

    # --- the end of a batch, and time ---

    def drained(self) -> None:
        """Report what this server holds, if that has changed or may have been missed."""
        state = self._state
        if not self._report_due or state.store.backlog_bytes > MAX_BACKLOG_BYTES:
            return
        self._report_due = False
        last = state.stream.last
        state.send(
            self._primary,
            Report(
                state.cluster, state.shard, state.view, state.server, state.incarnation,
                last, min(self._durable, last),
            ),
        )  # fmt: skip

    def woke(self, now: int) -> None:
        """Ask for what is missing."""
        if self._ask_due is None or now < self._ask_due:
            return
        state = self._state
        self._ask_due = now + ASK_AGAIN_NS
        first = state.stream.last + len(self._pending) + 1
        bodies = 0
        if self._pending:
            first, bodies = state.stream.last + 1, self._missing_bodies()
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

    def next_wakeup(self) -> int | None:
        """Return when something becomes due."""
        return self._ask_due

    def check(self) -> None:
        """Assert the invariants."""
        self.guesses.check(self._state.stream.end)
        assert self._undecided_bytes >= 0
