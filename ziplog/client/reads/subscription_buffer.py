"""The buffer of a subscription: records fetched and not yet returned to the caller.

Both public APIs use it. Values that belong together are computed first and stored in one statement,
so that no signal handler's exception separates them (CPython runs handlers at calls and loops).

Invariant: `position` is after every record that was returned, and not after any other.
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
    """Records between a fetch and the caller."""

    __slots__ = ("_records", "after", "batch", "closed", "ended", "progress")

    def __init__(self, start: RecordId) -> None:
        self._records: list[Record] = []
        #: Iterates over the buffered records. (A list's iterator knows how many are left.)
        self.batch: Iterator[Record] = iter(self._records)
        #: The gsn of the last record that was fetched; 0: none.
        self.after = 0
        #: The client node's progress, with the records that it returned to this buffer.
        first = RecordId(max(start.gsn, 1), start.shard)
        self.progress = Progress(first, caught_up=False, blocked_on=None)
        #: No record will follow the buffered ones.
        self.ended = False
        self.closed = False

    def fill(self, batch: Fetched) -> bool:
        """Buffer the records of a fetch; return False if none are available.

        Buffered records stay: two tasks that fetch at once get the same result.
        """
        records = batch.records
        if self.closed or not records:
            self.ended = self.closed or batch.ended
            return self.pending > 0
        if not self.pending and records[0].rid.gsn > self.after:
            iterator, after = iter(records), records[-1].rid.gsn
            self._records, self.batch, self.after = records, iterator, after
        return True

    @property
    def pending(self) -> int:
        """Number of buffered records."""
        return length_hint(self.batch)

    def pop(self, max_records: int) -> list[Record]:
        """Return up to `max_records` records and remove them."""
        records = self._records
        start = len(records) - self.pending
        stop = min(start + max_records, len(records))
        pending = iter(records)
        pending.__setstate__(stop)  # type: ignore[attr-defined]
        # A copy: the client node shares the list, and the caller may change the result.
        result = records[start:stop]
        self.batch = pending
        return result

    @property
    def position(self) -> RecordId:
        """Where to continue: at the first buffered record, or at the client node's position."""
        pending = self.pending
        return self._records[-pending].rid if pending else self.progress.position

    @property
    def caught_up(self) -> bool:
        """Whether everything was returned."""
        return not self.pending and self.progress.caught_up

    @property
    def blocked_on(self) -> Blocked | None:
        """What blocks further records, if no record is buffered."""
        return None if self.pending else self.progress.blocked_on

    @property
    def needs_progress(self) -> bool:
        """Whether only the client node knows the progress."""
        return not self.closed and not self.pending

    def close(self) -> None:
        """Drop the buffered records; `position` stays."""
        progress, none = Progress(self.position, self.caught_up, None), list[Record]()
        pending = iter(none)
        self.progress, self._records, self.batch = progress, none, pending
        self.ended = self.closed = True
