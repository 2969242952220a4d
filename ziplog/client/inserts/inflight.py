"""The in-flight window of one shard: calls that wait, and units without an outcome.

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

from ziplog.client.inserts.insert_calls import InsertCall, InsertGroup
from ziplog.client.inserts.retransmission import (
    MAX_BACKOFF_NS,
    REFUSED_BACKOFF_NS,
)
from ziplog.core.units import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.client.common.routing import Route
    from ziplog.client.common.unknown_outcome import UnknownOutcome
    from ziplog.client.inserts.retransmission import RetransmitTimeout
    from ziplog.errors import ZiplogError
    from ziplog.wire import Insert, InsertAck, Refused

#: Maximum number of in-flight bytes at a shard; a unit is sent if there is room for some of it.
MAX_INFLIGHT_BYTES: Final = 4 * 1024 * 1024
_NO_SERVERS: Final[frozenset[int]] = frozenset()
_NONE: Final[Mapping[int, int]] = MappingProxyType({})


class InflightUnit:
    """A unit that was sent and has no outcome yet."""

    __slots__ = (
        "acks", "backoff", "call", "first_sent", "index", "is_absent_in_newer_view", "is_expired",
        "is_of_singles", "is_reported", "last_sent", "locate_count", "may_be_queued",
        "may_be_stale", "message", "no_space", "outcomes", "pending_error", "redirects",
        "refusals", "replicas", "retransmit_at", "too_large", "took_slow_path",
    )  # fmt: skip

    def __init__(
        self, call: InsertCall, index: int, message: Insert, route: Route, now: int
    ) -> None:
        #: None after its call ended.
        self.call: InsertCall | None = call
        #: The unknown outcomes of its ended calls, each with the position of the call's record in
        #: the unit; None: the call has all of its records.
        self.outcomes: tuple[tuple[UnknownOutcome, int | None], ...] = ()
        #: It counts as one of `ShardWindow.single_units`.
        self.is_of_singles = False
        #: Its calls have its placement, although acks are missing: it was located.
        self.is_reported = False
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
        #: Why a server that refused it has no disk space; "": none did.
        self.no_space = ""
        #: Number of `Locate` requests that were sent for it.
        self.locate_count = 0
        #: The servers that refused it as too large. It promises nothing: each may have its own
        #: limits, and another one may place the unit.
        self.too_large = _NO_SERVERS
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
        return self.call is not None or any(outcome.calls for outcome, _ in self.outcomes)

    @property
    def calls(self) -> list[InsertCall]:
        """The calls that wait for its outcome."""
        return self.call.calls if self.call is not None else []

    def detach(self, call: InsertCall, outcome: UnknownOutcome | None) -> None:
        """Remove a call that ended; `outcome`: what its caller may ask for later."""
        index = None
        if isinstance(self.call, InsertGroup):
            index = self.call.remove(call)
        if not self.calls or index is None:
            self.call = None
        if outcome is not None:
            self.outcomes = (*self.outcomes, (outcome, index))

    def retransmit_soon(self, now: int) -> int:
        """Schedule another copy, because a server refused the newest one; return its time.

        The pauses grow.
        """
        pause = min(REFUSED_BACKOFF_NS << min(self.copies, 10), MAX_BACKOFF_NS)
        self.retransmit_at = min(self.retransmit_at, now + pause)
        self.may_be_queued = False
        return self.retransmit_at

    def add_refusal(self, refused: Refused) -> None:
        """Record a server's promise never to accept the first copies; it may arrive twice.

        A backup's guess for one of these copies is void.
        """
        server = refused.server
        if refused.code == "no-space":
            self.no_space = refused.detail
        if refused.copies > self.refusals.get(server, 0):
            self.refusals = {**self.refusals, server: refused.copies}
        ack = self.acks.get(server)
        if ack is not None and not self.counts_ack(ack):
            del self.acks[server]

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
            return True
        return ack.server not in self.redirects and not (
            0 < ack.copy <= self.refusals.get(ack.server, 0)
        )

    def move_to_view(self, view: int, replicas: int) -> None:
        """Send the unit in this view from now on; acks of the older view no longer count."""
        self.message = replace(self.message, view=view)
        self.replicas = replicas
        self.acks.clear()
        self.redirects = self.too_large = _NO_SERVERS
        self.pending_error = None
        self.may_be_stale = self.may_be_queued = False


class ShardWindow:
    """The in-flight window of a client at one shard."""

    __slots__ = (
        "answered_up_to", "avoid_until", "bytes", "highest_gsns", "inflight",
        "is_blocked_by_view_change", "lost_gsns", "next_seq", "no_space", "probe_at", "progress_at",
        "queue", "reported", "retransmit_timeout", "route", "shard", "since", "single_units",
        "singles", "synced_gsns",
    )  # fmt: skip

    def __init__(self, shard: int, since: int, timeout: RetransmitTimeout) -> None:
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
        #: Single inserts that wait to share a unit, and number of units of such inserts in flight.
        self.singles: deque[InsertCall] = deque()
        self.single_units = 0
        #: Some calls may be blocked by a view change; these are not in the queue.
        self.is_blocked_by_view_change = False
        self.retransmit_timeout = timeout
        #: Until then, the client retransmits only units that were passed over.
        self.probe_at = 0
        #: When acks of a unit agreed last.
        self.progress_at = 0
        #: By server: the send time of the newest message that it has answered.
        self.answered_up_to: Final[dict[int, int]] = {}
        self.avoid_until = 0
        #: Why no replica had disk space for a unit, while the shard is avoided; "": another cause.
        self.no_space = ""
        #: The last gsn of this client in each view since its last `sync`.
        self.highest_gsns: dict[int, int] = {}
        #: Those of them that a `sync` found on stable storage.
        self.synced_gsns: Final[set[int]] = set()
        #: By view: the last record that a `sync` has reported as lost.
        self.lost_gsns: dict[int, int] = {}
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

    @property
    def is_empty(self) -> bool:
        """Whether no unit is in flight, and no call waits to be sent."""
        return not (self.inflight or self.queue or self.singles)

    @property
    def has_queue(self) -> bool:
        """Whether calls wait to be sent."""
        return bool(self.queue or self.singles)

    def enqueue(self, call: InsertCall) -> None:
        """Add a call to the queue unless it is there."""
        if call not in self.queue:
            self.queue.append(call)

    def dequeue(self, call: InsertCall) -> None:
        """Remove a call from the queues."""
        for queue in (self.queue, self.singles):
            if call in queue:
                queue.remove(call)

    def dequeue_unsent(self) -> list[InsertCall]:
        """Remove and return the queued calls without a sent unit."""
        unsent = [call for call in self.queue if not call.sent]
        for call in unsent:
            self.queue.remove(call)
        unsent += self.singles
        self.singles.clear()
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

    def count_as_single(self, unit: InflightUnit) -> None:
        """Count a unit of single inserts that was sent."""
        unit.is_of_singles = True
        self.single_units += 1

    def note_placed(self, view: int, last: int) -> None:
        """Note the last gsn of a placed unit."""
        self.avoid_until = 0
        if last >= self.since:
            self.since = last + 1
        if last > self.highest_gsns.get(view, 0):
            self.highest_gsns[view] = last

    def note_lost(self, view: int) -> None:
        """Note that a `sync` reports the last record of a view as lost."""
        self.lost_gsns[view] = self.highest_gsns.pop(view)

    def note_returned(self, gsn: int) -> None:
        """Note that a caller receives a record: if it may be lost, the next `sync` reports it.

        A `sync` may have reported the loss before, while the record's call was pending.
        """
        for view in [view for view, lost in self.lost_gsns.items() if lost >= gsn]:
            self.note_placed(view, self.lost_gsns.pop(view))

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

    def partly_acked(self, now: int) -> list[InflightUnit]:
        """Return the units with overdue acks of some servers only, for which callers wait."""
        latest = now - self.retransmit_timeout.undoubled_ns
        return [
            unit
            for unit in self.inflight.values()
            if unit.first_sent <= latest and 0 < len(unit.acks) < unit.replicas and unit.has_waiter
        ]

    def retire(self, unit: InflightUnit) -> None:
        """Remove a unit after its outcome is known."""
        del self.inflight[unit.message.seq]
        self.bytes -= len(unit.message.body)
        self.single_units -= unit.is_of_singles

    def keep(self, unit: InflightUnit) -> None:
        """Keep a unit in flight after its outcome was reported.

        The client sends copies of it until all servers ack it, and avoids the shard meanwhile.
        """
        unit.call, unit.outcomes, unit.is_reported = None, (), True
        self.single_units -= unit.is_of_singles
        unit.is_of_singles = False
        self.retransmit_timeout.reset()  # The shard itself is not slow.

    def units_of_older_views(self, view: int) -> dict[InsertCall, list[InflightUnit]]:
        """Return the units of pending calls that were sent in another view than this one."""
        found: dict[InsertCall, list[InflightUnit]] = {}
        for unit in self.inflight.values():
            if unit.call is not None and unit.message.view != view:
                found.setdefault(unit.call, []).append(unit)
        return found

    def units_of(self, call: InsertCall) -> list[InflightUnit]:
        """Return the units of a call that are in flight."""
        sent = call.group or call
        return [unit for unit in self.inflight.values() if unit.call is sent]

    def rejected_at(self, unit: InflightUnit) -> int:
        """Return from when on no server places a misfit, or another unit of its call.

        `NEVER`: not all of them are refused. A server that holds a later unit places it once this
        client has given up those before it.
        """
        units = self.units_of(unit.call) if unit.call is not None else [unit]
        missing = [each for each in units if not each.is_absent]
        if any(each.pending_error is None for each in missing):
            return NEVER
        return max((each.retransmit_at for each in missing), default=0)

    def check(self, max_units: int) -> None:
        """Assert the invariant, and that all seqs are within `max_units` of the lowest one."""
        seqs = list(self.inflight)
        assert all(map(lt, seqs, seqs[1:])), "seqs are out of order"
        assert self.next_seq - self.first_incomplete <= max_units, "servers would refuse this"
        assert self.bytes == sum(len(unit.message.body) for unit in self.inflight.values())
        assert self.single_units == sum(unit.is_of_singles for unit in self.inflight.values())
        for unit in self.inflight.values():
            assert all(ack.view == unit.message.view for ack in unit.acks.values())
            assert not unit.acks.keys() & unit.redirects, "a replica refused and acked a unit"


def has_later_unit(call: InsertCall, units: list[InflightUnit]) -> bool:
    """Whether a unit after the first of these units of a call is placed, or may be placed.

    The primary places units in order. But a recovery keeps units that a backup acked, and may lose
    earlier ones. An earlier unit that is sent again would be placed after them.
    """
    first, *rest = units
    return not all(unit.is_absent for unit in rest) or call.has_later_unit_placed(first.index)
