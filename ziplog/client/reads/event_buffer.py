"""The buffer of a speculation: events fetched and not yet returned to the caller.

Invariant: `taken` is the number of events that were returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.client.reads.read_buffer import ReadBuffer
from ziplog.types import Event

if TYPE_CHECKING:
    from ziplog.client.common.requests import EventBatch
    from ziplog.types import RecordId


class EventBuffer(ReadBuffer[Event]):
    """Events between a fetch and the caller."""

    __slots__ = ("_fetched",)

    def __init__(self, start: RecordId) -> None:
        super().__init__(start)
        self._fetched = 0

    def fill(self, batch: EventBatch) -> bool:
        """Buffer the events of a fetch; return False if none are available.

        Buffered events stay: two tasks that fetch at once get the same result.
        """
        events = batch.events
        if self.closed or not events:
            self.ended = self.closed or batch.ended
            return self.left > 0
        fetched = batch.first + len(events)
        if not self.left and fetched > self._fetched:
            events = events[self._fetched - batch.first :]
            iterator = iter(events)
            self._items, self.batch, self._fetched = events, iterator, fetched
        return True

    @property
    def taken(self) -> int:
        """Number of events that were returned to the caller."""
        return self._fetched - self.left

    def close(self) -> None:
        """Drop the buffered events; `progress` stays."""
        self.is_complete = self.ended and not self.left
        none = list[Event]()
        rest, fetched = iter(none), self.taken
        self._items, self.batch, self._fetched = none, rest, fetched
        self.ended = self.closed = True
