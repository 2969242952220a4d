"""Speculations: readers that receive records early, and later which of them were right.

    opening --> open, without a guess --all streams are current--> open, with a guess

A speculation is an ordinary reader of stable records, the *truth*, and a *guess*: a reader of what
the primaries have decided. Rules: the guess begins with what the truth's streams have received, and
begins again so when it was wrong, or a shard begins another view. The guess never delivers below
the truth's position. If the truth fails, the speculation does; if the guess does, it begins again.
The caller may lose a result, so events are kept until a fetch names them.

Invariants: those of `Comparison`. See docs/protocol.md, section 18.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ziplog.client.common.requests import EventBatch, EventsRequest, Progress, Request
from ziplog.client.reads.comparison import Comparison, Ledger
from ziplog.client.reads.early_stream import EarlyStream
from ziplog.client.reads.log_reader import LogReader
from ziplog.core.units import NEVER, NS_PER_S
from ziplog.core.writer_table import WriterTable
from ziplog.errors import ProtocolError
from ziplog.types import Failed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.client.common.requests import SpeculateRequest
    from ziplog.client.reads.log_reader import LogReaders
    from ziplog.client.reads.shard_stream import ShardStream
    from ziplog.core.view import LeaseRun
    from ziplog.types import Event, Record
    from ziplog.wire import Trimmed

#: Interval before a guess that failed with an error begins again.
_RETRY_NS: Final = NS_PER_S
_GSN_OF: Final = attrgetter("rid.gsn")


class Speculation(LogReader[EventsRequest]):
    """The truth of a speculation, its guess, and its events."""

    def __init__(self, readers: LogReaders, call: int, request: SpeculateRequest) -> None:
        start = max(request.start.gsn, 1)
        super().__init__(readers, call, request.deadline, start, request.shards)
        self._readers: Final = readers
        self._max_pending: Final = request.max_pending
        self._comparison: Comparison | None = None
        self._guess: Guess | None = None
        #: The truth has caught up once, so the guess may begin.
        self._has_caught_up = False
        #: When the guess may begin again after an error.
        self._retry_at = 0
        #: Events, kept until the caller has all of them, and the number of those before.
        self._events: list[Event] = []
        self._first = 0
        #: What the events before these say; None: none was made.
        self._ledger: Ledger | None = None

    # --- events ---

    def _result(self, request: EventsRequest) -> EventBatch | Exception | None:
        self._forget_events(request.after)
        if not self._events:
            self._produce()
        if self._events:
            return EventBatch(self._events[: request.max_events], self._first)
        return self._error

    def _result_at_deadline(self) -> EventBatch:
        return EventBatch([], self._first)

    def _result_at_close(self) -> EventBatch:
        return EventBatch([], self._first, ended=True)

    def _forget_events(self, after: int) -> None:
        """Forget the events that the caller has."""
        count = after - self._first
        if count > 0:
            assert self._ledger is not None, "the caller has events of a closed speculation"
            self._ledger.add(self._events[:count])
            del self._events[:count]
            self._first = after

    def _produce(self) -> None:
        """Make the events of what both readers have received."""
        if not self.is_open:
            return
        if self._comparison is None:
            self._ledger = Ledger(self.position)
            self._comparison = Comparison(self.position, self._context.counters, self._owner)
        records = None if self._is_merged else self._pop_merged()
        if records is not None:
            self._events += self._comparison.on_truth(records, self.position)
            if any(type(event) is Failed for event in self._events):
                self._drop_guess()
        if self._guess is not None and self._error is None:
            room = self._max_pending - len(self._comparison.pending)
            self._events += self._comparison.on_guess(
                self._guess.pop_records(self._comparison.next_gsn, room)
            )

    def _owner(self, gsn: int) -> int:
        return self._leases.owner(gsn) or 0

    def progress(self, after: int) -> Progress:
        """Return the progress of a caller that has so many events."""
        self._forget_events(after)
        if not self._events:
            self._produce()
        pending = len(self._ledger.pending) if self._ledger is not None else 0
        has_ready = bool(self._events)
        position = (
            self._ledger.position if self._ledger is not None and has_ready else self.position
        )
        return replace(self._progress(position, has_ready=has_ready), pending=pending)

    def _first_kept(self) -> int | None:
        return None

    # --- the guess ---

    def end_batch(self) -> None:
        """Make events of a batch of messages, and start the guess if it is due."""
        super().end_batch()
        guess = self._guess
        if guess is not None and guess.is_void:
            if guess.is_failed_by_error:
                self._retry_at = self._context.now + _RETRY_NS
                self._context.set_timer(self._retry_at)
            self._drop_guess()
        if self._guess is None and self.is_open and self._error is None:
            self._start_guess()

    def _start_guess(self) -> None:
        """Start a guess with what the truth's streams have received."""
        streams = self._streams
        if not self._has_caught_up:
            is_complete = streams.keys() >= self._members()
            self._has_caught_up = is_complete and all(s.is_current for s in streams.values())
        if self._has_caught_up and self._context.now >= self._retry_at:
            guess = self._guess = Guess(self, self._readers, self._shards)
            self._readers.add_guess(self.number, guess)
            guess.start(self._leases.runs, streams, self._writers)

    def _drop_guess(self) -> None:
        """Close the guess; the end of the batch starts another one."""
        self._guess = None
        self.is_dirty = True
        self._readers.drop_guess(self.number)

    def tick(self) -> None:
        """Do the work that is due."""
        if self._context.now < self._retry_at:
            self._context.set_timer(self._retry_at)
        super().tick()

    def close(self) -> None:
        """Close the truth and the guess, and end the pending fetches."""
        self._drop_guess()
        super().close()

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        if self._comparison is not None:
            self._comparison.check()


