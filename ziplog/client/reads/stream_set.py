"""The streams of one reader, at most one of each shard.

Rules: a stream that lost a message, was refused, or has no answer is reopened where it was. A
stream may start below the reader's position; it then continues at that position. If the servers of
a removed shard do not answer, the reader also asks the service for the trim point: they may be gone
(section 13.9).

Invariant: each stream is found by its newest number. See docs/protocol.md, section 7.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ziplog.client.common.routing import owner_in
from ziplog.client.reads.frontier_stream import FrontierStream
from ziplog.errors import TrimmedError
from ziplog.types import RecordId
from ziplog.wire import LeaseQuery

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.wire import Deliver, Early, LeaseHistory, Refused, Trimmed

StreamT = TypeVar("StreamT", bound=FrontierStream)
#: Each stream with its reader, by the stream's number at the server.
Numbers = dict[int, "tuple[StreamSet[Any], Any]"]


class StreamSet(ABC, Generic[StreamT]):
    """The streams of one reader."""

    def __init__(
        self, context: StepContext, routing: Routing, numbers: Numbers, position: int
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._numbers: Final = numbers
        #: The end of what the reader passed.
        self.position = position
        #: By shard.
        self._streams: Final[dict[int, StreamT]] = {}
        #: The request for the owner of a trimmed position; 0: there was none.
        self._owner_request = 0
        #: The last request for the trim point; 0: there was none.
        self._trim_request = 0
        #: Something arrived since `end_batch`.
        self.is_dirty = False

    def _open(self, stream: StreamT) -> None:
        """Open or reopen a stream where it was."""
        self._numbers.pop(stream.number, None)
        stream.open(self._start_of(stream))
        self._numbers[stream.number] = (self, stream)
        self._streams[stream.shard] = stream

    def _start_of(self, _stream: StreamT) -> int:
        """Return the position at which to open a stream, at least."""
        return self.position

    def _open_members(
        self, shards: set[int], new: Callable[[int], StreamT], again: Callable[[], None]
    ) -> None:
        """Open the missing streams of these shards, and close those of others.

        Calls `again` once the placements of all shards are known, if one is not.
        """
        for shard in sorted(shards - self._streams.keys()):
            if self._routing.route(shard) is None:
                self._routing.refresh(again)
                continue
            self._open(new(shard))
        for shard in sorted(self._streams.keys() - shards):
            self._close_stream(shard)

    def _close_stream(self, shard: int) -> None:
        stream = self._streams.pop(shard)
        del self._numbers[stream.number]
        stream.close()

    def _close_streams(self) -> None:
        self._routing.membership.cancel(self._owner_request)
        self._routing.membership.cancel(self._trim_request)
        for shard in list(self._streams):
            self._close_stream(shard)

    # --- messages ---

    def on_deliver(self, stream: StreamT, deliver: Deliver | Early) -> None:
        """Handle a `Deliver` or `Early` of a stream."""
        if not stream.on_deliver(deliver):
            self._open(stream)
        self.is_dirty = True

    def on_refused(self, stream: StreamT, refused: Refused) -> None:
        """Handle a server's refusal of a stream."""
        if refused.code == "unknown-subscription":
            self._open(stream)
        else:
            self._routing.refresh()
            stream.reopen_later()

    def on_trimmed(self, stream: StreamT, trimmed: Trimmed) -> None:
        """Handle the trim of a stream's position: fail if it affects the reader."""

        def found(owner: int) -> None:
            self.fail(TrimmedError(RecordId(trimmed.first, owner)))

        if trimmed.first <= self.position:
            self._open(stream)
        elif not self._routing.membership.is_open(self._owner_request):
            self._owner_request = self._routing.find_owner(trimmed.first, found)

    def on_routes_changed(self, shards: list[int]) -> None:
        """Reopen the streams of shards with a new view."""
        for shard in self._streams.keys() & shards:
            stream, route = self._streams[shard], self._routing.route(shard)
            if route is not None and route.view != stream.view:
                self._open(stream)

    # --- time and the end ---

    def _send_wants(self, gsn: int) -> None:
        """Ask the shards of streams that have not passed `gsn` to decide up to it."""
        for stream in self._streams.values():
            if stream.frontier <= gsn:
                stream.send_want(gsn)

    def _tick_streams(self) -> None:
        """Do the work of streams that is due."""
        for stream in list(self._streams.values()):
            if not stream.tick():
                self._open(stream)
                if self._routing.is_removed(stream.shard):
                    self._query_trim(stream)

    def _query_trim(self, stream: StreamT) -> None:
        """Fail if what follows in a stream was trimmed; its shard needs no servers then."""
        membership, gsn = self._routing.membership, self.position

        def on_history(history: LeaseHistory) -> None:
            if history.trim > max(self.position, stream.frontier):
                owner = owner_in(history, history.trim)
                self.fail(TrimmedError(RecordId(history.trim, owner)))

        if not membership.is_open(self._trim_request):
            self._trim_request = membership.send_request(
                lambda cluster, request: LeaseQuery(cluster, request, gsn), on_history
            )

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """End with an error."""

    def check(self) -> None:
        """Assert the invariants."""
        for shard, stream in self._streams.items():
            stream.check()
            assert stream.shard == shard
            assert self._numbers[stream.number] == (self, stream)


class StreamNumbers:
    """The open streams of several readers; messages of other streams are ignored."""

    def __init__(self) -> None:
        self.numbers: Final[Numbers] = {}

    def on_deliver(self, deliver: Deliver | Early) -> None:
        """Handle a `Deliver` or `Early`."""
        found = self.numbers.get(deliver.subscription)
        if found is not None:
            found[0].on_deliver(found[1], deliver)

    def on_trimmed(self, trimmed: Trimmed) -> None:
        """Handle a `Trimmed`: a stream's position is below the trim point."""
        found = self.numbers.get(trimmed.subscription)
        if found is not None:
            found[0].on_trimmed(found[1], trimmed)

    def on_refused(self, refused: Refused) -> None:
        """Handle a refusal."""
        found = self.numbers.get(refused.request)
        if found is not None:
            found[0].on_refused(found[1], refused)
