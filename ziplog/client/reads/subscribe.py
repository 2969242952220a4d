"""Subscriptions: one stream per shard, merged below the frontiers of all shards.

    (tail queried) --> leases queried --> streams open --> ... --> ended, or failed

Rules: a subscription returns the records below the members' lowest frontier, in gsn order, and
never passes the end of the known leases. A subscription of some shards has streams of these shards
only, and its members are those among them. A stream continues where it was, or is reopened there
(D43, D44). The client asks a shard that blocks others to decide its positions (`Want`, D49). The
reader may lose a result, so each fetch names the reader's last record; records are kept until then.

Invariant: `position` never passes a frontier; every record below it was returned once. See
docs/protocol.md, section 7.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, ClassVar, Final

from ziplog.client.common.requests import NEVER, Blocked, Fetched, FetchRequest, Progress
from ziplog.client.reads.lease_follower import LeaseFollower
from ziplog.client.reads.shard_stream import ShardStream
from ziplog.client.reads.stream_readers import StreamReader, StreamReaders
from ziplog.core.writer_table import WriterTable
from ziplog.errors import ClosedError, ConfigError, DeadlineError, ProtocolError, TrimmedError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from ziplog.client.common.requests import (
        ProgressRequest,
        SubscribeRequest,
        UnsubscribeRequest,
    )
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.tail import LogTail, TailQueries
    from ziplog.types import Record
    from ziplog.wire import Deliver

_BY_GSN: Final = itemgetter(0)
_GSN_OF: Final = attrgetter("rid.gsn")


class Subscription(StreamReader[FetchRequest]):
    """One reader of the whole log, or of some shards."""

    def __init__(self, subscriptions: Subscriptions, call: int, request: SubscribeRequest) -> None:
        super().__init__(subscriptions, call, request.deadline, max(request.start.gsn, 1))
        #: The shards to read; None: all.
        self._shards: Final = request.shards
        #: The last gsn of the subscription; `NEVER` if it follows the log.
        self.last = NEVER
        #: A tail query is pending.
        self.awaits_tail = False
        self._follower: Final = LeaseFollower(self._context, self._routing, self._on_history)
        self._leases: Final = self._follower.known
        #: The rows that were returned, by shard; a shard that becomes a member again keeps them.
        self._writers: Final[dict[int, WriterTable]] = {}
        #: Merged records, kept until the reader has all of them; `_handed_out` were returned.
        self._ready: list[Record] = []
        self._handed_out = 0
        #: Everything below the frontiers was merged, and nothing arrived since.
        self._is_merged = False
        self._is_closed = False

    # --- leases ---

    def on_tail(self, tails: LogTail | DeadlineError, *, follow: bool) -> None:
        """Handle the result of the tail query."""
        self.awaits_tail = False
        if isinstance(tails, DeadlineError):
            self.fail(tails)
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
            self._complete_opening()

    def request_leases(self) -> None:
        """Request the leases from the position on."""
        self._follower.request(self.position)

    def _on_history(self, trim: int, is_whole: bool) -> None:
        self._open_streams()
        self.is_dirty = True
        if trim > self.position and not (self.is_open and is_whole):
            self._follower.close()
            self.fail(TrimmedError(RecordId(trim, self._leases.owner(trim) or 0)))
        else:
            self._open_if_ready()

    def _open_streams(self) -> None:
        """Open a stream of each shard that owns positions from here on, and close the others."""
        if self._is_closed:
            return
        self._leases.forget(self.position)
        self._open_members(self._members(), self._new_stream, self._open_streams)

    def _new_stream(self, shard: int) -> ShardStream:
        writers = self._writers.setdefault(shard, WriterTable())
        return ShardStream(self._context, self._routing, shard, self.position, writers)

    def _members(self) -> set[int]:
        """Return the shards to read that own positions from here on, by the known leases."""
        members = self._leases.shards
        return members if self._shards is None else members & self._shards

    # --- streams ---

    def on_deliver(self, stream: ShardStream, deliver: Deliver) -> None:
        """Handle a `Deliver` of a stream."""
        super().on_deliver(stream, deliver)
        if self._follower.extend(deliver.leases, self.position):
            self._open_streams()

    # --- results ---

    def end_batch(self) -> None:
        """Merge what arrived in a batch of messages; see `StreamReader.end_batch`."""
        self._is_merged = False
        super().end_batch()

    def _wanted(self) -> int:
        highest = self.last if self.last != NEVER else 0
        for stream in self._streams.values():
            highest = max(highest, stream.highest)
        return highest

    def _result(self, request: FetchRequest) -> Fetched | Exception | None:
        self._seek(request.after)
        if self._handed_out == len(self._ready) and not self._is_merged:
            self._merge()
        return self._hand_out(request.max_records)

    def _result_at_deadline(self) -> Fetched:
        return Fetched([], ended=False)

    def _result_at_close(self) -> Fetched:
        return Fetched([], ended=True)

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
        frontiers = {shard: stream.frontier for shard, stream in self._streams.items()}
        limit = self._leases.settled_end(self.position, frontiers, self._shards)
        return max(self.position, min(limit, self.last + 1))

    def _advance(self, position: int) -> None:
        self.position = position
        before = self._leases.run_count
        self._leases.forget(position)
        if self._leases.run_count < before:
            self._open_streams()
        if position >= self._leases.stop and position <= self.last:
            # A removed shard may never get positions again, so its next leases are not urgent.
            self._follower.pass_end(is_urgent=self._shards is None or bool(self._streams))

    def progress(self, after: int) -> Progress:
        """Return the progress for a reader with its last record at `after`."""
        self._seek(after)
        if self._handed_out == len(self._ready):
            self._merge()
        has_ready = self._handed_out < len(self._ready)
        gsn = self._ready[self._handed_out].rid.gsn if has_ready else self.position
        streams, members = self._streams.values(), self._members()
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
                or (self._streams.keys() >= members and all(stream.caught_up for stream in streams))
            ),
            blocked,
        )

    @property
    def backlog(self) -> tuple[int, int]:
        """The positions that servers reported and the reader has not got: [start, stop)."""
        # Metrics read it from other threads, so each attribute is read once.
        at, ready = self._handed_out, self._ready
        has_ready = at < len(ready)
        start = ready[at].rid.gsn if has_ready else self.position
        streams = list(self._streams.values())
        if not streams or (not has_ready and all(stream.caught_up for stream in streams)):
            return start, start
        return start, max(start, *(stream.stable for stream in streams))

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
        self._follower.tick(self.position)
        super().tick()

    def _awaited(self) -> str:
        return f"the leases of gsn {self.position}"

    def close(self) -> None:
        """Close the subscription and its streams, and end the pending fetches."""
        self._is_closed = True
        self._follower.close()
        super().close()

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        gsns = [record.rid.gsn for record in self._ready]
        assert gsns == sorted(set(gsns)), "records are out of order"
        assert not gsns or gsns[-1] < self.position
        assert self.position <= max(self._leases.stop, self._limit())


class Subscriptions(StreamReaders[Subscription]):
    """The subscriptions of a client."""

    CLOSED: ClassVar[tuple[str, str]] = ("this subscription", "subscribe again to continue")

    def __init__(self, context: StepContext, routing: Routing, tail_queries: TailQueries) -> None:
        super().__init__(context, routing)
        self._tail_queries: Final = tail_queries

    def get(self, number: int) -> Subscription | None:
        """Return an open subscription."""
        return self._open.get(number)

    def backlogs(self) -> list[tuple[int, int]]:
        """Return the backlog of each open subscription; any thread may call it."""
        return [reader.backlog for reader in list(self._open.values()) if reader.is_open]

    def start(self, call: int, request: SubscribeRequest) -> None:
        """Open a subscription; its number is the call's."""
        subscription = Subscription(self, call, request)
        self._add(subscription)
        if self._unknown(request):
            self.routing.refresh(lambda: self._on_refreshed(subscription, request))
        else:
            self._query(subscription, request)

    def _unknown(self, request: SubscribeRequest) -> list[int]:
        """Return the requested shards that this client does not know."""
        return sorted((request.shards or frozenset()) - set(self.routing.shards))

    def _on_refreshed(self, subscription: Subscription, request: SubscribeRequest) -> None:
        if subscription.number not in self._open or subscription.is_failed:
            return
        unknown = self._unknown(request)
        if unknown:
            subscription.fail(ConfigError("shards", unknown, f"some of {self.routing.shards}"))
        else:
            self._query(subscription, request)

    def _query(self, subscription: Subscription, request: SubscribeRequest) -> None:
        """Query the tail, if it is needed, and the leases."""
        is_recent = request.start.gsn < 0
        if is_recent or not request.follow:
            subscription.awaits_tail = True
            self._tail_queries.query(
                subscription.number,
                request.deadline,
                lambda tails: subscription.on_tail(tails, follow=request.follow),
                with_recent=is_recent,
                shards=request.shards,
            )
        if not is_recent:
            subscription.request_leases()

    def fetch(self, call: int, request: FetchRequest) -> None:
        """Start a fetch."""
        self._fetch(request.subscription, call, request)

    def progress(self, call: int, request: ProgressRequest) -> None:
        """Return the progress of a subscription."""
        subscription = self._open.get(request.subscription)
        closed = ClosedError(*self.CLOSED)
        found = subscription.progress(request.after) if subscription else closed
        self.context.complete(call, found)

    def unsubscribe(self, call: int, request: UnsubscribeRequest) -> None:
        """Close a subscription."""
        self._close(request.subscription)
        self.context.complete(call, None)

    def _close(self, number: int) -> None:
        self._tail_queries.cancel(number)
        super()._close(number)
