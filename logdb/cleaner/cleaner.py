"""Makes checkpoints, and has the log trimmed: one round after the other, in small steps.

When one is due, says `due`; what it does, `round`. Rule: at most one round of ours is under way,
and it goes on only in a step of the coordinator, or with an answer of the log.
See docs/logdb.md, section 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.cleaner.cleaning_round import Round, SlicePause, Until
from logdb.cleaner.schedule import Due
from logdb.cleaner.settings import Counts, RoundSettings
from logdb.tasks import Running
from ziplog.client.common.requests import NEVER
from ziplog.core.node import LogWarning
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Generator

    from logdb.state import State
    from logdb.tasks import LogCalls


class Cleaner:
    """The rounds of one coordinator."""

    def __init__(
        self,
        state: State,
        calls: LogCalls,
        coordinator: bytes,
        settings: RoundSettings | None = None,
    ) -> None:
        """Begin; nothing happens before the first `step`.

        Args:
            state: what checkpoints are made of; if another takes its place, so must the cleaner.
            calls: the log.
            coordinator: 8 bytes, of this process alone.
            settings: default: as the docs have it.

        """
        settings = settings or RoundSettings()
        self._state: Final = state
        self._calls: Final = calls
        self._pause_ns: Final = settings.pause_ns
        self.counts: Final = Counts()
        self._due: Final = Due(state, coordinator, settings, self.counts)
        self._round: Final = Round(state, calls, self._due, settings, self.counts)
        self._running: Running | None = None
        #: What it waits for: that this gsn is passed, or this time has come; 0: for neither.
        self._until = 0
        self._resume_at = 0

    @property
    def is_busy(self) -> bool:
        """Whether a round is under way."""
        return self._running is not None

    def step(self, now: int) -> None:
        """Go on; after each batch of events, and when `next_wakeup` says so.

        Args:
            now: monotonic nanoseconds.

        """
        self._due.watch(now)
        if self._running is None:
            if self._due.look(now):
                owed = self._due.owed
                self._start(self._round.trim(owed) if owed else self._round.run())
        elif (self._until and self._state.position.gsn >= self._until) or (
            self._resume_at and now >= self._resume_at
        ):
            self._until = self._resume_at = 0
            self._running.resume()

    def next_wakeup(self) -> int:
        """Return when it wants a step; `NEVER`: with the next event."""
        if self.is_busy:
            return self._resume_at or NEVER
        return self._due.next_look()

    def close(self) -> None:
        """Give the round up, if there is one: the state is another's, or the process ends."""
        running, self._running = self._running, None
        self._until = self._resume_at = 0
        if running is not None:
            running.cancel()
        self._due.stop()

    def _start(self, task: Generator[Any, Any, None]) -> None:
        self._running = Running(task, self._ended, lambda: self._calls, self._wait)
        self._running.resume()

    def _wait(self, running: Running, step: Until | SlicePause) -> None:
        """Let a round wait for what is no answer of the log."""
        if isinstance(step, SlicePause):
            self._resume_at = self._calls.now + self._pause_ns
        elif self._state.position.gsn >= step.gsn:
            running.resume()
        else:
            self._until = step.gsn

    def _ended(self, result: ZiplogError | None) -> None:
        self._running = None
        is_failed = isinstance(result, ZiplogError)
        self._due.ended(self._calls.now, failed=is_failed)
        if is_failed:
            self.counts.failed += 1
            self.counts.reason = str(result)
            text = f"gave a checkpoint up, trying again later: {result}"
            self._calls.effects.append(LogWarning(text))
