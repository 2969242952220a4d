"""Follows the log, and keeps the state of the database that is in it.

    find a checkpoint --> subscribe behind it --> apply --passed the first tail--> ready
            ^                                        |
            '------ the log was trimmed before us ---'

Rule: `passed` is a gsn such that nothing at or below it is still to come, and all of it was
applied. Who must see what was told before now waits until it has passed what anybody had; one
question serves all who came before it was asked. See docs/logdb.md, sections 6 and 8.
"""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, Protocol

from logdb.cleaner.checkpoint import find
from logdb.errors import NoCheckpointError
from logdb.state import State
from logdb.tasks import ignore
from ziplog.client.common.requests import (
    NEVER,
    BarrierRequest,
    ConnectRequest,
    FetchRequest,
    ProgressRequest,
    SubscribeRequest,
    TailRequest,
    UnsubscribeRequest,
)
from ziplog.core.node import LogWarning
from ziplog.errors import TrimmedError, ZiplogError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from logdb.state import Applied
    from logdb.tasks import LogCalls, Task
    from ziplog.client.common.requests import Fetched, Progress

_S: Final = 1_000_000_000
#: Records that are applied at once: some milliseconds.
_SLICE: Final = 1_000
#: A question to the log, and an attempt to subscribe, take so long at most.
_PATIENCE_NS: Final = 5 * _S
#: After a failure, the next attempt is made so much later.
_PAUSE_NS: Final = _S


class Waiter(Protocol):
    """Somebody who waits for a position."""

    #: Nobody waits any more.
    is_over: bool

    def resume(self) -> None:
        """Go on: the position was passed."""
        ...


class _Ready:
    """Waits until the tail of the start was passed."""

    def __init__(self, resume: Callable[[], None]) -> None:
        self.resume: Final = resume
        self.is_over = False


