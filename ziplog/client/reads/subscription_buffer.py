"""The buffer of a subscription: records fetched and not yet returned to the caller.

Invariant: `position` is after every record that was returned, and not after any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.client.common.requests import Progress
from ziplog.client.reads.read_buffer import ReadBuffer
from ziplog.types import Record

if TYPE_CHECKING:
    from ziplog.client.common.requests import Blocked, Fetched
    from ziplog.types import RecordId


class SubscriptionBuffer(ReadBuffer[Record]):
    """Records between a fetch and the caller."""

    __slots__ = ("after",)

    def __init__(self, start: RecordId) -> None:
        super().__init__(start)
        #: The gsn of the last record that was fetched; 0: none.
        self.after = 0

    def fill(self, batch: Fetched) -> bool:
        """Buffer the records of a fetch; return False if none are available.

        Buffered records stay: two tasks that fetch at once get the same result.
        """
        records = batch.records
        if self.closed or not records:
            self.ended = self.closed or batch.ended
            return self.left > 0
        if not self.left and records[0].rid.gsn > self.after:
            iterator, after = iter(records), records[-1].rid.gsn
            self._items, self.batch, self.after = records, iterator, after
        return True

    @property
    def position(self) -> RecordId:
        """Where to continue: at the first buffered record, or at the client node's position."""
        left = self.left
        return self._items[-left].rid if left else self.progress.position

    @property
    def caught_up(self) -> bool:
        """Whether everything was returned."""
        return not self.left and self.progress.caught_up

    @property
    def blocked_on(self) -> Blocked | None:
        """What blocks further records, if no record is buffered."""
        return None if self.left else self.progress.blocked_on

    @property
    def needs_progress(self) -> bool:
        """Whether only the client node knows the progress."""
        return not self.closed and not self.left

    def close(self) -> None:
        """Drop the buffered records; `position` stays."""
        self.is_complete = self.ended and not self.left
        progress, none = Progress(self.position, self.caught_up, None), list[Record]()
        rest = iter(none)
        self.progress, self._items, self.batch = progress, none, rest
        self.ended = self.closed = True
