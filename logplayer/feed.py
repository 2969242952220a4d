"""The feed: the subscription that the tasks of a process share.

It begins at the greatest position of the tasks that read when it opens. It never waits for a slow
task while another one is quicker: a task below the ring reads for itself until it reaches the ring.
The feed waits while no task is with it, that is while no task's position is in the ring; and while
half of the memory holds records that no task has looked at, so that none is dropped unread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logplayer.ring import Ring
from logplayer.source import Source, window_bytes
from ziplog.core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ziplog.client.log_tasks import LogTasks
    from ziplog.errors import TrimmedError

_FETCH_RECORDS: Final = 1000
#: The part of the memory that each shard may send ahead.
_WINDOW_PART: Final = 16
#: The part of the memory for records that no task has looked at.
_UNREAD_PART: Final = 2
#: Interval at which it learns which positions have no record, unless a call waits for them.
PROGRESS_NS: Final = 50 * NS_PER_MS


class Feed:
    """The shared subscription of a process, and its ring."""

    def __init__(
        self,
        calls: LogTasks,
        memory_bytes: int,
        on_change: Callable[[], None],
        counts: Collection[int] = (),
    ) -> None:
        """Make a closed feed.

        Args:
            calls: the log.
            memory_bytes: the bound of its ring.
            on_change: called when it opens, and when its ring has more.
            counts: the numbers of partitions of the targets.

        """
        window = window_bytes(memory_bytes, _WINDOW_PART)
        ring = Ring(memory_bytes, counts)
        self._source: Final = Source(calls, ring, _FETCH_RECORDS, window, on_change)
        self._wants_records = False
        #: When it learns that next, and whether there were events since the last time.
        self._progress_at = 0
        self._is_stale = False

    @property
    def ring(self) -> Ring:
        """The last records."""
        return self._source.ring

    @property
    def is_open(self) -> bool:
        """Whether it covers positions."""
        return self._source.is_open

    @property
    def blocked_on(self) -> str:
        """The shard that the feed waits for; "": none."""
        blocked = self._source.blocked_on
        return f"shard {blocked.shard}" if blocked is not None else ""

    def covers(self, position: int) -> bool:
        """Whether a task at a position is with the feed."""
        return self._source.is_open and self._source.ring.covers(position)

    def on_batch_end(self, now: int, *, is_urgent: bool) -> None:
        """Learn which further positions have no record, at once or from time to time."""
        is_due = is_urgent or now >= self._progress_at
        self._is_stale = self._wants_records and not is_due
        if self._wants_records and is_due:
            self._progress_at = now + PROGRESS_NS
            self._source.query_progress()

    def poll(self, positions: Collection[int]) -> None:
        """Open, continue, wait or close, as the positions of the reading tasks require."""
        source = self._source
        if not positions:
            self.close()
            return
        if not source.is_open or min(positions) > source.ring.stop:
            source.open(max(positions))
        covered = [position for position in positions if source.ring.covers(position)]
        self._wants_records = bool(covered) and self._has_room(max(covered))
        source.poll(wants_records=self._wants_records)

    def _has_room(self, looked: int) -> bool:
        """Whether it may read further ahead of the quickest task, which has looked so far."""
        ring = self._source.ring
        return ring.ahead(looked) < ring.memory_bytes // _UNREAD_PART

    def pop_trimmed(self) -> TrimmedError | None:
        """Return the error if the position of the feed was trimmed, and close it."""
        trimmed = self._source.trimmed
        if trimmed is not None:
            self.close()
        return trimmed

    def close(self) -> None:
        """Close the subscription, and drop the records."""
        if self._source.is_open:
            self._source.close()
            self._source.ring.reset(0)
        self._wants_records = self._is_stale = False

    def next_wakeup(self) -> int:
        """Return the time of the next poll."""
        due = self._source.next_wakeup(wants_records=self._wants_records)
        return min(due, self._progress_at) if self._is_stale else due

    def check(self) -> None:
        """Assert the invariants."""
        self._source.ring.check()
