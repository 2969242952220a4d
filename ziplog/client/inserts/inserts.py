"""Inserts: from a call to acks that agree.

    call --policy--> queued at a shard --window--> sent --acks agree, or found--> settled
                                                    |--deadline--> doubtful --the same--> settled
                                                    '--nowhere--> moved, sent again, or failed

A call's payloads are cut into *units*; a unit is one `Insert`, identified by (client, seq), seq
counted per shard in a `ShardWindow`. Rules: a unit that was sent is repeated with the same identity at the
same shard, or asked for while that is away, until its fate is known, even when its call was
answered (D13); it is settled when the newest acks of all replicas, of one view, name the same gsns
(D8); it is nowhere if all replicas promised never to take a copy of it, or a view after theirs says
so; a later view is sent it only if nothing of its call can be behind it (rule 5). Invariant: open
seqs lie within the window that servers allow. See docs/protocol.md, sections 4 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.common.requests import NEVER
from ziplog.client.common.unknown_outcome import UnknownOutcomes
from ziplog.client.inserts import insert_errors
from ziplog.client.inserts.copies import MAX_BACKOFF_NS, Copies
from ziplog.client.inserts.inflight import MAX_INFLIGHT_BYTES, InflightUnit, InsertCall, ShardWindow
from ziplog.client.inserts.locate import LocateQueries, must_not_send
from ziplog.client.inserts.settling import SettledReports
from ziplog.client.inserts.shard_selector import ShardSelector
from ziplog.core.node import Broadcast
from ziplog.errors import (
    NoSuchRecordError,
    ProtocolError,
    RecordTooLargeError,
    ZiplogError,
)
from ziplog.types import RecordId
from ziplog.wire import Insert, InsertAck, Located, Refused

if TYPE_CHECKING:
    from ziplog.client.common.requests import InsertRequest, Policy
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.common.unknown_outcome import ResolveRequest, UnknownOutcome

_MS: Final = 1_000_000
#: Pause before a refused unit is sent again, doubling up to `MAX_BACKOFF_NS`.
_REFUSED_BACKOFF_NS: Final = 2 * _MS


class Inserts:
    """All inserts of a client."""

    def __init__(self, context: StepContext, routing: Routing, policy: Policy) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._calls: dict[int, InsertCall] = {}
        self.windows: Final[dict[int, ShardWindow]] = {}
        #: By shard, as the windows.
        self._locates: Final[dict[int, LocateQueries]] = {}
        self.shard_selector: Final = ShardSelector(context, routing, policy, self.windows)
        #: Batches whose shard is not live (or that have none), by call.
        self._unassigned: dict[int, InsertCall] = {}
        #: They are looked at with the next answer about where shards are.
        self._is_reassign_due = False
        self._outcomes: Final = UnknownOutcomes(context)
        self.settled_reports: Final = SettledReports(context, routing, self.windows)
        self._copies: Final = Copies(context, routing, self.shard_selector, self._reject)
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a call is under way."""
        return bool(self._calls or self._outcomes)

    # --- from the call to the wire ---

    def start(self, number: int, request: InsertRequest) -> None:
        """Take a call."""
        call = InsertCall(number, request)
        self._calls[number] = call
        self._context.set_timer(request.deadline)
        self._dispatch(call)

    def resolve(self, number: int, request: ResolveRequest) -> None:
        """Take the question what became of a call in doubt, and find out at once."""
        context, outcome = self._context, request.outcome
        if outcome.is_session_expired:
            context.complete(
                number, insert_errors.unknown_outcome_error(outcome, self.windows, self._routing)
            )
            return
        self._outcomes.start(number, request)
        window = self.windows[outcome.shard]
        self._locates[outcome.shard].expedite()
        for unit in window.inflight.values():
            if unit.outcome is outcome:
                unit.backoff = min(unit.backoff, window.retransmit_timeout.ns)
                unit.retransmit_at, unit.may_be_queued = context.now, False
        context.set_timer(context.now)

    def cancel(self, number: int) -> None:
        """The user waits no longer: what was sent is doubtful, the rest is dropped."""
        self._outcomes.cancel(number)
        call = self._calls.get(number)
        if call is not None:
            self._detach(call)

    def _dispatch(self, call: InsertCall) -> None:
        """Give a batch, none of whose open units can have been taken, to a shard."""
        shard = self._choose(call)
        if shard is not None:
            self._assign(call, shard)

    def _assign(self, call: InsertCall, shard: int) -> None:
        call.shard = shard
        if shard not in self._routing.live:
            self._unassigned[call.number] = call
            self._routing.refresh()
            return
        window = self.windows.get(shard)
        if window is None:
            since = self._routing.frontiers.get(shard, 0)
            window = self.windows[shard] = ShardWindow(shard, since)
            self._locates[shard] = LocateQueries()
        window.queue.append(call)
        if len(window.queue) == 1:
            self._fill(window)

    def _choose(self, call: InsertCall) -> int | None:
        """Ask the policy. None: it failed, and so did the call."""
        shard = self.shard_selector(call)
        if isinstance(shard, int):
            return shard
        self._fail(call, shard)
        return None

    def _fill(self, window: ShardWindow) -> None:
        """Send queued units as far as the window allows, call by call in turns."""
        route = self._routing.route(window.shard)
        if route is None or route.is_unavailable:
            return
        queue, max_units = window.queue, self._routing.limits.max_unsettled_units
        while (
            queue
            and window.bytes < MAX_INFLIGHT_BYTES
            and (not window.inflight or window.next_seq - next(iter(window.inflight)) < max_units)
        ):
            call = queue[0]
            self._launch(window, call, route)
            if call.sent == len(call.unit_ranges) or call.is_sequential:
                queue.popleft()  # one that goes step by step is back when the step is done
            elif len(queue) > 1:
                queue.rotate(-1)

    def _launch(self, window: ShardWindow, call: InsertCall, route: Route) -> None:
        context = self._context
        start, stop = call.unit_ranges[call.sent]
        body = call.body(start, stop)
        if not call.sent:
            call.since = window.since
        seq = window.next_seq
        message = Insert(
            self._routing.cluster, window.shard, route.view, context.client, seq, window.first_incomplete,
            call.previous, call.floor, stop - start, body, 1, call.since,
        )  # fmt: skip
        unit = InflightUnit(call, call.sent, message, route, context.now)
        unit.backoff = window.retransmit_timeout.ns
        unit.retransmit_at = context.now + unit.backoff
        context.set_timer(unit.retransmit_at)
        window.route = route
        window.next_seq = seq + 1
        window.inflight[seq] = unit
        window.reported = message.first_incomplete
        window.bytes += len(body)
        call.sent += 1
        call.previous = seq
        context.effects.append(Broadcast(route.names, message))

    # --- answers ---

    def on_ack(self, ack: InsertAck) -> None:
        """Take an ack; settle the unit if all replicas agree (D8)."""
        window = self.windows.get(ack.shard)
        unit = window.inflight.get(ack.seq) if window is not None else None
        if window is None or unit is None:
            return
        if ack.view != unit.message.view or ack.server >= unit.replicas:
            if ack.view > unit.message.view:
                self._routing.refresh()
            return
        if unit.redirects and not unit.counts_ack(ack):
            return
        acks = unit.acks
        known = acks.get(ack.server)
        if known is not None:
            if known.incarnation == ack.incarnation and known.counter >= ack.counter:
                return
            if known.gsns != ack.gsns:
                unit.took_slow_path = True
        if ack.waited:
            unit.took_slow_path = True
        acks[ack.server] = ack
        if window.note_ack(unit, ack) and known is None:
            self._copies.on_copy_answered(window)
        unit.pending_error = None
        if len(acks) == unit.replicas:
            gsns = ack.gsns
            for other in acks.values():
                if other.gsns != gsns:
                    return
            self._copies.on_acks_agree()
            window.observe_latency(unit, self._context.now)
            self._complete_unit(window, unit, gsns)

    def on_located(self, located: Located) -> None:
        """Take a server's word on where a unit is."""
        window = self.windows.get(located.shard)
        unit = window.inflight.get(located.seq) if window is not None else None
        if window is None or unit is None or located.client != self._context.client:
            return
        locates = self._locates[located.shard]
        if located.verdict == "present":
            if unit.is_valid_placement(located.gsns):
                self._context.counters.located += len(located.gsns)
                unit.took_slow_path = True
            locates.on_decided()
            self._complete_unit(window, unit, located.gsns)
        elif located.verdict == "absent" and located.view > unit.message.view:
            if not unit.is_absent_in_newer_view:
                locates.on_decided()
                self._mark_absent(window, unit)
        elif located.view > unit.message.view:
            self._routing.refresh()
        self._context.set_timer(max(locates.due, self._context.now))

    def _mark_absent(self, window: ShardWindow, unit: InflightUnit) -> None:
        """A view after that of its copies does not have it, so it never will exist by them."""
        unit.is_absent_in_newer_view = True
        self._routing.refresh()
        if unit.call is None:
            self._abandon(window, unit)
            self._fill(window)
        elif not self._reroute(window, unit.call) and window.is_blocked_by_view_change:
            self._context.set_timer(self._context.now)

    def _complete_unit(self, window: ShardWindow, unit: InflightUnit, gsns: list[int]) -> None:
        call, counters = unit.call, self._context.counters
        if not unit.is_valid_placement(gsns):
            message = unit.message
            what = f"shard {message.shard} placed {message.count} records at {gsns[:3]}..."
            self._protocol_violation(window, unit, f"{what}, after {message.after}")
            return
        window.retire(unit)
        if unit.outcome is not None:
            self._outcomes.on_unit_resolved(unit.outcome, unit.message.seq, gsns)
        window.avoid_until = 0
        view = unit.message.view
        if gsns[-1] >= window.since:
            window.since = gsns[-1] + 1
        if gsns[-1] > window.highest_gsns.get(view, 0):
            window.highest_gsns[view] = gsns[-1]
        counters.inserts += len(gsns)
        if unit.took_slow_path:
            counters.slow_path += len(gsns)
        else:
            counters.fast_path += len(gsns)
        if call is not None:
            call.gsns[unit.index] = gsns
            call.open -= 1
            if not call.open:
                self._complete(call)
            elif call.is_sequential:
                window.queue.append(call)
            elif window.is_blocked_by_view_change:
                self._context.set_timer(self._context.now)
        if window.queue:
            self._fill(window)
        if not window.inflight:
            self.settled_reports.on_window_empty(window)

    def _protocol_violation(self, window: ShardWindow, unit: InflightUnit, what: str) -> None:
        """Servers did what they may not. A doubt about it stays one: nothing they say helps."""
        self._context.counters.protocol_errors += 1
        window.retire(unit)
        if unit.call is not None:
            self._fail(unit.call, ProtocolError(what))
        self._fill(window)

    def _abandon(self, window: ShardWindow, unit: InflightUnit) -> None:
        """A unit never will exist."""
        window.retire(unit)
        if unit.outcome is not None:
            self._outcomes.on_unit_resolved(unit.outcome, unit.message.seq, None)

    def _complete(self, call: InsertCall) -> None:
        del self._calls[call.number]
        self._context.complete(call.number, call.rids)

    def on_refused(self, refused: Refused) -> None:
        """Take a refusal of a unit: repeat it, move it, or fail its call."""
        window = self.windows.get(refused.shard)
        unit = window.inflight.get(refused.request) if window is not None else None
        if window is None or unit is None:
            return
        unit.add_refusal(refused)
        match refused.code:
            case "no-such-position":
                if refused.server == 0:
                    self._fail_unless_copy_in_flight(window, unit)
            case "too-large":
                limit = self._routing.limits.max_payload_bytes
                self._reject(window, unit, RecordTooLargeError(len(unit.message.body), limit))
            case "malformed" | "identity-reused":
                what = f"shard {refused.shard} refused seq {refused.request}: {refused.code}"
                self._protocol_violation(window, unit, f"{what}: {refused.detail}")
            case "redirect":
                self._context.counters.redirects += 1
                unit.add_permanent_refusal(refused)
                self._postpone(window, unit, refused)
            case "expired":
                window.since = max(window.since, refused.since)
                self._on_identity_expired(window, unit, refused)
            case _:
                unit.may_be_stale |= refused.code in {"not-ready", "wrong-view"}
                unit.may_be_queued &= refused.copies < unit.copies and not unit.may_be_stale
                self._postpone(window, unit, refused)

    def _fail_unless_copy_in_flight(self, window: ShardWindow, unit: InflightUnit) -> None:
        """The primary says that `after` does not exist: that ends it, unless a copy is under way.

        One refusal may answer several copies; one that is still to arrive gets another answer by
        the time when the unit would be sent again.
        """
        after = unit.call.request.after if unit.call else RecordId(unit.message.after, window.shard)
        error = NoSuchRecordError(after, "no position from there on was ever given to a shard")
        if unit.copies == 1:
            self._reject(window, unit, error)
        else:
            unit.pending_error = error
            unit.retransmit_at = self._context.now + window.retransmit_timeout.ns
            self._context.set_timer(unit.retransmit_at)

    def _reject(self, window: ShardWindow, unit: InflightUnit, error: ZiplogError) -> None:
        self._abandon(window, unit)
        if unit.call is not None:
            self._fail(unit.call, error)
        self._fill(window)

    def _on_identity_expired(
        self, window: ShardWindow, unit: InflightUnit, refused: Refused
    ) -> None:
        """A server never takes a unit, as it cannot tell it from one that it has forgotten.

        No server forgets a unit so soon after it was sent for the first time: then the unit was not
        placed, and is nowhere once all replicas refused it. Otherwise its fate stays unknown.
        """
        if self._context.now - unit.first_sent > self._context.session_expiry_ns:
            self._forget(window, unit)
            self._fill(window)
            return
        unit.is_expired = True
        unit.add_permanent_refusal(refused)
        if unit.call is not None:
            self._reroute(window, unit.call)
        elif unit.is_absent:
            self._abandon(window, unit)
            self._fill(window)

    def _postpone(self, window: ShardWindow, unit: InflightUnit, refused: Refused) -> None:
        """Send a refused unit again later; to another shard if no server can have taken it."""
        context = self._context
        self._routing.refresh()
        self.shard_selector.avoid(window)
        if not unit.is_absent:
            context.set_timer(max(self._locates[window.shard].due, context.now))
            if refused.copies >= unit.copies:
                self._retransmit_soon(unit)
        elif unit.call is None:
            self._abandon(window, unit)
            self._fill(window)
        elif not self._reroute(window, unit.call):
            self._retransmit_soon(unit)

    def _retransmit_soon(self, unit: InflightUnit) -> None:
        """A server put the newest copy off: another one is due, later after each."""
        pause = min(_REFUSED_BACKOFF_NS << min(unit.copies, 10), MAX_BACKOFF_NS)
        unit.retransmit_at = min(unit.retransmit_at, self._context.now + pause)
        unit.may_be_queued = False
        self._context.set_timer(unit.retransmit_at)

    def _reroute(self, window: ShardWindow, call: InsertCall) -> bool:
        """Give a batch of which nothing is anywhere to another shard, if the policy allows it.

        If not, and its identity is used up, it waits for its shard with a new one, as does the rest
        of one that is placed in part. Its call ends if the shard never comes back, or if a later
        part was placed than one that is nowhere. False: it stays as it is.
        """
        units = window.units_of(call)
        if not all(unit.is_absent for unit in units):
            return False
        if call.has_later_unit_placed(units[0]):
            self._fail(call, insert_errors.partial_insert_error(call, self._routing))
            return True
        is_redirected = all(unit.is_redirected for unit in units)
        if call.is_partly_placed and not is_redirected:
            return False
        shard = self._choose(call)
        if shard is None:
            return True
        if shard == window.shard and not is_redirected:
            return False
        for unit in units:
            window.retire(unit)
        window.dequeue(call)
        call.restart_remainder()
        self._fill(window)
        if shard == window.shard and not any(unit.is_expired for unit in units):
            self._retry_after_refresh(call)
        else:
            if shard != window.shard:
                self._context.counters.moved += len(call.request.payloads)
            self._assign(call, shard)
        return True

    def _retry_after_refresh(self, call: InsertCall) -> None:
        """Its shard takes nothing, whatever is known of it: try again when more is known."""
        self._unassigned[call.number] = call
        if not self._is_reassign_due:
            self._is_reassign_due = True
            self._routing.refresh(self._reassign)

    # --- time and routes ---

    def _on_routes_changed(self, shards: list[int]) -> None:
        """Send what is unsettled to the new view; find a place for what has none."""
        for shard in shards:
            window = self.windows.get(shard)
            route = self._routing.route(shard) if window is not None else None
            if window is None or route is None:
                continue
            self._redirect(window, route)
            if shard not in self._routing.live:
                self._unassigned |= {call.number: call for call in window.dequeue_unsent()}
        self._reassign()
        for window in list(self.windows.values()):
            lost = [unit.call for unit in window.inflight.values() if unit.is_absent_in_newer_view]
            for call in dict.fromkeys(lost):
                if call is not None and call.number in self._calls:
                    self._reroute(window, call)

    def _redirect(self, window: ShardWindow, route: Route) -> None:
        """The shard has another view or state: send again what it may take, ask for the rest."""
        if not window.update_route(route):
            return
        context = self._context
        self._locates[window.shard].expedite()
        window.retransmit_timeout.reset()
        window.probe_at = 0
        context.set_timer(context.now)
        if route.is_unavailable:
            return
        for unit in window.inflight.values():
            unit.backoff = window.retransmit_timeout.ns
            unit.retransmit_at, unit.may_be_queued = context.now, False
        window.avoid_until = 0
        self._resume_after_view_change(window, route)

    def _resume_after_view_change(self, window: ShardWindow, route: Route) -> None:
        """Send calls of a former view on in this one, but not what could get behind its followers.

        Of those all is asked for, until it is known which of them are in the log.
        """
        window.is_blocked_by_view_change = False
        known: list[InsertCall] = []
        for call, units in window.units_of_older_views(route.view).items():
            if not call.has_later_unit(units):
                for unit in units:
                    unit.move_to_view(route.view, len(route.names))
                    unit.retransmit_at = self._context.now
                if call.sent < len(call.unit_ranges) and not call.is_sequential:
                    window.enqueue(call)
                continue
            window.is_blocked_by_view_change = True
            window.dequeue(call)
            if all(unit.is_absent for unit in units):
                known.append(call)
        for call in known:
            self._reroute(window, call)
        self._fill(window)

    def _reassign(self) -> None:
        """Find a place for the batches that have none."""
        self._is_reassign_due = False
        unassigned, self._unassigned = self._unassigned, {}
        for call in unassigned.values():
            self._dispatch(call)

    def tick(self) -> None:
        """Repeat and ask what is due, and end the calls whose deadline has passed."""
        context = self._context
        for call in list(self._calls.values()):
            if context.now >= call.request.deadline:
                self._expire(call)
            else:
                context.set_timer(call.request.deadline)
        for number, outcome in self._outcomes.pop_expired():
            context.complete(
                number, insert_errors.unknown_outcome_error(outcome, self.windows, self._routing)
            )
        for window in list(self.windows.values()):
            if window.inflight or window.queue:
                self._tick_window(window)
        newly_avoided, self.shard_selector.newly_avoided = self.shard_selector.newly_avoided, []
        for call in [call for window in newly_avoided for call in window.dequeue_unsent()]:
            self._dispatch(call)
        if self._unassigned:
            self._routing.refresh()

    def _tick_window(self, window: ShardWindow) -> None:
        route = self._routing.route(window.shard)
        assert route is not None, "a lane without a route"
        if window.is_blocked_by_view_change and not route.is_unavailable:
            self._resume_after_view_change(window, route)
        self._copies.retransmit_due(window, route)
        units = window.inflight.values()
        has_asked = self._locates[window.shard].poll(self._context, route, units)
        if has_asked or (
            route.is_unavailable and (window.queue or any(u.has_waiter for u in units))
        ):
            self._routing.refresh()

    def on_session_expired(self) -> None:
        """This client was silent for so long that servers may have forgotten it.

        What they may hold can be told by nobody any more, and must not be sent again: it could be
        placed twice (docs/protocol.md, section 4, rule 8).
        """
        for window in self.windows.values():
            for unit in [unit for unit in window.inflight.values() if not unit.is_absent]:
                self._forget(window, unit)

    def _forget(self, window: ShardWindow, unit: InflightUnit) -> None:
        """Neither send nor ask for a unit any more: its fate will never be known."""
        if unit.call is not None:
            self._expire(unit.call, is_session_expired=True)
        window.retire(unit)
        if unit.outcome is not None:
            unit.outcome.is_session_expired = True

    # --- the end of a call ---

    def _expire(self, call: InsertCall, *, is_session_expired: bool = False) -> None:
        """Its deadline has come, or servers may have forgotten it: say what is known about it."""
        is_unassigned = call.number in self._unassigned
        error, outcome = insert_errors.deadline_error(
            call,
            self.windows,
            self._routing,
            is_unassigned=is_unassigned,
            is_session_expired=is_session_expired,
        )
        self._fail(call, error, outcome)

    def _fail(
        self, call: InsertCall, error: Exception, outcome: UnknownOutcome | None = None
    ) -> None:
        if isinstance(error, ZiplogError) and call.many:
            insert_errors.add_partial_results(error, call)
        self._detach(call, outcome)
        self._context.complete(call.number, error)

    def _detach(self, call: InsertCall, outcome: UnknownOutcome | None = None) -> None:
        """Forget a call. Its units that were sent stay until their fate is known."""
        del self._calls[call.number]
        self._unassigned.pop(call.number, None)
        window = self.windows.get(call.shard)
        if window is None:
            return
        for unit in window.units_of(call):
            unit.call = None
            if unit.is_absent:
                window.retire(unit)
            else:
                unit.outcome = outcome
        window.dequeue(call)
        self._fill(window)

    def check(self) -> None:
        """Assert the invariants."""
        for shard, window in self.windows.items():
            assert shard == window.shard
            window.check(self._routing.limits.max_unsettled_units)
            route = self._routing.route(shard)
            if route is not None and not route.is_unavailable:
                blocked = window.units_of_older_views(route.view)
                assert window.is_blocked_by_view_change or not blocked, (
                    "a call stays in a former view"
                )
                assert not any(call in blocked for call in window.queue), (
                    "more of a call could go out"
                )
            self._check_timers(window, route)
            for unit in window.inflight.values():
                assert unit.call is None or unit.call.number in self._calls
        self._outcomes.check()
        for call in self._calls.values():
            assert self._context.next_timer <= call.request.deadline, "a deadline would be missed"
            assert call.open == call.gsns.count(None)

    def _check_timers(self, window: ShardWindow, route: Route | None) -> None:
        """Assert that each unit is retransmitted, or located, in time."""
        context = self._context
        for unit in window.inflight.values():
            due = unit.retransmit_at
            if route is not None and must_not_send(unit, route):
                due = self._locates[window.shard].due if not unit.is_absent else NEVER
            assert context.next_timer <= max(due, context.now + window.retransmit_timeout.ns // 4)
            assert unit.outcome is None or unit.message.seq in unit.outcome.open
