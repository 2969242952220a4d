"""Inserts: from a call to agreeing acks of all replicas.

    call --policy--> queued at a shard --window--> sent --acks agree, or located--> placed
                                                    |--deadline--> unknown --> placed or absent
                                                    '--absent--> rerouted, sent again, or failed

A call is split into units; each is one `Insert` with the identity (client, seq). While two units of
single inserts are in flight at a shard, further ones wait, and then share a unit (`InsertGroup`).
Rules: a sent unit is retransmitted at the same shard under the same identity, or located while the
shard is not available, until its outcome is known, even after its call ended (D13). It is placed
when the newest acks of all replicas, of one view, name the same gsns (D8). It is absent if all
replicas promised never to accept it, or a newer view reports that. It is sent in a newer view only
if no later unit of its call may be placed (rule 5). See docs/protocol.md, sections 4 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.common.unknown_outcome import UnknownOutcomes
from ziplog.client.inserts import insert_errors
from ziplog.client.inserts.copies import Copies
from ziplog.client.inserts.inflight import ShardWindow, has_later_unit
from ziplog.client.inserts.insert_calls import InsertCall, InsertGroup
from ziplog.client.inserts.locate import LocateQueries, must_not_send
from ziplog.client.inserts.measurements import Measurements
from ziplog.client.inserts.plain_inserts import PlainInserts
from ziplog.client.inserts.results import Results
from ziplog.client.inserts.sending import Sender
from ziplog.client.inserts.settling import SettledReports
from ziplog.client.inserts.shard_selector import ShardSelector
from ziplog.errors import ProtocolError, ZiplogError

if TYPE_CHECKING:
    from ziplog.client.common.requests import InsertRequest, Preferences
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.common.unknown_outcome import ResolveRequest, UnknownOutcome
    from ziplog.client.inserts.inflight import InflightUnit
    from ziplog.client.seals.seals import Seals
    from ziplog.errors import OutcomeUnknownError
    from ziplog.wire import InsertAck, Located, Refused


class Inserts:
    """All inserts of a client."""

    def __init__(
        self, context: StepContext, routing: Routing, preferences: Preferences, seals: Seals
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._calls: dict[int, InsertCall] = {}
        self.windows: Final[dict[int, ShardWindow]] = {}
        #: The `Locate` requests, by shard.
        self._locates: Final[dict[int, LocateQueries]] = {}
        self.shard_selector: Final = ShardSelector(
            context, routing, preferences, self.windows, self._reassign
        )
        #: Calls without a shard, or with a shard that is not live.
        self._unassigned: dict[int, InsertCall] = {}
        self.sender: Final = Sender(context, routing)
        #: `_reassign` runs after the next reply about placements.
        self._is_reassign_due = False
        self._seals: Final = seals
        results = self._results = Results(context, routing, self.windows, seals)
        self.outcomes: Final = UnknownOutcomes(
            context, routing, self._unknown_error, results.resolve
        )
        self.settled_reports: Final = SettledReports(context, routing, self.windows)
        self._copies: Final = Copies(context, routing, self.shard_selector, self._reject)
        self.plain: Final = PlainInserts(context, routing, self.windows, self._copies)
        self.measurements: Final = Measurements(context, self.windows, self.plain)
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a call is pending."""
        return bool(self._calls)

    # --- from the call to the wire ---

    def start(self, number: int, request: InsertRequest) -> None:
        """Start a call."""
        if request.sealed:
            self._seals.prepare()
        shard = self.shard_selector.select(request)
        if isinstance(shard, int) and self.plain.start(number, request, shard):
            return
        call = self._calls[number] = InsertCall(number, request)
        self._context.set_timer(request.deadline)
        self._dispatch(call, shard)

    def take_over_plain(self) -> None:
        """Continue the insert on the short path, if there is one, as any other."""
        plain = self.plain.take()
        if plain is None:
            return
        call = self._calls[plain.number] = InsertCall(plain.number, plain.request)
        call.shard = plain.message.shard
        self.sender.add_sent(call, plain)
        for ack in plain.acks.values():
            self.on_ack(ack)

    def resolve(self, number: int, request: ResolveRequest) -> None:
        """Wait for the outcome of a call that ended, and locate its units now."""
        context, outcome = self._context, request.outcome
        if outcome.is_lost:
            context.complete(number, self._unknown_error(outcome))
            return
        self.outcomes.start(number, request)
        window = self.windows[outcome.shard]
        self._locates[outcome.shard].expedite()
        for unit in window.inflight.values():
            if any(known is outcome for known, _ in unit.outcomes):
                unit.backoff = min(unit.backoff, window.retransmit_timeout.ns)
                unit.retransmit_at, unit.may_be_queued = context.now, False
        context.set_timer(context.now)

    def cancel(self, number: int) -> None:
        """Cancel a call: its unsent units are dropped, the others stay in flight."""
        call = self._calls.get(number)
        if call is not None:
            self._detach(call)

    def _dispatch(self, call: InsertCall, shard: int | Exception) -> None:
        """Assign a call, none of whose open units exists, to the selected shard, or fail it."""
        if isinstance(shard, int):
            self._assign(call, shard)
        else:
            self._fail(call, shard)

    def _assign(self, call: InsertCall, shard: int) -> None:
        call.shard = shard
        if shard not in self._routing.live:
            self._unassigned[call.number] = call
            self._routing.refresh()
            return
        window = self.windows.get(shard)
        if window is None:
            since = self._routing.frontiers.get(shard, 0)
            window = self.windows[shard] = ShardWindow(shard, since, self.measurements.timeout())
            self._locates[shard] = LocateQueries()
        self.sender.queue(window, call)

    # --- replies ---

    def on_ack(self, ack: InsertAck) -> None:
        """Handle an ack; the unit is placed if the acks of all replicas agree (D8)."""
        window = self.windows.get(ack.shard)
        unit = window.inflight.get(ack.seq) if window is not None else None
        if window is None or unit is None:
            return
        if ack.view != unit.message.view or ack.server >= unit.replicas:
            if ack.view > unit.message.view:
                self._routing.refresh()
            return
        if (unit.redirects or unit.refusals) and not unit.counts_ack(ack):
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
        """Handle a server's report on where a unit is."""
        window = self.windows.get(located.shard)
        unit = window.inflight.get(located.seq) if window is not None else None
        if window is None or unit is None or located.client != self._context.client:
            return
        locates = self._locates[located.shard]
        if located.verdict == "present":
            locates.on_decided()
            self._on_present(window, unit, located.gsns)
        elif located.verdict == "absent" and located.view > unit.message.view:
            if not unit.is_absent_in_newer_view:
                locates.on_decided()
                self._mark_absent(window, unit)
        elif located.view > unit.message.view:
            self._routing.refresh()
        self._context.set_timer(max(locates.due, self._context.now))

    def _mark_absent(self, window: ShardWindow, unit: InflightUnit) -> None:
        """Mark a unit as absent: a newer view than that of its copies does not have it."""
        unit.is_absent_in_newer_view = True
        self._routing.refresh()
        if unit.call is None:
            self._abandon(window, unit)
            self.sender.fill(window)
        elif not self._reroute(window, unit.call) and window.is_blocked_by_view_change:
            self._context.set_timer(self._context.now)

    def _on_present(self, window: ShardWindow, unit: InflightUnit, gsns: list[int]) -> None:
        """Complete a located unit; it stays in flight while a replica of its view is silent."""
        route = self._routing.route(window.shard)
        if not unit.is_reported:
            unit.took_slow_path = True
            self._context.counters.located += len(gsns)
        if route is None or must_not_send(unit, route) or len(unit.acks) == unit.replicas:
            self._complete_unit(window, unit, gsns)
        elif not unit.is_reported and self._is_valid(window, unit, gsns):
            self._report(window, unit, gsns)
            window.keep(unit)
            self.shard_selector.avoid(window, unit.backoff)
            self.sender.fill(window)

    def _complete_unit(self, window: ShardWindow, unit: InflightUnit, gsns: list[int]) -> None:
        if not self._is_valid(window, unit, gsns):
            return
        window.retire(unit)
        window.avoid_until = 0
        if not unit.is_reported:
            self._report(window, unit, gsns)
        if window.queue:
            self.sender.fill(window)
        if not window.inflight:
            self.settled_reports.on_window_empty(window)

    def _report(self, window: ShardWindow, unit: InflightUnit, gsns: list[int]) -> None:
        """Pass the placement of a unit to its calls."""
        self.outcomes.on_unit_resolved(unit.outcomes, unit.message.seq, gsns)
        for number in self._results.place(window, unit, gsns):
            del self._calls[number]

    def _is_valid(self, window: ShardWindow, unit: InflightUnit, gsns: list[int]) -> bool:
        """Return whether a placement is valid; if not, fail the unit."""
        if unit.is_valid_placement(gsns):
            return True
        message = unit.message
        what = f"shard {message.shard} placed {message.count} records at {gsns[:3]}..."
        self._protocol_violation(window, unit, f"{what}, after {message.after}")
        return False

    def _protocol_violation(self, window: ShardWindow, unit: InflightUnit, what: str) -> None:
        """Fail a unit because servers violated the protocol; an unknown outcome stays unknown."""
        self._context.counters.protocol_errors += 1
        window.retire(unit)
        for call in unit.call.dissolve() if isinstance(unit.call, InsertGroup) else unit.calls:
            self._fail(call, ProtocolError(what))
        self.outcomes.on_lost(unit.outcomes)
        self.sender.fill(window)

    def _abandon(self, window: ShardWindow, unit: InflightUnit) -> None:
        """Retire a unit that will never exist."""
        window.retire(unit)
        self.outcomes.on_unit_resolved(unit.outcomes, unit.message.seq, None)

    def on_refused(self, refused: Refused) -> None:
        """Handle a refusal of a unit: retransmit it, reroute it, or fail its call."""
        window = self.windows.get(refused.shard)
        unit = window.inflight.get(refused.request) if window is not None else None
        if window is None or unit is None:
            return
        unit.add_refusal(refused)
        match refused.code:
            case "no-such-position" | "too-large":
                self._fail_unless_held(window, unit, refused)
            case "malformed" | "identity-reused":
                what = f"shard {refused.shard} refused seq {refused.request}: {refused.code}"
                self._protocol_violation(window, unit, f"{what}: {refused.detail}")
            case "redirect":
                self._context.counters.redirects += 1
                unit.add_permanent_refusal(refused)
                self._postpone(window, unit, refused)
            case "expired":
                window.since = max(window.since, refused.since)
                self._on_expired(window, unit, refused)
            case _:
                unit.may_be_stale |= refused.code in {"not-ready", "wrong-view"}
                unit.may_be_queued &= refused.copies < unit.copies and not unit.may_be_stale
                self._postpone(window, unit, refused)

    def _fail_unless_held(self, window: ShardWindow, unit: InflightUnit, refused: Refused) -> None:
        """Fail the call of a unit that does not fit, unless a server holds a copy, or may get one.

        The primary decides whether `after` exists. Servers that restart may differ in their limits.
        One refusal may answer several copies. A copy in flight gets another reply in time.
        """
        is_too_large, now = refused.code == "too-large", self._context.now
        if is_too_large:
            unit.too_large |= {refused.server}
        elif refused.server:
            return
        if unit.acks or (is_too_large and 0 not in unit.too_large):
            self._context.set_timer(unit.retransmit_soon(now))
            return
        unit.pending_error = insert_errors.misfit_error(unit, refused.code, self._routing)
        is_final = len(unit.too_large) == unit.replicas if is_too_large else unit.copies == 1
        unit.retransmit_at = now if is_final else now + window.retransmit_timeout.ns
        self._context.set_timer(unit.retransmit_at)
        if now >= window.rejected_at(unit):
            self._reject(window, unit)

    def _reject(self, window: ShardWindow, unit: InflightUnit) -> None:
        """Fail the call of a unit that does not fit, with the error of its first such unit."""
        units = window.units_of(unit.call) if unit.call is not None else [unit]
        for each in units:
            self._abandon(window, each)
        if isinstance(unit.call, InsertGroup):
            # The error may be about one of them.
            for call in unit.call.dissolve():
                call.is_single = False
                self._assign(call, window.shard)
        elif unit.call is not None:
            self._fail(unit.call, next(each.pending_error for each in units if each.pending_error))
        self.sender.fill(window)

    def _on_expired(self, window: ShardWindow, unit: InflightUnit, refused: Refused) -> None:
        """Handle a server's report that it cannot distinguish this unit from a forgotten one.

        Servers do not forget a unit within the session timeout. If it was first sent within it, it
        was not placed, and is absent once all replicas refused it. Otherwise its outcome stays
        unknown.
        """
        is_late = self._context.now - unit.first_sent > self._context.session_expiry_ns
        if is_late and not unit.is_absent:
            self._forget(window, unit)
            return
        unit.is_expired = True
        unit.add_permanent_refusal(refused)
        if unit.call is not None:
            self._reroute(window, unit.call)
        elif unit.is_absent:
            self._abandon(window, unit)
            self.sender.fill(window)

    def _postpone(self, window: ShardWindow, unit: InflightUnit, refused: Refused) -> None:
        """Retransmit a refused unit later, or reroute it if no server can have accepted it."""
        context = self._context
        self._routing.refresh()
        self.shard_selector.avoid(window, no_space=unit.no_space if unit.is_absent else "")
        if not unit.is_absent:
            context.set_timer(max(self._locates[window.shard].due, context.now))
            if refused.copies >= unit.copies:
                self._context.set_timer(unit.retransmit_soon(self._context.now))
        elif unit.call is None:
            self._abandon(window, unit)
            self.sender.fill(window)
        elif not self._reroute(window, unit.call):
            self._context.set_timer(unit.retransmit_soon(self._context.now))

    def _reroute(self, window: ShardWindow, call: InsertCall) -> bool:
        """Assign a call without a placed unit to another shard, if the policy allows it.

        Otherwise, if its identities are used up, or it is placed in part, it waits for its shard
        with new identities. The call fails if its shard never comes back, or if a later unit than
        an absent one is placed. Returns False if the call stays as it is.
        """
        if isinstance(call, InsertGroup):
            return self._reroute_group(window, call)
        units = window.units_of(call)
        if not all(unit.is_absent for unit in units):
            return False
        if call.has_later_unit_placed(units[0].index):
            self._fail(call, insert_errors.partial_insert_error(call, self._routing))
            return True
        is_redirected = all(unit.is_redirected for unit in units)
        if call.is_partly_placed and not is_redirected and not window.no_space:
            return False
        shard = self.shard_selector(call)
        if shard == window.shard and not is_redirected:
            return False
        for unit in units:
            window.retire(unit)
        window.dequeue(call)
        call.restart_remainder()
        self.sender.fill(window)
        self._move(window, call, shard, is_expired=any(unit.is_expired for unit in units))
        return True

    def _reroute_group(self, window: ShardWindow, group: InsertGroup) -> bool:
        """Assign each call of a group again if any may change its shard; return whether."""
        (unit,) = window.units_of(group)
        if not unit.is_absent:
            return False
        chosen = [(call, self.shard_selector(call)) for call in group.calls]
        if not unit.is_redirected and all(shard == window.shard for _, shard in chosen):
            return False
        self._abandon(window, unit)
        group.dissolve()
        self.sender.fill(window)
        for call, shard in chosen:
            self._move(window, call, shard, is_expired=unit.is_expired)
        return True

    def _move(
        self, window: ShardWindow, call: InsertCall, shard: int | Exception, *, is_expired: bool
    ) -> None:
        """Assign a call again after its units proved absent, or fail it with the policy's error."""
        if shard == window.shard and not is_expired:
            # It accepts nothing now: try again after the next reply about placements.
            self._unassigned[call.number] = call
            if not self._is_reassign_due:
                self._is_reassign_due = True
                self._routing.refresh(self._reassign)
            return
        if isinstance(shard, int) and shard != window.shard:
            self._context.counters.moved += len(call.request.payloads)
        self._dispatch(call, shard)

    # --- time and routes ---

    def _on_routes_changed(self, shards: list[int]) -> None:
        """Retransmit the units in flight in the new views, and assign calls without a shard."""
        for shard in shards:
            window = self.windows.get(shard)
            route = self._routing.route(shard) if window is not None else None
            if window is None or route is None:
                continue
            self._redirect(window, route)
            if shard not in self._routing.live or self.shard_selector.is_too_narrow(window):
                self._unassigned |= {call.number: call for call in window.dequeue_unsent()}
        self._reassign()
        for window in list(self.windows.values()):
            lost = [unit.call for unit in window.inflight.values() if unit.is_absent_in_newer_view]
            for call in dict.fromkeys(lost):
                if call is not None and any(each.number in self._calls for each in call.calls):
                    self._reroute(window, call)

    def _redirect(self, window: ShardWindow, route: Route) -> None:
        """Retransmit or locate a shard's units, because its view or state has changed."""
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
        """Retransmit calls of older views in this view.

        If a later unit may be placed, or the shard became too narrow, the client locates all units.
        """
        window.is_blocked_by_view_change = False
        known: list[InsertCall] = []
        for call, units in window.units_of_older_views(route.view).items():
            if not (has_later_unit(call, units) or self.shard_selector.must_leave(window, call)):
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
        self.sender.fill(window)

    def _reassign(self) -> None:
        """Assign the calls without a shard."""
        self._is_reassign_due = False
        unassigned, self._unassigned = self._unassigned, {}
        for call in unassigned.values():
            self._dispatch(call, self.shard_selector(call))

    def tick(self) -> None:
        """Retransmit and locate the units that are due; end the calls at their deadlines."""
        context = self._context
        for call in list(self._calls.values()):
            if context.now < call.request.deadline:
                context.set_timer(call.request.deadline)
            elif call.number in self._calls:  # It may have failed with its group, just now.
                self._expire(call)
        for window in list(self.windows.values()):
            if window.inflight or window.has_queue:
                self._tick_window(window)
        newly_avoided, self.shard_selector.newly_avoided = self.shard_selector.newly_avoided, []
        for call in [call for window in newly_avoided for call in window.dequeue_unsent()]:
            self._dispatch(call, self.shard_selector(call))
        if self._unassigned:
            self._routing.refresh()
        self.settled_reports.tick()

    def _tick_window(self, window: ShardWindow) -> None:
        route = self._routing.route(window.shard)
        assert route is not None, "a window without a route"
        if window.is_blocked_by_view_change and not route.is_unavailable:
            self._resume_after_view_change(window, route)
        has_located = self._locates[window.shard].poll(self._context, route, window)
        self._copies.retransmit_due(window, route)
        units = window.inflight.values()
        if has_located or (
            route.is_unavailable and (window.has_queue or any(u.has_waiter for u in units))
        ):
            self._routing.refresh()

    def on_session_expired(self) -> None:
        """End the outcomes that servers can no longer report: they may have expired the session.

        A unit that such a server may hold must not be sent again, because it could be placed twice
        (docs/protocol.md, section 4, rule 8).
        """
        self.take_over_plain()
        for window in self.windows.values():
            for unit in [unit for unit in window.inflight.values() if not unit.is_absent]:
                self._forget(window, unit)

    def _forget(self, window: ShardWindow, unit: InflightUnit) -> None:
        """Stop retransmitting and locating a unit; its outcome stays unknown."""
        for call in unit.calls:
            self._expire(call, is_session_expired=True)
        window.retire(unit)
        self.outcomes.on_lost(unit.outcomes, is_session_expired=True)
        self.sender.fill(window)

    # --- the end of a call ---

    def _unknown_error(self, outcome: UnknownOutcome) -> OutcomeUnknownError:
        return insert_errors.unknown_outcome_error(outcome, self.windows, self._routing)

    def _expire(self, call: InsertCall, *, is_session_expired: bool = False) -> None:
        """Fail a call at its deadline, or because servers may have expired this session."""
        is_unassigned = call.number in self._unassigned
        error, outcome = insert_errors.deadline_error(
            call,
            self.windows,
            self._routing,
            is_unassigned=is_unassigned,
            is_session_expired=is_session_expired,
            min_regions=self.shard_selector.required(call.request),
        )
        self._fail(call, error, outcome)

    def _fail(
        self, call: InsertCall, error: Exception, outcome: UnknownOutcome | None = None
    ) -> None:
        if isinstance(error, ZiplogError) and call.many:
            insert_errors.add_partial_results(error, call)
            self._results.note_returned(error.results)
        self.measurements.note_failed(call, outcome)
        self._detach(call, outcome)
        self._context.complete(call.number, error)

    def _detach(self, call: InsertCall, outcome: UnknownOutcome | None = None) -> None:
        """Forget a call; its units that were sent stay in flight until their outcome is known."""
        del self._calls[call.number]
        self._unassigned.pop(call.number, None)
        window = self.windows.get(call.shard)
        if window is None:
            return
        for unit in window.units_of(call):
            if not unit.is_absent:
                unit.detach(call, outcome)
                continue
            self._abandon(window, unit)
            if isinstance(unit.call, InsertGroup):
                # No copy of the unit may be sent again, so the other calls need another one.
                unit.call.remove(call)
                for other in unit.call.dissolve():
                    self._dispatch(other, self.shard_selector(other))
        window.dequeue(call)
        self.sender.fill(window)

    def check(self) -> None:
        """Assert the invariants."""
        self.plain.check()
        for shard, window in self.windows.items():
            assert shard == window.shard
            window.check(self._routing.limits.max_unsettled_units)
            route = self._routing.route(shard)
            if route is not None and not route.is_unavailable:
                blocked = window.units_of_older_views(route.view)
                assert window.is_blocked_by_view_change or not blocked, "a call is stale"
                assert not any(call in blocked for call in window.queue), "it could send more"
            self._copies.check(window, route, self._locates[shard].due)
            for unit in window.inflight.values():
                assert unit.call is None or unit.calls, "a unit waits for ended calls"
                assert all(call.number in self._calls for call in unit.calls)
            self.sender.check(window)
        for call in self._calls.values():
            assert self._context.next_timer <= call.request.deadline, "a deadline would be missed"
            assert call.open == call.gsns.count(None)
