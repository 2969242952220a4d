"""What a subscription's owner has in hand: the records fetched and not yet handed out.

The same for the blocking and the asyncio API. Rule: what is stored together is computed first, so
that no exception of a signal's handler comes between (CPython runs handlers at calls and loops).
Invariant: `position` is after every record handed out, and not after any other.
"""

from __future__ import annotations

from operator import length_hint
from typing import TYPE_CHECKING

from ziplog.client.common.requests import Progress
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.client.common.requests import Blocked, Fetched


class SubscriptionBuffer:
    """Records on their way to the user."""

    __slots__ = ("_records", "after", "batch", "closed", "ended", "progress")

    def __init__(self, start: RecordId) -> None:
        self._records: list[Record] = []
        #: Gives the records in hand. (A list's iterator knows how many are left.)
        self.batch: Iterator[Record] = iter(self._records)
        #: The gsn of the last record that came; 0: none did.
        self.after = 0
        #: The core's part: how far it is with what it handed to us.
        first = RecordId(max(start.gsn, 1), start.shard)
        self.progress = Progress(first, caught_up=False, blocked_on=None)
        #: Nothing will ever follow what is in hand.
        self.ended = False
        self.closed = False

    def fill(self, batch: Fetched) -> bool:
        """Take the next records; False if none are there.

        What is there already stays as it is: two tasks that read at once get the same answer.
        """
        records = batch.records
        if self.closed or not records:
            self.ended = self.closed or batch.ended
            return self.pending > 0
        if not self.pending and records[0].rid.gsn > self.after:
            batch_left, after = iter(records), records[-1].rid.gsn
            self._records, self.batch, self.after = records, batch_left, after
        return True

    @property
    def pending(self) -> int:
        """How many records are in hand."""
        return length_hint(self.batch)

    def pop(self, max_records: int) -> list[Record]:
        """Hand out up to so many records."""
        records = self._records
        start = len(records) - self.pending
        stop = min(start + max_records, len(records))
        pending = iter(records)
        pending.__setstate__(stop)  # type: ignore[attr-defined]
        # Not the list itself: it is the core's, too, and the user may change what it gets.
        taken = records[start:stop]
        self.batch = pending
        return taken

    @property
    def position(self) -> RecordId:
        """Where to go on: with the first record in hand, else where the core is."""
        pending = self.pending
        return self._records[-pending].rid if pending else self.progress.position

    @property
    def caught_up(self) -> bool:
        """Whether all was handed out."""
        return not self.pending and self.progress.caught_up

    @property
    def blocked_on(self) -> Blocked | None:
        """What holds records back, if nothing is in hand."""
        return None if self.pending else self.progress.blocked_on

    @property
    def needs_progress(self) -> bool:
        """Whether only the core can tell how far it is."""
        return not self.closed and not self.pending

    def close(self) -> None:
        """Hand out nothing more; `position` stays."""
        progress, none = Progress(self.position, self.caught_up, None), list[Record]()
        pending = iter(none)
        self.progress, self._records, self.batch = progress, none, pending
        self.ended = self.closed = True
