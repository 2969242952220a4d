"""One subscription of the log, which fills a ring: that of the process, or that of one task.

    closed --open--> opening --> open --failed--> waiting, then opening again at the ring's end

A position that was trimmed ends it: `trimmed` holds the error until `open` or `close`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.common.requests import (
    FetchRequest,
    ProgressRequest,
    SubscribeRequest,
    UnsubscribeRequest,
)
from ziplog.client.log_tasks import ignore
from ziplog.core.node import LogWarning
from ziplog.core.units import NEVER, NS_PER_S
from ziplog.errors import TrimmedError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.ring import Ring
    from ziplog.client.common.requests import Blocked, Fetched, Progress
    from ziplog.client.log_tasks import LogTasks
    from ziplog.errors import ZiplogError

#: Timeout of an attempt to subscribe, and the pause before the next one.
_SUBSCRIBE_TIMEOUT_NS: Final = 5 * NS_PER_S
_RETRY_NS: Final = NS_PER_S
#: The least and the greatest number of bytes that a shard may send ahead.
_MIN_WINDOW: Final = 64 * 1024
_MAX_WINDOW: Final = 4 * 1024 * 1024


def window_bytes(memory_bytes: int, part: int) -> int:
    """Return how many bytes each shard may send ahead: a part of the player's memory."""
    return min(max(memory_bytes // part, _MIN_WINDOW), _MAX_WINDOW)


class Source:
    """A subscription and the ring that it fills."""

    __slots__ = (
        "_call", "_calls", "_is_fetching", "_max_records", "_number", "_on_change", "_retry_at",
        "_skip_writers", "_window", "blocked_on", "is_open", "ring", "trimmed",
    )  # fmt: skip

    def __init__(
        self,
        calls: LogTasks,
        ring: Ring,
        max_records: int,
        window: int,
        on_change: Callable[[], None],
        skip_writers: tuple[bytes, ...] = (),
    ) -> None:
        """Make a closed source.

        Args:
            calls: the log.
            ring: what it fills.
            max_records: number of records of one fetch.
            window: number of bytes that each shard may send ahead.
            on_change: called when it was opened, when the ring has more, and after a failure.
            skip_writers: rows are left out if their writer begins with one of these.

        """
        self._calls: Final = calls
        self._max_records: Final = max_records
        self._window: Final = window
        self._on_change: Final = on_change
        self._skip_writers: Final = skip_writers
        self.ring: Final = ring
        #: It was opened, and not closed; its subscription may be waiting for the next attempt.
        self.is_open = False
        #: The position of the ring's end was trimmed.
        self.trimmed: TrimmedError | None = None
        #: The undecided positions that block the subscription.
        self.blocked_on: Blocked | None = None
        #: The open call, and the number of the subscription; 0: none.
        self._call = self._number = 0
        self._is_fetching = False
        self._retry_at = NEVER

    def open(self, position: int) -> None:
        """Begin at a position, with an empty ring."""
        self.close()
        self.is_open = True
        self.ring.reset(position)
        self._on_change()
        self._subscribe()

    def close(self) -> None:
        """Close the subscription; the ring stays. Idempotent."""
        self.is_open = self._is_fetching = False
        self.trimmed, self._retry_at = None, NEVER
        call, self._call = self._call, 0
        if call:
            self._calls.cancel(call)
        self._unsubscribe()

    def _unsubscribe(self) -> None:
        number, self._number = self._number, 0
        if number:
            self._calls.call(UnsubscribeRequest(NEVER, number), ignore)

    def _subscribe(self) -> None:
        calls = self._calls
        self._retry_at = NEVER
        is_answered = False

        def on_result(result: int | ZiplogError) -> None:
            nonlocal is_answered
            is_answered, self._call = True, 0
            self._on_change()
            if isinstance(result, int):
                self._number = result
            else:
                self._on_failure(result)

        request = SubscribeRequest(
            calls.now + _SUBSCRIBE_TIMEOUT_NS, RecordId(self.ring.stop, 0), follow=True,
            known_rows=True, skip_writers=self._skip_writers, window_bytes=self._window,
        )  # fmt: skip
        call = calls.call(request, on_result)
        self._call = 0 if is_answered else call

    def _on_failure(self, error: ZiplogError) -> None:
        """Wait for the next attempt; or end, if the position was trimmed."""
        self._unsubscribe()
        if isinstance(error, TrimmedError):
            self.trimmed = error
            return
        self._retry_at = self._calls.now + _RETRY_NS
        self._calls.effects.append(LogWarning(f"cannot read the log, retrying: {error}"))

    def poll(self, *, wants_records: bool) -> None:
        """Subscribe again if that is due; fetch records if they are wanted."""
        if self._retry_at <= self._calls.now:
            self._subscribe()
        if wants_records and self._number and not self._is_fetching:
            self._fetch()

    def query_progress(self) -> None:
        """Learn which further positions have no record; at the end of a batch."""
        if self._number:
            self._calls.call(ProgressRequest(NEVER, self._number), self._on_progress)

    def _fetch(self) -> None:
        is_answered = False

        def on_fetched(result: Fetched | ZiplogError) -> None:
            nonlocal is_answered
            is_answered, self._call, self._is_fetching = True, 0, False
            self._on_change()
            if isinstance(result, Exception):
                self._on_failure(result)
            else:
                self.ring.append(result.records, self._calls.now)

        self._is_fetching = True
        request = FetchRequest(NEVER, self._number, self._max_records)
        call = self._calls.call(request, on_fetched)
        if not is_answered:
            self._call = call

    def _on_progress(self, progress: Progress | ZiplogError) -> None:
        if not isinstance(progress, Exception):
            self.blocked_on = progress.blocked_on
            if progress.position.gsn > self.ring.stop:
                self.ring.extend(progress.position.gsn)
                self._on_change()

    def next_wakeup(self, *, wants_records: bool) -> int:
        """Return the time of the next poll; `NEVER`: with the next event."""
        if wants_records and self._number and not self._is_fetching:
            return self._calls.now
        return self._retry_at
