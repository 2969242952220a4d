"""The primary: decides the positions of units, and so the order of the shard (D6).

A unit is: accepted -> (waits for its predecessor, a lease, or room) -> placed -> stable. The
primary numbers its decisions and forwards them to the backups at the end of each batch. Their
reports advance the watermarks. In a view, only the primary makes no-ops (docs/protocol.md,
sections 3 to 5).

Invariant: decisions are in increasing gsn order, and a placed unit never moves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from shard.ordering.admission import refuse_permanently
from shard.ordering.awaiting_lease import UnitsAwaitingLease
from shard.ordering.epoch_closer import EpochCloser
from shard.ordering.forwards import Forwards
from shard.ordering.progress import BackupProgress
from shard.ordering.waiters import Waiters
from shard.ordering.watermarks import Watermarks
from shard.state.replica_state import MAX_BACKLOG_BYTES
from ziplog.core.entries import Expire, Place, Skip
from ziplog.core.units import NEVER

if TYPE_CHECKING:
    from shard.ordering.lag_fix import LagFix
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import HeldUnit, Session
    from ziplog.core.entries import Decision
    from ziplog.segments.entry import Entry
    from ziplog.wire import LeaseHistory, RefusalCode, Report, Sync, Want

_Key = tuple[bytes, int]

#: Most bytes and units that wait; above this, new units are refused.
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
MAX_WAITING_UNITS: Final = 65_536


class Primary:
    """The primary's part of a replica."""

    def __init__(self, state: ReplicaState, lag_fix: LagFix) -> None:
        self._state: Final = state
        self._lag_fix: Final = lag_fix
        self._backups: Final = BackupProgress(state)
        state.counters.replicated = self._backups.held
        self._epoch_closer: Final = EpochCloser(state)
        self._watermarks: Final = Watermarks(state)
        self._waiters: Final = Waiters(state)
        self._forwards: Final = Forwards(state, self._backups, self._watermarks, self._waiters)
        #: Units without slots: waiting here, for a lease, or in their sessions as successors.
        self._undecided_units = 0
        self._undecided_bytes = 0
        #: Units that wait for room or for the next lease, in order of arrival.
        self._waiting: OrderedDict[_Key, HeldUnit] = OrderedDict()
        #: Units that name an `after` beyond the leases held.
        self._awaiting_lease: Final = UnitsAwaitingLease(state)
        #: The highest gsn that a reader wants decided.
        self._wanted = 0
        #: The highest wanted gsn beyond the leases held; 0: none.
        self._wanted_later = 0

    @property
    def has_undecided(self) -> bool:
        """Whether a unit waits for its slots."""
        return self._undecided_units > 0

    def restore(self) -> None:
        """Restore after a restart: units wait again, unstable entries are forwarded again."""
        for session in self._state.sessions.by_client.values():
            for unit in session.units.values():
                if not unit.has_slots:
                    self._undecided_units += 1
                    self._undecided_bytes += len(unit.body)
                    if session.has_slots(unit.predecessor):
                        self._waiting[unit.client, unit.seq] = unit
                    else:
                        session.successors.setdefault(unit.predecessor, []).append(unit)
        self._forwards.restore()

    # --- inserts ---

    def can_accept(self) -> bool:
        """Whether there is room for another unit."""
        has_room = self._undecided_bytes <= MAX_WAITING_BYTES
        return has_room and self._undecided_units < MAX_WAITING_UNITS

    def accept(self, session: Session, unit: HeldUnit, now: int) -> None:
        """Place a new unit, or let it wait."""
        self._undecided_units += 1
        self._undecided_bytes += len(unit.body)
        if unit.predecessor and not session.has_slots(unit.predecessor):
            session.successors.setdefault(unit.predecessor, []).append(unit)
        elif self._waiting or not self._has_room() or not self._place(unit, now):
            self._waiting[unit.client, unit.seq] = unit
        if self._waiting:
            self._place_waiting(now)

    def plain_until(self, now: int) -> int:
        """Return the time until which no unit waits and no epoch has to be closed; 0: not now."""
        self._forwards.before_plain()
        return 0 if self._undecided_units else self._epoch_closer.open_until(now)

    def accept_plain(self, session: Session, unit: HeldUnit, now: int) -> bool:
        """Place a new unit at the end of the stream, if it may be there and there is room."""
        stream, clock = self._state.stream, self._state.clock
        end, count = stream.end, unit.count
        if unit.after >= end or not self._has_room():
            return False
        gsns = [clock.next_owned(end)] if count == 1 else clock.first_slots(end, count)
        if not gsns or gsns[0] >= clock.limit or (count > 1 and clock.next_owned(end) < gsns[0]):
            return False
        session.units[unit.seq] = unit
        self._epoch_closer.last_activity_at = now
        self._record_place(session, unit, gsns)
        self._forwards.linger(now)
        return True

    @property
    def batch_end_due(self) -> int:
        """When a batch next needs `on_batch_end`, in ns."""
        return min(self._forwards.batch_end_due, self._lag_fix.due, self._watermarks.due)

    def on_copy(self, unit: HeldUnit, _since: int) -> None:
        """Handle another copy of a known unit: ack its slots again."""
        if unit.has_slots:
            self._state.ack(unit)

    def on_settled(self, session: Session, first_incomplete: int, now: int) -> None:
        """Forget the units below the client's `first_incomplete`, and release their successors."""
        for unit in session.settle(first_incomplete):
            self._forget(unit)
        if session.successors:
            for seq in sorted(seq for seq in session.successors if seq < first_incomplete):
                self._release_successors(session, seq)
            self._place_waiting(now)

    def _release_successors(self, session: Session, seq: int) -> None:
        """Move the successors of a unit to the units that wait for room."""
        for unit in session.successors.pop(seq, ()):
            if session.units.get(unit.seq) is unit:
                self._waiting[unit.client, unit.seq] = unit

    def _forget(self, unit: HeldUnit) -> None:
        """Stop tracking an undecided unit that was removed from its session."""
        self._undecided_units -= 1
        self._undecided_bytes -= len(unit.body)
        self._waiting.pop((unit.client, unit.seq), None)
        self._awaiting_lease.remove(unit)

    def _reject(self, unit: HeldUnit, code: RefusalCode, detail: str) -> None:
        """Refuse an accepted unit, and all its successors."""
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
        state = self._state
        return (
            self._forwards.has_room
            and state.is_compared
            and state.store.backlog_bytes < MAX_BACKLOG_BYTES
        )

    def _place(self, unit: HeldUnit, now: int) -> bool:
        """Decide the unit's positions; return False if it must wait in order for a lease."""
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
        self._undecided_units -= 1
        self._undecided_bytes -= len(unit.body)
        session = state.sessions.by_client[unit.client]
        self._record_place(session, unit, gsns)
        state.ack(unit)
        if session.successors:
            self._release_successors(session, unit.seq)
        return True

    def _record_place(self, session: Session, unit: HeldUnit, gsns: list[int]) -> None:
        """Record the decision that a unit is at these positions."""
        state = self._state
        epoch = state.clock.epoch_at(gsns[0])
        place = Place(
            unit.client, unit.seq, session.first_incomplete, epoch, gsns, unit.checksum, unit.body
        )
        state.record(place)
        self._forwards.gathered.append(place)
        state.placed_records += unit.count
        state.placed_bytes += len(unit.body)
        session.confirm(unit, gsns)
        if unit.sealed:
            state.raise_awaited(unit.client, gsns[-1])
            self._forwards.hasten()
            self._lag_fix.on_append()
        if unit.count > 1:
            state.sessions.schedule_packing(unit)

    def _defer_or_reject(self, unit: HeldUnit, floor: int, now: int) -> bool:
        """Handle a unit that gets no slots now; return False if it must wait in order."""
        clock = self._state.clock
        if 0 < clock.epoch_slots < unit.count:
            detail = f"an epoch has {clock.epoch_slots} positions of this shard"
            self._reject(unit, "too-large", detail)
            return True
        if unit.after < clock.limit and not clock.first_slots(floor, unit.count):
            return False
        # Only its own `after` delays it: later units need not wait for it.
        if self._state.is_leaving:
            self._reject(unit, "redirect", f"the shard leaves before {unit.after}")
            return True
        self._awaiting_lease.add(unit, now)
        return True

    def _decide(self, decision: Decision) -> None:
        self._state.record(decision)
        self._forwards.gathered.append(decision)
        self._forwards.hasten()

    def _place_waiting(self, now: int) -> None:
        """Place waiting units, as far as there are room and leases."""
        waiting = self._waiting
        while waiting and self._has_room():
            key, unit = waiting.popitem(last=False)
            if not self._place(unit, now):
                waiting[key] = unit
                waiting.move_to_end(key, last=False)
                return

    # --- leases ---

    def decide_waiting(self, now: int) -> None:
        """Place the units and decide the positions that waited for a lease, or for a comparison."""
        self._waiting.update(self._awaiting_lease.pop_all())
        self._place_waiting(now)
        if 0 < self._wanted_later < self._state.clock.limit:
            self._wanted, self._wanted_later = max(self._wanted, self._wanted_later), 0
        self._decide_wanted(now)

    def on_no_positions(self, now: int) -> None:
        """Turn the remaining positions into no-ops, and refuse all waiting units."""
        state = self._state
        self._skip_to(state.clock.current_lease_base(now))
        for session in state.sessions.by_client.values():
            session.successors.clear()
            for unit in [unit for unit in session.units.values() if not unit.has_slots]:
                self._reject(unit, "redirect", "the shard has no more positions")

    def on_lease_history(self, history: LeaseHistory) -> bool:
        """Handle a reply to a `LeaseQuery`: refuse units that name a position that does not exist.

        Returns whether the position exists, in leases that this server does not hold.
        """
        units = self._awaiting_lease.on_history(history)
        if not history.runs:
            for unit in units:
                detail = f"position {unit.after} was never assigned"
                self._reject(unit, "no-such-position", detail)
        return bool(history.runs and units)

    # --- readers that wait ---

    def on_want(self, route: bytes, want: Want, now: int) -> None:
        """Decide all positions up to the wanted one, and reply when they are stable (D49).

        A gsn that the next lease may have waits for that lease; one further off is ignored: the
        reader repeats its want. Without lag-fix, a want without a request number closes no epoch
        early.
        """
        state = self._state
        state.last_want = now
        if want.gsn >= state.clock.limit:
            last = state.clock.last
            if last is not None and want.gsn - state.clock.limit < last.stop - last.base:
                self._wanted_later = max(self._wanted_later, want.gsn)
            return
        if not want.request and not state.config.lag_fix:
            self._skip_to(self._epoch_closer.min_gsn(now))
            return
        self._wanted = max(self._wanted, want.gsn)
        self._decide_wanted(now)
        self._waiters.on_want(route, want)
        if self._forwards.gathered:
            self._forwards.hasten()
        lacks_reports = bool(state.awaiting) and not self._forwards.has_requested_reports
        if (self._waiters or lacks_reports) and state.stream.stable < state.stream.last:
            self._watermarks.due = now  # The forward requests the reports at once.

    def _decide_wanted(self, now: int) -> None:
        """Decide all positions up to the highest wanted one, in one range."""
        self._skip_until(self._wanted + 1, now)

    def on_ahead_hint(self, gsn: int, now: int) -> None:
        """Handle a hint: another shard has a record at `gsn`, and its readers wait for this one."""
        state = self._state
        if gsn < state.clock.limit:  # else the position may not exist
            self._lag_fix.on_hint(gsn)
            if state.has_readers(now):
                self._skip_until(gsn, now)

    def _skip_until(self, stop: int, now: int) -> None:
        """Turn undecided positions below `stop` into no-ops before their epoch ends; count them."""
        stream, clock = self._state.stream, self._state.clock
        end = stream.end
        self._skip_to(stop)
        lease = clock.lease_of(stop)
        if stream.end > end and lease is not None and lease.view_of(clock.shard) is not None:
            self._epoch_closer.last_activity_at = now
            start = max(end, lease.epoch_base(lease.epoch_at(stop)))
            self._state.holes += lease.slot(clock.shard, stop) - lease.slot(clock.shard, start)

    def _skip_to(self, stop: int) -> None:
        """Turn all undecided owned positions below `stop` into no-ops."""
        end, clock = self._state.stream.end, self._state.clock
        if stop > end and self._epoch_closer.can_skip() and clock.next_owned(end) < stop:
            self._decide(Skip(end, stop))

    def on_sync(self, route: bytes, sync: Sync) -> None:
        """Reply when all records up to a gsn are on stable storage at all replicas."""
        self._waiters.on_sync(route, sync)

    # --- the stream to the backups ---

    def newly_stable(self, now: int) -> list[Entry]:
        """Return what became stable with this batch: without backups, all decisions."""
        return [] if self._backups.held else self.stabilise(now)

    def on_batch_end(self, now: int) -> None:
        """Forward the decisions made since the last batch, unless they may linger."""
        is_followed = self._state.has_followers or self._backups.is_followed
        self._lag_fix.on_batch_end(now, is_followed=is_followed)
        if self._forwards.gathered:
            self._skip_to(self._epoch_closer.first_open_gsn(now, now))
            self._forwards.on_batch_end(now, units_wait=bool(self._waiting))

    def resend(self, dst: bytes, first: int, bodies: int) -> None:
        """Send one backup decisions again, the first `bodies` records with their bodies."""
        self._forwards.resend(dst, first, bodies)

    def on_report(self, report: Report, now: int) -> None:
        """Handle a backup's report of the entries that it holds."""
        if report.server in self._backups.held and self._backups.on_report(report, now):
            self._forwards.on_progress(now)

    def on_persisted(self, fseq: int, now: int) -> None:
        """Record that this server's own entries up to `fseq` are on stable storage."""
        is_awaited = self._backups.has_subscribers and len(self._backups.held) == 1
        self._watermarks.on_persisted(fseq, now, is_awaited=is_awaited)
        if self._waiting:
            self._place_waiting(now)

    def stabilise(self, now: int) -> list[Entry]:
        """Advance the watermarks as far as all reports allow; return what became stable."""
        stream, watermarks = self._state.stream, self._watermarks
        news = stream.stabilise(min([watermarks.held, *self._backups.held.values()]))
        stream.make_durable(min([watermarks.on_disk, *self._backups.durable.values()]))
        self._waiters.on_durable()
        if news:
            self._waiters.on_frontier()
            self._place_waiting(now)
            self._decide_wanted(now)
        if self._state.has_no_positions:
            self._skip_to(self._state.clock.current_lease_base(now))
        if self._backups.held:
            watermarks.on_stable(now)
        return news

    # --- time ---

    def tick(self, now: int) -> None:
        """Perform the actions that are due."""
        if now >= self._awaiting_lease.due:
            self._awaiting_lease.send_queries(now)
        if self._waiting:
            self._place_waiting(now)
        self._skip_to(self._epoch_closer.close_due(now))
        self._forwards.tick(now)

    def expire_sessions(self, now: int) -> None:
        """Expire idle sessions, and drop their waiting units.

        If there are many sessions, also evict idle ones without units.
        """
        state = self._state
        if state.shard_state not in {"live", "parked"}:
            return  # add no entries to the log of a leaving or finalized shard
        for session in [*state.sessions.idle(now), *state.sessions.evictable(now)]:
            if not self._epoch_closer.can_skip():
                return
            for unit in [u for u in session.units.values() if not u.has_slots]:
                self._forget(unit)
            state.sessions.expire(session.client)
            self._decide(Expire(session.client, state.sessions.horizon))

    def next_wakeup(self, now: int) -> int | None:
        """Return the time of the next action, in ns; None: none is due."""
        due = min(self._awaiting_lease.due, self._forwards.due, self._lag_fix.due)
        close_at = self._epoch_closer.next_close_at(now, is_awaited=bool(self._waiting))
        if close_at is not None:
            due = min(due, close_at)
        return due if due < NEVER else None

    def check(self) -> None:
        """Assert the invariants."""
        undecided: dict[_Key, HeldUnit] = {}
        for session in self._state.sessions.by_client.values():
            for unit in session.units.values():
                if not unit.confirmed:
                    assert unit.gsns is None, "a primary guesses nothing"
                    undecided[unit.client, unit.seq] = unit
        assert self._undecided_units == len(undecided)
        assert self._undecided_bytes == sum(len(unit.body) for unit in undecided.values())
        for session in self._state.sessions.by_client.values():
            for seq, units in session.successors.items():
                assert not session.has_slots(seq), "a successor was forgotten"
                for unit in units:
                    assert undecided.pop((unit.client, unit.seq)) is unit
        for waiting in (self._waiting, self._awaiting_lease.units):
            for key, unit in waiting.items():
                assert undecided.pop(key) is unit, "a unit waits twice, or was forgotten"
        assert not undecided, "a unit without slots is not waiting"
        self._forwards.check()
