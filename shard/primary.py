"""The primary: it decides which positions units get, and its order is the shard's (D6).

A unit goes through: arrived -> (waits for its predecessor, its lease, or room) -> placed -> stable.
Decisions are numbered and forwarded to the backups at the end of each batch; reports come back and
move the stable watermark. Only the primary makes no-ops. docs/protocol.md, sections 3 to 5.

Invariant: decisions go upwards in gsn, and a placed unit never moves.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING, Final

from shard.entry import Mark, Table, UnreadableError
from shard.stream import STREAM_FLOWS_NS
from ziplog.wire import Expire, Forward, Frontier, LeaseQuery, Place, Report, Resend, Skip, Synced

if TYPE_CHECKING:
    from shard.entry import Entry
    from shard.sessions import HeldUnit, Session
    from shard.state import ReplicaState
    from ziplog.wire import Decision, LeaseHistory, RefusalCode, Sync, Want

_Key = tuple[bytes, int]

_MS: Final = 1_000_000
#: Decided but unstable: above this, arrivals wait (D23).
MAX_UNSTABLE_RECORDS: Final = 4096
MAX_UNSTABLE_BYTES: Final = 16 * 1024 * 1024
#: Above so many unstable decisions of any kind, no more no-ops are decided, and no session expires.
MAX_UNSTABLE_DECISIONS: Final = 12_288
#: Not yet written to disk: above this, arrivals wait.
MAX_BACKLOG_BYTES: Final = 128 * 1024 * 1024
#: Waiting: above this, arrivals are refused.
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
MAX_WAITING_UNITS: Final = 65_536
#: One frame carries at most so many bytes of bodies.
MAX_FORWARD_BYTES: Final = 4 * 1024 * 1024
MAX_FORWARD_DECISIONS: Final = 4096
#: Nothing heard of a forward for so long: send it again, and then less and less often.
RESEND_AFTER_NS: Final = 20 * _MS
MAX_RESEND_AFTER_NS: Final = 1000 * _MS
#: The backups learn what is stable at most so much later if nothing else is forwarded.
SPREAD_AFTER_NS: Final = 5 * _MS
#: In a calm shard decisions wait so long for others, and are never more, before they are forwarded.
LINGER_NS: Final = 1 * _MS
MAX_LINGERING: Final = 64
#: While inserts flow, an epoch may end so late.
TURN_LATE_NS: Final = 2 * _MS
_NEVER: Final = 2**63
#: A shard is watched for so long after somebody waited behind it.
WATCHED_AFTER_WANT_NS: Final = 1000 * _MS
#: A question to the membership service is asked again after so long.
ASK_AGAIN_NS: Final = 100 * _MS
MAX_FRONTIER_WAITERS: Final = 1024
#: Questions to which an answer still counts.
_MAX_QUESTIONS: Final = 256


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
        #: What was gathered has to go out with this batch.
        self._is_urgent = False
        #: When it goes out at the latest; None while nothing lingers.
        self._linger_due: int | None = None
        #: The backups that are in no hurry to hear of decisions.
        self._calm: Final[set[int]] = set()
        #: When a unit was placed last.
        self._placed_at = -(2**62)
        #: When to send again what was not reported; None while everything is.
        self._resend_due: int | None = None
        self._resend_after = RESEND_AFTER_NS
        #: What the backups were told last.
        self._spread_stable = 0
        self._spread_due: int | None = None
        #: Units without slots, wherever they wait; their followers wait in their sessions.
        self._undecided_units = 0
        self._undecided_bytes = 0
        #: Those that wait for room or for a lease, in order of arrival.
        self._waiting: OrderedDict[_Key, HeldUnit] = OrderedDict()
        #: Those whose `after` leaves them nothing in the leases held.
        self._beyond: dict[_Key, HeldUnit] = {}
        #: Questions about such positions: by request, the units that it was asked for.
        self._questions: OrderedDict[int, list[HeldUnit]] = OrderedDict()
        self._requests: Final = count(1)
        self._ask_due: int | None = None
        #: Up to which gsn somebody waits for this shard to decide.
        self._wanted = 0
        #: Who waits for the frontier to pass a gsn, by route and request.
        self._frontier_waiters: dict[tuple[bytes, int], int] = {}
        #: Who waits for a gsn to be durable, by route and request.
        self._sync_waiters: dict[tuple[bytes, int], int] = {}

    @property
    def has_backups(self) -> bool:
        """Whether what is decided is not stable at once (f > 0)."""
        return bool(self._held)

    def restore(self) -> None:
        """After a restart: units that were waiting wait again, and all unstable is forwarded."""
        for session in self._state.sessions.by_client.values():
            for unit in session.units.values():
                if unit.gsns is None:
                    self._undecided_units += 1
                    self._undecided_bytes += len(unit.body)
                    if session.is_placed(unit.follows):
                        self._waiting[unit.client, unit.seq] = unit
                    else:
                        session.followers.setdefault(unit.follows, []).append(unit)
        self._gathered = [
            _without_body(d) if type(d) is Place else d
            for d in (entry.decision for entry in self._state.stream.window)
            if not isinstance(d, Mark | Table)
        ]
        self._is_urgent = True

    # --- inserts ---

    def arrived(self, session: Session, unit: HeldUnit, now: int) -> None:
        """Take a unit that this server has not seen before."""
        if (
            self._undecided_bytes > MAX_WAITING_BYTES
            or self._undecided_units >= MAX_WAITING_UNITS
        ):  # fmt: skip
            del session.units[unit.seq]
            self._state.refuse(unit.route, unit.seq, "full", "too many inserts are waiting")
            return
        self._undecided_units += 1
        self._undecided_bytes += len(unit.body)
        if unit.follows and not session.is_placed(unit.follows):
            session.followers.setdefault(unit.follows, []).append(unit)
        elif self._waiting or not self._has_room() or not self._place(unit, now):
            self._waiting[unit.client, unit.seq] = unit
        if self._waiting:
            self._admit_waiting(now)

    def copied(self, unit: HeldUnit) -> None:
        """Take another copy of a known unit: say again where it is."""
        if unit.gsns is not None:
            self._state.ack(unit)

    def settled(self, session: Session, done_below: int, now: int) -> None:
        """Forget what the client calls settled; nothing waits for it any more."""
        for unit in session.settle(done_below):
            self._forget(unit)
        if session.followers:
            for seq in sorted(seq for seq in session.followers if seq < done_below):
                self._release(session, seq)
            self._admit_waiting(now)

    def _release(self, session: Session, seq: int) -> None:
        """Let the followers of a unit wait for room only."""
        for unit in session.followers.pop(seq, ()):
            if session.units.get(unit.seq) is unit:
                self._waiting[unit.client, unit.seq] = unit

    def _forget(self, unit: HeldUnit) -> None:
        """Count a unit no more that was taken out of its session undecided."""
        self._undecided_units -= 1
        self._undecided_bytes -= len(unit.body)
        self._waiting.pop((unit.client, unit.seq), None)
        self._beyond.pop((unit.client, unit.seq), None)

    def _reject(self, unit: HeldUnit, code: RefusalCode, detail: str) -> None:
        """Refuse a unit that was taken, and all that wait for it."""
        state = self._state
        session = state.sessions.by_client[unit.client]
        rejected = [unit]
        for victim in rejected:
            rejected += session.followers.pop(victim.seq, ())
            if session.units.get(victim.seq) is victim:
                del session.units[victim.seq]
                self._forget(victim)
                state.refuse(victim.route, victim.seq, code, detail)

    def _has_room(self) -> bool:
        stream = self._state.stream
        return (
            stream.window_records < MAX_UNSTABLE_RECORDS
            and stream.window_bytes < MAX_UNSTABLE_BYTES
            and self._state.store.backlog_bytes < MAX_BACKLOG_BYTES
        )

    def _may_skip(self) -> bool:
        """Whether no-ops may be decided: who cannot take what was decided needs no more of them."""
        stream = self._state.stream
        return stream.last - stream.stable < MAX_UNSTABLE_DECISIONS

    def _place(self, unit: HeldUnit, now: int) -> bool:
        """Decide the unit's positions; False if it has to wait in line for a lease."""
        state, stream = self._state, self._state.stream
        clock = state.clock
        floor = max(self._floor(now), stream.end)
        self._placed_at = now
        after = unit.after
        gsns = clock.take(max(floor, after + 1), unit.count) if after < clock.limit else []
        if not gsns:
            return self._set_aside(unit, floor, now)
        if clock.next_owned(stream.end) < gsns[0]:
            self._decide(Skip(stream.end, gsns[0]))
        session = state.sessions.by_client[unit.client]
        epoch = clock.epoch_at(gsns[0])
        place = Place(
            unit.client, unit.seq, session.done_below, epoch, gsns, unit.checksum, unit.body
        )
        state.record(place)
        self._gathered.append(_without_body(place))
        self._undecided_units -= 1
        self._undecided_bytes -= len(unit.body)
        session.confirm(unit, gsns)
        state.placed_records += unit.count
        state.ack(unit)
        if session.followers:
            self._release(session, unit.seq)
        return True

    def _set_aside(self, unit: HeldUnit, floor: int, now: int) -> bool:
        """Take a unit for which the leases held have nothing; False if it must wait in line."""
        clock = self._state.clock
        if 0 < clock.epoch_slots < unit.count:
            detail = f"an epoch has {clock.epoch_slots} positions of this shard"
            self._reject(unit, "too-large", detail)
        elif unit.after >= clock.limit:
            self._beyond[unit.client, unit.seq] = unit
            self._ask_due = self._ask_due or now
        elif clock.take(floor, unit.count):
            # Only its own `after` is in its way: the others need not wait behind it.
            self._beyond[unit.client, unit.seq] = unit
        else:
            return False
        return True

    def _decide(self, decision: Decision) -> None:
        self._state.record(decision)
        self._gathered.append(decision)
        self._is_urgent = True

    def _admit_waiting(self, now: int) -> None:
        """Place what was waiting, as far as there is room and lease for it."""
        waiting = self._waiting
        while waiting and self._has_room():
            key, unit = waiting.popitem(last=False)
            if not self._place(unit, now):
                waiting[key] = unit
                waiting.move_to_end(key, last=False)
                return

    # --- leases ---

    def leased(self, now: int) -> None:
        """Take the news that there is another lease."""
        beyond, self._beyond = self._beyond, {}
        self._waiting.update(beyond)
        self._admit_waiting(now)

    def answered(self, history: LeaseHistory) -> bool:
        """Take an answer: positions that nobody was ever given are refused.

        Returns whether the leases exist, and this server has not heard of them.
        """
        units = self._questions.pop(history.request, [])
        limit = self._state.clock.limit
        open_units = [
            u for u in units if self._beyond.get((u.client, u.seq)) is u and u.after >= limit
        ]
        if not history.runs:
            for unit in open_units:
                detail = f"nobody was ever given {unit.after}"
                self._reject(unit, "no-such-position", detail)
        return bool(history.runs and open_units)

    def _ask(self, now: int) -> None:
        state = self._state
        asked: dict[int, list[HeldUnit]] = {}
        for unit in self._beyond.values():
            if unit.after >= state.clock.limit:
                asked.setdefault(unit.after, []).append(unit)
        self._ask_due = now + ASK_AGAIN_NS if asked else None
        names = tuple(node.name.encode() for node in state.config.mms)
        for after in sorted(asked)[:_MAX_QUESTIONS]:
            request = next(self._requests)
            self._questions[request] = asked[after]
            state.broadcast(names, LeaseQuery(state.cluster, request, after))
        while len(self._questions) > _MAX_QUESTIONS or (self._questions and not asked):
            self._questions.popitem(last=False)

    def _floor(self, now: int) -> int:
        """Return the first gsn that a record may get, by the clock.

        While inserts flow the backups take the epoch from the stream, not from their clocks. So it
        ends a little late, behind a batch: its token is then at the backups before the next insert,
        which they would otherwise guess into the former epoch. And only leases end if nobody reads.
        """
        clock, gap = self._state.clock, now - self._placed_at
        if gap >= STREAM_FLOWS_NS:
            return clock.due(now)
        late = now - TURN_LATE_NS if gap < TURN_LATE_NS else now
        return clock.due(late) if self._is_watched(now) else clock.begun(late)

    def _end_epoch(self, now: int) -> None:
        """Behind a batch: decide that what is over has no more records of this shard."""
        clock = self._state.clock
        self._skip_to(clock.due(now) if self._is_watched(now) else clock.begun(now))

    def _is_watched(self, now: int) -> bool:
        """Whether somebody waits for positions to be decided."""
        state = self._state
        return state.is_followed or now - state.last_want < WATCHED_AFTER_WANT_NS

    # --- readers that wait ---

    def wanted(self, route: bytes, want: Want, now: int) -> None:
        """Decide all positions up to the wanted one, and answer when they are stable (D49).

        A gsn beyond the leases held is let be: who waits for it asks again.
        """
        state = self._state
        state.last_want = now
        if want.gsn >= state.clock.limit:
            return
        self._wanted = max(self._wanted, want.gsn)
        self._fill_wanted()
        key = (route, want.request)
        waiters = self._frontier_waiters
        if want.request and (key in waiters or len(waiters) < MAX_FRONTIER_WAITERS):
            waiters[key] = want.gsn
            self._answer_waiters()

    def _fill_wanted(self) -> None:
        """Decide up to where somebody waits, in one range."""
        self._skip_to(self._wanted + 1)

    def _skip_to(self, stop: int) -> None:
        """Decide that all owned positions below `stop` that are not decided yet are no-ops."""
        end = self._state.stream.end
        if stop > end and self._may_skip() and self._state.clock.next_owned(end) < stop:
            self._decide(Skip(end, stop))

    def _answer_waiters(self) -> None:
        state, frontier = self._state, self._state.frontier
        for key, gsn in list(self._frontier_waiters.items()):
            if gsn < frontier:
                del self._frontier_waiters[key]
                route, request = key
                state.send(
                    route, Frontier(state.cluster, state.shard, state.view, request, frontier)
                )

    def sync(self, route: bytes, sync: Sync) -> None:
        """Answer when all up to a gsn is on stable storage at all replicas."""
        waiters, key = self._sync_waiters, (route, sync.request)
        if key in waiters or len(waiters) < MAX_FRONTIER_WAITERS:
            waiters[key] = sync.gsn
            self._answer_syncs()

    def _answer_syncs(self) -> None:
        state, durable = self._state, self._state.stream.durable_end
        for key, gsn in list(self._sync_waiters.items()):
            if gsn < durable:
                del self._sync_waiters[key]
                route, request = key
                if self._is_lost(gsn):
                    detail = f"{gsn} was lost with the memory of all servers"
                    state.refuse(route, request, "no-such-position", detail)
                    continue
                state.send(route, Synced(state.cluster, state.shard, state.view, request, durable))

    def _is_lost(self, gsn: int) -> bool:
        """Whether a record that was acked here is not there: a recovery made a no-op of it."""
        state = self._state
        if gsn < state.trim:
            return False
        try:
            entry = state.store.find(gsn)
        except UnreadableError:
            return False
        return entry is not None and type(entry.decision) is Skip

    # --- the stream to the backups ---

    def drained(self, now: int) -> None:
        """Forward what was decided since the last batch."""
        if not self._gathered:
            return
        self._end_epoch(now)
        if self._may_linger():
            self._linger_due = self._linger_due or now + LINGER_NS
            if now < self._linger_due:
                return
        self._linger_due, self._is_urgent = None, False
        gathered, self._gathered = self._gathered, []
        if not self._held:
            self._next_forward += len(gathered)
            return
        if self._resend_due is None:
            self._resend_due = now + self._resend_after
        for start in range(0, len(gathered), MAX_FORWARD_DECISIONS):
            decisions = gathered[start : start + MAX_FORWARD_DECISIONS]
            first, self._next_forward = self._next_forward, self._next_forward + len(decisions)
            self._spread(first, decisions)

    def _may_linger(self) -> bool:
        """Whether nobody waits for what was gathered: no reader, and no backup that guesses wrong.

        To tell the backups costs as much as an insert, so in a calm shard it serves several.
        """
        return (
            not self._is_urgent
            and not self._state.is_followed
            and not self._frontier_waiters
            and not self._waiting
            and len(self._calm) == len(self._held)
            and len(self._gathered) < MAX_LINGERING
        )

    def _spread(self, first: int, decisions: list[Decision]) -> None:
        """Tell all backups decisions, and what is stable."""
        self._spread_stable = self._state.stream.stable
        self._spread_due = None
        self._forward(self._state.peers, first, decisions)

    def _forward(self, dsts: tuple[bytes, ...], first: int, decisions: list[Decision]) -> None:
        state, stream = self._state, self._state.stream
        state.broadcast(
            dsts,
            Forward(
                state.cluster, state.shard, state.view, state.incarnation, first, decisions,
                stream.stable, stream.durable,
            ),
        )  # fmt: skip

    def reported(self, report: Report, now: int) -> None:
        """Take a backup's report of what it holds."""
        server = report.server
        if server not in self._held:
            return
        if report.hurry:
            self._calm.discard(server)
        else:
            self._calm.add(server)
        last = self._state.stream.last
        held, durable = min(report.held, last), min(report.durable, last)
        if held <= self._held[server] and durable <= self._durable[server]:
            return
        self._held[server] = max(self._held[server], held)
        self._durable[server] = max(self._durable[server], durable)
        self._resend_after = RESEND_AFTER_NS
        lowest = min(*self._held.values(), *self._durable.values())
        is_complete = lowest + 1 >= self._next_forward
        self._resend_due = None if is_complete else now + self._resend_after

    def persisted(self, fseq: int, now: int) -> None:
        """Take the news that this server's own entries are on stable storage."""
        self._own_durable = max(self._own_durable, fseq)
        if self._waiting:
            self._admit_waiting(now)

    def stabilise(self, now: int) -> list[Entry]:
        """Move the watermarks as far as all reports allow; return what became stable."""
        stream = self._state.stream
        # Alone, at level `disk`, only what is on its disk: what is stable may be told at once.
        alone = self._own_durable if self._state.config.durability == "disk" else stream.last
        news = stream.stabilise(min(self._held.values(), default=alone))
        stream.make_durable(min([self._own_durable, *self._durable.values()]))
        if self._sync_waiters:
            self._answer_syncs()
        if news:
            if self._frontier_waiters:
                self._answer_waiters()
            self._admit_waiting(now)
            self._fill_wanted()
            if self._held and self._spread_due is None and self._spread_stable < stream.stable:
                self._spread_due = now + SPREAD_AFTER_NS
        return news

    def resend(self, route: bytes, request: Resend) -> None:
        """Send a backup the part of the stream that it misses."""
        self._send_again(route, request.first, request.bodies)

    def _send_again(self, dst: bytes, first: int, bodies: int) -> None:
        """Send one backup decisions again, or if there are none, what is stable."""
        if first <= self._state.stream.stable:
            return  # everybody has it: the question is old
        decisions: list[Decision] = []
        size = 0
        for entry in self._state.stream.after(first - 1)[:MAX_FORWARD_DECISIONS]:
            decision = entry.decision
            assert not isinstance(decision, Mark | Table), "a mark takes no position of the stream"
            if type(decision) is Place:
                if len(decisions) < bodies:
                    size += len(decision.body or b"")
                    if decisions and size > MAX_FORWARD_BYTES:
                        break
                else:
                    decision = _without_body(decision)
            decisions.append(decision)
        self._forward((dst,), first, decisions)

    # --- time ---

    def woke(self, now: int) -> None:
        """Do what has become due."""
        if self._ask_due is not None and now >= self._ask_due:
            self._ask(now)
        if self._waiting:
            self._admit_waiting(now)
        if self._is_watched(now) or now - self._placed_at < STREAM_FLOWS_NS:
            self._skip_to(self._floor(now))
        if self._resend_due is not None and now >= self._resend_due:
            self._resend_after = min(self._resend_after * 2, MAX_RESEND_AFTER_NS)
            self._resend_due = now + self._resend_after
            self._repeat()
        if self._spread_due is not None and now >= self._spread_due:
            self._spread(self._next_forward, [])

    def _repeat(self) -> None:
        """Send every backup again what it has not reported."""
        for server, held in self._held.items():
            if min(held, self._durable[server]) + 1 < self._next_forward:
                name = self._state.config.replicas[server].name.encode()
                self._send_again(name, held + 1, 0)

    def expire_sessions(self, now: int) -> None:
        """Forget the clients that were silent for too long, and what of theirs still waits."""
        state = self._state
        for session in state.sessions.silent(now, state.config.session_timeout_s * 1000 * _MS):
            if not self._may_skip():
                return
            for unit in [u for u in session.units.values() if u.gsns is None]:
                self._forget(unit)
            state.sessions.expire(session.client)
            self._decide(Expire(session.client))

    def next_wakeup(self, now: int) -> int | None:
        """Return when something becomes due."""
        earliest = _NEVER
        for due in (self._ask_due, self._spread_due, self._resend_due, self._linger_due):
            if due is not None and due < earliest:
                earliest = due
        turn = self._next_end(now)
        if turn is not None and turn < earliest:
            earliest = turn
        return earliest if earliest != _NEVER else None

    def _next_end(self, now: int) -> int | None:
        """Return when an epoch or a lease has to be ended, at the latest."""
        clock, gap = self._state.clock, now - self._placed_at
        late = TURN_LATE_NS if gap < TURN_LATE_NS else 0
        if self._waiting or self._is_watched(now):
            turn = clock.next_turn(now - late)
        else:
            turn = clock.next_begin if gap < STREAM_FLOWS_NS else None
        return None if turn is None else turn + late

    def check(self) -> None:
        """Assert the invariants."""
        undecided: dict[_Key, HeldUnit] = {}
        for session in self._state.sessions.by_client.values():
            for unit in session.units.values():
                assert unit.confirmed or unit.gsns is None, "a primary guesses nothing"
                if unit.gsns is None:
                    undecided[unit.client, unit.seq] = unit
        assert self._undecided_units == len(undecided)
        assert self._undecided_bytes == sum(len(unit.body) for unit in undecided.values())
        for session in self._state.sessions.by_client.values():
            for seq, units in session.followers.items():
                assert not session.is_placed(seq), "a follower was forgotten"
                for unit in units:
                    assert undecided.pop((unit.client, unit.seq)) is unit
        for waiting in (self._waiting, self._beyond):
            for key, unit in waiting.items():
                assert undecided.pop(key) is unit, "a unit waits twice, or was forgotten"
        assert not undecided, "a unit without slots waits nowhere"
        assert self._next_forward + len(self._gathered) == self._state.stream.last + 1


def _without_body(place: Place) -> Place:
    return Place(place.client, place.seq, place.done_below, place.epoch, place.gsns, place.checksum)