class Follower:
    """The state, and how far it is."""

    def __init__(
        self,
        calls: LogCalls,
        *,
        connect_ns: int,
        on_state: Callable[[State], None],
        on_applied: Callable[[Applied], None],
        on_passed: Callable[[], None],
        on_ready: Callable[[], None],
        on_failure: Callable[[ZiplogError], None],
    ) -> None:
        """Follow a log; `start` begins.

        Args:
            calls: the log.
            connect_ns: how long the log may be silent at first.
            on_state: gets each state that is begun with, empty.
            on_applied: gets each commit record that was decided.
            on_passed: called after some were.
            on_ready: called when it has passed the tail of the moment when it started.
            on_failure: gets the reason why it cannot go on, ever.

        """
        self._calls: Final = calls
        self._connect_ns: Final = connect_ns
        self._on_state, self._on_applied, self._on_passed = on_state, on_applied, on_passed
        self._on_ready, self._on_failure = on_ready, on_failure
        self.state = State()
        self.is_ready = False
        #: Nothing at or below it is still to come.
        self.passed = 0
        #: The greatest end of the log that was heard of.
        self.tail = 0
        #: The shards that hold up its start, and why; for whoever looks, from any thread.
        self.awaited: list[str] = []
        #: How often it began.
        self.starts = 0
        #: The subscription's number; 0: there is none.
        self._subscription = 0
        self._is_fetching = False
        self._retry_at = NEVER
        self._numbers: Final = itertools.count()
        self._waiting: list[tuple[int, int, Waiter]] = []
        #: Those who wait for a question how far anybody is, and those for the one under way.
        self._unasked: list[Waiter] = []
        self._asked: list[Waiter] = []
        self._is_asking = False
        self._has_warned = False

    # --- the start ---

    def start(self) -> None:
        """Begin, at a checkpoint if there is one."""
        self.starts += 1
        self._retry_at = NEVER
        self.is_ready = False
        self.passed = 0
        self.state = State()
        self._on_state(self.state)
        self._calls.run(self._begin(), self._begun)

    def _begin(self) -> Task:
        """Return the number of a subscription that goes on where the state is."""
        calls = self._calls
        if not calls.core.cluster:
            yield ConnectRequest(calls.now + self._connect_ns)
        start = RID_GENESIS
        found = yield from find()
        if found is not None:
            done, parts = found
            self.state.restore(done, parts)
            start = RecordId(done.position.gsn + 1, 0)
        return (yield SubscribeRequest(calls.now + _PATIENCE_NS, start, follow=True))

    def _begun(self, result: int | ZiplogError) -> None:
        if isinstance(result, ZiplogError):
            self._failed(result)
            return
        self._subscription = result
        self._pass(self.state.position.gsn)
        self._survey()
        self._ask_if_due()

    def _survey(self) -> None:
        """Find out where the log ends: it is ready when it has passed that."""
        self._calls.call(TailRequest(self._calls.now + _PATIENCE_NS), self._surveyed)

    def _surveyed(self, tail: RecordId | ZiplogError) -> None:
        if isinstance(tail, ZiplogError):
            self._survey()
            return
        self.tail = max(self.tail, tail.gsn)
        self.when_at(tail.gsn, _Ready(self._caught_up))

    def _failed(self, error: ZiplogError) -> None:
        if isinstance(error, NoCheckpointError) or not self._calls.core.cluster:
            self._on_failure(error)
            return
        self._retry_at = self._calls.now + _PAUSE_NS
        self._calls.effects.append(LogWarning(f"cannot follow the log, trying again: {error}"))

    def _caught_up(self) -> None:
        if not self.is_ready:
            self.is_ready = True
            self._on_ready()

    # --- applying ---

    def turn(self, *, drained: bool) -> None:
        """After each event: take records, if there are some; after the last one, look around."""
        calls = self._calls
        # Nothing it does at the start could do without: no tail is known before all have told.
        self.awaited = [] if self.is_ready else calls.core.waiting_for
        if self._retry_at <= calls.now:
            self.start()
        if self._subscription and not self._is_fetching:
            self._is_fetching = True
            request = FetchRequest(NEVER, self._subscription, _SLICE)
            calls.call(request, self._fetched)
        if drained and self._waiting and self._subscription:
            calls.call(ProgressRequest(NEVER, self._subscription), self._progressed)

    def next_wakeup(self) -> int:
        """Return when it wants a turn; `NEVER`: with the next event."""
        if self._subscription and not self._is_fetching:
            return self._calls.now
        return self._retry_at

    def _fetched(self, result: Fetched | ZiplogError) -> None:
        self._is_fetching = False
        if isinstance(result, ZiplogError):
            self._lost(result)
            return
        assert not result.ended, "a subscription that follows has no end"
        records = result.records
        if not records:
            return
        apply, tell = self.state.apply, self._on_applied
        for record in records:
            applied = apply(record)
            if applied is not None:
                tell(applied)
        self._warn_of_foreign()
        self._pass(records[-1].rid.gsn)

    def _warn_of_foreign(self) -> None:
        """Say once that the log is shared, as that can't be undone: it is not cleaned any more."""
        gsn = self.state.first_foreign
        if gsn and not self._has_warned:
            self._has_warned = True
            what = (
                f"the record at gsn {gsn} is not LogDB's (`ziplog tail --from {gsn}@0 --limit 1`"
                " prints it): the log is not cleaned from there on any more, and grows for ever;"
                " keep others from inserting into it, and copy the database into a log of its own"
            )
            self._calls.effects.append(LogWarning(what))

    def _lost(self, error: ZiplogError) -> None:
        """The subscription failed: fell behind a trim, or met what is no record."""
        number, self._subscription = self._subscription, 0
        self._calls.call(UnsubscribeRequest(NEVER, number), ignore)
        self._calls.effects.append(LogWarning(f"lost the log, starting again: {error}"))
        self.is_ready = False
        self._retry_at = (
            self._calls.now if isinstance(error, TrimmedError) else (self._calls.now + _PAUSE_NS)
        )

    def _progressed(self, progress: Progress | ZiplogError) -> None:
        if not isinstance(progress, ZiplogError):
            self._pass(progress.position.gsn - 1)

    def _pass(self, gsn: int) -> None:
        if gsn > self.passed:
            self.passed = gsn
            self.tail = max(self.tail, gsn)
            self._on_passed()
        waiting = self._waiting
        while waiting and waiting[0][0] <= self.passed:
            heappop(waiting)[2].resume()

    # --- those who wait ---

    def when_at(self, gsn: int, waiter: Waiter) -> None:
        """Resume a waiter when a position was passed, at once if it was."""
        if gsn <= self.passed:
            waiter.resume()
        else:
            heappush(self._waiting, (gsn, next(self._numbers), waiter))

    def when_fresh(self, waiter: Waiter) -> None:
        """Resume a waiter when everything was passed that anybody had passed before now."""
        self._unasked.append(waiter)
        self._ask_if_due()

    def _ask(self) -> None:
        self._asked, self._unasked = self._unasked, []
        self._is_asking = True
        request = BarrierRequest(self._calls.now + _PATIENCE_NS, self._subscription)
        self._calls.call(request, self._told)

    def _told(self, bound: int | ZiplogError) -> None:
        self._is_asking = False
        asked, self._asked = self._asked, []
        if isinstance(bound, ZiplogError):
            self._unasked[:0] = asked
        else:
            for waiter in asked:
                self.when_at(bound - 1, waiter)
        self._ask_if_due()

    def _ask_if_due(self) -> None:
        if self._unasked and self._subscription and not self._is_asking:
            self._ask()

    def forget(self) -> None:
        """Forget those whose waiting is over."""
        self._unasked = [waiter for waiter in self._unasked if not waiter.is_over]
        self._asked = [waiter for waiter in self._asked if not waiter.is_over]
        self._waiting = [entry for entry in self._waiting if not entry[2].is_over]
        heapify(self._waiting)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._unasked) + len(self._asked) + len(self._waiting)

    @property
    def progress(self) -> str:
        """How far the replay is, in words."""
        waits = f", and waits for {', '.join(self.awaited)}" if self.awaited else ""
        return f"at {self.passed:,} of {self.tail:,}{waits}"

    def check(self) -> None:
        """Assert the invariants."""
        assert self.state.position.gsn <= self.passed or not self._subscription
        assert not self._waiting or not self._subscription or self._waiting[0][0] > self.passed
