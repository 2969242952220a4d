"""A reader of the log: one stream per shard, merged below the frontiers of all shards.

    (tail queried) --> leases queried --> streams open --> ... --> failed, or closed

Rules: a reader gets the records below the members' lowest frontier, in gsn order, and never passes
the end of the known leases. A reader of some shards has streams of these shards only, and its
members are those among them. A stream continues where it was, or is reopened there (D43, D44). The
client asks a shard that blocks others to decide its positions (`Want`, D49).

Invariant: `position` never passes a frontier of a stream that is not behind it (`KnownRows`). See
docs/protocol.md, section 7.
"""

from __future__ import annotations

from abc import abstractmethod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ziplog.client.common.requests import Blocked, Progress, Request
from ziplog.client.reads.known_rows import KnownRows
from ziplog.client.reads.lease_follower import LeaseFollower
from ziplog.client.reads.shard_stream import WINDOW_BYTES, ShardStream
from ziplog.client.reads.stream_readers import StreamReader, StreamReaders
from ziplog.core.units import NEVER
from ziplog.core.writer_table import WriterTable
from ziplog.errors import DeadlineError, ProtocolError, TrimmedError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from ziplog.client.reads.known_rows import TableSearches
    from ziplog.client.reads.tail import LogTail
    from ziplog.types import Record
    from ziplog.wire import Deliver, Early, Trimmed

FetchT = TypeVar("FetchT", bound=Request)
_BY_GSN: Final = itemgetter(0)


