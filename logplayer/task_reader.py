"""Where a task's records come from: the feed, or a subscription of its own.

A task takes from the feed while its position is in the feed's ring; otherwise it reads for itself
until it is there. A task that leaves out rows of some writers always reads for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logplayer.source import Source
from ziplog.client.common.requests import NEVER

if TYPE_CHECKING:
    from logplayer.context import PlayerContext
    from logplayer.ring import Ring
    from ziplog.errors import TrimmedError

#: The ring of a task that reads for itself is emptied before each fetch, so it needs no bound.
_UNBOUNDED: Final = NEVER


class TaskReader:
    """The source of one task's records."""

    __slots__ = ("_context", "_max_records", "_skip_writers", "source", "trimmed")

    def __init__(
        self, context: PlayerContext, max_records: int, skip_writers: tuple[bytes, ...] = ()
    ) -> None:
        """Read nothing yet.

        Args:
            context: the process's.
            max_records: number of records of one fetch.
            skip_writers: rows are left out if their writer begins with one of these.

        """
        self._context: Final = context
        self._max_records: Final = max_records
        self._skip_writers: Final = skip_writers
        #: The subscription of its own; None: it has none.
        self.source: Source | None = None
        #: The records that the task needs next were trimmed.
        self.trimmed: TrimmedError | None = None

    @property
    def uses_feed(self) -> bool:
        """Whether it takes from the feed what the feed has."""
        return not self._skip_writers

    def _is_with_feed(self, position: int) -> bool:
        return self.uses_feed and self._context.feed.covers(position)

    def ring(self, position: int) -> Ring | None:
        """Return records that cover a position; None: not yet, or they were trimmed."""
        feed = self._context.feed
        if self.trimmed is not None or (self.uses_feed and not feed.is_open):
            return None
        if self._is_with_feed(position):
            self.close()
            return feed.ring
        if self.source is None:
            self.source = Source(
                self._context.calls, _UNBOUNDED, self._max_records, self._skip_writers
            )
        own = self.source
        if not own.ring.covers(position) or not own.is_open:
            own.open(position)
        if own.ring.stop == position:
            own.ring.reset(position)  # The task has looked at all of these records.
        self.poll(position, is_batch_end=False)
        return own.ring if self.trimmed is None else None

    def poll(self, position: int, *, is_batch_end: bool) -> None:
        """Fetch what the task needs at a position."""
        own = self.source
        if own is not None:
            own.poll(wants_records=self._wants_records(position), is_batch_end=is_batch_end)
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

    def close(self) -> None:
        """Close the subscription of its own."""
        source, self.source = self.source, None
        if source is not None:
            source.close()

    def next_wakeup(self, position: int) -> int:
        """Return the time of the next poll; `NEVER`: with the next event."""
        if self.source is None:
            return NEVER
        return self.source.next_wakeup(wants_records=self._wants_records(position))
