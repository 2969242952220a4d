"""Subscriptions: one stream per shard, merged below the frontiers of all shards.

    (tail queried) --> leases queried --> streams open --> ... --> ended, or failed

Rules: a subscription returns the records below the members' lowest frontier, in gsn order, and
never passes the end of the known leases. A stream continues where it was, or is reopened there
(D43, D44). The client asks a shard that blocks others to decide its positions (`Want`, D49). The
reader may lose a result, so each fetch names the reader's last record; records are kept until then.

Invariant: `position` never passes a frontier; every record below it was returned once. See
docs/protocol.md, section 7.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final

from ziplog.client.common.lease_map import LeaseMap
from ziplog.client.common.requests import NEVER, Blocked, Fetched, Progress
from ziplog.client.reads.shard_stream import ShardStream
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.core.writer_table import WriterTable
from ziplog.errors import ClosedError, DeadlineError, ProtocolError, TrimmedError, ZiplogError
from ziplog.types import RecordId
from ziplog.wire import LeaseQuery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.client.common.requests import (
        FetchRequest,
        ProgressRequest,
        SubscribeRequest,
        UnsubscribeRequest,
    )
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.tail import LogTail, TailQueries
    from ziplog.core.view import LeaseRun
    from ziplog.types import Record
    from ziplog.wire import Deliver, LeaseHistory, Refused, Trimmed

#: Interval before the first lease is requested again, and before later leases are.
_FIRST_LEASE_RETRY_NS: Final = 50 * NS_PER_MS
_NEXT_LEASE_RETRY_NS: Final = NS_PER_S
_BY_GSN: Final = itemgetter(0)
_GSN_OF: Final = attrgetter("rid.gsn")


class PendingFetch:
    """A pending fetch."""

    __slots__ = ("call", "request")

    def __init__(self, call: int, request: FetchRequest) -> None:
        self.call: Final = call
        self.request: Final = request


class Subscription:
    """One reader of the whole log."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        streams: dict[int, tuple[Subscription, ShardStream]],
        call: int,
        request: SubscribeRequest,
    ) -> None:
        self._context: Final = context
        self._membership: Final = routing.membership
        self._routing: Final = routing
        #: All streams of the client, by their numbers at the servers.
        self._numbers: Final = streams
        self.number: Final = call
        #: Whether the call that opens it was completed.
        self.is_open = False
        self.deadline: Final = request.deadline
        #: The end of the records that were merged.
        self.position = max(request.start.gsn, 1)
        #: The last gsn of the subscription; `NEVER` if it follows the log.
        self.last = NEVER
        #: A tail query is pending.
        self.awaits_tail = False
        self.fetches: Final[deque[PendingFetch]] = deque()
        self._leases: Final = LeaseMap()
        self._streams: Final[dict[int, ShardStream]] = {}
        #: The rows that were returned, by shard; a shard that becomes a member again keeps them.
        self._writers: Final[dict[int, WriterTable]] = {}
        self._error: Exception | None = None
        #: Merged records, kept until the reader has all of them; `_handed_out` were returned.
        self._ready: list[Record] = []
        self._handed_out = 0
        #: The open lease request (0: none), when to send it again, and the number of requests.
        self._lease_request = 0
        self._lease_due = NEVER
        self._attempts = 0
        #: Something arrived since `end_batch`.
        self.is_dirty = False
        #: Everything below the frontiers was merged, and nothing arrived since.
        self._is_merged = False
        self._is_closed = False

    # --- leases ---

    def on_tail(self, tails: LogTail | DeadlineError, *, follow: bool) -> None:
        """Handle the result of the tail query."""
        self.awaits_tail = False
        if isinstance(tails, DeadlineError):
            self._fail(tails)
            return
        if not follow:
            self.last = tails.last.gsn
        if tails.recent is not None:
            self.position = max(tails.recent.gsn, 1)
            self.request_leases()
        else:
            self._open_if_ready()

    def _open_if_ready(self) -> None:
        """Complete the opening call once the tail and the leases are known."""
        if self._error is None and not self.is_open and not self.awaits_tail and self._leases.stop:
            self.is_open = True
            self._context.complete(self.number, self.number)

    def request_leases(self) -> None:
        """Request the leases after the known ones."""
        gsn = self._leases.stop or self.position
        lease = self._routing.lease
        if not self._leases.stop and self._attempts % 2:
            # No lease contains the position yet: start with the newest lease.
            gsn = lease.base if lease is not None else 1
        self._attempts += 1
        self._lease_due = NEVER
        self._membership.cancel(self._lease_request)
        self._lease_request = self._membership.send_request(
            lambda cluster, request: LeaseQuery(cluster, request, gsn), self._on_lease_history
        )

    def _on_lease_history(self, history: LeaseHistory) -> None:
        self._lease_request = 0
        self._routing.update_placements(history.placements)
        is_whole = self._add_leases(history.runs)
        if history.trim > self.position and not (self.is_open and is_whole):
            first = RecordId(history.trim, self._leases.owner(history.trim) or 0)
            self._fail(TrimmedError(first))
        elif self._leases.stop:
            self._open_if_ready()
            self._lease_due = self._context.now + _NEXT_LEASE_RETRY_NS
        elif self._attempts == 1:
            self.request_leases()
        else:
            self._lease_due = self._context.now + _FIRST_LEASE_RETRY_NS
        self._context.set_timer(self._lease_due)

    def _add_leases(self, runs: Iterable[LeaseRun]) -> bool:
        """Add leases; return False if leases before them are missing."""
        is_whole = self._leases.extend(runs)
        self._open_streams()
        self.is_dirty = True
        return is_whole

    def _open_streams(self) -> None:
        """Open a stream of each shard that owns positions from here on, and close the others."""
        if self._is_closed:
            return
        self._leases.forget(self.position)
        members = self._leases.shards
        for shard in sorted(members - self._streams.keys()):
            if self._routing.route(shard) is None:
                self._routing.refresh(self._open_streams)
                continue
            writers = self._writers.setdefault(shard, WriterTable())
            stream = ShardStream(self._context, self._routing, shard, self.position, writers)
            self._streams[shard] = stream
            self._open(stream)
        for shard in sorted(self._streams.keys() - members):
            stream = self._streams.pop(shard)
            del self._numbers[stream.number]
            stream.close()

    def _open(self, stream: ShardStream) -> None:
        self._numbers.pop(stream.number, None)
        stream.open(self.position)
        self._numbers[stream.number] = (self, stream)

    # --- streams ---

    def on_deliver(self, stream: ShardStream, deliver: Deliver) -> None:
        """Handle a `Deliver` of a stream."""
        if not stream.on_deliver(deliver):
            self._open(stream)
        self.is_dirty = True
        has_news = deliver.leases and deliver.leases[-1].last.stop > self._leases.stop
        if has_news and not self._add_leases(deliver.leases) and not self._lease_request:
            self.request_leases()

    def on_refused(self, stream: ShardStream, on_refused: Refused) -> None:
        """Handle a server's refusal of a stream."""
        if on_refused.code == "unknown-subscription":
            self._open(stream)
            return
        self._routing.refresh()
        stream.reopen_later()

    def on_trimmed(self, stream: ShardStream, on_trimmed: Trimmed) -> None:
        """Handle the trim of a stream's position: fail if it affects the subscription.

        A new stream may start below the position; it then continues at the subscription's position.
        """

        def found(shard: int) -> None:
            self._fail(TrimmedError(RecordId(on_trimmed.first, shard)))

        if on_trimmed.first > self.position:
            self._routing.find_owner(on_trimmed.first, found)
        else:
            self._open(stream)

    def on_routes_changed(self, shards: list[int]) -> None:
        """Reopen the streams of shards with a new view."""
        for shard in shards:
            stream, route = self._streams.get(shard), self._routing.route(shard)
            if stream is not None and route is not None and route.view != stream.view:
                self._open(stream)

    # --- results ---

    def end_batch(self) -> None:
        """Complete fetches, grant credit, and send `Want`, after a batch of messages."""
        self.is_dirty = self._is_merged = False
        self.serve()
        highest = self.last if self.last != NEVER else 0
        for stream in self._streams.values():
            highest = max(highest, stream.highest)
        for stream in self._streams.values():
            stream.renew_credit()
            if stream.frontier <= highest:
                stream.send_want(highest)

    def serve(self) -> None:
        """Complete the pending fetches, as far as there are records."""
        while self.fetches:
            fetch = self.fetches[0]
            self._seek(fetch.request.after)
            if self._handed_out == len(self._ready) and not self._is_merged:
                self._merge()
            result = self._hand_out(fetch.request.max_records)
            if result is None:
                return
            self.fetches.popleft()
            self._context.complete(fetch.call, result)

    def _seek(self, after: int) -> None:
        """Continue after the reader's last record; go back if the reader lost a result."""
        former, ready = self._handed_out, self._ready
        if after == NEVER or not ready or (former and ready[former - 1].rid.gsn == after):
            return
        self._handed_out = bisect_right(ready, after, key=_GSN_OF)
        self._context.counters.delivered += self._handed_out - former

    def _hand_out(self, max_records: int) -> Fetched | Exception | None:
        start, ready = self._handed_out, self._ready
        if start < len(ready):
            self._handed_out = min(start + max_records, len(ready))
            is_all = start == 0 and self._handed_out == len(ready)
            records = ready if is_all else ready[start : self._handed_out]
            self._context.counters.delivered += len(records)
            return Fetched(records, ended=False)
        if self._error is not None:
            return self._error
        return Fetched([], ended=True) if self.position > self.last else None

    def _merge(self) -> None:
        """Merge the records below all frontiers."""
        self._is_merged = True
        limit = self._limit()
        if limit == self.position or self._error is not None:
            return
        try:
            parts = [stream.pop_records(self.position, limit) for stream in self._streams.values()]
        except ProtocolError as error:
            self._context.counters.protocol_errors += 1
            self._error = error
            return
        filled = [rows for rows in parts if rows]
        rows = filled[0] if filled else []
        if len(filled) > 1:
            rows = [row for part in filled for row in part]
            rows.sort(key=_BY_GSN)
        self._ready = [record for _, record in rows]
        self._handed_out = 0
        self._advance(limit)

    def _limit(self) -> int:
        """Return the members' lowest frontier: all positions below it are known."""
        limit = self.position
        for run in self._leases.runs:
            lowest = stop = run.last.stop
            if stop <= limit:
                continue
            for member in run.first.members:
                stream = self._streams.get(member.shard)
                frontier = stream.frontier if stream is not None else 0
                lowest = min(lowest, frontier)
            if lowest < stop:
                limit = max(limit, lowest)
                break
            limit = stop
        return max(self.position, min(limit, self.last + 1))

    def _advance(self, position: int) -> None:
        self.position = position
        before = self._leases.run_count
        self._leases.forget(position)
        if self._leases.run_count < before:
            self._open_streams()
        if position >= self._leases.stop and position <= self.last:
            self._lease_due = min(self._lease_due, self._context.now + _FIRST_LEASE_RETRY_NS)
            self._context.set_timer(self._lease_due)

    def progress(self, after: int) -> Progress:
        """Return the progress for a reader with its last record at `after`."""
        self._seek(after)
        if self._handed_out == len(self._ready):
            self._merge()
        has_ready = self._handed_out < len(self._ready)
        gsn = self._ready[self._handed_out].rid.gsn if has_ready else self.position
        streams = self._streams.values()
        highest = max((stream.highest for stream in streams), default=0)
        if self.last != NEVER:
            highest = self.last if self.position <= self.last else 0
        blocked = None
        if highest and streams and not has_ready:
            slowest = min(streams, key=lambda stream: stream.frontier)
            lease = self._leases.lease_at(slowest.frontier)
            blocked = Blocked(slowest.shard, lease.epoch_at(slowest.frontier) if lease else 0)
        return Progress(
            RecordId(gsn, self._leases.owner(gsn) or 0),
            not has_ready
            and (
                self.position > self.last
                or (bool(streams) and all(stream.caught_up for stream in streams))
            ),
            blocked,
        )

    def slowest(self) -> int | None:
        """Return the shard with the lowest frontier, of those that own positions from here on."""
        owners = [
            stream
            for shard, stream in self._streams.items()
            if self._leases.next_owned(shard, stream.frontier) is not None
        ]
        slowest = min(owners, key=lambda stream: stream.frontier, default=None)
        return slowest.shard if slowest is not None else None

    def next_owned(self, shard: int, gsn: int) -> int | None:
        """Return a shard's first position at or after `gsn`; None if none is known."""
        return self._leases.next_owned(shard, gsn)

    # --- time and the end ---

    def tick(self) -> None:
        """Do the work that is due."""
        context = self._context
        if self.is_failed:
            return
        if not self.is_open and context.now >= self.deadline:
            what = f"timed out waiting for {self._routing} to report the leases"
            self._fail(DeadlineError(f"{what} of gsn {self.position}"))
            return
        if context.now >= self._lease_due:
            self._lease_due = NEVER
            if not self.is_open or self.position >= self._leases.stop:
                self.request_leases()
        for fetch in list(self.fetches):
            if context.now >= fetch.request.deadline:
                self.fetches.remove(fetch)
                context.complete(fetch.call, Fetched([], ended=False))
            else:
                context.set_timer(fetch.request.deadline)
        for stream in list(self._streams.values()):
            if not stream.tick():
                self._open(stream)
        context.set_timer(self._lease_due if self.is_open else min(self._lease_due, self.deadline))
        self.is_dirty = True

    def _fail(self, error: ZiplogError) -> None:
        """Fail: readers get the merged records first, then the first error."""
        if self._error is not None:
            return
        self._error = error
        if self.is_open:
            self.serve()
        else:
            self._context.complete(self.number, error)
            self._context.set_timer(self._context.now)

    @property
    def is_failed(self) -> bool:
        """Whether the opening call failed."""
        return self._error is not None and not self.is_open

    def close(self) -> None:
        """Close the subscription and its streams, and end the pending fetches."""
        self._is_closed = True
        if not self.is_open and self._error is None:
            # It was closed before it was open: complete the opening call, too.
            self._context.complete(self.number, self.number)
        self._membership.cancel(self._lease_request)
        for stream in self._streams.values():
            del self._numbers[stream.number]
            stream.close()
        self._streams.clear()
        for fetch in self.fetches:
            self._context.complete(fetch.call, Fetched([], ended=True))
        self.fetches.clear()

    def check(self) -> None:
        """Assert the invariants."""
        for shard, stream in self._streams.items():
            stream.check()
            assert stream.shard == shard
            assert self._numbers[stream.number] == (self, stream)
        gsns = [record.rid.gsn for record in self._ready]
        assert gsns == sorted(set(gsns)), "records are out of order"
        assert not gsns or gsns[-1] < self.position
        assert self.position <= max(self._leases.stop, self._limit())
        for fetch in self.fetches:
            assert self._context.next_timer <= fetch.request.deadline, "a deadline would be missed"


