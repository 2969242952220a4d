"""Readers of streams: what subscriptions and scans have in common.

    opening --> open --fetches, in order--> closed;  --error--> failed

A reader has a stream of each shard that it reads. Rules: fetches are completed in the order of the
calls; a fetch gets no records at its deadline; the first error fails the opening call, or the
fetches after the last record.

Invariant: each pending fetch ends in time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from ziplog.client.common.requests import Request
from ziplog.client.reads.shard_stream import ShardStream
from ziplog.client.reads.stream_set import StreamNumbers, StreamSet
from ziplog.errors import ClosedError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext

FetchT = TypeVar("FetchT", bound=Request)


class StreamReader(StreamSet[ShardStream], Generic[FetchT]):
    """One reader: an opening call, streams, and fetches."""

    def __init__(
        self, readers: StreamReaders[Any], call: int, deadline: int, position: int
    ) -> None:
        super().__init__(readers.context, readers.routing, readers.numbers, position)
        self.number: Final = call
        #: When the opening call fails.
        self.deadline: Final = deadline
        self.fetches: Final[deque[tuple[int, FetchT]]] = deque()
        self._error: Exception | None = None
        #: Whether the opening call was completed.
        self.is_open = False
        #: The request for shards that the client does not know; 0: there was none.
        self._shards_request = 0

    @property
    def is_failed(self) -> bool:
        """Whether the opening call failed."""
        return self._error is not None and not self.is_open

    def _complete_opening(self) -> None:
        self.is_open = True
        self._context.complete(self.number, self.number)

    def look_up_shards(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the client knows all shards that exist."""
        self._shards_request = self._routing.look_up(callback)

    # --- results ---

    def end_batch(self) -> None:
        """Complete fetches, grant credit, and send `Want`, after a batch of messages."""
        self.is_dirty = False
        self.serve()
        for stream in self._streams.values():
            stream.renew_credit()
        self._send_wants(self._wanted())

    @abstractmethod
    def _wanted(self) -> int:
        """Return the position up to which shards should decide."""

    def serve(self) -> None:
        """Complete the pending fetches, as far as there are records."""
        while self.fetches:
            call, request = self.fetches[0]
            result = self._result(request)
            if result is None:
                return
            self.fetches.popleft()
            self._context.complete(call, result)

    @abstractmethod
    def _result(self, request: FetchT) -> Any:
        """Return the result of a fetch; None: it waits."""

    @abstractmethod
    def _result_at_deadline(self) -> Any:
        """Return the result of a fetch that ends without records."""

    @abstractmethod
    def _result_at_close(self) -> Any:
        """Return the result of a fetch that ends because the reader is closed."""

    # --- time and the end ---

    @abstractmethod
    def _awaited(self) -> str:
        """Return what the opening call waits for, for its error."""

    def tick(self) -> None:
        """Do the work that is due."""
        context = self._context
        if not self.is_open:
            if context.now >= self.deadline:
                what = f"timed out waiting for {self._routing} to report {self._awaited()}"
                self.fail(DeadlineError(what))
                return
            context.set_timer(self.deadline)
        for fetch in list(self.fetches):
            call, request = fetch
            if context.now >= request.deadline:
                self.fetches.remove(fetch)
                context.complete(call, self._result_at_deadline())
            else:
                context.set_timer(request.deadline)
        self._tick_streams()
        self.is_dirty = True

    def fail(self, error: Exception) -> None:
        """Fail: readers get the records before it first, then the first error."""
        if self._error is not None:
            return
        self._error = error
        if self.is_open:
            self.serve()
        else:
            self._context.complete(self.number, error)
            self._context.set_timer(self._context.now)

    def close(self) -> None:
        """Close the streams, and end the pending fetches."""
        if not self.is_open and self._error is None:
            # It was closed before it was open: complete the opening call, too.
            self._context.complete(self.number, self.number)
        self._routing.membership.cancel(self._shards_request)
        self._close_streams()
        for call, _ in self.fetches:
            self._context.complete(call, self._result_at_close())
        self.fetches.clear()

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        for _, request in self.fetches:
            assert self._context.next_timer <= request.deadline, "a deadline would be missed"


ReaderT = TypeVar("ReaderT", bound=StreamReader[Any])


class StreamReaders(StreamNumbers, Generic[ReaderT]):
    """The readers of one kind of a client."""

    #: What a closed reader is, and what to do about it.
    CLOSED: ClassVar[tuple[str, str]]

    def __init__(self, context: StepContext, routing: Routing) -> None:
        super().__init__()
        self.context: Final = context
        self.routing: Final = routing
        #: By the number of the opening call.
        self._open: Final[dict[int, ReaderT]] = {}
        routing.on_change.append(self._on_routes_changed)

    @property
    def waiting(self) -> bool:
        """Whether a fetch or an opening call is pending."""
        return any(reader.fetches or not reader.is_open for reader in self._open.values())

    # --- calls ---

    def _add(self, reader: ReaderT) -> None:
        self._open[reader.number] = reader
        self.context.set_timer(reader.deadline)

    def _fetch(self, number: int, call: int, request: Request) -> None:
        """Start a fetch."""
        reader = self._open.get(number)
        if reader is None:
            self.context.complete(call, ClosedError(*self.CLOSED))
            return
        reader.fetches.append((call, request))
        self.context.set_timer(request.deadline)
        before = reader.position
        reader.serve()
        if reader.position > before:
            # The returned records may free credit; a fetch that waits does not.
            reader.is_dirty = True

    def cancel(self, call: int) -> None:
        """Cancel an opening call or a fetch."""
        reader = self._open.get(call)
        if reader is not None and not reader.is_open:
            self._close(call)
        for other in self._open.values():
            for fetch in [fetch for fetch in other.fetches if fetch[0] == call]:
                other.fetches.remove(fetch)

    def _close(self, number: int) -> None:
        reader = self._open.pop(number, None)
        if reader is not None:
            reader.close()

    # --- routes ---

    def _on_routes_changed(self, shards: list[int]) -> None:
        for reader in self._open.values():
            reader.on_routes_changed(shards)

    # --- time ---

    def on_batch_end(self) -> None:
        """End a batch of messages."""
        for reader in list(self._open.values()):  # a speculation may open or close its guess
            if reader.is_dirty:
                reader.end_batch()

    def tick(self) -> None:
        """Do the work that is due."""
        for number, reader in list(self._open.items()):
            if not reader.is_failed:
                reader.tick()
            if reader.is_failed:
                self._close(number)

    def check(self) -> None:
        """Assert the invariants."""
        for reader in self._open.values():
            reader.check()
        assert all(reader in self._open.values() for reader, _ in self.numbers.values())
