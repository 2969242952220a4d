"""The in-flight window of one shard: calls split into units, and units without an outcome.

Seqs start at 1, are assigned in the order of sending, and are never reused. A call is blocked by a
view change while some of its units are of an older view, and a later unit than the first of them is
placed or may be placed. The client sends nothing of a blocked call.

Invariant: `inflight` is in seq order; `bytes` is the total size of its bodies. See
docs/protocol.md, section 4.
"""

from __future__ import annotations

from collections import deque
from operator import lt
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ziplog.client.common.requests import NEVER
from ziplog.client.inserts.retransmission import RetransmitTimeout
from ziplog.core.entries import Body, encode_body
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ziplog.client.common.requests import InsertRequest
    from ziplog.client.common.routing import Route
    from ziplog.client.common.unknown_outcome import UnknownOutcome
    from ziplog.errors import ZiplogError
    from ziplog.wire import Insert, InsertAck, Refused

#: Maximum number of records of a unit, and of bytes unless it has a single record.
MAX_UNIT_RECORDS: Final = 256
MAX_UNIT_BYTES: Final = 256 * 1024
#: Maximum number of in-flight bytes at a shard; a unit is sent if there is room for some of it.
MAX_INFLIGHT_BYTES: Final = 4 * 1024 * 1024
_SINGLE: Final[Sequence[tuple[int, int]]] = ((0, 1),)
_NO_SERVERS: Final[frozenset[int]] = frozenset()
_NONE: Final[Mapping[int, int]] = MappingProxyType({})


class InsertCall:
    """One insert call: its payloads, split into units."""

    __slots__ = (
        "gsns", "number", "open", "placed_rids", "previous", "request", "sent", "shard", "since",
        "unit_ranges",
    )  # fmt: skip

    def __init__(self, number: int, request: InsertRequest) -> None:
        self.number: Final = number
        self.request: Final = request
        #: The rids of the payloads that were placed before `restart_remainder`.
        self.placed_rids: tuple[RecordId, ...] = ()
        #: The payloads [start, stop) of each unit.
        payloads = request.payloads
        self.unit_ranges: Sequence[tuple[int, int]] = (
            split_into_units(payloads, request.keys) if len(payloads) > 1 else _SINGLE
        )
        #: The gsns of each unit; None while they are unknown.
        self.gsns: list[list[int] | None] = [None] * len(self.unit_ranges)
        #: Number of units without gsns.
        self.open = len(self.unit_ranges)
        #: The shard that the policy selected last; -1 before that.
        self.shard = -1
        #: Number of units that were sent, and the seq of the last one.
        self.sent = 0
        self.previous = 0
        #: `ShardWindow.since` when the first unit was sent.
        self.since = 0

    @property
    def rids(self) -> list[RecordId]:
        """The rids of the payloads that are placed."""
        shard = self.shard
        rids = [RecordId(gsn, shard) for gsns in self.gsns if gsns is not None for gsn in gsns]
        return [*self.placed_rids, *rids] if self.placed_rids else rids

    @property
    def is_partly_placed(self) -> bool:
        """Whether some payloads are placed."""
        return self.open < len(self.unit_ranges) or bool(self.placed_rids)

    def restart_remainder(self) -> None:
        """Give new identities to the units that are not placed; all of them are absent."""
        self.placed_rids = tuple(self.rids)
        first = len(self.unit_ranges) - self.open
        self.unit_ranges, self.gsns = self.unit_ranges[first:], self.gsns[first:]
        assert self.gsns.count(None) == self.open, "a unit would be placed after a later one"
        self.sent = self.previous = 0

    @property
    def is_sequential(self) -> bool:
        """Whether a unit is sent only after all units before it are placed.

        With several units in flight, a later one might be placed alone: if the client crashes, or
        if a recovery uses a backup that guessed them in another order than the primary's.
        """
        return self.request.origin is not None

    @property
    def floor(self) -> int:
        """The gsn that must precede the next unit."""
        before = self.gsns[self.sent - 1] if self.is_sequential and self.sent else None
        if before:
            return before[-1]
        return self.placed_rids[-1].gsn if self.placed_rids else self.request.after.gsn

    def has_later_unit(self, units: list[InflightUnit]) -> bool:
        """Whether a unit after the first of these units is placed, or may be placed.

        The primary places units in order. But a recovery keeps units that a backup acked, and may
        lose earlier ones. An earlier unit that is sent again would be placed after them.
        """
        first, *rest = units
        return not all(unit.is_absent for unit in rest) or self.has_later_unit_placed(first)

    def has_later_unit_placed(self, unit: InflightUnit) -> bool:
        """Whether a unit after this one is placed."""
        return any(gsns is not None for gsns in self.gsns[unit.index + 1 : self.sent])

    def body(self, start: int, stop: int) -> bytes:
        """Return the encoded body of a unit with these payloads."""
        request = self.request
        origin, key, keys = request.origin, request.key, request.keys
        if origin is not None:
            origin = replace(origin, row=origin.row + start)
        if keys is not None:
            keys = keys[start:stop]
            if keys.count(keys[0]) == len(keys):
                key, keys = keys[0], None
        payloads = request.payloads[start:stop]
        return encode_body(Body(request.timestamp_us, key, payloads, origin, keys))

    @property
    def many(self) -> bool:
        """Whether the caller passed a list."""
        return self.request.many or len(self.request.payloads) > 1

    @property
    def results(self) -> list[RecordId | None]:
        """The rid of each payload; None while it is unknown."""
        results: list[RecordId | None] = [*self.placed_rids]
        for (start, stop), gsns in zip(self.unit_ranges, self.gsns, strict=True):
            known = [RecordId(gsn, self.shard) for gsn in gsns or ()]
            results += known or [None] * (stop - start)
        return results