class Subscriptions:
    """The subscriptions of a client."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        tail_queries: TailQueries,
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._tail_queries: Final = tail_queries
        self._open: Final[dict[int, Subscription]] = {}
        self._numbers: Final[dict[int, tuple[Subscription, ShardStream]]] = {}
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a fetch or an opening call is pending."""
        return any(sub.fetches or not sub.is_open for sub in self._open.values())

    def get(self, number: int) -> Subscription | None:
        """Return an open subscription."""
        return self._open.get(number)

    # --- calls ---

    def start(self, call: int, request: SubscribeRequest) -> None:
        """Open a subscription; its number is the call's."""
        subscription = Subscription(self._context, self._routing, self._numbers, call, request)
        self._open[call] = subscription
        self._context.set_timer(request.deadline)
        is_recent = request.start.gsn < 0
        if is_recent or not request.follow:
            subscription.awaits_tail = True
            self._tail_queries.query(
                call,
                request.deadline,
                lambda tails: subscription.on_tail(tails, follow=request.follow),
                with_recent=is_recent,
            )
        if not is_recent:
            subscription.request_leases()

    def fetch(self, call: int, request: FetchRequest) -> None:
        """Start a fetch."""
        subscription = self._open.get(request.subscription)
        if subscription is None:
            self._context.complete(
                call, ClosedError("this subscription", "subscribe again to continue")
            )
            return
        subscription.fetches.append(PendingFetch(call, request))
        self._context.set_timer(request.deadline)
        before = subscription.position
        subscription.serve()
        if subscription.position > before:
            # The returned records may free credit; a fetch that waits does not.
            subscription.is_dirty = True

    def progress(self, call: int, request: ProgressRequest) -> None:
        """Return the progress of a subscription."""
        subscription = self._open.get(request.subscription)
        closed = ClosedError("this subscription", "subscribe again to continue")
        found = subscription.progress(request.after) if subscription else closed
        self._context.complete(call, found)

    def unsubscribe(self, call: int, request: UnsubscribeRequest) -> None:
        """Close a subscription."""
        self._close(request.subscription)
        self._context.complete(call, None)

    def cancel(self, call: int) -> None:
        """Cancel an opening call or a fetch."""
        subscription = self._open.get(call)
        if subscription is not None and not subscription.is_open:
            self._close(call)
        for other in self._open.values():
            for fetch in [fetch for fetch in other.fetches if fetch.call == call]:
                other.fetches.remove(fetch)

    def _close(self, number: int) -> None:
        subscription = self._open.pop(number, None)
        if subscription is not None:
            self._tail_queries.cancel(number)
            subscription.close()

    # --- messages ---

    def on_deliver(self, deliver: Deliver) -> None:
        """Handle a `Deliver`."""
        found = self._numbers.get(deliver.subscription)
        if found is not None:
            found[0].on_deliver(found[1], deliver)

    def on_trimmed(self, on_trimmed: Trimmed) -> None:
        """Handle a `Trimmed`, if it is for a stream: its position is below the trim point."""
        found = self._numbers.get(on_trimmed.subscription)
        if found is not None:
            found[0].on_trimmed(found[1], on_trimmed)

    def on_refused(self, on_refused: Refused) -> None:
        """Handle a refusal, if it is for a stream."""
        found = self._numbers.get(on_refused.request)
        if found is not None:
            found[0].on_refused(found[1], on_refused)

    def _on_routes_changed(self, shards: list[int]) -> None:
        for subscription in self._open.values():
            subscription.on_routes_changed(shards)

    # --- time ---

    def on_batch_end(self) -> None:
        """End a batch of messages."""
        for subscription in self._open.values():
            if subscription.is_dirty:
                subscription.end_batch()

    def tick(self) -> None:
        """Do the work that is due."""
        for number, subscription in list(self._open.items()):
            subscription.tick()
            if subscription.is_failed:
                self._close(number)

    def check(self) -> None:
        """Assert the invariants."""
        for subscription in self._open.values():
            subscription.check()
        assert all(sub.number in self._open for sub, _ in self._numbers.values())
