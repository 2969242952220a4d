"""What is under way at one shard: calls cut into units, and units that are not settled.

Rule: seqs are given in the order of sending, from 1, and never used again. A call is *tied* while
units of it are of a former view, and a later one than the first of them is in the log, or may be:
then nothing of it is sent. Invariant: `inflight` is in the order of seqs, and `bytes` is what its
bodies hold. See docs/protocol.md, section 4.
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

#: A unit holds at most so many records and (unless it is a single one) bytes.
MAX_UNIT_RECORDS: Final = 256
MAX_UNIT_BYTES: Final = 256 * 1024
#: Bytes that may be unsettled at a shard; a unit goes out if there is room for some of it.
MAX_INFLIGHT_BYTES: Final = 4 * 1024 * 1024
_SINGLE: Final[Sequence[tuple[int, int]]] = ((0, 1),)
_NOBODY: Final[frozenset[int]] = frozenset()
_NONE: Final[Mapping[int, int]] = MappingProxyType({})


class InsertCall:
    """One call: its payloads, cut into units."""

    __slots__ = (
        "done", "gsns", "number", "open", "previous", "request", "sent", "shard", "since",
        "unit_ranges",
    )  # fmt: skip

    def __init__(self, number: int, request: InsertRequest) -> None:
        self.number: Final = number
        self.request: Final = request
        #: The rids of what was placed before the rest began anew.
        self.done: tuple[RecordId, ...] = ()
        #: The payloads [start, stop) of each unit.
        payloads = request.payloads
        self.unit_ranges: Sequence[tuple[int, int]] = (
            split_into_units(payloads, request.keys) if len(payloads) > 1 else _SINGLE
        )
        #: Where each unit is; None while that is not known.
        self.gsns: list[list[int] | None] = [None] * len(self.unit_ranges)
        #: Units without gsns.
        self.open = len(self.unit_ranges)
        #: The shard that the policy chose last; -1 before it was asked.
        self.shard = -1
        #: Units that were sent, and the seq of the last of them.
        self.sent = 0
        self.previous = 0
        #: `ShardWindow.since` when the first of them was sent.
        self.since = 0

    @property
    def rids(self) -> list[RecordId]:
        """The rids of what is placed."""
        shard = self.shard
        rids = [RecordId(gsn, shard) for gsns in self.gsns if gsns is not None for gsn in gsns]
        return [*self.done, *rids] if self.done else rids

    @property
    def is_partly_placed(self) -> bool:
        """Whether some of it is placed."""
        return self.open < len(self.unit_ranges) or bool(self.done)

    def restart_remainder(self) -> None:
        """What is not placed is nowhere: it gets new identities, behind what is placed."""
        self.done = tuple(self.rids)
        first = len(self.unit_ranges) - self.open
        self.unit_ranges, self.gsns = self.unit_ranges[first:], self.gsns[first:]
        assert self.gsns.count(None) == self.open, "a part would get behind a later one"
        self.sent = self.previous = 0

    @property
    def is_sequential(self) -> bool:
        """Whether a unit may go out only when all before it are in the log, for good.

        With several under way, a later one may be there alone: when the client dies, or when a
        backup, which guessed them in another order than the primary decided, leads a recovery.
        """
        return self.request.origin is not None

    @property
    def floor(self) -> int:
        """The gsn that the next unit must be placed above."""
        before = self.gsns[self.sent - 1] if self.is_sequential and self.sent else None
        if before:
            return before[-1]
        return self.done[-1].gsn if self.done else self.request.after.gsn

    def has_later_unit(self, units: list[InflightUnit]) -> bool:
        """Whether something behind the first of its open units is in the log, or may be.

        The primary places units in order. But a recovery keeps what a backup promised, and may lose
        what comes before: sent again, that would get behind it.
        """
        first, *rest = units
        return not all(unit.is_absent for unit in rest) or self.has_later_unit_placed(first)

    def has_later_unit_placed(self, unit: InflightUnit) -> bool:
        """Whether a later unit than this one is in the log."""
        return any(gsns is not None for gsns in self.gsns[unit.index + 1 : self.sent])

    def body(self, start: int, stop: int) -> bytes:
        """Return what a unit of these payloads holds."""
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
        """Whether the user gave a list."""
        return self.request.many or len(self.request.payloads) > 1

    @property
    def results(self) -> list[RecordId | None]:
        """The rid of each payload, as far as it is known."""
        results: list[RecordId | None] = [*self.done]
        for (start, stop), gsns in zip(self.unit_ranges, self.gsns, strict=True):
            known = [RecordId(gsn, self.shard) for gsn in gsns or ()]
            results += known or [None] * (stop - start)
        return results


class InflightUnit:
    """One unit that was sent."""

    __slots__ = (
        "acks", "backoff", "call", "first_sent", "index", "is_absent_in_newer_view", "is_expired",
        "last_sent", "locate_count", "may_be_queued", "may_be_stale", "message", "outcome",
        "pending_error", "redirects", "refusals", "replicas", "retransmit_at", "took_slow_path",
    )  # fmt: skip

    def __init__(
        self, call: InsertCall, index: int, message: Insert, route: Route, now: int
    ) -> None:
        #: None once its call was answered: then it is doubtful.
        self.call: InsertCall | None = call
        #: What its call's error asks about, if it has one.
        self.outcome: UnknownOutcome | None = None
        self.index: Final = index
        self.message = message
        self.first_sent: Final = now
        #: When the newest copy was sent.
        self.last_sent = now
        self.retransmit_at = NEVER
        #: The newest copy may be in the queues of its servers: none of them refused it, and the
        #: shard's view is the one that it was sent in.
        self.may_be_queued = True
        self.backoff = 0
        #: The newest ack of each replica, all of the message's view.
        self.acks: dict[int, InsertAck] = {}
        self.replicas = len(route.names)
        #: A backup changed its word, or waited for the primary's.
        self.took_slow_path = False
        #: How many of the first copies each replica will never take, whatever happens.
        self.refusals = _NONE
        #: The replicas that will never take it in the message's view, whichever copy comes.
        self.redirects: frozenset[int] = _NOBODY
        #: A server refused it because it is too old to be told from one that was forgotten.
        self.is_expired = False
        #: A server of a later view than the message's told that it is nowhere.
        self.is_absent_in_newer_view = False
        #: A server that refused it may have left the view: others may know what became of it.
        self.may_be_stale = False
        #: How often servers were asked for it.
        self.locate_count = 0
        #: How its call ends unless a server holds the unit after all.
        self.pending_error: ZiplogError | None = None

    def is_valid_placement(self, gsns: list[int]) -> bool:
        """Whether servers may put it there."""
        return (
            len(gsns) == self.message.count
            and gsns[0] > self.message.after
            and (len(gsns) == 1 or all(map(lt, gsns, gsns[1:])))
        )

    @property
    def copies(self) -> int:
        """How many copies each replica was sent, in all views."""
        return self.message.copy

    @property
    def is_absent(self) -> bool:
        """Whether it is nowhere: no server ever takes a copy of it, or all come too late."""
        return self.is_absent_in_newer_view or (
            not self.acks
            and all(
                server in self.redirects or self.refusals.get(server, 0) >= self.copies
                for server in range(self.replicas)
            )
        )

    @property
    def is_redirected(self) -> bool:
        """Whether no server will ever take it under this identity in this view."""
        return len(self.redirects) == self.replicas

    @property
    def has_waiter(self) -> bool:
        """Whether somebody waits for its fate."""
        return self.call is not None or (self.outcome is not None and self.outcome.calls > 0)

    def add_refusal(self, refused: Refused) -> None:
        """Take a server's promise never to take the first copies; it may come late, or twice."""
        server = refused.server
        if refused.copies > self.refusals.get(server, 0):
            self.refusals = {**self.refusals, server: refused.copies}

    def add_permanent_refusal(self, refused: Refused) -> None:
        """Take a server's promise never to take it in a view: what it guessed before is void.

        Where the primary has put it, there it is, whatever a backup promised.
        """
        server, ack = refused.server, self.acks.get(refused.server)
        is_of_view = refused.view == self.message.view and server < self.replicas
        if is_of_view and not (ack is not None and ack.confirmed):
            self.acks.pop(server, None)
            self.redirects |= {server}

    def counts_ack(self, ack: InsertAck) -> bool:
        """Whether an ack counts beside the promises: a guess is older than its server's promise."""
        if ack.confirmed:
            self.redirects -= {ack.server}
        return ack.server not in self.redirects

    def move_to_view(self, view: int, replicas: int) -> None:
        """From now on it is sent in this view; acks of the former one no longer count."""
        self.message = replace(self.message, view=view)
        self.replicas = replicas
        self.acks.clear()
        self.redirects = _NOBODY
        self.pending_error = None
        self.may_be_stale = self.may_be_queued = False


