"""The primary: it decides which positions units get, and its order is the shard's (D6).

A unit goes through: arrived -> (waits for its predecessor, its lease, or room) -> placed -> stable.
Decisions are numbered and forwarded to the backups at the end of each batch; reports come back and
move the stable watermark. Only the primary makes no-ops. docs/protocol.md, sections 3 to 5.

Invariant: decisions go upwards in gsn, and a placed unit never moves.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from shard.entry import Mark
from ziplog.wire import Expire, Forward, Frontier, LeaseQuery, Place, Report, Resend, Skip

if TYPE_CHECKING:
    from shard.entry import Entry
    from shard.sessions import HeldUnit, Session
    from shard.state import ReplicaState
    from ziplog.wire import Decision, LeaseHistory, Want

_MS: Final = 1_000_000
#: Decided but unstable: above this, arrivals wait (D23).
MAX_UNSTABLE_RECORDS: Final = 4096
MAX_UNSTABLE_BYTES: Final = 16 * 1024 * 1024
#: Not yet written to disk: above this, arrivals wait.
MAX_BACKLOG_BYTES: Final = 128 * 1024 * 1024
#: Waiting: above this, arrivals are refused.
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
MAX_WAITING_UNITS: Final = 65_536
#: One frame carries at most so many bytes of bodies.
MAX_FORWARD_BYTES: Final = 4 * 1024 * 1024
MAX_FORWARD_DECISIONS: Final = 4096
#: Nothing heard of a forward for so long: send it again.
RESEND_AFTER_NS: Final = 20 * _MS
#: The backups learn what is stable at most so much later if nothing else is forwarded.
SPREAD_AFTER_NS: Final = 5 * _MS
#: A shard is active for so long after its last insert, and after somebody waited behind it.
ACTIVE_AFTER_INSERT_NS: Final = 200 * _MS
ACTIVE_AFTER_WANT_NS: Final = 1000 * _MS
#: A question to the membership service is asked again after so long.
ASK_AGAIN_NS: Final = 100 * _MS
MAX_FRONTIER_WAITERS: Final = 1024


class Primary:
    """The primary's part of a replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: What each backup holds, in memory and on stable storage, by its index.
        backups = range(1, len(state.config.replicas))
        self._held: Final = dict.fromkeys(backups, state.stream.stable)
        self._durable: Final = dict.fromkeys(backups, state.stream.durable)
        self._own_durable = state.stream.last
        #: The next decision that was not forwarded yet.
        self._next_forward = state.stream.stable + 1
        self._gathered: list[Decision] = []
        #: When the oldest unanswered forward was sent last.
        self._forwarded_at = 0
        #: What the backups were told last.
        self._spread_stable = 0
        self._spread_due: int | None = None
        #: Units that wait for room or for a lease, in order of arrival.
        self._waiting: deque[HeldUnit] = deque()
        self._waiting_bytes = 0
        #: Units whose `after` lies beyond the leases held, and when to ask about them again.
        self._beyond: list[HeldUnit] = []
        self._ask_due: int | None = None
        #: Who waits for the frontier to pass a gsn: (gsn, route, request).
        self._frontier_waiters: list[tuple[int, bytes, int]] = []

    @property
    def has_backups(self) -> bool:
        """Whether what is decided is not stable at once (f > 0)."""
        return bool(self._held)

    def restore(self) -> None:
        """After a restart: units that were waiting wait again, and all unstable is forwarded."""
        for session in self._state.sessions.by_client.values():
            for unit in session.units.values():
                if unit.gsns is None:
                    self._waiting.append(unit)
                    self._waiting_bytes += len(unit.body)
        self._gathered = [
            _without_body(d) if type(d) is Place else d
            for d in (entry.decision for entry in self._state.stream.window)
            if not isinstance(d, Mark)
        ]

    # --- inserts ---

    def arrived(self, session: Session, unit: HeldUnit, now: int) -> None:
        """Take a unit that this server has not seen before."""
        state = self._state
        if self._waiting_bytes > MAX_WAITING_BYTES or len(self._waiting) >= MAX_WAITING_UNITS:
            del session.units[unit.seq]
            state.refuse(unit.route, unit.seq, "full", "too many inserts are waiting")
            return
        if unit.follows and not session.is_placed(unit.follows):
            session.followers.setdefault(unit.follows, []).append(unit)
            return
        self._admit(unit, now)

    def copied(self, unit: HeldUnit) -> None:
        """Take another copy of a known unit: say again where it is."""
        if unit.gsns is not None:
            self._state.ack(unit)

    def _admit(self, unit: HeldUnit, now: int) -> None:
        if self._waiting or not self._has_room() or not self._place(unit, now):
            self._waiting.append(unit)
            self._waiting_bytes += len(unit.body)

    def _has_room(self) -> bool:
        stream = self._state.stream
        return (
            stream.window_records < MAX_UNSTABLE_RECORDS
            and stream.window_bytes < MAX_UNSTABLE_BYTES
            and self._state.store.backlog_bytes < MAX_BACKLOG_BYTES
        )

    def _place(self, unit: HeldUnit, now: int) -> bool:
        """Decide the unit's positions; False if it has to wait for a lease."""
        state, stream = self._state, self._state.stream
        clock = state.clock
        if unit.after >= clock.limit:
            self._beyond.append(unit)
            self._ask_due = self._ask_due or now
            return True
        floor = max(clock.due(now), unit.after + 1)
        gsns = clock.take(max(floor, stream.end), unit.count)
        if not gsns:
            return False
        if clock.next_owned(stream.end) < gsns[0]:
            self._decide(Skip(stream.end, gsns[0]))
        session = state.sessions.by_client[unit.client]
        epoch = clock.epoch_at(gsns[0])
        place = Place(
            unit.client, unit.seq, session.done_below, epoch, gsns, unit.checksum, unit.body
        )
        state.record(place)
        self._gathered.append(
            Place(unit.client, unit.seq, session.done_below, epoch, gsns, unit.checksum)
        )
        session.confirm(unit, gsns)
        state.placed_records += unit.count
        state.ack(unit)
        for follower in session.followers.pop(unit.seq, ()):
            if follower.seq in session.units:
                self._admit(follower, now)
        return True

    def _decide(self, decision: Decision) -> None:
        self._state.record(decision)
        self._gathered.append(decision)

    def _admit_waiting(self, now: int) -> None:
        """Place what was waiting, as far as there is room and lease for it."""
        while self._waiting and self._has_room():
            unit = self._waiting.popleft()
            self._waiting_bytes -= len(unit.body)
            session = self._state.sessions.by_client.get(unit.client)
            if session is None or unit.seq not in session.units:
                continue
            if not self._place(unit, now):
                self._waiting.appendleft(unit)
                self._waiting_bytes += len(unit.body)
                return

    # --- leases ---

    def leased(self, now: int) -> None:
        """Take the news that there is another lease."""
        limit = self._state.clock.limit
        ready = [unit for unit in self._beyond if unit.after < limit]
        self._beyond = [unit for unit in self._beyond if unit.after >= limit]
        for unit in ready:
            self._admit(unit, now)
        self._admit_waiting(now)

    def answered(self, history: LeaseHistory) -> None:
        """Refuse the units that wait for a position that nobody was ever given."""
        if history.runs:
            return
        state = self._state
        for unit in [u for u in self._beyond if u.after == history.request]:
            self._beyond.remove(unit)
            session = state.sessions.by_client.get(unit.client)
            if session is not None:
                session.units.pop(unit.seq, None)
            state.refuse(
                unit.route, unit.seq, "no-such-position", f"nobody was ever given {unit.after}"
            )

    def _ask(self, now: int) -> None:
        state = self._state
        known = state.sessions.by_client
        self._beyond = [
            u for u in self._beyond if u.client in known and u.seq in known[u.client].units
        ]
        self._ask_due = now + ASK_AGAIN_NS if self._beyond else None
        names = tuple(node.name.encode() for node in state.config.mms)
        for after in sorted({unit.after for unit in self._beyond}):
            state.broadcast(names, LeaseQuery(state.cluster, after, after))

    def turn_epoch(self, now: int) -> None:
        """Decide that the epochs before the clock's have no more records of this shard."""
        due, stream = self._state.clock.due(now), self._state.stream
        if due > stream.end and self._state.clock.next_owned(stream.end) < due:
            self._decide(Skip(stream.end, due))

    def is_active(self, now: int) -> bool:
        """Whether epochs are closed as they end (else when somebody needs it)."""
        state = self._state
        return (
            now - state.last_insert < ACTIVE_AFTER_INSERT_NS
            or now - state.last_want < ACTIVE_AFTER_WANT_NS
        )

    # --- readers that wait ---

    def wanted(self, route: bytes, want: Want, now: int) -> None:
        """Decide all positions up to the wanted one, and answer when they are stable (D49)."""
        state, stream = self._state, self._state.stream
        state.last_want = now
        if stream.end <= want.gsn < state.clock.limit:
            if state.clock.next_owned(stream.end) <= want.gsn:
                self._decide(Skip(stream.end, want.gsn + 1))
        if want.request and len(self._frontier_waiters) < MAX_FRONTIER_WAITERS:
            self._frontier_waiters.append((want.gsn, route, want.request))
            self._answer_waiters()

    def _answer_waiters(self) -> None:
        if not self._frontier_waiters:
            return
        state, frontier = self._state, self._state.frontier
        still: list[tuple[int, bytes, int]] = []
        for gsn, route, request in self._frontier_waiters:
            if gsn < frontier:
                state.send(
                    route, Frontier(state.cluster, state.shard, state.view, request, frontier)
                )
            else:
                still.append((gsn, route, request))
        self._frontier_waiters = still

    # --- the stream to the backups ---

    def drained(self, now: int) -> None:
        """Forward what was decided since the last batch."""
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, []
        if not self._held:
            return
        self._forwarded_at = self._forwarded_at or now
        for start in range(0, len(gathered), MAX_FORWARD_DECISIONS):
            decisions = gathered[start : start + MAX_FORWARD_DECISIONS]
            first, self._next_forward = self._next_forward, self._next_forward + len(decisions)
            self._forward(self._state.peers, first, decisions)

    def _forward(self, dsts: tuple[bytes, ...], first: int, decisions: list[Decision]) -> None:
        state, stream = self._state, self._state.stream
        self._spread_stable = stream.stable
        self._spread_due = None
        state.broadcast(
            dsts,
            Forward(
                state.cluster,
                state.shard,
                state.view,
                state.incarnation,
                first,
                decisions,
                stream.stable,
                stream.durable,
            ),
        )

    def reported(self, report: Report, now: int) -> None:
        """Take a backup's report of what it holds."""
        if report.server not in self._held:
            return
        held = min(report.held, self._state.stream.last)
        if held > self._held[report.server]:
            self._held[report.server] = held
            self._forwarded_at = now
        self._durable[report.server] = max(self._durable[report.server], report.durable)
        if min(self._held.values()) + 1 >= self._next_forward:
            self._forwarded_at = 0

    def persisted(self, fseq: int) -> None:
        """Take the news that this server's own entries are on stable storage."""
        self._own_durable = max(self._own_durable, fseq)

    def stabilise(self, now: int) -> list[Entry]:
        """Move the watermarks as far as all reports allow; return what became stable."""
        stream = self._state.stream
        news = stream.stabilise(min(self._held.values(), default=stream.last))
        stream.make_durable(min([self._own_durable, *self._durable.values()]))
        if news:
            self._answer_waiters()
            self._admit_waiting(now)
            if self._held and self._spread_due is None and self._spread_stable < stream.stable:
                self._spread_due = now + SPREAD_AFTER_NS
        return news

    def resend(self, route: bytes, request: Resend) -> None:
        """Send a backup the part of the stream that it misses."""
        self._send_again((route,), request.first, request.bodies)

    def _send_again(self, dsts: tuple[bytes, ...], first: int, bodies: int) -> None:
        decisions: list[Decision] = []
        size = 0
        for entry in self._state.stream.after(first - 1)[:MAX_FORWARD_DECISIONS]:
            decision = entry.decision
            assert not isinstance(decision, Mark), "a mark takes no position of the stream"
            if type(decision) is Place:
                if len(decisions) < bodies:
                    size += len(decision.body or b"")
                else:
                    decision = _without_body(decision)
            decisions.append(decision)
            if size >= MAX_FORWARD_BYTES:
                break
        if decisions and first > self._state.stream.stable:
            self._forward(dsts, first, decisions)

    # --- time ---

    def woke(self, now: int) -> None:
        """Do what has become due."""
        state = self._state
        if self._ask_due is not None and now >= self._ask_due:
            self._ask(now)
        if self._waiting:
            self._admit_waiting(now)
        if self.is_active(now):
            self.turn_epoch(now)
        if self._forwarded_at and now - self._forwarded_at >= RESEND_AFTER_NS:
            self._forwarded_at = now
            lowest = min(self._held.values())
            self._send_again(state.peers, lowest + 1, 0)
        if self._spread_due is not None and now >= self._spread_due:
            self._forward(state.peers, self._next_forward, [])

    def expire_sessions(self, now: int) -> None:
        """Forget the clients that were silent for too long."""
        state = self._state
        for session in state.sessions.silent(now, state.config.session_timeout_s * 1000 * _MS):
            if all(unit.confirmed for unit in session.units.values()):
                state.sessions.expire(session.client)
                self._decide(Expire(session.client))

    def next_wakeup(self, now: int) -> int | None:
        """Return when something becomes due."""
        due = [d for d in (self._ask_due, self._spread_due) if d is not None]
        if self._forwarded_at:
            due.append(self._forwarded_at + RESEND_AFTER_NS)
        if self.is_active(now) or self._waiting:
            turn = self._state.clock.next_turn(now)
            if turn is not None:
                due.append(turn)
        return min(due, default=None)


def _without_body(place: Place) -> Place:
    return Place(place.client, place.seq, place.done_below, place.epoch, place.gsns, place.checksum)
