"""Inserts: from a call to acks that agree.

    call --policy--> queued at a shard --window--> sent --acks agree, or found--> settled
                                                    |--deadline--> doubtful --the same--> settled
                                                    '--nowhere--> moved, sent again, or failed

A call's payloads are cut into *units*; a unit is one `Insert`, identified by (client, seq), seq
counted per shard in a `Lane`. Rules: a unit that was sent is repeated with the same identity at the
same shard, or asked for while that is away, until its fate is known, even when its call was
answered (D13); it is settled when the newest acks of all replicas, of one view, name the same gsns
(D8); it is nowhere if all replicas promised never to take a copy of it, or a view after theirs says
so; a later view is sent it only if nothing of its call can be behind it (rule 5). Invariant: open
seqs lie within the window that servers allow. See docs/protocol.md, sections 4 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.common.unknown_outcome import Doubts
from ziplog.client.inserts import insert_errors
from ziplog.client.inserts.copies import LAST_PAUSE_NS, Copies
from ziplog.client.inserts.inflight import LANE_BYTES, Batch, Lane, Unit
from ziplog.client.inserts.settling import Settling
from ziplog.client.inserts.shard_selector import Choice
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
    from ziplog.client.common.requests import InsertRequest, Policy, ResolveRequest
    from ziplog.client.common.routing import Route, Routing
    from ziplog.client.common.step_context import Turn
    from ziplog.client.common.unknown_outcome import Doubt

_MS: Final = 1_000_000
#: Pause before a refused unit is sent again, doubling up to `LAST_PAUSE_NS`.
_REFUSED_PAUSE_NS: Final = 2 * _MS


class Inserts:
    """All inserts of a client."""

    def __init__(self, turn: Turn, routing: Routing, policy: Policy) -> None:
        self._turn: Final = turn
        self._routing: Final = routing
        self._batches: dict[int, Batch] = {}
        self.lanes: Final[dict[int, Lane]] = {}
        self.choice: Final = Choice(turn, routing, policy, self.lanes)
        #: Batches whose shard is not live (or that have none), by call.
        self._homeless: dict[int, Batch] = {}
        #: They are looked at with the next answer about where shards are.
        self._is_house_due = False
        self._doubts: Final = Doubts(turn)
        self.settling: Final = Settling(turn, routing, self.lanes)
        self._copies: Final = Copies(turn, routing, self.choice, self._reject)
        routing.on_change.append(self._rerouted)

    @property
    def waiting(self) -> bool:
        """Whether a call is under way."""
        return bool(self._batches or self._doubts)

    # --- from the call to the wire ---

    def start(self, call: int, request: InsertRequest) -> None:
        """Take a call."""
        batch = Batch(call, request)
        self._batches[call] = batch
        self._turn.wake_at(request.deadline)
        self._dispatch(batch)

    def resolve(self, call: int, request: ResolveRequest) -> None:
        """Take the question what became of a call in doubt, and find out at once."""
        turn, doubt = self._turn, request.doubt
        if doubt.is_forgotten:
            turn.complete(call, insert_errors.unknown(doubt, self.lanes, self._routing))
            return
        self._doubts.start(call, request)
        lane = self.lanes[doubt.shard]
        lane.search.hurry()
        for unit in lane.unsettled.values():
            if unit.doubt is doubt:
                unit.pause = min(unit.pause, lane.timeout.ns)
                unit.retry_at, unit.is_expected = turn.now, False
        turn.wake_at(turn.now)

    def cancel(self, call: int) -> None:
        """The user waits no longer: what was sent is doubtful, the rest is dropped."""
        self._doubts.cancel(call)
        batch = self._batches.get(call)
        if batch is not None:
            self._detach(batch)

    def _dispatch(self, batch: Batch) -> None:
        """Give a batch, none of whose open units can have been taken, to a shard."""
        shard = self._choose(batch)
        if shard is not None:
            self._assign(batch, shard)

    def _assign(self, batch: Batch, shard: int) -> None:
        batch.shard = shard
        if shard not in self._routing.live:
            self._homeless[batch.call] = batch
            self._routing.refresh()
            return
        lane = self.lanes.get(shard)
        if lane is None:
            since = self._routing.frontiers.get(shard, 0)
            lane = self.lanes[shard] = Lane(shard, since)
        lane.queue.append(batch)
        if len(lane.queue) == 1:
            self._fill(lane)

    def _choose(self, batch: Batch) -> int | None:
        """Ask the policy. None: it failed, and so did the call."""
        shard = self.choice(batch)
        if isinstance(shard, int):
            return shard
        self._fail(batch, shard)
        return None

    def _fill(self, lane: Lane) -> None:
        """Send queued units as far as the window allows, call by call in turns."""
        route = self._routing.route(lane.shard)
        if route is None or route.is_away:
            return
        queue, window = lane.queue, self._routing.limits.max_unsettled_units
        while (
            queue
            and lane.bytes < LANE_BYTES
            and (not lane.unsettled or lane.next_seq - next(iter(lane.unsettled)) < window)
        ):
            batch = queue[0]
            self._launch(lane, batch, route)
            if batch.sent == len(batch.cuts) or batch.is_stepwise:
                queue.popleft()  # one that goes step by step is back when the step is done
            elif len(queue) > 1:
                queue.rotate(-1)

    def _launch(self, lane: Lane, batch: Batch, route: Route) -> None:
        turn = self._turn
        start, stop = batch.cuts[batch.sent]
        body = batch.body(start, stop)
        if not batch.sent:
            batch.since = lane.since
        seq = lane.next_seq
        message = Insert(
            self._routing.cluster, lane.shard, route.view, turn.client, seq, lane.first_incomplete,
            batch.previous, batch.floor, stop - start, body, 1, batch.since,
        )  # fmt: skip
        unit = Unit(batch, batch.sent, message, route, turn.now)
        unit.pause = lane.timeout.ns
        unit.retry_at = turn.now + unit.pause
        turn.wake_at(unit.retry_at)
        lane.route = route
        lane.next_seq = seq + 1
        lane.unsettled[seq] = unit
        lane.reported = message.first_incomplete
        lane.bytes += len(body)
        batch.sent += 1
        batch.previous = seq
        turn.effects.append(Broadcast(route.names, message))

    # --- answers ---

    def on_ack(self, ack: InsertAck) -> None:
        """Take an ack; settle the unit if all replicas agree (D8)."""
        lane = self.lanes.get(ack.shard)
        unit = lane.unsettled.get(ack.seq) if lane is not None else None
        if lane is None or unit is None:
            return
        if ack.view != unit.message.view or ack.server >= unit.replicas:
            if ack.view > unit.message.view:
                self._routing.refresh()
            return
        if unit.redirects and not unit.heeds(ack):
            return
        acks = unit.acks
        known = acks.get(ack.server)
        if known is not None:
            if known.incarnation == ack.incarnation and known.counter >= ack.counter:
                return
            if known.gsns != ack.gsns:
                unit.is_slow = True
        if ack.waited:
            unit.is_slow = True
        acks[ack.server] = ack
        if lane.note_answer(unit, ack) and known is None:
            self._copies.answered(lane)
        unit.verdict = None
        if len(acks) == unit.replicas:
            gsns = ack.gsns
            for other in acks.values():
                if other.gsns != gsns:
                    return
            self._copies.settled()
            lane.measure(unit, self._turn.now)
            self._settle(lane, unit, gsns)

    def on_located(self, located: Located) -> None:
        """Take a server's word on where a unit is."""
        lane = self.lanes.get(located.shard)
        unit = lane.unsettled.get(located.seq) if lane is not None else None
        if lane is None or unit is None or located.client != self._turn.client:
            return
        if located.verdict == "present":
            if unit.admits(located.gsns):
                self._turn.counters.located += len(located.gsns)
                unit.is_slow = True
            lane.search.decided()
            self._settle(lane, unit, located.gsns)
        elif located.verdict == "absent" and located.view > unit.message.view:
            if not unit.is_lost:
                lane.search.decided()
                self._lose(lane, unit)
        elif located.view > unit.message.view:
            self._routing.refresh()
        self._turn.wake_at(max(lane.search.due, self._turn.now))

    def _lose(self, lane: Lane, unit: Unit) -> None:
        """A view after that of its copies does not have it, so it never will exist by them."""
        unit.is_lost = True
        self._routing.refresh()
        if unit.batch is None:
            self._give_up(lane, unit)
            self._fill(lane)
        elif not self._move(lane, unit.batch) and lane.is_tied:
            self._turn.wake_at(self._turn.now)

    def _settle(self, lane: Lane, unit: Unit, gsns: list[int]) -> None:
        batch, counters = unit.batch, self._turn.counters
        if not unit.admits(gsns):
            message = unit.message
            what = f"shard {message.shard} placed {message.count} records at {gsns[:3]}..."
            self._accuse(lane, unit, f"{what}, after {message.after}")
            return
        lane.settle(unit)
        if unit.doubt is not None:
            self._doubts.learned(unit.doubt, unit.message.seq, gsns)
        lane.avoid_until = 0
        view = unit.message.view
        if gsns[-1] >= lane.since:
            lane.since = gsns[-1] + 1
        if gsns[-1] > lane.highest.get(view, 0):
            lane.highest[view] = gsns[-1]
        counters.inserts += len(gsns)
        if unit.is_slow:
            counters.slow_path += len(gsns)
        else:
            counters.fast_path += len(gsns)
        if batch is not None:
            batch.gsns[unit.index] = gsns
            batch.open -= 1
            if not batch.open:
                self._complete(batch)
            elif batch.is_stepwise:
                lane.queue.append(batch)
            elif lane.is_tied:
                self._turn.wake_at(self._turn.now)
        if lane.queue:
            self._fill(lane)
        if not lane.unsettled:
            self.settling.emptied(lane)

    def _accuse(self, lane: Lane, unit: Unit, what: str) -> None:
        """Servers did what they may not. A doubt about it stays one: nothing they say helps."""
        self._turn.counters.protocol_errors += 1
        lane.settle(unit)
        if unit.batch is not None:
            self._fail(unit.batch, ProtocolError(what))
        self._fill(lane)

    def _give_up(self, lane: Lane, unit: Unit) -> None:
        """A unit never will exist."""
        lane.settle(unit)
        if unit.doubt is not None:
            self._doubts.learned(unit.doubt, unit.message.seq, None)

    def _complete(self, batch: Batch) -> None:
        del self._batches[batch.call]
        self._turn.complete(batch.call, batch.rids)

    def on_refused(self, refused: Refused) -> None:
        """Take a refusal of a unit: repeat it, move it, or fail its call."""
        lane = self.lanes.get(refused.shard)
        unit = lane.unsettled.get(refused.request) if lane is not None else None
        if lane is None or unit is None:
            return
        unit.refuse(refused)
        match refused.code:
            case "no-such-position":
                if refused.server == 0:
                    self._doom(lane, unit)
            case "too-large":
                limit = self._routing.limits.max_payload_bytes
                self._reject(lane, unit, RecordTooLargeError(len(unit.message.body), limit))
            case "malformed" | "identity-reused":
                what = f"shard {refused.shard} refused seq {refused.request}: {refused.code}"
                self._accuse(lane, unit, f"{what}: {refused.detail}")
            case "redirect":
                self._turn.counters.redirects += 1
                unit.renounce(refused)
                self._postpone(lane, unit, refused)
            case "expired":
                lane.since = max(lane.since, refused.since)
                self._start_over(lane, unit, refused)
            case _:
                unit.is_suspect |= refused.code in {"not-ready", "wrong-view"}
                unit.is_expected &= refused.copies < unit.copies and not unit.is_suspect
                self._postpone(lane, unit, refused)

    def _doom(self, lane: Lane, unit: Unit) -> None:
        """The primary says that `after` does not exist: that ends it, unless a copy is under way.

        One refusal may answer several copies; one that is still to arrive gets another answer by
        the time when the unit would be sent again.
        """
        after = unit.batch.request.after if unit.batch else RecordId(unit.message.after, lane.shard)
        verdict = NoSuchRecordError(after, "no position from there on was ever given to a shard")
        if unit.copies == 1:
            self._reject(lane, unit, verdict)
        else:
            unit.verdict = verdict
            unit.retry_at = self._turn.now + lane.timeout.ns
            self._turn.wake_at(unit.retry_at)

    def _reject(self, lane: Lane, unit: Unit, error: ZiplogError) -> None:
        self._give_up(lane, unit)
        if unit.batch is not None:
            self._fail(unit.batch, error)
        self._fill(lane)

    def _start_over(self, lane: Lane, unit: Unit, refused: Refused) -> None:
        """A server never takes a unit, as it cannot tell it from one that it has forgotten.

        No server forgets a unit so soon after it was sent for the first time: then the unit was not
        placed, and is nowhere once all replicas refused it. Otherwise its fate stays unknown.
        """
        if self._turn.now - unit.first_sent > self._turn.forgotten_ns:
            self._forget(lane, unit)
            self._fill(lane)
            return
        unit.is_expired = True
        unit.renounce(refused)
        if unit.batch is not None:
            self._move(lane, unit.batch)
        elif unit.is_absent:
            self._give_up(lane, unit)
            self._fill(lane)

    def _postpone(self, lane: Lane, unit: Unit, refused: Refused) -> None:
        """Send a refused unit again later; to another shard if no server can have taken it."""
        turn = self._turn
        self._routing.refresh()
        self.choice.avoid(lane)
        if not unit.is_absent:
            turn.wake_at(max(lane.search.due, turn.now))
            if refused.copies >= unit.copies:
                self._repeat_soon(unit)
        elif unit.batch is None:
            self._give_up(lane, unit)
            self._fill(lane)
        elif not self._move(lane, unit.batch):
            self._repeat_soon(unit)

    def _repeat_soon(self, unit: Unit) -> None:
        """A server put the newest copy off: another one is due, later after each."""
        pause = min(_REFUSED_PAUSE_NS << min(unit.copies, 10), LAST_PAUSE_NS)
        unit.retry_at = min(unit.retry_at, self._turn.now + pause)
        unit.is_expected = False
        self._turn.wake_at(unit.retry_at)

    def _move(self, lane: Lane, batch: Batch) -> bool:
        """Give a batch of which nothing is anywhere to another shard, if the policy allows it.

        If not, and its identity is used up, it waits for its shard with a new one, as does the rest
        of one that is placed in part. Its call ends if the shard never comes back, or if a later
        part was placed than one that is nowhere. False: it stays as it is.
        """
        units = lane.of(batch)
        if not all(unit.is_absent for unit in units):
            return False
        if batch.has_behind(units[0]):
            self._fail(batch, insert_errors.torn(batch, self._routing))
            return True
        is_redirected = all(unit.is_redirected for unit in units)
        if batch.is_begun and not is_redirected:
            return False
        shard = self._choose(batch)
        if shard is None:
            return True
        if shard == lane.shard and not is_redirected:
            return False
        for unit in units:
            lane.settle(unit)
        lane.dequeue(batch)
        batch.begin_anew()
        self._fill(lane)
        if shard == lane.shard and not any(unit.is_expired for unit in units):
            self._wait_for_news(batch)
        else:
            if shard != lane.shard:
                self._turn.counters.moved += len(batch.request.payloads)
            self._assign(batch, shard)
        return True

    def _wait_for_news(self, batch: Batch) -> None:
        """Its shard takes nothing, whatever is known of it: try again when more is known."""
        self._homeless[batch.call] = batch
        if not self._is_house_due:
            self._is_house_due = True
            self._routing.refresh(self._house)

    # --- time and routes ---

    def _rerouted(self, shards: list[int]) -> None:
        """Send what is unsettled to the new view; find a place for what has none."""
        for shard in shards:
            lane = self.lanes.get(shard)
            route = self._routing.route(shard) if lane is not None else None
            if lane is None or route is None:
                continue
            self._redirect(lane, route)
            if shard not in self._routing.live:
                self._homeless |= {batch.call: batch for batch in lane.evacuate()}
        self._house()
        for lane in list(self.lanes.values()):
            lost = [unit.batch for unit in lane.unsettled.values() if unit.is_lost]
            for batch in dict.fromkeys(lost):
                if batch is not None and batch.call in self._batches:
                    self._move(lane, batch)

    def _redirect(self, lane: Lane, route: Route) -> None:
        """The shard has another view or state: send again what it may take, ask for the rest."""
        if not lane.moves_to(route):
            return
        turn = self._turn
        lane.search.hurry()
        lane.timeout.reset()
        lane.probe_at = 0
        turn.wake_at(turn.now)
        if route.is_away:
            return
        for unit in lane.unsettled.values():
            unit.pause = lane.timeout.ns
            unit.retry_at, unit.is_expected = turn.now, False
        lane.avoid_until = 0
        self._untie(lane, route)

    def _untie(self, lane: Lane, route: Route) -> None:
        """Send calls of a former view on in this one, but not what could get behind its followers.

        Of those all is asked for, until it is known which of them are in the log.
        """
        lane.is_tied = False
        known: list[Batch] = []
        for batch, units in lane.older(route.view).items():
            if not batch.is_ahead(units):
                for unit in units:
                    unit.reroute(route.view, len(route.names))
                    unit.retry_at = self._turn.now
                if batch.sent < len(batch.cuts) and not batch.is_stepwise:
                    lane.enqueue(batch)
                continue
            lane.is_tied = True
            lane.dequeue(batch)
            if all(unit.is_absent for unit in units):
                known.append(batch)
        for batch in known:
            self._move(lane, batch)
        self._fill(lane)

    def _house(self) -> None:
        """Find a place for the batches that have none."""
        self._is_house_due = False
        homeless, self._homeless = self._homeless, {}
        for batch in homeless.values():
            self._dispatch(batch)

    def tick(self) -> None:
        """Repeat and ask what is due, and end the calls whose deadline has passed."""
        turn = self._turn
        for batch in list(self._batches.values()):
            if turn.now >= batch.request.deadline:
                self._expire(batch)
            else:
                turn.wake_at(batch.request.deadline)
        for call, doubt in self._doubts.expired():
            turn.complete(call, insert_errors.unknown(doubt, self.lanes, self._routing))
        for lane in list(self.lanes.values()):
            if lane.unsettled or lane.queue:
                self._look_after(lane)
        overdue, self.choice.overdue = self.choice.overdue, []
        for batch in [batch for lane in overdue for batch in lane.evacuate()]:
            self._dispatch(batch)
        if self._homeless:
            self._routing.refresh()

    def _look_after(self, lane: Lane) -> None:
        route = self._routing.route(lane.shard)
        assert route is not None, "a lane without a route"
        if lane.is_tied and not route.is_away:
            self._untie(lane, route)
        self._copies.look(lane, route)
        units = lane.unsettled.values()
        has_asked = lane.search.look(self._turn, route, units)
        if has_asked or (route.is_away and (lane.queue or any(u.is_awaited for u in units))):
            self._routing.refresh()

    def overslept(self) -> None:
        """This client was silent for so long that servers may have forgotten it.

        What they may hold can be told by nobody any more, and must not be sent again: it could be
        placed twice (docs/protocol.md, section 4, rule 8).
        """
        for lane in self.lanes.values():
            for unit in [unit for unit in lane.unsettled.values() if not unit.is_absent]:
                self._forget(lane, unit)

    def _forget(self, lane: Lane, unit: Unit) -> None:
        """Neither send nor ask for a unit any more: its fate will never be known."""
        if unit.batch is not None:
            self._expire(unit.batch, is_forgotten=True)
        lane.settle(unit)
        if unit.doubt is not None:
            unit.doubt.is_forgotten = True

    # --- the end of a call ---

    def _expire(self, batch: Batch, *, is_forgotten: bool = False) -> None:
        """Its deadline has come, or servers may have forgotten it: say what is known about it."""
        is_homeless = batch.call in self._homeless
        error, doubt = insert_errors.late(
            batch, self.lanes, self._routing, is_homeless=is_homeless, is_forgotten=is_forgotten
        )
        self._fail(batch, error, doubt)

    def _fail(self, batch: Batch, error: Exception, doubt: Doubt | None = None) -> None:
        if isinstance(error, ZiplogError) and batch.many:
            insert_errors.mark_parts(error, batch)
        self._detach(batch, doubt)
        self._turn.complete(batch.call, error)

    def _detach(self, batch: Batch, doubt: Doubt | None = None) -> None:
        """Forget a call. Its units that were sent stay until their fate is known."""
        del self._batches[batch.call]
        self._homeless.pop(batch.call, None)
        lane = self.lanes.get(batch.shard)
        if lane is None:
            return
        for unit in lane.of(batch):
            unit.batch = None
            if unit.is_absent:
                lane.settle(unit)
            else:
                unit.doubt = doubt
        lane.dequeue(batch)
        self._fill(lane)

    def check(self) -> None:
        """Assert the invariants."""
        for shard, lane in self.lanes.items():
            assert shard == lane.shard
            lane.check(self._routing.limits.max_unsettled_units)
            route = self._routing.route(shard)
            if route is not None and not route.is_away:
                tied = lane.older(route.view)
                assert lane.is_tied or not tied, "a call stays in a former view"
                assert not any(batch in tied for batch in lane.queue), "more of a call could go out"
            lane.check_timers(route, self._turn)
            for unit in lane.unsettled.values():
                assert unit.batch is None or unit.batch.call in self._batches
        self._doubts.check()
        for batch in self._batches.values():
            assert self._turn.alarm <= batch.request.deadline, "a deadline would be missed"
            assert batch.open == batch.gsns.count(None)