class ShardWindow:
    """What this client has under way at one shard."""

    __slots__ = (
        "answered_up_to", "avoid_until", "bytes", "highest_gsns", "inflight",
        "is_blocked_by_view_change", "next_seq", "probe_at", "progress_at", "queue", "reported",
        "retransmit_timeout", "route", "shard", "since",
    )  # fmt: skip

    def __init__(self, shard: int, since: int) -> None:
        self.shard: Final = shard
        #: The route that it was told of, or used, last.
        self.route: Route | None = None
        self.next_seq = 1
        #: Servers were told last that everything below is settled.
        self.reported = 1
        #: By seq, in order.
        self.inflight: dict[int, InflightUnit] = {}
        #: What the bodies of the unsettled units hold.
        self.bytes = 0
        #: Calls with units that were not sent yet; they take turns.
        self.queue: deque[InsertCall] = deque()
        #: There may be calls that are tied; they are not in the queue.
        self.is_blocked_by_view_change = False
        self.retransmit_timeout: Final = RetransmitTimeout()
        #: Before this time, nothing is sent again without evidence that it was lost.
        self.probe_at = 0
        #: When a unit was settled last.
        self.progress_at = 0
        #: By server: when the newest message was sent that it has answered.
        self.answered_up_to: Final[dict[int, int]] = {}
        self.avoid_until = 0
        #: The last gsn where this client has a record, of each view that it inserted in since it
        #: last synced.
        self.highest_gsns: dict[int, int] = {}
        #: All positions of the shard below this one are decided, as far as this client knows.
        self.since = max(since, 1)

    def update_route(self, route: Route) -> bool:
        """Take a route; whether what is under way must be sent there, or asked for, again."""
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
        """The lowest seq that is not settled."""
        return next(iter(self.inflight), self.next_seq)

    def enqueue(self, call: InsertCall) -> None:
        """Let more of a call be sent, if that was not so."""
        if call not in self.queue:
            self.queue.append(call)

    def dequeue(self, call: InsertCall) -> None:
        """Let no more of a call be sent."""
        if call in self.queue:
            self.queue.remove(call)

    def dequeue_unsent(self) -> list[InsertCall]:
        """The shard takes no new records: take out the batches of which nothing was sent."""
        unsent = [call for call in self.queue if not call.sent]
        for call in unsent:
            self.queue.remove(call)
        return unsent

    def observe_latency(self, unit: InflightUnit, now: int) -> None:
        """Learn from a unit whose acks agree how long an insert takes here.

        Of a unit that was sent more than once, that is known if all servers answered the same
        copy, the first or the newest; otherwise it gives no sample (Karn's rule).
        """
        self.progress_at = now
        if unit.copies == 1 or all(ack.copy == 1 for ack in unit.acks.values()):
            self.retransmit_timeout.observe_latency(now - unit.first_sent)
        elif all(ack.copy == unit.copies for ack in unit.acks.values()):
            self.retransmit_timeout.observe_latency(now - unit.last_sent)

    def note_ack(self, unit: InflightUnit, ack: InsertAck) -> bool:
        """Learn how far a server has read this client's connection, which it reads in order.

        Returns whether it answers a further copy.
        """
        is_newest = (ack.copy or 1) == unit.copies
        if is_newest and unit.last_sent > self.answered_up_to.get(ack.server, 0):
            self.answered_up_to[ack.server] = unit.last_sent
        return is_newest and unit.copies > 1

    def was_passed_over(self, unit: InflightUnit) -> bool:
        """Whether a server that owes an ack of this unit has answered what was sent later.

        Then the unit was lost, or the ack was, or it waits for something else than its turn. The
        ack of a backup that did not guess right comes with the primary's word, a while later.
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
        """Return when a unit that is due by its own pause is to be sent again.

        While others are settled, its servers work, and it is in their queue like these were.
        """
        if self.was_passed_over(unit):
            return unit.retransmit_at
        return max(unit.retransmit_at, self.progress_at + self.retransmit_timeout.ns)

    def retire(self, unit: InflightUnit) -> None:
        """Forget a unit whose fate is known."""
        del self.inflight[unit.message.seq]
        self.bytes -= len(unit.message.body)

    def units_of_older_views(self, view: int) -> dict[InsertCall, list[InflightUnit]]:
        """Return the units of calls that were sent in another view, and not in this one."""
        found: dict[InsertCall, list[InflightUnit]] = {}
        for unit in self.inflight.values():
            if unit.call is not None and unit.message.view != view:
                found.setdefault(unit.call, []).append(unit)
        return found

    def units_of(self, call: InsertCall) -> list[InflightUnit]:
        """Return a batch's units that are not settled."""
        return [unit for unit in self.inflight.values() if unit.call is call]

    def check(self, max_units: int) -> None:
        """Assert the invariant; no seq is farther than `max_units` from the lowest open one."""
        seqs = list(self.inflight)
        assert all(map(lt, seqs, seqs[1:])), "seqs are out of order"
        assert self.next_seq - self.first_incomplete <= max_units, "servers would refuse this"
        assert self.bytes == sum(len(unit.message.body) for unit in self.inflight.values())
        for unit in self.inflight.values():
            assert all(ack.view == unit.message.view for ack in unit.acks.values())
            assert not unit.acks.keys() & unit.redirects, "who promised never to take it has it"


def split_into_units(
    payloads: list[bytes], keys: list[bytes | None] | None = None
) -> list[tuple[int, int]]:
    """Cut payloads into units [start, stop), of so many records and, but one, bytes."""
    unit_ranges: list[tuple[int, int]] = []
    start = size = 0
    for index, payload in enumerate(payloads):
        taken = len(payload) + (len(keys[index] or b"") if keys is not None else 0)
        size += taken
        if index > start and (size > MAX_UNIT_BYTES or index - start == MAX_UNIT_RECORDS):
            unit_ranges.append((start, index))
            start, size = index, taken
    unit_ranges.append((start, len(payloads)))
    return unit_ranges
