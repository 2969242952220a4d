"""Tails the log and applies its records to the database's state.

    find a checkpoint --> subscribe after it --> apply --passed the first tail--> ready
            ^                                        |
            '------ the log was trimmed before us --'

`passed` is a gsn such that all records at or below it were applied and none can follow. A fresh
read waits until the tailer has passed the read barrier; one barrier request serves all reads that
arrived before it was sent. See docs/logdb.md, sections 6 and 8.
"""

from __future__ import annotations

import itertools
from functools import partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Protocol

from logdb.cleaner.checkpoint import find_checkpoint
from logdb.errors import NoCheckpointError
from logdb.state import State
from ziplog.client.common.requests import (
    BarrierRequest,
    ConnectRequest,
    FetchRequest,
    ProgressRequest,
    SubscribeRequest,
    TailRequest,
    UnsubscribeRequest,
)
from ziplog.client.log_tasks import ignore
from ziplog.core.histogram import Histogram
from ziplog.core.node import LogWarning
from ziplog.core.units import NEVER, NS_PER_S
from ziplog.errors import TrimmedError, ZiplogError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from logdb.state import Applied
    from ziplog.client.common.requests import Fetched, Progress
    from ziplog.client.log_tasks import LogTasks, TaskSteps

#: Records applied in one step, which takes some milliseconds.
_FETCH_RECORDS: Final = 1_000
#: Timeout of a request to the log, and of a subscription attempt.
_REQUEST_TIMEOUT_NS: Final = 5 * NS_PER_S
#: Delay before the next attempt after a failure.
_RETRY_NS: Final = NS_PER_S
#: Maximum number of shards that a text names: `NotReady` has room for some 200.
_MAX_NAMED: Final = 8


class Waiter(Protocol):
    """A request that waits for a position."""

    #: The wait was cancelled.
    is_over: bool

    def resume(self) -> None:
        """Continue: the position was passed."""
        ...


