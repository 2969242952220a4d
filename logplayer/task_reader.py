"""Where a task's records come from: the feed, or a subscription of its own.

A task takes from the feed while its position is in the feed's ring; otherwise it waits for a turn,
and reads for itself until it is there. A task that leaves out rows of some writers always reads for
itself, without a turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logplayer.contract import cursor_name
from logplayer.ring import Ring
from logplayer.source import Source, window_bytes
from ziplog.core.units import NEVER

if TYPE_CHECKING:
    from logplayer.context import PlayerContext
    from logplayer.contract import TargetSpec
    from ziplog.errors import TrimmedError

#: The ring of a task that reads for itself is emptied before each fetch, so it needs no bound.
_UNBOUNDED: Final = NEVER
#: The part of the memory that each shard may send ahead.
_WINDOW_PART: Final = 64


class TaskReader:
    """The source of one task's records."""

    __slots__ = (
        "_context", "_max_records", "_name", "_only", "_skip_writers", "source", "trimmed",
        "uses_feed",
    )  # fmt: skip

    def __init__(self, context: PlayerContext, spec: TargetSpec, partition: int) -> None:
        """Read nothing yet."""
        self._context: Final = context
        self._name: Final = cursor_name(context.settings.name, spec.name, partition)
        self._max_records: Final = spec.batch_records
        self._only: Final = (partition, spec.partitions)
        self._skip_writers: Final = spec.skip_writers
        #: Whether it takes from the feed what the feed has.
        self.uses_feed: Final = not spec.skip_writers
        #: The subscription of its own; None: it has none.
        self.source: Source | None = None
        #: The records that the task needs next were trimmed.
        self.trimmed: TrimmedError | None = None

    def wake(self) -> None:
        """Have the task polled."""
        self._context.wake(self._name)

    def _is_with_feed(self, position: int) -> bool:
        return self.uses_feed and self._context.feed.covers(position)

    def ring(self, position: int) -> Ring | None:
        """Return records that cover a position; None: not yet, or they were trimmed."""
        feed = self._context.feed
        if self.trimmed is not None or (self.uses_feed and not feed.is_open):
            return None
        if self._is_with_feed(position):
            if self.source is not None:
                self.close()
            else:
                self.stop_waiting()
            return feed.ring
        own = self.source or self._new_source()
        if own is None:
            return None
        if not own.ring.covers(position) or not own.is_open:
            own.open(position)
        self.poll(position, is_batch_end=False)
        return own.ring if self.trimmed is None else None

    def _new_source(self) -> Source | None:
        """Return a source of its own; None: other tasks have all turns."""
        context = self._context
        if self.uses_feed and not context.turns.take(self, context.calls.now):
            return None
        context.own_readers.add(self._name)
        ring = Ring(_UNBOUNDED, only=self._only)
        window = window_bytes(context.settings.memory_bytes, _WINDOW_PART)
        self.source = Source(
            context.calls, ring, self._max_records, window, self.wake, self._skip_writers
        )
        return self.source

    def poll(self, position: int, *, is_batch_end: bool) -> None:
        """Fetch what the task needs at a position."""
        own = self.source
        if own is None:
            return
        wants_records = self._wants_records(position)
        if self.uses_feed:
            turns, now = self._context.turns, self._context.calls.now
            turns.note(self, now, wants_records=wants_records)
            if now >= turns.over_at(self):
                self.close()
                return
        if own.ring.stop == position:
            own.ring.reset(position)  # The task has looked at all of these records.
        own.poll(wants_records=wants_records)
        if is_batch_end:
            own.query_progress()
        if own.trimmed is not None:
            self.on_trimmed(own.trimmed)

    def _wants_records(self, position: int) -> bool:
        return self.source is not None and position >= self.source.ring.stop

    def on_trimmed(self, error: TrimmedError) -> None:
        """Note that the records that the task needs next were trimmed."""
        self.trimmed = error
        self.close()

    def has_more(self, position: int, limit: int) -> bool:
        """Whether there are positions to look at from a position on, below a limit."""
        feed, own = self._context.feed, self.source
        ring = own.ring if own is not None else feed.ring
        is_covered = own is not None or self._is_with_feed(position)
        return is_covered and position < min(ring.stop, limit)

    @property
    def is_next(self) -> bool:
        """Whether a turn that it waits for is free."""
        return self._context.feed.is_open and self._context.turns.is_next(self)

    def stop_waiting(self) -> None:
        """Let others have the next turn: a step begins."""
        self._context.turns.stop_waiting(self)

    def close(self) -> None:
        """Close the subscription of its own, or stop waiting for one."""
        source, self.source = self.source, None
        self._context.turns.leave(self)
        if source is not None:
            self._context.own_readers.discard(self._name)
            source.close()

    def next_wakeup(self, position: int) -> int:
        """Return the time of the next poll; `NEVER`: with the next event."""
        if self.source is None:
            return NEVER
        due = self.source.next_wakeup(wants_records=self._wants_records(position))
        return min(due, self._context.turns.over_at(self)) if self.uses_feed else due
