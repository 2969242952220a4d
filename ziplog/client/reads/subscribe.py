"""Subscriptions: readers that return the records of the log.

    (tail queried) --> leases queried --> streams open --> ... --> ended, or failed

Rule: the reader may lose a result, so each fetch names the reader's last record; records are kept
until then.

Invariant: every record below `position` was returned once. See docs/protocol.md, section 7.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ziplog.client.common.requests import (
    ArchiveReply,
    EventsRequest,
    Fetched,
    FetchRequest,
    Progress,
    ProgressRequest,
    SpeculateRequest,
    SubscribeRequest,
)
from ziplog.client.reads.known_rows import TableSearches
from ziplog.client.reads.log_reader import LogReader, LogReaders
from ziplog.client.reads.speculation import Speculation
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.requests import UnsubscribeRequest
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.known_rows import Archives
    from ziplog.client.reads.tail import TailQueries
    from ziplog.types import Record

_GSN_OF: Final = attrgetter("rid.gsn")


class Subscription(LogReader[FetchRequest]):
    """One subscription to the whole log, or to some shards."""

    def __init__(self, subscriptions: Subscriptions, call: int, request: SubscribeRequest) -> None:
        start = max(request.start.gsn, 1)
        searches = subscriptions.table_searches if request.known_rows else None
        super().__init__(
            subscriptions, call, request.deadline, start, request.shards, searches,
            request.skip_writers, request.window_bytes,
        )  # fmt: skip
        #: Merged records, kept until the reader has all of them; `_handed_out` were returned.
        self._ready: list[Record] = []
        self._handed_out = 0

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
        stop = len(ready)
        if self._pause_at != NEVER:
            stop = max(start, bisect_left(ready, self._pause_at, key=_GSN_OF))
        if start < stop:
            self._handed_out = min(start + max_records, stop)
            is_all = start == 0 and self._handed_out == len(ready)
            records = ready if is_all else ready[start : self._handed_out]
            self._context.counters.delivered += len(records)
            return Fetched(records, ended=False)
        if self._error is not None:
            return self._error
        if stop < len(ready):
            return None
        return Fetched([], ended=True) if self.position > self.last else None

    def _merge(self) -> None:
        """Merge the records below all frontiers."""
        records = self._pop_merged()
        if records is not None:
            self._ready, self._handed_out = records, 0

    def progress(self, after: int) -> Progress:
        """Return the progress for a reader with its last record at `after`."""
        self._seek(after)
        if self._handed_out == len(self._ready):
            before = self.position
            self._merge()
            self.is_dirty |= self.position > before  # What was merged frees credit.
        first = self._first_kept()
        gsn = self.position if first is None else first
        return self._progress(gsn, has_ready=first is not None)

    def _first_kept(self) -> int | None:
        at, ready = self._handed_out, self._ready
        return ready[at].rid.gsn if at < len(ready) else None

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        gsns = [record.rid.gsn for record in self._ready]
        assert gsns == sorted(set(gsns)), "records are out of order"
        assert not gsns or gsns[-1] < self.position


class Subscriptions(LogReaders):
    """The subscriptions of a client."""

    CLOSED: ClassVar[tuple[str, str]] = ("this subscription", "subscribe again to continue")

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        tail_queries: TailQueries,
        archives: Archives,
    ) -> None:
        super().__init__(context, routing)
        self._tail_queries: Final = tail_queries
        self.table_searches: Final = TableSearches(context, routing, archives)

    @property
    def calls(self) -> dict[type, Callable[[int, Any], None]]:
        """The handler of each request."""
        return {
            SubscribeRequest: self.start,
            FetchRequest: self.fetch,
            SpeculateRequest: self.speculate,
            EventsRequest: self.fetch,
            ProgressRequest: self.progress,
            ArchiveReply: self.table_searches.on_reply,
        }

    def get(self, number: int) -> LogReader[Any] | None:
        """Return an open subscription or speculation."""
        return self._open.get(number)

    def backlogs(self) -> list[tuple[int, int]]:
        """Return the backlog of each open subscription; any thread may call it."""
        readers = list(self._open.items())
        return [reader.backlog for number, reader in readers if reader.is_open and number > 0]

    def start(self, call: int, request: SubscribeRequest) -> None:
        """Open a subscription; its number is the call's."""
        self._start(Subscription(self, call, request), request)

    def speculate(self, call: int, request: SpeculateRequest) -> None:
        """Open a speculation; its number is the call's."""
        self._start(Speculation(self, call, request), request)

    def _start(self, subscription: LogReader[Any], request: SubscribeRequest) -> None:
        self._add(subscription)
        if self._unknown(request):
            subscription.look_up_shards(lambda: self._on_looked_up(subscription, request))
        else:
            self._query(subscription, request)

    def _unknown(self, request: SubscribeRequest) -> list[int]:
        """Return the requested shards that this client does not know."""
        return sorted((request.shards or frozenset()) - set(self.routing.shards))

    def _on_looked_up(self, subscription: LogReader[Any], request: SubscribeRequest) -> None:
        if subscription.number not in self._open or subscription.is_failed:
            return
        unknown = self._unknown(request)
        if unknown:
            subscription.fail(ConfigError("shards", unknown, f"some of {self.routing.shards}"))
        else:
            self._query(subscription, request)

    def _query(self, subscription: LogReader[Any], request: SubscribeRequest) -> None:
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

    def fetch(self, call: int, request: FetchRequest | EventsRequest) -> None:
        """Start a fetch of records, or of a speculation's events."""
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

    def tick(self) -> None:
        """Do the work that is due."""
        self.table_searches.tick()
        super().tick()