class _ReadyWaiter:
    """Waits until the tail of the start was passed; it is over when the start has failed."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready: Final = on_ready
        self.is_over = False

    def resume(self) -> None:
        if not self.is_over:
            self._on_ready()


class LogTailer:
    """The state, and how far it has followed the log."""

    def __init__(
        self,
        calls: LogTasks,
        *,
        connect_ns: int,
        on_state: Callable[[State], None],
        on_applied: Callable[[Applied], None],
        on_passed: Callable[[], None],
        on_ready: Callable[[], None],
        on_failure: Callable[[ZiplogError], None],
    ) -> None:
        """Tail a log; `start` begins.

        Args:
            calls: the log.
            connect_ns: timeout of the first connection.
            on_state: called with each new, empty state.
            on_applied: called with each decided commit record.
            on_passed: called after records were applied.
            on_ready: called when the tail of the start was passed.
            on_failure: called with the error after which tailing cannot continue.

        """
        self._calls: Final = calls
        self._connect_ns: Final = connect_ns
        self._on_state, self._on_applied, self._on_passed = on_state, on_applied, on_passed
        self._on_ready, self._on_failure = on_ready, on_failure
        self.state = State()
        self.is_ready = False
        #: The wall clock minus the clock of `calls`, in ns; 0: unknown, and no commit is timed.
        self.wall_offset_ns = 0
        #: From the insertion of a commit record until it is applied, by both sides' clocks.
        self.commit_durations: Final = Histogram()
        #: All records at or below it were applied, and none can follow.
        self.passed = 0
        #: The greatest known tail of the log.
        self.tail = 0
        #: The shards that delay the start, and why; readable from any thread.
        self.waiting_for: list[str] = []
        #: Number of starts.
        self.starts = 0
        #: The subscription's number; 0: none.
        self._subscription = 0
        self._is_fetching = False
        self._retry_at = NEVER
        self._numbers: Final = itertools.count()
        self._waiters: list[tuple[int, int, Waiter]] = []
        #: The waiter for the tail of the start; None: the tail is unknown.
        self._ready_waiter: _ReadyWaiter | None = None
        #: Waiters for a barrier that is not requested yet, and for the one that is.
        self._unsent: list[Waiter] = []
        self._requested: list[Waiter] = []
        self._is_barrier_open = False
        self._has_warned_of_foreign = self._has_warned_of_unreadable = False

    # --- the start ---

    def start(self) -> None:
        """Start, from a checkpoint if there is one."""
        self.starts += 1
        self._retry_at = NEVER
        self.is_ready = False
        self.passed = 0
        self.state = State()
        self._on_state(self.state)
        self._calls.run(self._open_subscription(), self._on_subscribed)

    def _open_subscription(self) -> TaskSteps:
        """Return the number of a subscription that continues after the state's position."""
        calls = self._calls
        if not calls.core.cluster:
            yield ConnectRequest(calls.now + self._connect_ns)
        start = RID_GENESIS
        found = yield from find_checkpoint()
        if found is not None:
            done, parts = found
            self.state.restore(done, parts)
            start = RecordId(done.position.gsn + 1, 0)
        return (yield SubscribeRequest(calls.now + _REQUEST_TIMEOUT_NS, start, follow=True))

    def _on_subscribed(self, result: int | ZiplogError) -> None:
        if isinstance(result, ZiplogError):
            self._on_start_failed(result)
            return
        self._subscription = result
        self._advance_to(self.state.position.gsn)
        self._query_tail()
        self._request_barrier_if_due()

    def _query_tail(self) -> None:
        """Request the log's tail: the tailer is ready when it has passed it."""
        request = TailRequest(self._calls.now + _REQUEST_TIMEOUT_NS)
        self._calls.call(request, partial(self._on_tail, self._subscription))

    def _on_tail(self, subscription: int, tail: RecordId | ZiplogError) -> None:
        if subscription != self._subscription:
            # The start has failed; the next one requests a tail of its own.
            return
        if isinstance(tail, ZiplogError):
            self._query_tail()
            return
        self.tail = max(self.tail, tail.gsn)
        self._ready_waiter = _ReadyWaiter(self._on_caught_up)
        self.wait_for_position(tail.gsn, self._ready_waiter)

    def _on_start_failed(self, error: ZiplogError) -> None:
        if isinstance(error, NoCheckpointError) or not self._calls.core.cluster:
            self._on_failure(error)
            return
        self._retry_at = self._calls.now + _RETRY_NS
        self._calls.effects.append(LogWarning(f"cannot tail the log, retrying: {error}"))

    def _on_caught_up(self) -> None:
        self.is_ready = True
        self._on_ready()

    # --- applying ---

    def poll(self, *, drained: bool) -> None:
        """Fetch records after each event; after the last of a batch, also check the progress."""
        calls = self._calls
        # Only a start waits for shards: it needs the tail, which all shards must report.
        self.waiting_for = [] if self.is_ready else _named(calls.core.waiting_for)
        if self._retry_at <= calls.now:
            self.start()
        if self._subscription and not self._is_fetching:
            self._is_fetching = True
            request = FetchRequest(NEVER, self._subscription, _FETCH_RECORDS)
            calls.call(request, self._on_fetched)
        if drained and self._waiters and self._subscription:
            calls.call(ProgressRequest(NEVER, self._subscription), self._on_progress)

    def next_wakeup(self) -> int:
        """Return the time of the next poll; `NEVER`: with the next event."""
        if self._subscription and not self._is_fetching:
            return self._calls.now
        return self._retry_at

    def _on_fetched(self, result: Fetched | ZiplogError) -> None:
        self._is_fetching = False
        if isinstance(result, ZiplogError):
            self._on_subscription_lost(result)
            return
        assert not result.ended, "a following subscription ended"
        records = result.records
        if not records:
            return
        apply, on_applied = self.state.apply, self._on_applied
        for record in records:
            applied = apply(record)
            if applied is not None:
                on_applied(applied)
        if applied is not None and self.is_ready and self.wall_offset_ns:
            wall_ns = self._calls.now + self.wall_offset_ns
            self.commit_durations.add(wall_ns - 1000 * records[-1].timestamp_us)
        self._warn_of_others()
        self._advance_to(records[-1].rid.gsn)

    def _warn_of_others(self) -> None:
        """Warn once of foreign records, and once of unreadable ones."""
        foreign, unreadable = self.state.first_foreign, self.state.first_unreadable
        if foreign and not self._has_warned_of_foreign:
            self._has_warned_of_foreign = True
            self._warn(
                f"the record at gsn {foreign} is not LogDB's (`ziplog tail --from {foreign}@0"
                " --limit 1` prints it): the cleaner inserts such records again whenever it trims"
                " the log, so they take space and time for good; stop other programs from"
                " inserting into this log"
            )
        if unreadable and not self._has_warned_of_unreadable:
            self._has_warned_of_unreadable = True
            self._warn(
                f"this version of LogDB cannot read the record at gsn {unreadable}: the log is not"
                " trimmed from there on and grows without limit; start coordinators of the version"
                " that wrote it"
            )

    def _warn(self, text: str) -> None:
        self._calls.effects.append(LogWarning(text))

    def _on_subscription_lost(self, error: ZiplogError) -> None:
        """Restart after a failed subscription: the log was trimmed ahead, or is unavailable."""
        number, self._subscription = self._subscription, 0
        self._calls.call(UnsubscribeRequest(NEVER, number), ignore)
        self._calls.effects.append(LogWarning(f"lost the log, starting again: {error}"))
        self.is_ready = False
        if self._ready_waiter is not None:
            self._ready_waiter.is_over, self._ready_waiter = True, None
        self._retry_at = (
            self._calls.now if isinstance(error, TrimmedError) else (self._calls.now + _RETRY_NS)
        )

    def _on_progress(self, progress: Progress | ZiplogError) -> None:
        if not isinstance(progress, ZiplogError):
            self._advance_to(progress.position.gsn - 1)

    def _advance_to(self, gsn: int) -> None:
        if gsn > self.passed:
            self.passed = gsn
            self.tail = max(self.tail, gsn)
            self._on_passed()
        waiters = self._waiters
        while waiters and waiters[0][0] <= self.passed:
            heappop(waiters)[2].resume()

    @property
    def backlog(self) -> tuple[int, int]:
        """The positions that servers reported and that were not fetched: [start, stop)."""
        return self._calls.core.backlog(self._subscription)

    # --- waiters ---

    def wait_for_position(self, gsn: int, waiter: Waiter) -> None:
        """Resume a waiter once a position was passed, immediately if it was."""
        if gsn <= self.passed:
            waiter.resume()
        else:
            heappush(self._waiters, (gsn, next(self._numbers), waiter))

    def wait_for_tail(self, waiter: Waiter) -> None:
        """Resume a waiter once everything is passed that any reader had passed before this call."""
        self._unsent.append(waiter)
        self._request_barrier_if_due()

    def _request_barrier(self) -> None:
        self._requested, self._unsent = self._unsent, []
        self._is_barrier_open = True
        request = BarrierRequest(self._calls.now + _REQUEST_TIMEOUT_NS, self._subscription)
        self._calls.call(request, self._on_barrier)

    def _on_barrier(self, bound: RecordId | ZiplogError) -> None:
        self._is_barrier_open = False
        waiters, self._requested = self._requested, []
        if isinstance(bound, ZiplogError):
            self._unsent[:0] = waiters
        else:
            for waiter in waiters:
                self.wait_for_position(bound.gsn - 1, waiter)
        self._request_barrier_if_due()

    def _request_barrier_if_due(self) -> None:
        if self._unsent and self._subscription and not self._is_barrier_open:
            self._request_barrier()

    def drop_finished_waiters(self) -> None:
        """Forget the waiters that are over."""
        self._unsent = [waiter for waiter in self._unsent if not waiter.is_over]
        self._requested = [waiter for waiter in self._requested if not waiter.is_over]
        self._waiters = [entry for entry in self._waiters if not entry[2].is_over]
        heapify(self._waiters)

    @property
    def progress(self) -> str:
        """The progress of the replay, in words."""
        waits = f", and waits for {', '.join(self.waiting_for)}" if self.waiting_for else ""
        return f"at {self.passed:,} of {self.tail:,}{waits}"

    def check(self) -> None:
        """Assert the invariants."""
        assert self.state.position.gsn <= self.passed or not self._subscription
        assert not self._waiters or not self._subscription or self._waiters[0][0] > self.passed


def _named(shards: list[str]) -> list[str]:
    """Return the first shards of a list, and how many others it has."""
    more = len(shards) - _MAX_NAMED
    return [*shards[:_MAX_NAMED], f"and {more} more"] if more > 0 else shards