class InflightUnit:
    """A unit that was sent and has no outcome yet."""

    __slots__ = (
        "acks", "backoff", "call", "first_sent", "index", "is_absent_in_newer_view", "is_expired",
        "last_sent", "locate_count", "may_be_queued", "may_be_stale", "message", "outcome",
        "pending_error", "redirects", "refusals", "replicas", "retransmit_at", "took_slow_path",
    )  # fmt: skip

    def __init__(
        self, call: InsertCall, index: int, message: Insert, route: Route, now: int
    ) -> None:
        #: None after its call ended.
        self.call: InsertCall | None = call
        #: The unknown outcome of its call, if that ended with one.
        self.outcome: UnknownOutcome | None = None
        self.index: Final = index
        self.message = message
        self.first_sent: Final = now
        #: When the newest copy was sent.
        self.last_sent = now
        self.retransmit_at = NEVER
        #: The newest copy may be in its servers' queues: no server refused it, and the shard's view
        #: is the view that it was sent in.
        self.may_be_queued = True
        self.backoff = 0
        #: The newest ack of each replica, all of the message's view.
        self.acks: dict[int, InsertAck] = {}
        self.replicas = len(route.names)
        #: A backup corrected its guess, or waited for the primary's decision.
        self.took_slow_path = False
        #: By server: it will never accept the first copies, up to this number.
        self.refusals = _NONE
        #: The replicas that will never accept any copy in the message's view.
        self.redirects: frozenset[int] = _NO_SERVERS
        #: A server refused it as expired: it cannot distinguish the unit from a forgotten one.
        self.is_expired = False
        #: A server of a newer view than the message's reported it as absent.
        self.is_absent_in_newer_view = False
        #: A server that refused it may have left the view, so other servers may know its outcome.
        self.may_be_stale = False
        #: Number of `Locate` requests that were sent for it.
        self.locate_count = 0
        #: The error that ends its call unless a server acks the unit.
        self.pending_error: ZiplogError | None = None

    def is_valid_placement(self, gsns: list[int]) -> bool:
        """Whether these gsns are a valid placement of the unit."""
        return (
            len(gsns) == self.message.count
            and gsns[0] > self.message.after
            and (len(gsns) == 1 or all(map(lt, gsns, gsns[1:])))
        )

    @property
    def copies(self) -> int:
        """Number of copies that each replica was sent, in all views."""
        return self.message.copy

    @property
    def is_absent(self) -> bool:
        """Whether the unit is placed nowhere, and no server will accept a copy of it."""
        return self.is_absent_in_newer_view or (
            not self.acks
            and all(
                server in self.redirects or self.refusals.get(server, 0) >= self.copies
                for server in range(self.replicas)
            )
        )

    @property
    def is_redirected(self) -> bool:
        """Whether no server will ever accept this identity in this view."""
        return len(self.redirects) == self.replicas

    @property
    def has_waiter(self) -> bool:
        """Whether a caller waits for its outcome."""
        return self.call is not None or (self.outcome is not None and self.outcome.calls > 0)

    def add_refusal(self, refused: Refused) -> None:
        """Record a server's promise never to accept the first copies; it may arrive twice."""
        server = refused.server
        if refused.copies > self.refusals.get(server, 0):
            self.refusals = {**self.refusals, server: refused.copies}

    def add_permanent_refusal(self, refused: Refused) -> None:
        """Record a server's promise never to accept the unit in a view; its own guess is void.

        A placement by the primary stays valid, whatever a backup promised.
        """
        server, ack = refused.server, self.acks.get(refused.server)
        is_of_view = refused.view == self.message.view and server < self.replicas
        if is_of_view and not (ack is not None and ack.confirmed):
            self.acks.pop(server, None)
            self.redirects |= {server}

    def counts_ack(self, ack: InsertAck) -> bool:
        """Whether an ack counts; a guess of a server that then refused the unit does not."""
        if ack.confirmed:
            self.redirects -= {ack.server}
        return ack.server not in self.redirects

    def move_to_view(self, view: int, replicas: int) -> None:
        """Send the unit in this view from now on; acks of the older view no longer count."""
        self.message = replace(self.message, view=view)
        self.replicas = replicas
        self.acks.clear()
        self.redirects = _NO_SERVERS
        self.pending_error = None
        self.may_be_stale = self.may_be_queued = False


