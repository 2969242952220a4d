"""What a subscription's owner has in hand: the records fetched and not yet handed out.

The same for the blocking and the asyncio API. Invariant: `position` is after every record handed
out, and not after any other.
"""

from __future__ import annotations

from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING

from ziplog.client.requests import Progress
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.client.requests import Blocked, Fetched


class Reader:
    """Records on their way to the user."""

    __slots__ = ("_records", "batch", "closed", "ended", "progress")

    def __init__(self, start: RecordId) -> None:
        self._records: list[Record] = []
        #: Gives the records in hand. (A list's iterator knows how many are left.)
        self.batch: Iterator[Record] = iter(self._records)
        #: The core's part: how far it is with what it handed to us.
        first = RecordId(max(start.gsn, 1), start.shard)
        self.progress = Progress(first, caught_up=False, blocked_on=None)
        #: Nothing will ever follow what is in hand.
        self.ended = False
        self.closed = False

    def fill(self, batch: Fetched) -> bool:
        """Take the next records; False if there are none."""
        self._records = batch.records
        self.batch = iter(batch.records)
        self.ended = batch.ended
        return bool(batch.records)

    @property
    def pending(self) -> int:
        """How many records are in hand."""
        return length_hint(self.batch)

    def take(self, max_records: int) -> list[Record]:
        """Hand out up to so many records."""
        if max_records >= len(self._records) == self.pending:
            self.batch = iter(())
            return self._records
        return list(islice(self.batch, max_records))

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
    def must_ask(self) -> bool:
        """Whether only the core can tell how far it is."""
        return not self.closed and not self.pending

    def close(self) -> None:
        """Hand out nothing more; `position` stays."""
        position = self.position
        self.progress = Progress(position, self.caught_up, None)
        self._records = []
        self.batch = iter(self._records)
        self.ended = self.closed = True
