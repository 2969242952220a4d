"""Decides when a coordinator starts a cleaning round, or finishes the trim of a dead coordinator.

An open round of another coordinator is given up to a minute; a failed round is retried later.
Invariant: without new records an idle coordinator stays idle. See docs/logdb.md, section 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.units import NEVER

if TYPE_CHECKING:
    from logdb.cleaner.settings import Counts, RoundSettings
    from logdb.state import State
    from ziplog.types import RecordId

#: Interval between checks whether a round is due.
_CHECK_INTERVAL_NS: Final = 100_000_000
#: Approximate bytes of a key in a checkpoint.
_KEY_BYTES: Final = 64


class CheckpointSchedule:
    """The round schedule of one coordinator. Times are monotonic nanoseconds."""

    def __init__(
        self, state: State, coordinator: bytes, settings: RoundSettings, counts: Counts
    ) -> None:
        """Start; nothing is due before the first check.

        Args:
            state: the state to checkpoint.
            coordinator: this coordinator; its own rounds are not waited for.
            settings: thresholds and timeouts.
            counts: what the rounds have done.

        """
        self._state: Final = state
        self.coordinator: Final = coordinator
        self._settings: Final = settings
        self._counts: Final = counts
        self._check_at = self._retry_at = 0
        #: The state's position at the last check, and whether a due round was postponed.
        self._checked_position: RecordId | None = None
        self._is_postponed = False
        #: When each open round was first seen, by the gsn of its announcement.
        self._first_seen: dict[int, int] = {}
        #: The last completed round of any coordinator, and the dead bytes that the last cut left.
        self._last_done: RecordId | None = None
        self._dead_after_cut = 0
        #: The trim position of the checkpoint that this process started from; None: unknown.
        self._initial_trim: int | None = None

    @property
    def pending_trim(self) -> int:
        """The trim position of a coordinator that may have died before trimming; 0: none."""
        started = self._initial_trim or 0
        return started if started > self._counts.trimmed else 0

    def observe_rounds(self, now: int) -> None:
        """Record which rounds are open or completed; called after each batch of events."""
        state = self._state
        if state.last_done != self._last_done:
            self._last_done = state.last_done
            if state.last_begun is not None and state.last_begun.cut:
                self._dead_after_cut = state.log_usage.dead_bytes
        if state.begun or self._first_seen:
            gsns = [each.position.gsn for each in state.begun.values()]
            self._first_seen = {gsn: self._first_seen.get(gsn, now) for gsn in gsns}

    def is_due(self, now: int) -> bool:
        """Whether to start now: a trim to `pending_trim`, or else a round."""
        if now < self._check_at:
            return False
        self._check_at = now + _CHECK_INTERVAL_NS
        self._checked_position = self._state.position
        if self._initial_trim is None:
            self._initial_trim = self._state.restored_trim
            self._retry_at = now + self._settings.retry_ns if self._initial_trim else 0
        pending_trim = self.pending_trim
        self._is_postponed = bool(pending_trim) or self._is_worth_it()
        if not self._is_postponed:
            return False
        start_at = max(self._retry_at, 0 if pending_trim else self._others_expire_at(NEVER))
        self._check_at = max(start_at, self._check_at)
        return now >= start_at

    def next_check(self) -> int:
        """Return the time of the next check; `NEVER`: after the next event."""
        has_news = self._is_postponed or self._state.position != self._checked_position
        return self._check_at if has_news else NEVER

    def on_end(self, now: int, *, failed: bool) -> None:
        """Record the end of a round or of a trim."""
        self._check_at = now + _CHECK_INTERVAL_NS
        if failed:
            self._retry_at = now + self._settings.retry_ns

    def stop(self) -> None:
        """Never report a round as due again."""
        self._check_at = NEVER

    def cut(self) -> int:
        """Return the gsn at which a round should cut the log; 0: no cut is worth it."""
        cut = self._state.choose_cut()
        return cut if cut > self._state.trimmed else 0

    def is_first(self, begun: RecordId, now: int) -> bool:
        """Whether no open round of another coordinator was announced before ours."""
        self.observe_rounds(now)
        return self._others_expire_at(begun.gsn) <= now

    def _is_worth_it(self) -> bool:
        state, settings = self._state, self._settings
        keys = len(state.versions)
        if state.since_checkpoint >= max(keys, settings.every_records, 1):
            return True
        dead = state.log_usage.dead_bytes - self._dead_after_cut
        return dead > max(settings.min_dead_bytes, _KEY_BYTES * keys) and self.cut() > 0

    def _others_expire_at(self, before: int) -> int:
        """Return when the wait ends for other coordinators' rounds announced before a gsn."""
        begun = self._state.begun.items()
        gsns = [each.position.gsn for owner, each in begun if owner != self.coordinator]
        seen = [self._first_seen[gsn] for gsn in gsns if gsn < before]
        return max(seen) + self._settings.other_round_timeout_ns if seen else 0
