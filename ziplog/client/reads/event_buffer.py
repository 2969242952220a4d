"""The buffer of a speculation: events fetched and not yet returned to the caller.

As in `SubscriptionBuffer`, values that belong together are stored in one statement, so that no
signal handler's exception separates them.

Invariant: `taken` is the number of events that were returned.
"""

from __future__ import annotations

from operator import length_hint
from typing import TYPE_CHECKING

from ziplog.client.common.requests import Progress
from ziplog.types import Event, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.client.common.requests import EventBatch


class EventBuffer:
    """Events between a fetch and the caller."""

    __slots__ = ("_events", "_fetched", "batch", "closed", "ended", "progress")

    def __init__(self, start: RecordId) -> None:
        self._events: list[Event] = []
        #: Iterates over the buffered events. (A list's iterator knows how many are left.)
        self.batch: Iterator[Event] = iter(self._events)
        self._fetched = 0
        first = RecordId(max(start.gsn, 1), start.shard)
        #: The client node's progress, with the events that were returned.
        self.progress = Progress(first, caught_up=False, blocked_on=None)
        #: No event will follow the buffered ones.
        self.ended = False
        self.closed = False

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
            self._events, self.batch, self._fetched = events, iterator, fetched
        return True

    @property
    def left(self) -> int:
        """Number of buffered events."""
        return length_hint(self.batch)

    @property
    def taken(self) -> int:
        """Number of events that were returned to the caller."""
        return self._fetched - self.left

    def pop(self, max_events: int) -> list[Event]:
        """Return up to `max_events` events and remove them."""
        events = self._events
        start = len(events) - self.left
        stop = min(start + max_events, len(events))
        rest = iter(events)
        rest.__setstate__(stop)  # type: ignore[attr-defined]
        result = events[start:stop]
        self.batch = rest
        return result

    def close(self) -> None:
        """Drop the buffered events; `progress` stays."""
        none = list[Event]()
        rest, fetched = iter(none), self.taken
        self._events, self.batch, self._fetched = none, rest, fetched
        self.ended = self.closed = True