class LogReader(StreamReader[FetchT]):
    """One reader of the whole log, or of some shards."""

    def __init__(
        self,
        readers: StreamReaders[Any],
        call: int,
        deadline: int,
        position: int,
        shards: frozenset[int] | None,
        searches: TableSearches | None = None,
        skip_writers: tuple[bytes, ...] = (),
        window_bytes: int = 0,
    ) -> None:
        super().__init__(readers, call, deadline, position)
        #: The shards to read; None: all.
        self._shards: Final = shards
        #: Rows are left out if their writer begins with one of these.
        self._skip_writers: Final = skip_writers
        #: The credit window of each stream.
        self._window: Final = window_bytes or WINDOW_BYTES
        #: The last gsn to read; `NEVER`: the reader follows the log.
        self.last = NEVER
        #: The reader pauses before this gsn; `NEVER`: nowhere.
        self._pause_at = NEVER
        #: A tail query is pending.
        self.awaits_tail = False
        #: It begins at the last stable record, or at the trim point if that record was trimmed.
        self._is_recent = False
        self._follower: Final = LeaseFollower(self._context, self._routing, self._on_history)
        self._leases: Final = self._follower.known
        #: The rows that were returned, by shard; a shard that becomes a member again keeps them.
        self._writers: Final[dict[int, WriterTable]] = {}
        #: The rows before the position; None: they do not count.
        self._known_rows: Final = (
            None if searches is None else KnownRows(searches, self._writers, self._on_table)
        )
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
            self._is_recent = True
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
        if self._is_recent and not self.is_open:
            self.position = max(self.position, trim)
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
        members, known_rows = self._members(), self._known_rows
        ready = members if known_rows is None else known_rows.ready(members, self.position)
        self._open_members(ready, self._new_stream, self._open_streams)

    def _on_table(self) -> None:
        self._open_streams()
        self.is_dirty = True

    def _new_stream(self, shard: int) -> ShardStream:
        writers, known_rows = self._writers.setdefault(shard, WriterTable()), self._known_rows
        start = self.position if known_rows is None else known_rows.start_of(shard, self.position)
        return ShardStream(
            self._context, self._routing, shard, start, writers, self._skip_writers, self._window
        )

    def _start_of(self, stream: ShardStream) -> int:
        is_behind = self._known_rows is not None and self._known_rows.is_behind(stream.shard)
        return stream.frontier if is_behind else self.position

    def _members(self) -> set[int]:
        """Return the shards to read that own positions from here on, by the known leases."""
        members = self._leases.shards
        return members if self._shards is None else members & self._shards

    # --- streams ---

    def on_deliver(self, stream: ShardStream, deliver: Deliver | Early) -> None:
        """Handle a `Deliver` of a stream."""
        super().on_deliver(stream, deliver)
        if self._follower.extend(deliver.leases, self.position):
            self._open_streams()

    def on_trimmed(self, stream: ShardStream, trimmed: Trimmed) -> None:
        """Handle a trim; see `StreamSet.on_trimmed`."""
        self._catch_up()
        known_rows, shard = self._known_rows, stream.shard
        if known_rows is None or not known_rows.is_behind(shard) or trimmed.first > self.position:
            super().on_trimmed(stream, trimmed)
            return
        self._close_stream(shard)
        known_rows.on_trimmed(shard, trimmed.first, self.position)

    # --- results ---

    def end_batch(self) -> None:
        """Merge what arrived in a batch of messages; see `StreamReader.end_batch`."""
        self._is_merged = False
        self._catch_up()
        super().end_batch()

    def _catch_up(self) -> None:
        """Drop what streams have received below the position."""
        if self._known_rows is not None and self._error is None:
            try:
                self._known_rows.advance(self._streams, self.position)
            except ProtocolError as error:
                self._on_malformed(error)

    def _on_malformed(self, error: ProtocolError) -> None:
        self._context.counters.protocol_errors += 1
        self._error = error

    def _wanted(self) -> int:
        highest = self.last if self.last != NEVER else 0
        for stream in self._streams.values():
            highest = max(highest, stream.highest)
        return highest

    def _pop_merged(self) -> list[Record] | None:
        """Return the records below all frontiers, and advance; None: nothing is new."""
        self._is_merged = True
        limit = self._limit()
        if limit == self.position or self._error is not None:
            return None
        try:
            parts = [stream.pop_records(self.position, limit) for stream in self._streams.values()]
        except ProtocolError as error:
            self._on_malformed(error)
            return None
        filled = [rows for rows in parts if rows]
        rows = filled[0] if filled else []
        if len(filled) > 1:
            rows = [row for part in filled for row in part]
            rows.sort(key=_BY_GSN)
        self._advance(limit)
        return [record for _, record in rows]

    def _limit(self) -> int:
        """Return the members' lowest frontier: all positions below it are known."""
        frontiers = {shard: stream.frontier for shard, stream in self._streams.items()}
        limit = self._leases.settled_end(self.position, frontiers, self._shards)
        return max(self.position, min(limit, self.last + 1, self._pause_at))

    def pause(self, at: int) -> None:
        """Return no records at or after a gsn (0: no further ones) until `resume`."""
        first = self._first_kept()
        self._pause_at = at or (self.position if first is None else first)

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._pause_at != NEVER:
            self._pause_at, self._is_merged, self.is_dirty = NEVER, False, True

    def _advance(self, position: int) -> None:
        self.position = position
        before = self._leases.run_count
        self._leases.forget(position)
        if self._leases.run_count < before:
            self._open_streams()
        if position >= self._leases.stop and position <= self.last:
            # A removed shard may never get positions again, so its next leases are not urgent.
            self._follower.pass_end(is_urgent=self._shards is None or bool(self._streams))

    @abstractmethod
    def progress(self, after: int) -> Progress:
        """Return the progress of a reader that has everything up to `after`."""

    @abstractmethod
    def _first_kept(self) -> int | None:
        """Return the gsn of the first merged record that was not returned, if there is one."""

    def _progress(self, gsn: int, *, has_ready: bool) -> Progress:
        """Return the progress of a reader that continues at `gsn`; `has_ready`: with records."""
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
        first = self._first_kept()
        start = self.position if first is None else first
        streams = list(self._streams.values())
        if not streams or (first is None and all(stream.caught_up for stream in streams)):
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
        if self._known_rows is not None:
            self._known_rows.close()
        super().close()

    def check(self) -> None:
        """Assert the invariant."""
        super().check()
        assert self.position <= max(self._leases.stop, self._limit())
        if self._known_rows is not None:
            self._known_rows.check()


class LogReaders(StreamReaders[LogReader[Any]]):
    """The readers of a client that read the log."""

    def add_guess(self, number: int, guess: LogReader[Any]) -> None:
        """Add the guess of a speculation, under the negative number."""
        self._open[-number] = guess

    def drop_guess(self, number: int) -> None:
        """Close the guess of a speculation, if it has one."""
        guess = self._open.pop(-number, None)
        if guess is not None:
            guess.close()