class ShardWindow:
    """The in-flight window of a client at one shard."""

    __slots__ = (
        "answered_up_to", "avoid_until", "bytes", "highest_gsns", "inflight",
        "is_blocked_by_view_change", "next_seq", "probe_at", "progress_at", "queue", "reported",
        "retransmit_timeout", "route", "shard", "since",
    )  # fmt: skip

    def __init__(self, shard: int, since: int) -> None:
        self.shard: Final = shard
        #: The last known route of the shard.
        self.route: Route | None = None
        self.next_seq = 1
        #: The last `first_incomplete` that the servers were sent.
        self.reported = 1
        #: By seq, in order.
        self.inflight: dict[int, InflightUnit] = {}
        #: Total size of the bodies of the units in flight.
        self.bytes = 0
        #: Calls with unsent units; the client sends their units in turn.
        self.queue: deque[InsertCall] = deque()
        #: Some calls may be blocked by a view change; these are not in the queue.
        self.is_blocked_by_view_change = False
        self.retransmit_timeout: Final = RetransmitTimeout()
        #: Until then, the client retransmits only units that were passed over.
        self.probe_at = 0
        #: When acks of a unit agreed last.
        self.progress_at = 0
        #: By server: the send time of the newest message that it has answered.
        self.answered_up_to: Final[dict[int, int]] = {}
        self.avoid_until = 0
        #: The last gsn of this client in each view since its last `sync`.
        self.highest_gsns: dict[int, int] = {}
        #: All positions of the shard below this one are decided, as far as the client knows.
        self.since = max(since, 1)

    def update_route(self, route: Route) -> bool:
        """Update the route; return whether units must be retransmitted or located."""
        former, self.route = self.route, route
        if former is None or former.names != route.names:
            return True
        was_parked, is_parked = former.state == "parked", route.state == "parked"
        return (former.view, former.is_unavailable, was_parked) != (
            route.view,
            route.is_unavailable,
            is_parked,
        )

    @property
    def first_incomplete(self) -> int:
        """The lowest seq in flight; the next seq if there is none."""
        return next(iter(self.inflight), self.next_seq)

    def enqueue(self, call: InsertCall) -> None:
        """Add a call to the queue unless it is there."""
        if call not in self.queue:
            self.queue.append(call)

    def dequeue(self, call: InsertCall) -> None:
        """Remove a call from the queue."""
        if call in self.queue:
            self.queue.remove(call)

    def dequeue_unsent(self) -> list[InsertCall]:
        """Remove and return the queued calls without a sent unit."""
        unsent = [call for call in self.queue if not call.sent]
        for call in unsent:
            self.queue.remove(call)
        return unsent

    def observe_latency(self, unit: InflightUnit, now: int) -> None:
        """Observe the latency of a unit after its acks agree.

        A unit with several copies gives a sample only if all servers answered the same copy, the
        first or the newest one (Karn's algorithm).
        """
        self.progress_at = now
        if unit.copies == 1 or all(ack.copy == 1 for ack in unit.acks.values()):
            self.retransmit_timeout.observe_latency(now - unit.first_sent)
        elif all(ack.copy == unit.copies for ack in unit.acks.values()):
            self.retransmit_timeout.observe_latency(now - unit.last_sent)

    def note_ack(self, unit: InflightUnit, ack: InsertAck) -> bool:
        """Note how far a server has read this client's connection, which it reads in order.

        Returns whether the ack answers a further copy.
        """
        is_newest = (ack.copy or 1) == unit.copies
        if is_newest and unit.last_sent > self.answered_up_to.get(ack.server, 0):
            self.answered_up_to[ack.server] = unit.last_sent
        return is_newest and unit.copies > 1

    def was_passed_over(self, unit: InflightUnit) -> bool:
        """Whether a server that owes an ack of this unit has answered a later message.

        Then the unit or its ack was lost, or the unit waits for something else than the queue. The
        ack of a backup with a wrong guess arrives after the primary's decision, so it may be later.
        """
        if not unit.may_be_queued:
            return True
        primary, sent = unit.acks.get(0), unit.last_sent
        for server, read in self.answered_up_to.items():
            ack = unit.acks.get(server)
            if (ack is None or (primary is not None and ack.gsns != primary.gsns)) and (
                sent + (self.retransmit_timeout.ns if server else 0) < read
            ):
                return True
        return False

    def overdue_at(self, unit: InflightUnit) -> int:
        """Return when to retransmit a unit after its backoff.

        While acks of other units arrive, the servers work, and this unit is most likely in their
        queue.
        """
        if self.was_passed_over(unit):
            return unit.retransmit_at
        return max(unit.retransmit_at, self.progress_at + self.retransmit_timeout.ns)

    def retire(self, unit: InflightUnit) -> None:
        """Remove a unit after its outcome is known."""
        del self.inflight[unit.message.seq]
        self.bytes -= len(unit.message.body)

    def units_of_older_views(self, view: int) -> dict[InsertCall, list[InflightUnit]]:
        """Return the units of pending calls that were sent in another view than this one."""
        found: dict[InsertCall, list[InflightUnit]] = {}
        for unit in self.inflight.values():
            if unit.call is not None and unit.message.view != view:
                found.setdefault(unit.call, []).append(unit)
        return found

    def units_of(self, call: InsertCall) -> list[InflightUnit]:
        """Return the units of a call that are in flight."""
        return [unit for unit in self.inflight.values() if unit.call is call]

    def check(self, max_units: int) -> None:
        """Assert the invariant, and that all seqs are within `max_units` of the lowest one."""
        seqs = list(self.inflight)
        assert all(map(lt, seqs, seqs[1:])), "seqs are out of order"
        assert self.next_seq - self.first_incomplete <= max_units, "servers would refuse this"
        assert self.bytes == sum(len(unit.message.body) for unit in self.inflight.values())
        for unit in self.inflight.values():
            assert all(ack.view == unit.message.view for ack in unit.acks.values())
            assert not unit.acks.keys() & unit.redirects, "a replica refused and acked a unit"


def split_into_units(
    payloads: list[bytes], keys: list[bytes | None] | None = None
) -> list[tuple[int, int]]:
    """Split payloads into units [start, stop) within the limits of records and bytes."""
    unit_ranges: list[tuple[int, int]] = []
    start = size = 0
    for index, payload in enumerate(payloads):
        payload_size = len(payload) + (len(keys[index] or b"") if keys is not None else 0)
        size += payload_size
        if index > start and (size > MAX_UNIT_BYTES or index - start == MAX_UNIT_RECORDS):
            unit_ranges.append((start, index))
            start, size = index, payload_size
    unit_ranges.append((start, len(payloads)))
    return unit_ranges
