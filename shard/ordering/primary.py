"""The primary: it decides which positions units get, and its order is the shard's (D6).

A unit goes through: arrived -> (waits for its predecessor, its lease, or room) -> placed -> stable.
Decisions are numbered and forwarded to the backups at the end of each batch; reports come back and
move the stable watermark. Only the primary makes no-ops. docs/protocol.md, sections 3 to 5.

Invariant: decisions go upwards in gsn, and a placed unit never moves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from shard.ordering.admission import refuse_permanently
from shard.ordering.awaiting_lease import UnitsAwaitingLease
from shard.ordering.epoch_closer import EpochCloser
from shard.ordering.waiters import Waiters
from shard.state.decision_log import SUBSCRIBERS_EXPIRY_NS
from ziplog.core.entries import Expire, Place, Skip
from ziplog.segments.entry import SessionTablePartRecord, SessionTableRecord, WatermarkRecord
from ziplog.wire import Forward, Report, Resend

if TYPE_CHECKING:
    from shard.ordering.lag_fix import LagFix
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import HeldUnit, Session
    from ziplog.core.entries import Decision
    from ziplog.segments.entry import Entry
    from ziplog.wire import LeaseHistory, RefusalCode, Sync, Want

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
WATERMARK_DELAY_NS: Final = 5 * _MS
#: In a calm shard decisions wait so long for others, and are never more, before they are forwarded.
LINGER_NS: Final = 1 * _MS
MAX_LINGERING: Final = 64
_NEVER: Final = 2**63


class Primary:
    """The primary's part of a replica."""

    def __init__(self, state: ReplicaState, lag_fix: LagFix) -> None:
        self._state: Final = state
        self._lag_fix: Final = lag_fix
        #: What each backup holds, in memory and on stable storage, by its index.
        backups = range(1, len(state.config.replicas))
        self._replicated: Final = dict.fromkeys(backups, state.stream.stable)
        self._durable: Final = dict.fromkeys(backups, state.stream.durable)
        self._own_durable = state.stream.last
        #: The next decision that was not forwarded yet.
        self._next_forward = state.stream.stable + 1
        self._unforwarded: list[Decision] = []
        #: What was gathered has to go out with this batch.
        self._forward_now = False
        #: When it goes out at the latest; None while nothing lingers.
        self._linger_due: int | None = None
        #: The backups that are in no hurry to hear of decisions.
        self._batching_backups: Final[set[int]] = set()
        #: Backups with subscribers, and until when that counts.
        self._subscribed_backups: Final[dict[int, int]] = {}
        self._epoch_closer: Final = EpochCloser(state)
        #: When to send again what was not reported; None while everything is.
        self._resend_due: int | None = None
        self._resend_after = RESEND_AFTER_NS
        #: What the backups were told last.
        self._sent_stable = self._sent_durable = 0
        self._watermarks_due: int | None = None
        #: Units without slots, wherever they wait; their followers wait in their sessions.
        self._undecided_units = 0
        self._undecided_bytes = 0
        #: Those that wait for room or for a lease, in order of arrival.
        self._waiting: OrderedDict[_Key, HeldUnit] = OrderedDict()
        #: Those whose `after` leaves them nothing in the leases held.
        self._awaiting_lease: Final = UnitsAwaitingLease(state)
        #: Up to which gsn somebody waits for this shard to decide.
        self._wanted = 0
        self._waiters: Final = Waiters(state)

    @property
    def has_backups(self) -> bool:
        """Whether what is decided is not stable at once (f > 0)."""
        return bool(self._replicated)

    @property
    def has_undecided(self) -> bool:
        """Whether a unit waits for its slots."""
        return self._undecided_units > 0

    def restore(self) -> None:
        """After a restart: units that were waiting wait again, and all unstable is forwarded."""
        for session in self._state.sessions.by_client.values():
            for unit in session.units.values():
                if not unit.is_placed:
                    self._undecided_units += 1
                    self._undecided_bytes += len(unit.body)
                    if session.is_placed(unit.predecessor):
                        self._waiting[unit.client, unit.seq] = unit
                    else:
                        session.successors.setdefault(unit.predecessor, []).append(unit)
        self._unforwarded = [
            _without_body(d) if type(d) is Place else d
            for d in (entry.decision for entry in self._state.stream.window)
            if not isinstance(d, WatermarkRecord | SessionTableRecord | SessionTablePartRecord)
        ]
        self._forward_now = True

    # --- inserts ---

    def accept(self, session: Session, unit: HeldUnit, now: int) -> bool:
        """Take a unit that this server has not seen before; False: there is no room for it."""
        if (
            self._undecided_bytes > MAX_WAITING_BYTES
            or self._undecided_units >= MAX_WAITING_UNITS
        ):  # fmt: skip
            del session.units[unit.seq]
            return False
        self._undecided_units += 1
        self._undecided_bytes += len(unit.body)
        if unit.predecessor and not session.is_placed(unit.predecessor):
            session.successors.setdefault(unit.predecessor, []).append(unit)
        elif self._waiting or not self._has_room() or not self._place(unit, now):
            self._waiting[unit.client, unit.seq] = unit
        if self._waiting:
            self._place_waiting(now)
        return True

    def on_copy(self, unit: HeldUnit, _since: int) -> None:
        """Take another copy of a known unit: say again where it is."""
        if unit.is_placed:
            self._state.ack(unit)

    def on_settled(self, session: Session, first_incomplete: int, now: int) -> None:
        """Forget what the client calls settled; nothing waits for it any more."""
        for unit in session.settle(first_incomplete):
            self._forget(unit)
        if session.successors:
            for seq in sorted(seq for seq in session.successors if seq < first_incomplete):
                self._release_successors(session, seq)
            self._place_waiting(now)

    def _release_successors(self, session: Session, seq: int) -> None:
        """Let the followers of a unit wait for room only."""
        for unit in session.successors.pop(seq, ()):
            if session.units.get(unit.seq) is unit:
                self._waiting[unit.client, unit.seq] = unit

    def _forget(self, unit: HeldUnit) -> None:
        """Count a unit no more that was taken out of its session undecided."""
        self._undecided_units -= 1
        self._undecided_bytes -= len(unit.body)
        self._waiting.pop((unit.client, unit.seq), None)
        self._awaiting_lease.remove(unit)

    def _reject(self, unit: HeldUnit, code: RefusalCode, detail: str) -> None:
        """Refuse a unit that was taken, and all that wait for it."""
        state = self._state
        session = state.sessions.by_client[unit.client]
        is_for_good = code == "redirect"
        rejected = [unit]
        for victim in rejected:
            rejected += session.successors.pop(victim.seq, ())
            if session.units.get(victim.seq) is victim:
                del session.units[victim.seq]
                self._forget(victim)
                if is_for_good:
                    refuse_permanently(state, victim.route, session, victim.seq, detail)
                elif victim.route:
                    state.refuse(victim.route, victim.seq, code, detail)

    def _has_room(self) -> bool:
        stream = self._state.stream
        return (
            stream.window_records < MAX_UNSTABLE_RECORDS
            and stream.window_bytes < MAX_UNSTABLE_BYTES
            and self._state.store.backlog_bytes < MAX_BACKLOG_BYTES
        )

    def _can_skip(self) -> bool:
        """Whether no-ops may be decided: who cannot take what was decided needs no more of them.

        In a finalized shard nothing is left to decide, also if this server has missed leases.
        """
        stream = self._state.stream
        is_finalized = self._state.shard_state == "finalized"
        return stream.last - stream.stable < MAX_UNSTABLE_DECISIONS and not is_finalized

    def _place(self, unit: HeldUnit, now: int) -> bool:
        """Decide the unit's positions; False if it has to wait in line for a lease."""
        state, stream = self._state, self._state.stream
        clock = state.clock
        floor = max(self._epoch_closer.min_gsn(now), stream.end)
        self._epoch_closer.last_activity_at = now
        after = unit.after
        gsns = clock.first_slots(max(floor, after + 1), unit.count) if after < clock.limit else []
        if not gsns:
            return self._defer_or_reject(unit, floor, now)
        if clock.next_owned(stream.end) < gsns[0]:
            self._decide(Skip(stream.end, gsns[0]))
        session = state.sessions.by_client[unit.client]
        epoch = clock.epoch_at(gsns[0])
        place = Place(
            unit.client, unit.seq, session.first_incomplete, epoch, gsns, unit.checksum, unit.body
        )
        state.record(place)
        self._unforwarded.append(_without_body(place))
        self._undecided_units -= 1
        self._undecided_bytes -= len(unit.body)
        session.confirm(unit, gsns)
        if unit.count > 1:
            state.sessions.schedule_packing(unit)
        state.placed_records += unit.count
        state.ack(unit)
        if session.successors:
            self._release_successors(session, unit.seq)
        return True

    def _defer_or_reject(self, unit: HeldUnit, floor: int, now: int) -> bool:
        """Take a unit for which the leases held have nothing; False if it must wait in line."""
        clock = self._state.clock
        if 0 < clock.epoch_slots < unit.count:
            detail = f"an epoch has {clock.epoch_slots} positions of this shard"
            self._reject(unit, "too-large", detail)
            return True
        if unit.after < clock.limit and not clock.first_slots(floor, unit.count):
            return False
        # Only its own `after` is in its way: the others need not wait behind it.
        if self._state.is_leaving:
            self._reject(unit, "redirect", f"the shard leaves before {unit.after}")
            return True
        self._awaiting_lease.add(unit, now)
        return True

    def _decide(self, decision: Decision) -> None:
        self._state.record(decision)
        self._unforwarded.append(decision)
        self._forward_now = True

    def _place_waiting(self, now: int) -> None:
        """Place what was waiting, as far as there is room and lease for it."""
        waiting = self._waiting
        while waiting and self._has_room():
            key, unit = waiting.popitem(last=False)
            if not self._place(unit, now):
                waiting[key] = unit
                waiting.move_to_end(key, last=False)
                return

    # --- leases ---

    def on_lease(self, now: int) -> None:
        """Take the news that there is another lease."""
        self._waiting.update(self._awaiting_lease.pop_all())
        self._place_waiting(now)

    def on_no_positions(self, now: int) -> None:
        """Take the news that there are no more positions: the rest of them are no-ops."""
        state = self._state
        self._skip_to(state.clock.current_lease_base(now))
        for session in state.sessions.by_client.values():
            session.successors.clear()
            for unit in [unit for unit in session.units.values() if not unit.is_placed]:
                self._reject(unit, "redirect", "the shard has no more positions")

    def on_lease_history(self, history: LeaseHistory) -> bool:
        """Take an answer: positions that nobody was ever given are refused.

        Returns whether the leases exist, and this server has not heard of them.
        """
        units = self._awaiting_lease.on_history(history)
        if not history.runs:
            for unit in units:
                detail = f"nobody was ever given {unit.after}"
                self._reject(unit, "no-such-position", detail)
        return bool(history.runs and units)

    # --- readers that wait ---

    def on_want(self, route: bytes, want: Want, now: int) -> None:
        """Decide all positions up to the wanted one, and answer when they are stable (D49).

        A gsn beyond the leases held is let be: who waits for it asks again. Without lag-fix, a
        reader (who needs no answer) has nothing decided before the end of an epoch.
        """
        state = self._state
        state.last_want = now
        if want.gsn >= state.clock.limit:
            return
        if not want.request and not state.config.lag_fix:
            self._skip_to(self._epoch_closer.min_gsn(now))
            return
        self._wanted = max(self._wanted, want.gsn)
        self._decide_wanted(now)
        self._waiters.on_want(route, want)

    def _decide_wanted(self, now: int) -> None:
        """Decide up to where somebody waits, in one range."""
        self._skip_until(self._wanted + 1, now)

    def on_ahead_hint(self, gsn: int, now: int) -> None:
        """Take a hint that another shard has a record at `gsn`: its readers wait for this one."""
        state = self._state
        if gsn >= state.clock.limit:
            return  # it may be no position at all
        self._lag_fix.on_hint(gsn)
        if state.has_readers(now):
            self._skip_until(gsn, now)

    def _skip_until(self, stop: int, now: int) -> None:
        """Decide that what is left below `stop` gets no records, before its epoch is over."""
        stream, clock = self._state.stream, self._state.clock
        end = stream.end
        self._skip_to(stop)
        lease = clock.lease_of(stop)
        if stream.end > end and lease is not None and lease.view_of(clock.shard) is not None:
            self._epoch_closer.last_activity_at = now
            start = max(end, lease.epoch_base(lease.epoch_at(stop)))
            self._state.holes += lease.slot(clock.shard, stop) - lease.slot(clock.shard, start)

    def _skip_to(self, stop: int) -> None:
        """Decide that all owned positions below `stop` that are not decided yet are no-ops."""
        end = self._state.stream.end
        if stop > end and self._can_skip() and self._state.clock.next_owned(end) < stop:
            self._decide(Skip(end, stop))

    def on_sync(self, route: bytes, sync: Sync) -> None:
        """Answer when all up to a gsn is on stable storage at all replicas."""
        self._waiters.on_sync(route, sync)

    # --- the stream to the backups ---

    def on_batch_end(self, now: int) -> None:
        """Forward what was decided since the last batch."""
        self._lag_fix.on_batch_end(now)
        if not self._unforwarded:
            return
        self._skip_to(self._epoch_closer.first_open_gsn(now, now))
        if self._can_linger():
            self._linger_due = self._linger_due or now + LINGER_NS
            if now < self._linger_due:
                return
        self._linger_due, self._forward_now = None, False
        gathered, self._unforwarded = self._unforwarded, []
        if not self._replicated:
            self._next_forward += len(gathered)
            return
        if self._resend_due is None:
            self._resend_due = now + self._resend_after
        for start in range(0, len(gathered), MAX_FORWARD_DECISIONS):
            decisions = gathered[start : start + MAX_FORWARD_DECISIONS]
            first, self._next_forward = self._next_forward, self._next_forward + len(decisions)
            self._broadcast(first, decisions)

    def _can_linger(self) -> bool:
        """Whether nobody waits for what was gathered: no reader, and no backup that guesses wrong.

        To tell the backups costs as much as an insert, so in a calm shard it serves several.
        """
        return (
            not self._forward_now
            and not self._state.has_subscribers
            and not self._waiters.wait_for_frontier
            and not self._waiting
            and len(self._batching_backups) == len(self._replicated)
            and len(self._unforwarded) < MAX_LINGERING
        )

    def _broadcast(self, first: int, decisions: list[Decision]) -> None:
        """Tell all backups decisions, and what is stable."""
        self._sent_stable = self._state.stream.stable
        self._sent_durable = self._state.stream.durable
        self._watermarks_due = None
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

    def on_report(self, report: Report, now: int) -> None:
        """Take a backup's report of what it holds."""
        server = report.server
        if server not in self._replicated:
            return
        if report.forward_immediately:
            self._batching_backups.discard(server)
        else:
            self._batching_backups.add(server)
        if report.has_subscribers:
            self._subscribed_backups[server] = now + SUBSCRIBERS_EXPIRY_NS
            self._state.subscribers_until = max(self._subscribed_backups.values())
        elif self._subscribed_backups.pop(server, None) is not None:
            self._state.subscribers_until = max(self._subscribed_backups.values(), default=now)
        last = self._state.stream.last
        held, durable = min(report.replicated_up_to, last), min(report.durable, last)
        if held <= self._replicated[server] and durable <= self._durable[server]:
            return
        self._replicated[server] = max(self._replicated[server], held)
        self._durable[server] = max(self._durable[server], durable)
        self._resend_after = RESEND_AFTER_NS
        lowest = min(*self._replicated.values(), *self._durable.values())
        is_complete = lowest + 1 >= self._next_forward
        self._resend_due = None if is_complete else now + self._resend_after

    def on_persisted(self, fseq: int, now: int) -> None:
        """Take the news that this server's own entries are on stable storage."""
        self._own_durable = max(self._own_durable, fseq)
        if self._waiting:
            self._place_waiting(now)

    def stabilise(self, now: int) -> list[Entry]:
        """Move the watermarks as far as all reports allow; return what became stable."""
        stream = self._state.stream
        # Alone, at level `disk`, only what is on its disk: what is stable may be told at once.
        alone = self._own_durable if self._state.config.durability == "disk" else stream.last
        news = stream.stabilise(min(self._replicated.values(), default=alone))
        stream.make_durable(min([self._own_durable, *self._durable.values()]))
        self._waiters.on_durable()
        if news:
            self._waiters.on_frontier()
            self._place_waiting(now)
            self._decide_wanted(now)
        has_no_positions = self._state.has_no_positions
        if has_no_positions:
            self._skip_to(self._state.clock.current_lease_base(now))
        if self._replicated and self._watermarks_due is None and (
            self._sent_stable < stream.stable
            # The backups of a shard that has left are to know that all is on all disks.
            or (has_no_positions and self._sent_durable < stream.durable)
        ):  # fmt: skip
            self._watermarks_due = now + WATERMARK_DELAY_NS
        return news

    def on_resend(self, route: bytes, request: Resend) -> None:
        """Send a backup the part of the stream that it misses."""
        self._resend(route, request.first, request.bodies)

    def _resend(self, dst: bytes, first: int, bodies: int) -> None:
        """Send one backup decisions again, or if there are none, what is stable."""
        if first <= self._state.stream.stable:
            return  # everybody has it: the question is old
        decisions: list[Decision] = []
        size = 0
        for entry in self._state.stream.after(first - 1)[:MAX_FORWARD_DECISIONS]:
            decision = entry.decision
            assert not isinstance(
                decision, WatermarkRecord | SessionTableRecord | SessionTablePartRecord
            ), "a mark takes no position of the stream"
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

    def tick(self, now: int) -> None:
        """Do what has become due."""
        if self._awaiting_lease.due is not None and now >= self._awaiting_lease.due:
            self._awaiting_lease.send_queries(now)
        if self._waiting:
            self._place_waiting(now)
        self._skip_to(self._epoch_closer.close_due(now))
        if self._resend_due is not None and now >= self._resend_due:
            self._resend_after = min(self._resend_after * 2, MAX_RESEND_AFTER_NS)
            self._resend_due = now + self._resend_after
            self._retransmit()
        if self._watermarks_due is not None and now >= self._watermarks_due:
            self._broadcast(self._next_forward, [])

    def _retransmit(self) -> None:
        """Send every backup again what it has not reported."""
        for server, held in self._replicated.items():
            if min(held, self._durable[server]) + 1 < self._next_forward:
                name = self._state.config.replicas[server].name.encode()
                self._resend(name, held + 1, 0)

    def expire_sessions(self, now: int) -> None:
        """Forget the clients that were silent for too long, and what of theirs still waits.

        If there are many, also those that have nothing here.
        """
        state = self._state
        if state.shard_state not in {"live", "parked"}:
            return  # nothing is added to what is, or is to be, finalized, as far as is known
        for session in [*state.sessions.idle(now), *state.sessions.evictable(now)]:
            if not self._can_skip():
                return
            for unit in [u for u in session.units.values() if not u.is_placed]:
                self._forget(unit)
            state.sessions.expire(session.client)
            self._decide(Expire(session.client, state.sessions.horizon))

    def next_wakeup(self, now: int) -> int | None:
        """Return when something becomes due."""
        earliest = _NEVER
        for due in (
            self._awaiting_lease.due, self._watermarks_due, self._resend_due, self._linger_due,
            self._lag_fix.due,
        ):  # fmt: skip
            if due is not None and due < earliest:
                earliest = due
        turn = self._epoch_closer.next_close_at(now, is_awaited=bool(self._waiting))
        if turn is not None and turn < earliest:
            earliest = turn
        return earliest if earliest != _NEVER else None

    def check(self) -> None:
        """Assert the invariants."""
        undecided: dict[_Key, HeldUnit] = {}
        for session in self._state.sessions.by_client.values():
            for unit in session.units.values():
                assert unit.confirmed or unit.gsns is None, "a primary guesses nothing"
                if not unit.is_placed:
                    undecided[unit.client, unit.seq] = unit
        assert self._undecided_units == len(undecided)
        assert self._undecided_bytes == sum(len(unit.body) for unit in undecided.values())
        for session in self._state.sessions.by_client.values():
            for seq, units in session.successors.items():
                assert not session.is_placed(seq), "a follower was forgotten"
                for unit in units:
                    assert undecided.pop((unit.client, unit.seq)) is unit
        for waiting in (self._waiting, self._awaiting_lease.units):
            for key, unit in waiting.items():
                assert undecided.pop(key) is unit, "a unit waits twice, or was forgotten"
        assert not undecided, "a unit without slots waits nowhere"
        assert self._next_forward + len(self._unforwarded) == self._state.stream.last + 1


def _without_body(place: Place) -> Place:
    return Place(
        place.client, place.seq, place.first_incomplete, place.epoch, place.gsns, place.checksum
    )