class Guess(LogReader[Request]):
    """A reader of what the primaries have decided."""

    def __init__(
        self, truth: Speculation, readers: LogReaders, shards: frozenset[int] | None
    ) -> None:
        super().__init__(readers, truth.number, NEVER, truth.position, shards)
        self._truth: Final = truth
        self.is_open = True
        #: Merged records; `_popped` of them were returned.
        self._ready: list[Record] = []
        self._popped = 0
        #: The truth's streams when the guess began.
        self._stable: Mapping[int, ShardStream] = {}
        #: A shard begins another view, so what was received may be wrong; or a stream was trimmed.
        self._is_stale = False

    def start(
        self,
        runs: list[LeaseRun],
        streams: Mapping[int, ShardStream],
        writers: Mapping[int, WriterTable],
    ) -> None:
        """Open the streams where those of the truth are, with what these have received."""
        self._leases.extend(runs)
        for shard, table in writers.items():
            self._writers[shard] = WriterTable(table.export())
        self._stable = streams
        self._open_streams()
        self._stable = {}

    def _new_stream(self, shard: int) -> EarlyStream:
        writers = self._writers.setdefault(shard, WriterTable())
        stable = self._stable.get(shard)
        return EarlyStream(self._context, self._routing, shard, self.position, writers, stable)

    @property
    def is_failed_by_error(self) -> bool:
        """Whether an error ended the guess."""
        return self._error is not None

    @property
    def is_void(self) -> bool:
        """Whether the guess must begin again."""
        return self._is_stale or self._error is not None

    def pop_records(self, start: int, room: int) -> list[Record]:
        """Return up to `room` of the next records from `start` on; drop those before."""
        if start > self.position:
            self._skip_to(start)
        if room <= 0 or self.is_void:
            return []
        ready = self._ready
        self._popped = bisect_left(ready, start, self._popped, key=_GSN_OF)
        if self._popped == len(ready) and not self._is_merged:
            ready = self._ready = self._pop_merged() or []
            self._popped = 0
            self.is_dirty = True
            if self._error is not None:
                self.fail(self._error)
        first, self._popped = self._popped, min(self._popped + room, len(ready))
        return ready[first : self._popped]

    def _skip_to(self, position: int) -> None:
        """Continue at a position that the truth has reached."""
        try:
            for stream in self._streams.values():
                stream.pop_records(position, position)
        except ProtocolError as error:
            self.fail(error)
        self._advance(position)
        self.is_dirty = True

    # --- as a reader ---

    def end_batch(self) -> None:
        """Make events of a batch of messages."""
        super().end_batch()
        self.is_dirty = False

    def serve(self) -> None:
        """Complete the fetches of the speculation."""
        self._truth.serve()

    def _start_of(self, stream: ShardStream) -> int:
        return stream.frontier  # the stream needs all rows of its writers

    def on_trimmed(self, stream: ShardStream, trimmed: Trimmed) -> None:
        """Begin again: the truth has passed the stream's position."""
        del stream, trimmed
        self._make_stale()

    def on_routes_changed(self, shards: list[int]) -> None:
        """Begin again if a shard begins another view."""
        for shard in self._streams.keys() & shards:
            route = self._routing.route(shard)
            if route is not None and route.view != self._streams[shard].view:
                self._make_stale()

    def _make_stale(self) -> None:
        self._is_stale = self._truth.is_dirty = True
        self._context.set_timer(self._context.now)

    def fail(self, error: Exception) -> None:
        """Fail: the speculation begins another guess."""
        self._error = self._error or error
        self._truth.is_dirty = True
        self._context.set_timer(self._context.now)

    def progress(self, after: int) -> Progress:
        """Return the progress; a guess has no caller."""
        return self._progress(max(after, self.position), has_ready=False)

    def _first_kept(self) -> int | None:
        return None

    def _result(self, _request: Request) -> None:
        return None

    def _result_at_deadline(self) -> None:
        return None

    def _result_at_close(self) -> None:
        return None
