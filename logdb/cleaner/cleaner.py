"""The cleaner: runs checkpoint and cleaning rounds one after the other, in small steps.

`schedule` decides when a round is due; `cleaning_round` runs it. Invariant: at most one round is
active, and it advances only in a step of the coordinator or with a reply of the log. See
docs/logdb.md, section 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.cleaner.cleaning_round import CleaningRound, WaitUntil, YieldSlice
from logdb.cleaner.schedule import CheckpointSchedule
from logdb.cleaner.settings import Counts, RoundSettings
from ziplog.client.log_tasks import Task
from ziplog.core.node import LogWarning
from ziplog.core.units import NEVER
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Generator

    from logdb.state import State
    from ziplog.client.log_tasks import LogTasks


class Cleaner:
    """The cleaning rounds of one coordinator."""

    def __init__(
        self,
        state: State,
        calls: LogTasks,
        coordinator: bytes,
        settings: RoundSettings | None = None,
    ) -> None:
        """Prepare; nothing happens before the first `step`.

        Args:
            state: the state to checkpoint; a new state needs a new cleaner.
            calls: the log.
            coordinator: 8 bytes that identify this process.
            settings: default: the values of docs/logdb.md.

        """
        settings = settings or RoundSettings()
        self._state: Final = state
        self._calls: Final = calls
        self._pause_ns: Final = settings.pause_ns
        self.counts: Final = Counts()
        self._schedule: Final = CheckpointSchedule(state, coordinator, settings, self.counts)
        self._round: Final = CleaningRound(state, calls, self._schedule, settings, self.counts)
        self._task: Task | None = None
        #: The gsn or the time that the active round waits for; 0: none.
        self._wait_for_gsn = 0
        self._resume_at = 0

    @property
    def is_busy(self) -> bool:
        """Whether a round is active."""
        return self._task is not None

    def step(self, now: int) -> None:
        """Advance; called after each batch of events, and at `next_wakeup`.

        Args:
            now: monotonic nanoseconds.

        """
        self._schedule.observe_rounds(now)
        if self._task is None:
            if self._schedule.is_due(now):
                trim, done = self._schedule.pending_trim, self._state.restored_done
                if trim and done is not None:
                    self._start(self._round.trim(trim, done))
                else:
                    self._start(self._round.run())
        elif (self._wait_for_gsn and self._state.position.gsn >= self._wait_for_gsn) or (
            self._resume_at and now >= self._resume_at
        ):
            self._wait_for_gsn = self._resume_at = 0
            self._task.resume()

    def next_wakeup(self) -> int:
        """Return the time of the next step; `NEVER`: with the next event."""
        if self.is_busy:
            return self._resume_at or NEVER
        return self._schedule.next_check()

    def close(self) -> None:
        """Cancel the active round: the state was replaced, or the process stops."""
        task, self._task = self._task, None
        self._wait_for_gsn = self._resume_at = 0
        if task is not None:
            task.cancel()
        self._round.unsubscribe()
        self._schedule.stop()

    def _start(self, steps: Generator[Any, Any, None]) -> None:
        self._task = Task(steps, self._on_end, lambda: self._calls, self._wait)
        self._task.resume()

    def _wait(self, task: Task, step: WaitUntil | YieldSlice) -> None:
        """Start a wait of the round that is not a request to the log."""
        if isinstance(step, YieldSlice):
            self._resume_at = self._calls.now + self._pause_ns
        elif self._state.position.gsn >= step.gsn:
            task.resume()
        else:
            self._wait_for_gsn = step.gsn

    def _on_end(self, result: ZiplogError | None) -> None:
        self._task = None
        self._round.unsubscribe()
        is_failed = isinstance(result, ZiplogError)
        self._schedule.on_end(self._calls.now, failed=is_failed)
        if is_failed:
            self.counts.failed += 1
            self.counts.reason = str(result)
            text = f"checkpoint failed, retrying later: {result}"
            self._calls.effects.append(LogWarning(text))
