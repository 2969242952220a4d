"""Inserts: from a call to acks that agree.

    call --policy--> queued at a shard --window--> sent --acks agree--> settled
                                                    |--deadline--> doubtful --acks agree--> settled
                                                    '--all copies refused--> moved, or failed

A call's payloads are cut into *units*; a unit is one `Insert`, identified by (client, seq), seq
counted per shard in a `Lane`. Rules: a unit that was sent is repeated with the same identity at the
same shard until its fate is known, even when its call was answered (D13); it is settled when the
newest acks of all replicas, of one view, name the same gsns (D8). Invariant: a lane's open seqs
lie within the window that servers allow. See docs/protocol.md, section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ziplog.client.lane import LANE_BYTES, MAX_PATIENCE_NS, Batch, Lane, Unit
from ziplog.errors import (
    DeadlineError,
    NoSuchRecordError,
    OutcomeUnknownError,
    ProtocolError,
    RecordTooLargeError,
    UnavailableError,
    ZiplogError,
)
from ziplog.node import Broadcast
from ziplog.types import RecordId
from ziplog.wire import Body, Insert, InsertAck, Refused, encode_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.client.requests import InsertRequest, Policy
    from ziplog.client.routing import Route, Routing
    from ziplog.client.turn import Turn

_MS: Final = 1_000_000
#: A shard that let us wait gets no new unpinned records for so long.
_AVOID_NS: Final = 500 * _MS
#: Pause before a refused unit is sent again, doubling up to `MAX_PATIENCE_NS`.
_REFUSED_PAUSE_NS: Final = 2 * _MS
#: Nobody waits for a doubtful unit any more: pauses up to this.
_DOUBTFUL_PAUSE_NS: Final = 5_000 * _MS
#: In one look, not more than this is sent again to a shard.
_REPEAT_BYTES: Final = 1024 * 1024


class Inserts:
    """All inserts of a client."""

    def __init__(self, turn: Turn, routing: Routing, policy: Policy) -> None:
        self._turn: Final = turn
        self._routing: Final = routing
        self.policy = policy
        self._batches: dict[int, Batch] = {}
        self._lanes: dict[int, Lane] = {}
        #: Batches whose shard is not live (or that have none), by call.
        self._homeless: dict[int, Batch] = {}
        #: No lane is avoided from here on.
        self._avoid_until = 0
        routing.on_change.append(self._rerouted)

    @property
    def waiting(self) -> bool:
        """Whether a call is under way."""
        return bool(self._batches)

    # --- from the call to the wire ---

    def start(self, call: int, request: InsertRequest) -> None:
        """Take a call."""
        batch = Batch(call, request)
        self._batches[call] = batch
        self._turn.wake_at(request.deadline)
        self._dispatch(batch)

    def cancel(self, call: int) -> None:
        """The user waits no longer: what was sent is doubtful, the rest is dropped."""
        batch = self._batches.get(call)
        if batch is not None:
            self._detach(batch)

    def _dispatch(self, batch: Batch) -> None:
        """Give a batch, none of whose units can have been taken, to a shard."""
        shard = self._choose(batch)
        if shard is None:
            return
        batch.shard = shard
        if shard not in self._routing.live:
            self._homeless[batch.call] = batch
            self._routing.refresh()
            return
        lane = self._lanes.get(shard)
        if lane is None:
            lane = self._lanes[shard] = Lane(shard)
        lane.queue.append(batch)
        if len(lane.queue) == 1:
            self._fill(lane)

    def _choose(self, batch: Batch) -> int | None:
        """Ask the policy. None: it failed, and so did the call."""
        live: Sequence[int] = self._routing.live
        if not live:
            return batch.shard
        if self._turn.now < self._avoid_until:
            live = self._preferred(live)
        request = batch.request
        try:
            shard = self.policy(request.payloads[0], request.key, live)
        except Exception as error:  # noqa: BLE001 - the user's code; the user gets it back
            self._fail(batch, error)
            return None
        if type(shard) is not int:
            self._fail(batch, TypeError(f"the policy chose {shard!r}; a shard id is an int"))
            return None
        return shard

    def _preferred(self, live: Sequence[int]) -> Sequence[int]:
        """Return the live shards without those that let us wait, or all if that leaves none."""
        now, lanes = self._turn.now, self._lanes
        return [s for s in live if s not in lanes or lanes[s].avoid_until <= now] or live

    def _fill(self, lane: Lane) -> None:
        """Send queued units as far as the window allows, call by call in turns."""
        route = self._routing.route(lane.shard)
        if route is None:
            return
        queue, window = lane.queue, self._routing.limits.max_unsettled_units
        while (
            queue
            and lane.bytes < LANE_BYTES
            and (not lane.unsettled or lane.next_seq - next(iter(lane.unsettled)) < window)
        ):
            batch = queue[0]
            self._launch(lane, batch, route)
            if batch.sent == len(batch.cuts):
                queue.popleft()
            elif len(queue) > 1:
                queue.rotate(-1)

    def _launch(self, lane: Lane, batch: Batch, route: Route) -> None:
        turn, request = self._turn, batch.request
        start, stop = batch.cuts[batch.sent]
        body = encode_body(Body(request.timestamp_us, request.key, request.payloads[start:stop]))
        seq = lane.next_seq
        message = Insert(
            self._routing.cluster, lane.shard, route.view, turn.client, seq, lane.done_below,
            batch.previous, request.after.gsn, stop - start, body,
        )  # fmt: skip
        unit = Unit(batch, batch.sent, message, route, turn.now)
        unit.pause = lane.patience
        unit.retry_at = turn.now + unit.pause
        turn.wake_at(unit.retry_at)
        lane.next_seq = seq + 1
        lane.unsettled[seq] = unit
        lane.bytes += len(body)
        batch.sent += 1
        batch.previous = seq
        turn.effects.append(Broadcast(route.names, message))

    # --- answers ---

    def on_ack(self, ack: InsertAck) -> None:
        """Take an ack; settle the unit if all replicas agree (D8)."""
        lane = self._lanes.get(ack.shard)
        unit = lane.unsettled.get(ack.seq) if lane is not None else None
        if lane is None or unit is None:
            return
        if ack.view != unit.message.view or ack.server >= unit.replicas:
            if ack.view > unit.message.view:
                self._routing.refresh()
            return
        acks = unit.acks
        known = acks.get(ack.server)
        if known is not None:
            if known.incarnation == ack.incarnation and known.counter >= ack.counter:
                return
            if known.gsns != ack.gsns:
                unit.corrected = True
        acks[ack.server] = ack
        unit.verdict = None
        if len(acks) == unit.replicas:
            gsns = ack.gsns
            for other in acks.values():
                if other.gsns != gsns:
                    return
            self._settle(lane, unit, gsns)

    def _settle(self, lane: Lane, unit: Unit, gsns: list[int]) -> None:
        message, batch, counters = unit.message, unit.batch, self._turn.counters
        lane.settle(unit)
        lane.avoid_until = 0
        lane.measure(self._turn.now - unit.first_sent)
        counters.inserts += len(gsns)
        if unit.corrected:
            counters.slow_path += len(gsns)
        else:
            counters.fast_path += len(gsns)
        if batch is not None:
            if unit.admits(gsns):
                batch.gsns[unit.index] = gsns
                batch.open -= 1
                if not batch.open:
                    self._complete(batch)
            else:
                counters.protocol_errors += 1
                what = f"shard {message.shard} placed {message.count} records at {gsns[:3]}..."
                self._fail(batch, ProtocolError(f"{what}, after {message.after}"))
        if lane.queue:
            self._fill(lane)

    def _complete(self, batch: Batch) -> None:
        del self._batches[batch.call]
        self._turn.complete(batch.call, batch.rids)

    def on_refused(self, refused: Refused) -> None:
        """Take a refusal of a unit: repeat it, move it, or fail its call."""
        lane = self._lanes.get(refused.shard)
        unit = lane.unsettled.get(refused.request) if lane is not None else None
        if lane is None or unit is None:
            return
        unit.refusals += 1
        match refused.code:
            case "no-such-position":
                if refused.server == 0:
                    self._doom(lane, unit)
            case "too-large":
                limit = self._routing.limits.max_payload_bytes
                self._reject(lane, unit, RecordTooLargeError(len(unit.message.body), limit))
            case "malformed" | "identity-reused":
                what = f"shard {refused.shard} refused seq {refused.request}: {refused.code}"
                self._turn.counters.protocol_errors += 1
                self._reject(lane, unit, ProtocolError(f"{what}: {refused.detail}"))
            case _:
                self._turn.counters.redirects += refused.code == "redirect"
                self._postpone(lane, unit)

    def _doom(self, lane: Lane, unit: Unit) -> None:
        """The primary says that `after` does not exist: that ends it, unless a copy is under way.

        One refusal may answer several copies; one that is still to arrive gets another answer by
        the time when the unit would be sent again.
        """
        after = unit.batch.request.after if unit.batch else RecordId(unit.message.after, lane.shard)
        verdict = NoSuchRecordError(after, "no position from there on was ever given to a shard")
        if unit.primary_copies == 1:
            self._reject(lane, unit, verdict)
        else:
            unit.verdict = verdict
            unit.retry_at = self._turn.now + lane.patience
            self._turn.wake_at(unit.retry_at)

    def _reject(self, lane: Lane, unit: Unit, error: ZiplogError) -> None:
        lane.settle(unit)
        if unit.batch is not None:
            self._fail(unit.batch, error)
        self._fill(lane)

    def _postpone(self, lane: Lane, unit: Unit) -> None:
        """Send a refused unit again later; to another shard if no server can have taken it."""
        turn, batch = self._turn, unit.batch
        self._routing.refresh()
        self._avoid(lane)
        if batch is not None and self._is_movable(lane, batch):
            shard = self._choose(batch)
            if shard is None:
                return
            if shard != lane.shard:
                self._withdraw(lane, batch)
                self._dispatch(batch)
                return
        if unit.is_absent:
            pause = min(_REFUSED_PAUSE_NS << min(unit.primary_copies, 7), MAX_PATIENCE_NS)
            unit.retry_at = min(unit.retry_at, turn.now + pause)
            turn.wake_at(unit.retry_at)

    def _is_movable(self, lane: Lane, batch: Batch) -> bool:
        """Whether no server can have taken any of the batch's units."""
        if batch.open < len(batch.cuts):
            return False
        return all(unit.is_absent for unit in lane.of(batch))

    def _withdraw(self, lane: Lane, batch: Batch) -> None:
        for unit in lane.of(batch):
            lane.settle(unit)
        if batch in lane.queue:
            lane.queue.remove(batch)
        batch.sent = batch.previous = 0
        self._fill(lane)

    # --- time and routes ---

    def _avoid(self, lane: Lane) -> None:
        lane.avoid_until = self._avoid_until = self._turn.now + _AVOID_NS

    def _rerouted(self, shards: list[int]) -> None:
        """Send what is unsettled to the new view; find a place for what has none."""
        for shard in shards:
            lane = self._lanes.get(shard)
            route = self._routing.route(shard) if lane is not None else None
            if lane is None or route is None:
                continue
            for unit in lane.unsettled.values():
                if unit.message.view != route.view:
                    unit.message = replace(unit.message, view=route.view)
                    unit.acks.clear()
                    unit.replicas = len(route.names)
                    unit.retry_at = self._turn.now
                    self._turn.wake_at(unit.retry_at)
            if shard not in self._routing.live:
                self._evacuate(lane)
        self._house()

    def _evacuate(self, lane: Lane) -> None:
        """The shard takes no new records: batches of which nothing was sent go elsewhere."""
        unsent = [batch for batch in lane.queue if not batch.sent]
        for batch in unsent:
            lane.queue.remove(batch)
            self._homeless[batch.call] = batch

    def _house(self) -> None:
        homeless, self._homeless = self._homeless, {}
        for batch in homeless.values():
            self._dispatch(batch)

    def tick(self) -> None:
        """Repeat what is due, and end the calls whose deadline has passed."""
        turn = self._turn
        for batch in list(self._batches.values()):
            if turn.now >= batch.request.deadline:
                self._expire(batch)
            else:
                turn.wake_at(batch.request.deadline)
        for lane in self._lanes.values():
            if lane.unsettled:
                self._repeat(lane)
        if self._homeless:
            self._routing.refresh()

    def _repeat(self, lane: Lane) -> None:
        turn, route = self._turn, self._routing.route(lane.shard)
        assert route is not None, "a lane without a route"
        allowance = _REPEAT_BYTES
        for unit in list(lane.unsettled.values()):
            if unit.message.seq not in lane.unsettled:
                continue
            if turn.now >= unit.retry_at:
                if unit.verdict is not None:
                    self._reject(lane, unit, unit.verdict)
                    continue
                if allowance <= 0:
                    turn.wake_at(turn.now + lane.patience // 4)
                    break
                allowance -= len(unit.message.body)
                self._send_again(lane, unit, route)
            turn.wake_at(unit.retry_at)

    def _send_again(self, lane: Lane, unit: Unit, route: Route) -> None:
        turn = self._turn
        longest = MAX_PATIENCE_NS if unit.batch is not None else _DOUBTFUL_PAUSE_NS
        unit.pause = min(unit.pause * 2, longest)
        unit.retry_at = turn.now + unit.pause
        unit.copies += len(route.names)
        unit.primary_copies += 1
        turn.counters.retries += 1
        turn.effects.append(Broadcast(route.names, unit.message))
        self._avoid(lane)

    # --- the end of a call ---

    def _expire(self, batch: Batch) -> None:
        """Its deadline has come: say what is known about it."""
        lane = self._lanes.get(batch.shard)
        units = lane.of(batch) if lane else []
        doubtful = [unit for unit in units if not unit.is_absent]
        where = f"shard {batch.shard} of {self._routing}"
        if doubtful:
            seq = doubtful[0].message.seq
            heard = sorted(doubtful[0].acks)
            self._fail(batch, OutcomeUnknownError(
                f"the deadline passed while an insert was under way at {where}: it may have"
                f" happened (seq {seq}; of {doubtful[0].replicas} replicas, {heard} answered)",
                shard=batch.shard, seq=seq,
            ))  # fmt: skip
        elif units:
            self._fail(batch, UnavailableError(
                f"{where} refused the record at each of its replicas until the deadline;"
                " nothing was inserted: try again"
            ))  # fmt: skip
        elif batch.shard < 0:
            self._fail(batch, DeadlineError(f"no shard of {self._routing} is live; try again"))
        elif batch.call in self._homeless:
            self._fail(batch, DeadlineError(
                f"the policy chose shard {batch.shard}, which is not live (live now:"
                f" {list(self._routing.live)}) in {self._routing}; nothing was inserted"
            ))  # fmt: skip
        else:
            self._fail(batch, DeadlineError(
                f"the window of {where} was full until the deadline; nothing was inserted"
            ))  # fmt: skip

    def _fail(self, batch: Batch, error: Exception) -> None:
        if isinstance(error, ZiplogError) and len(batch.request.payloads) > 1:
            error.results = batch.results
            # Some of it was done, so the whole must not simply be repeated.
            error.retriable = error.retriable and batch.open == len(batch.cuts)
        self._detach(batch)
        self._turn.complete(batch.call, error)

    def _detach(self, batch: Batch) -> None:
        """Forget a call. Its units that were sent stay until their fate is known."""
        del self._batches[batch.call]
        self._homeless.pop(batch.call, None)
        lane = self._lanes.get(batch.shard)
        if lane is None:
            return
        for unit in lane.of(batch):
            unit.batch = None
            if unit.is_absent:
                lane.settle(unit)
        if batch in lane.queue:
            lane.queue.remove(batch)
        self._fill(lane)

    def check(self) -> None:
        """Assert the invariants."""
        for shard, lane in self._lanes.items():
            assert shard == lane.shard
            lane.check(self._routing.limits.max_unsettled_units)
            for unit in lane.unsettled.values():
                assert self._turn.alarm <= max(unit.retry_at, self._turn.now + lane.patience // 4)
                assert unit.batch is None or unit.batch.call in self._batches
        for batch in self._batches.values():
            assert self._turn.alarm <= batch.request.deadline, "a deadline would be missed"
            assert batch.open == batch.gsns.count(None)
